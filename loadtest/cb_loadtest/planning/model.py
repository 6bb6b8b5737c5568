"""What of a model decides its cost: the shape, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from cb_sglang.errors import InvalidRequestError
from cb_sglang.model_fitness import dtype_bytes, model_facts, read_config

_MAX_NUMBER = 1 << 40


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

    Raises InvalidRequestError.
    """
    built_in = _built_in()
    if name_or_path in built_in:
        return shape_from_config(built_in[name_or_path], name_or_path)
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise InvalidRequestError(
            f"{name_or_path} is neither a file nor a built-in shape ({', '.join(built_in)})", param="config"
        )
    return shape_from_config(read_config(path), path.parent.name or path.stem)


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """From the keys of a Hugging Face config (its ``text_config`` when there is one). Raises InvalidRequestError.

    Gated MLPs (three matrices) are assumed, as in Qwen, Llama, Gemma and Mistral. MLA, linear attention and
    layers that mix dense MLPs with experts are refused: their cost has another form.
    """
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, Mapping) else config
    facts = model_facts(config)
    # Some mix attention and state within a layer, which the kinds of layers do not tell.
    mixed = text.get("mamba_d_state") or text.get("linear_num_value_heads")
    if facts.latent_attention or facts.attention_layers < facts.layers or mixed:
        raise InvalidRequestError(
            f"{name} has latent or linear attention; such models cannot be planned", param="config"
        )
    layers, hidden, heads, kv_heads, head_dim = facts.layers, facts.hidden, facts.heads, facts.kv_heads, facts.head_dim
    if heads % kv_heads:
        raise InvalidRequestError(f"{kv_heads} KV heads do not divide {heads} heads", param="config")
    windowed = facts.scored_layers < layers
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    experts = _number(text, "num_experts", "num_local_experts", default=0)
    if experts:
        per_token = _number(text, "num_experts_per_tok", most=experts)
        width = _number(text, "moe_intermediate_size", "intermediate_size")
        if text.get("mlp_only_layers") or _number(text, "decoder_sparse_step", default=1) != 1:
            raise InvalidRequestError(f"{name} mixes dense MLPs with experts; that cannot be planned", param="config")
        dense, expert = layers * (attention + hidden * experts), layers * 3 * hidden * width  # with the router
    else:
        per_token, expert = 0, 0
        dense = layers * (attention + 3 * hidden * _number(text, "intermediate_size"))
    table = _number(text, "vocab_size") * hidden
    tied = text.get("tie_word_embeddings", True)
    return ModelShape(
        name=name,
        layers=layers,
        full_layers=facts.scored_layers,
        window=_number(text, "sliding_window", "attention_chunk_size") if windowed else 0,
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
        context_length=facts.context_length,
        value_bytes=dtype_bytes(facts.dtype),
    )


def _number(text: Mapping[str, Any], *keys: str, default: int | None = None, most: int = _MAX_NUMBER) -> int:
    """The first key that is there, as a whole number within bounds. A default may be 0, a given number not."""
    found = next((text[key] for key in keys if text.get(key) is not None), None)
    if found is None:
        if default is None:
            raise InvalidRequestError(f"the config has no {' or '.join(keys)}", param="config")
        return default
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= most:
        raise InvalidRequestError(f"{keys[0]} must be a whole number from 1 to {most}, not {found!r}", param="config")
    return found


def _built_in() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(
        files("cb_loadtest").joinpath("data/models.json").read_text(encoding="utf-8")
    )
    return found
