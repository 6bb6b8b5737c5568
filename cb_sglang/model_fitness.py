"""What a model's config.json says about scoring it: which layers, how large its KV is, and what would be refused.

Read before any weights are, so it is a forecast: the loaded model decides (seam/layers.py), and says so at start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cb_sglang.errors import InvalidRequestError

MAX_CONFIG_BYTES = 4 << 20
MAX_LAYERS = 4_096
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SHORT = {"float": "float32", "bf16": "bfloat16", "half": "float16"}

_FULL = frozenset({"full_attention", "attention"})
_WINDOWED = frozenset({"sliding_attention", "chunked_attention"})
_CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A decoder as its config describes it.

    layers, attention_layers, scored_layers: all of them; those that keep keys and values of every position; those with
                      full attention, which alone are scored (design section 2).
    context_length:   positions; before what --context-length says.
    dtype:            of the weights, and of keys and values where nothing else is said.
    latent_attention: multi-head latent attention (MLA).
    logit_cap:        the soft cap on attention logits; 0 without one.
    fp8_cache:        whether the checkpoint asks for keys and values in FP8.
    """

    architecture: str
    layers: int
    attention_layers: int
    scored_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    context_length: int
    dtype: str
    latent_attention: bool
    logit_cap: float
    fp8_cache: bool

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of the keys and values of one position over all layers. Raises InvalidRequestError for ``dtype``."""
        return 2 * self.attention_layers * self.kv_heads * self.head_dim * dtype_bytes(dtype)


@dataclass(frozen=True, slots=True)
class Serving:
    """What of SGLang's arguments decides over scoring; the sizes are ``--tp-size`` and ``--pp-size``."""

    kv_cache_dtype: str = "auto"
    tp_size: int = 1
    pp_size: int = 1


def read_config(path: Path) -> dict[str, Any]:
    """The config.json at ``path``. Raises InvalidRequestError when there is none, or none that can be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}; give a model's folder") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise InvalidRequestError(f"{path} is longer than {MAX_CONFIG_BYTES} bytes; it is no config.json")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{path} is not JSON; download the model again") from None
    if not isinstance(config, dict):
        raise InvalidRequestError(f"{path} must hold a JSON object; download the model again")
    return config


def model_facts(config: Mapping[str, Any]) -> ModelFacts:
    """From the keys of a Hugging Face config (its ``text_config`` where there is one). Raises InvalidRequestError."""
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, Mapping) else config
    layers = _count(text, "num_hidden_layers", "n_layer", most=MAX_LAYERS)
    hidden = _count(text, "hidden_size", "n_embd")
    heads = _count(text, "num_attention_heads", "n_head")
    kinds = _layer_kinds(text, layers)
    return ModelFacts(
        architecture=_architecture(config),
        layers=layers,
        attention_layers=sum(kind in _FULL | _WINDOWED for kind in kinds),
        scored_layers=sum(kind in _FULL for kind in kinds),
        heads=heads,
        kv_heads=_count(text, "num_key_value_heads", default=heads),
        head_dim=_count(text, "head_dim", default=max(1, hidden // heads)),
        hidden=hidden,
        context_length=_context_length(text),
        dtype=plain_dtype(str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")),
        latent_attention=bool(text.get("kv_lora_rank")),
        logit_cap=float(text.get("attn_logit_softcapping") or 0.0),
        fp8_cache=_fp8_cache(text.get("quantization_config")),
    )


def refusals(facts: ModelFacts, serving: Serving) -> list[tuple[str, str]]:
    """Why the server would not start with this model so served, each reason with what to change. Empty: it would."""
    found = []
    another = "serve another model"
    if facts.latent_attention:
        found.append(("multi-head latent attention (MLA) cannot be scored yet", another))
    if not facts.scored_layers:
        found.append(("no layer has full attention, so there is nothing to score", another))
    if facts.logit_cap:
        found.append((f"attention logits have a soft cap ({facts.logit_cap:g}); it cannot be scored yet", another))
    if serving.kv_cache_dtype != "auto" and plain_dtype(serving.kv_cache_dtype) not in DTYPE_BYTES:
        reason = f"scoring cannot read a KV cache of {serving.kv_cache_dtype}"
        found.append((reason, "use --kv-cache-dtype auto or bfloat16"))
    elif serving.kv_cache_dtype == "auto" and facts.fp8_cache:
        found.append(("the checkpoint asks for a KV cache in FP8", "use --kv-cache-dtype bfloat16"))
    if serving.pp_size > 1:
        found.append((f"scoring does not support pipeline parallelism ({serving.pp_size})", "use --pp-size 1"))
    if serving.tp_size > facts.kv_heads and not facts.latent_attention:
        reason = f"{serving.tp_size} tensor-parallel ranks would share {facts.kv_heads} KV heads"
        found.append((reason, f"use --tp-size {facts.kv_heads} or less"))
    return found


def plain_dtype(name: str) -> str:
    """A dtype as ``DTYPE_BYTES`` calls it: without ``torch.``, and in full."""
    name = name.removeprefix("torch.")
    return _SHORT.get(name, name)


def dtype_bytes(dtype: str) -> int:
    """Raises InvalidRequestError for a dtype that is not among ``DTYPE_BYTES``."""
    if dtype not in DTYPE_BYTES:
        raise InvalidRequestError(f"dtype {dtype} is not one of {', '.join(DTYPE_BYTES)}", param="dtype")
    return DTYPE_BYTES[dtype]


def _layer_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of every layer; full attention where the config says nothing."""
    named = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(named, list) and len(named) == layers:
        return [str(kind) for kind in named]
    for key, others in (
        ("full_attention_interval", "linear_attention"),
        ("sliding_window_pattern", "sliding_attention"),
        ("_sliding_window_pattern", "sliding_attention"),
    ):
        every = text.get(key)
        if isinstance(every, int) and every > 1:
            return ["full_attention" if n % every == 0 else others for n in range(1, layers + 1)]
    return ["full_attention"] * layers


def _context_length(text: Mapping[str, Any]) -> int:
    """As SGLang reads it (srt/utils/hf_transformers/common.py, get_context_length)."""
    scaling = text.get("rope_scaling")
    factor = 1.0
    if (
        isinstance(scaling, Mapping)
        and "original_max_position_embeddings" not in scaling
        and scaling.get("rope_type") != "llama3"
    ):
        factor = float(scaling.get("factor") or 1.0)
    return int(factor * _count(text, *_CONTEXT_KEYS, default=2_048))


def _fp8_cache(quantization: object) -> bool:
    return isinstance(quantization, Mapping) and str(quantization.get("kv_cache_quant_algo", "")).upper() == "FP8"


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else str(config.get("model_type", "unnamed"))


def _count(text: Mapping[str, Any], *keys: str, default: int | None = None, most: int = 1 << 40) -> int:
    """The first of ``keys`` that is there, as a whole number from 1 to ``most``. Raises InvalidRequestError."""
    found = next((text[key] for key in keys if text.get(key) is not None), default)
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= most:
        raise InvalidRequestError(f"{keys[0]} in config.json must be a whole number from 1 to {most}, not {found!r}")
    return found
