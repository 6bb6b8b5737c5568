"""Which layers of the loaded model are scored, and with what geometry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_attn_tp_group
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from cb_sglang.errors import SeamError


@dataclass(frozen=True, slots=True)
class ScoredLayers:
    """The full-attention layers of one model runner, in order.

    ordinal:  SGLang's layer_id -> 0..n-1 over scored layers only. Sliding-window, chunked-local, linear and cross
              attention layers are never scored (design section 2).
    heads, kv_heads, head_dim: this rank's share, equal over all scored layers.
    """

    ordinal: dict[int, int]
    heads: int
    kv_heads: int
    head_dim: int
    tp_group: Any

    @classmethod
    def of(cls, runner: Any) -> ScoredLayers:
        """Read once per runner and kept on it. Raises SeamError when the model cannot be scored, and why."""
        if not hasattr(runner, "cacheback_layers"):
            runner.cacheback_layers = cls._read(runner)
        found: ScoredLayers = runner.cacheback_layers
        return found

    @classmethod
    def _read(cls, runner: Any) -> ScoredLayers:
        if runner.use_mla_backend:
            raise SeamError("models with multi-head latent attention (MLA) cannot be scored yet")
        if runner.pp_group.world_size > 1:
            raise SeamError("scoring does not support pipeline parallelism; start with --pp-size 1")
        layers = [m for m in runner.model.modules() if isinstance(m, RadixAttention) and is_scored(m)]
        if not layers:
            raise SeamError("this model has no full-attention layer, so there is nothing to score")
        geometry = {(m.tp_q_head_num, m.tp_k_head_num, m.qk_head_dim) for m in layers}
        if len(geometry) > 1:
            raise SeamError(f"full-attention layers of different geometry cannot be scored yet: {sorted(geometry)}")
        if any(m.logit_cap for m in layers):
            raise SeamError("full-attention layers with a logit soft cap cannot be scored yet")
        heads, kv_heads, head_dim = geometry.pop()
        # Not the buffer's own type: a pool may store codes and hand out what it has dequantised.
        if runner.kv_cache_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise SeamError(f"the KV cache is {runner.kv_cache_dtype}; scoring needs --kv-cache-dtype auto or bfloat16")
        pool = runner.token_to_kv_pool.get_key_buffer(layers[0].layer_id)
        if pool.dim() != 3 or tuple(pool.shape[1:]) != (kv_heads, head_dim):
            raise SeamError(
                f"the KV pool is laid out as {tuple(pool.shape)}; scoring needs [slots, kv heads, head dim]: start "
                "without SGLANG_USE_HND_KVCACHE and with another --attention-backend"
            )
        ids = sorted(m.layer_id for m in layers)
        group, total = get_attn_tp_group(), runner.model_config.get_total_num_kv_heads()
        if group.world_size > total:
            raise SeamError(
                f"attention runs on {group.world_size} tensor-parallel ranks but the model has {total} KV heads, so "
                f"one KV head's query heads lie on several ranks; scoring needs --tp-size <= {total}"
            )
        return cls({layer_id: n for n, layer_id in enumerate(ids)}, heads, kv_heads, head_dim, group)

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks that share the heads."""
        return int(self.tp_group.world_size)

    def all_reduce(self, parts: list[torch.Tensor], op: Any = torch.distributed.ReduceOp.SUM) -> None:
        """Combine 1-D tensors of one dtype over the tensor-parallel ranks, in place, in one collective."""
        if self.ranks == 1 or not parts:
            return
        flat = torch.cat(parts)
        torch.distributed.all_reduce(flat, op, group=self.tp_group.device_group)
        for part, total in zip(parts, flat.split([len(part) for part in parts]), strict=True):  # type: ignore[no-untyped-call]
            part.copy_(total)


def is_scored(layer: RadixAttention) -> bool:
    """The layer rule: full (global) causal self-attention only."""
    return (
        layer.attn_type == AttentionType.DECODER
        and not layer.is_cross_attention
        and layer.sliding_window_size in (-1, None)
        and not layer.use_irope
    )
