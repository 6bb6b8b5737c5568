"""What of a model decides its cost: the shape, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from cb_sglang.errors import InvalidRequestError

MAX_CONFIG_BYTES = 4 << 20
_MAX_NUMBER = 1 << 40
_MAX_LAYERS = 4_096


class ShapeError(InvalidRequestError):
    """A model config lacks something, or holds something that cannot be planned for."""

    code = "invalid_model_config"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes, in weights and values (not bytes unless said).

    layers, full_layers:  all attention layers, and those that attend to every position; only these are scored.
    window:               positions that the other layers attend to; 0 where there are none.
    dense_weights:        weights of the layers that every token is multiplied with.
    expert_weights:       weights of one expert over all layers; 0 without experts.
    head_weights:         the output head; read once a step, multiplied only for tokens that need logits.
    embedding_weights:    an input table of its own; looked up, so it costs memory and no time. 0 when tied.
    value_bytes:          bytes of a weight, and of a cached key or value.
    """

    name: str
    layers: int
    full_layers: int
    window: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    dense_weights: int
    expert_weights: int
    experts: int
    experts_per_token: int
    head_weights: int
    embedding_weights: int
    context_length: int
    value_bytes: int = 2

    @property
    def kv_bytes_per_position(self) -> int:
        """Keys and values of all layers (SGLang keeps sliding layers whole as well), in bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes

    @property
    def weights(self) -> int:
        """All weights; norms, a thousandth of a percent, are left out."""
        experts = self.experts * self.expert_weights
        return self.dense_weights + experts + self.head_weights + self.embedding_weights

    @property
    def active_weights(self) -> int:
        """Layer weights that one token is multiplied with."""
        return self.dense_weights + self.experts_per_token * self.expert_weights

    def weights_read(self, tokens: int) -> float:
        """Weights that a step over ``tokens`` tokens reads: the experts that at least one of them is expected to
        choose (independent, even choices), everything else once."""
        read = float(self.dense_weights + self.head_weights)
        if self.experts:
            missed = (1 - self.experts_per_token / self.experts) ** tokens
            read += self.experts * (1 - missed) * self.expert_weights
        return read


def built_in_names() -> list[str]:
    return list(_built_in())


def load_shape(name_or_path: str) -> ModelShape:
    """A built-in shape by its name, else the shape in a ``config.json`` (or the folder with one).

    Raises ShapeError.
    """
    built_in = _built_in()
    if name_or_path in built_in:
        return shape_from_config(built_in[name_or_path], name_or_path)
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ShapeError(
            f"{name_or_path} is neither a file nor a built-in shape ({', '.join(built_in)})", param="config"
        )
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ShapeError(f"{path} is longer than {MAX_CONFIG_BYTES} bytes; it is no config.json", param="config")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ShapeError(f"{path} is no JSON: {error}", param="config") from None
    if not isinstance(config, dict):
        raise ShapeError(f"{path} must hold a JSON object", param="config")
    return shape_from_config(config, path.parent.name or path.stem)


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """From the keys of a Hugging Face config (its ``text_config`` when there is one). Raises ShapeError.

    Gated MLPs (three matrices) are assumed, as in Qwen, Llama, Gemma and Mistral. MLA, linear attention and
    layers that mix dense MLPs with experts are refused: their cost has another form.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ShapeError("text_config must be an object", param="config")
    for key in ("kv_lora_rank", "linear_num_value_heads", "mamba_d_state"):
        if text.get(key):
            raise ShapeError(f"{name} has {key}: MLA and linear-attention models cannot be planned", param="config")
    layers = _number(text, "num_hidden_layers", most=_MAX_LAYERS)
    hidden = _number(text, "hidden_size")
    heads = _number(text, "num_attention_heads")
    kv_heads = _number(text, "num_key_value_heads", default=heads)
    head_dim = _number(text, "head_dim", default=max(1, hidden // heads))
    if heads % kv_heads:
        raise ShapeError(f"{kv_heads} KV heads do not divide {heads} heads", param="config")
    full_layers, window = _attention_kinds(text, layers)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    experts = _number(text, "num_experts", "num_local_experts", default=0)
    if experts:
        per_token = _number(text, "num_experts_per_tok", most=experts)
        width = _number(text, "moe_intermediate_size", "intermediate_size")
        if text.get("mlp_only_layers") or _number(text, "decoder_sparse_step", default=1) != 1:
            raise ShapeError(f"{name} mixes dense MLPs with experts; that cannot be planned", param="config")
        dense, expert = layers * (attention + hidden * experts), layers * 3 * hidden * width  # with the router
    else:
        per_token, expert = 0, 0
        dense = layers * (attention + 3 * hidden * _number(text, "intermediate_size"))
    table = _number(text, "vocab_size") * hidden
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", True))
    return ModelShape(
        name=name,
        layers=layers,
        full_layers=full_layers,
        window=window,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        dense_weights=dense,
        expert_weights=expert,
        experts=experts,
        experts_per_token=per_token,
        head_weights=table,
        embedding_weights=0 if tied else table,
        context_length=_number(text, "max_position_embeddings"),
        value_bytes=_value_bytes(text),
    )


def _attention_kinds(text: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """How many layers attend to everything, and the window of the others."""
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return layers, 0
    window = _number(text, "sliding_window")
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return sum(kind == "full_attention" for kind in kinds), window
    pattern = _number(text, "sliding_window_pattern", "_sliding_window_pattern", default=0)
    return (layers // pattern if pattern else 0), window


def _value_bytes(text: Mapping[str, Any]) -> int:
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    sizes = {"bfloat16": 2, "float16": 2, "float32": 4}
    if dtype not in sizes:
        raise ShapeError(f"dtype {dtype} cannot be planned; set one of {', '.join(sizes)}", param="config")
    return sizes[dtype]


def _number(text: Mapping[str, Any], *keys: str, default: int | None = None, most: int = _MAX_NUMBER) -> int:
    """The first key that is there, as a whole number within bounds. A default may be 0, a given number not."""
    found = next((text[key] for key in keys if text.get(key) is not None), None)
    if found is None:
        if default is None:
            raise ShapeError(f"the config has no {' or '.join(keys)}", param="config")
        return default
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= most:
        raise ShapeError(f"{keys[0]} must be a whole number from 1 to {most}, not {found!r}", param="config")
    return found


def _built_in() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(
        files("cb_loadtest").joinpath("data/models.json").read_text(encoding="utf-8")
    )
    return found
