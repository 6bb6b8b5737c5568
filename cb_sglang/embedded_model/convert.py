"""From a Gemma 3 GGUF file to the weights and config that transformers and SGLang load by path.

Only numpy and the gguf package's dequantisation are needed. Weights are dequantised a few rows at a time and
written straight into the safetensors file: some tens of megabytes of memory, whatever a tensor's size.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from cb_sglang.embedded_model.errors import EmbeddedModelError
from cb_sglang.embedded_model.gguf_header import GgufHeader, TensorInfo
from cb_sglang.embedded_model.progress import WEIGHTS, ProgressFn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# What the file format has no key for; the same for every Gemma 3 text model (transformers' Gemma3TextConfig).
SLIDING_PATTERN = 6  # every sixth layer attends to the whole context, the others slide
LOCAL_ROPE_THETA = 10_000.0  # of the sliding layers; the file's own value is for full attention

_CHUNK = 1 << 21  # weights dequantised at once
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def model_config(header: GgufHeader) -> dict[str, Any]:
    """The content of config.json. Raises EmbeddedModelError if the file holds another architecture."""
    meta = header.metadata
    if (architecture := meta.get("general.architecture")) != "gemma3":
        raise EmbeddedModelError(f"the embedded model must be of the gemma3 architecture, not {architecture}")
    layers = meta["gemma3.block_count"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        # The version whose config layout this is. Without it transformers warns of a Mistral tokenizer's bug.
        "transformers_version": "5.0.0",
        "dtype": "bfloat16",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["gemma3.embedding_length"],
        "intermediate_size": meta["gemma3.feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": meta["gemma3.attention.head_count"],
        "num_key_value_heads": meta["gemma3.attention.head_count_kv"],
        "head_dim": meta["gemma3.attention.key_length"],
        "query_pre_attn_scalar": meta["gemma3.attention.key_length"],
        "max_position_embeddings": meta["gemma3.context_length"],
        "sliding_window": meta["gemma3.attention.sliding_window"],
        "layer_types": [
            "sliding_attention" if (layer + 1) % SLIDING_PATTERN else "full_attention" for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": meta["gemma3.rope.freq_base"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_ROPE_THETA},
        },
        # Stored as float32: 1e-06 comes out as 9.99999997e-07.
        "rms_norm_eps": float(f"{meta['gemma3.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        **_special_ids(header),
    }


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """The content of generation_config.json: the special ids and no sampling defaults (the file has none)."""
    return dict(_special_ids(header))


def write_weights(gguf_path: Path, header: GgufHeader, target: Path, progress: ProgressFn) -> None:
    """Write every tensor of ``gguf_path`` as bfloat16 into the safetensors file ``target``.

    Norm weights lose 1, since Gemma multiplies by ``1 + weight`` and the GGUF file stores the sum.
    Raises EmbeddedModelError for a tensor that Gemma 3 does not have.
    """
    names = [tensor_name(tensor.name) for tensor in header.tensors]
    total = 2 * sum(tensor.size for tensor in header.tensors)
    done = 0
    with target.open("wb") as file:
        _write_safetensors_header(file, names, header.tensors)
        for name, tensor in zip(names, header.tensors, strict=True):
            for chunk in _dequantized(gguf_path, tensor):
                done += file.write(_bfloat16_bytes(chunk - 1 if name.endswith("norm.weight") else chunk))
                progress(WEIGHTS, done, total)


def tensor_name(gguf_name: str) -> str:
    """The transformers name of a GGUF tensor: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight.

    Raises EmbeddedModelError for a tensor that Gemma 3 does not have.
    """
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    match = _LAYER.fullmatch(gguf_name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise EmbeddedModelError(f"the embedded model has a tensor that Gemma 3 does not know: {gguf_name}")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _special_ids(header: GgufHeader) -> dict[str, int]:
    meta = header.metadata
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _write_safetensors_header(file: BinaryIO, names: list[str], tensors: tuple[TensorInfo, ...]) -> None:
    """The safetensors layout: length of the JSON in 8 bytes, the JSON padded to 8 bytes, the raw tensors."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in zip(names, tensors, strict=True):
        end = start + 2 * tensor.size
        table[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)


def _dequantized(path: Path, tensor: TensorInfo) -> Iterator[NDArray[np.float32]]:
    """Yield the tensor's rows as float32 arrays [rows, columns] of at most about ``_CHUNK`` weights."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(tensor.quant_type)
    block_weights, block_bytes = GGML_QUANT_SIZES[kind]
    columns = tensor.shape[-1]
    rows = tensor.size // columns
    row_bytes = columns // block_weights * block_bytes
    step = max(1, _CHUNK // columns)
    with path.open("rb") as file:
        file.seek(tensor.offset)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            raw = np.fromfile(file, dtype=np.uint8, count=count * row_bytes).reshape(count, row_bytes)
            yield dequantize(raw, kind)


def _bfloat16_bytes(values: NDArray[np.float32]) -> bytes:
    """Round float32 to bfloat16 (nearest, ties to even, as torch does) and give its little-endian bytes."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    # All weights are finite, so adding the rounding bias cannot run a NaN over into a number.
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded.tobytes()
