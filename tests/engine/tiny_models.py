"""Tiny random models: small enough to start in seconds, peaky enough for scores with clear winners."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 512
FIRST_TOKEN = 3  # 0..2 are pad, eos and bos
SLIDING_WINDOW = 32


def write_qwen3(directory: Path, *, kv_heads: int = 2) -> None:
    """Four full-attention layers, 8 query heads on 2 KV heads, or on more."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=2,
        eos_token_id=1,
    )
    _write(Qwen3ForCausalLM(config), directory, norm_gain=6.0)


def write_gemma3(directory: Path) -> None:
    """Seven layers of which every third sees everything and the others slide over 32 positions."""
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=8192,
        sliding_window=SLIDING_WINDOW,
        layer_types=["full_attention" if n % 3 == 2 else "sliding_attention" for n in range(7)],
        tie_word_embeddings=True,  # SGLang's Gemma 3 knows no other head
        initializer_range=0.1,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    _write(Gemma3ForCausalLM(config), directory, norm_gain=4.0)


def write_gemma2(directory: Path) -> None:
    """Two layers, the second with full attention, both with a soft cap on their logits: these cannot be scored."""
    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        hidden_act="gelu_pytorch_tanh",  # SGLang reads the older name of hidden_activation
        attn_logit_softcapping=50.0,
        final_logit_softcapping=None,
        max_position_embeddings=8192,
        sliding_window=SLIDING_WINDOW,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    _write(Gemma2ForCausalLM(config), directory, norm_gain=1.0)


def write_tokenizer(directory: Path) -> None:
    """Words w3, w4, ... for whoever cannot do without a tokenizer."""
    words = {f"w{n}": n for n in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w3")), bos_token="w2", eos_token="w1", pad_token="w0"
    )
    tokenizer.save_pretrained(directory)


def write_lfm2(directory: Path) -> None:
    """Six layers: two with full attention, the others short convolutions with a state per request."""
    torch.manual_seed(2)
    config = Lfm2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        conv_L_cache=3,
        layer_types=["full_attention" if n in (2, 4) else "conv" for n in range(6)],
        tie_word_embeddings=True,  # SGLang's LFM2 knows no other head
        initializer_range=0.1,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    _write(Lfm2ForCausalLM(config), directory, norm_gain=6.0)


def _write(model: PreTrainedModel, directory: Path, *, norm_gain: float) -> None:
    """Save in float32, with the query norms turned up so that attention is far from uniform."""
    # Gemma's norms multiply by 1 + weight.
    offset = 1.0 if isinstance(model, Gemma3ForCausalLM) else 0.0
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith((".q_norm", ".q_layernorm")):
                module.weight.fill_(norm_gain - offset)
    model.float().save_pretrained(directory)
