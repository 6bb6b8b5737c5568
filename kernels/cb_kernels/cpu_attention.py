"""Attention of new rows over a paged KV pool on the CPU, with the log-sum-exp that scoring needs.

Only the new rows are computed (SGLang's torch_native backend pads them to the whole sequence), keys are
never expanded to all query heads, slots are read in place where they are consecutive, and requests that
share a cached prefix read it once (the cascade). Window semantics are those of SGLang's torch_native and
triton backends: the row at position p sees positions p - window .. p, window =
RadixAttention.sliding_window_size (a Hugging Face window of 512 arrives as 511). Source: shared design
section 3, kernels page ("CPU").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cb_kernels.cpu_attention_math import attend, merge_into
from cb_kernels.cpu_attention_plan import (
    ExtendPlan,
    ExtendRequest,
    Index,
    Pass,
    SharedPrefix,
    plan_decode,
    plan_extend,
)

__all__ = [
    "ExtendPlan",
    "ExtendRequest",
    "SharedPrefix",
    "decode_attention",
    "extend_attention",
    "plan_decode",
    "plan_extend",
]

_DTYPES = (torch.float32, torch.bfloat16)


def extend_attention(
    plan: ExtendPlan,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    scale: float,
    window: int | None = None,
    logit_cap: float = 0.0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of every planned row over its request's slots (own rows are already in the pool).

    Shapes: q [N, H, D], k_pool [slots, Hkv, D], v_pool [slots, Hkv, Dv], H a multiple of Hkv; each float32
    or bfloat16. window: positions seen before the own one; None or negative: all. logit_cap: a score s
    becomes cap * tanh(s / cap); 0: off. Returns out [N, H, Dv] (q's dtype, or `out` itself) and lse [N, H]
    float32, the natural log-sum-exp over what the row sees of the scaled (capped) scores. A row of no
    request has lse -inf and zeros (or what `out` held). Computes in float32. Raises ValueError or TypeError
    for arguments that do not fit the plan or each other.
    """
    return _run(plan, q, k_pool, v_pool, scale, window, logit_cap, out)


def decode_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Sequence[Tensor] | ExtendPlan,
    *,
    scale: float,
    window: int | None = None,
    logit_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one new row a request: row b of q [B, H, D] is the last of slots[b] (int64 [kv_len], CPU).

    `slots` may be the plan of plan_decode(slots), built once a step and used by all layers. Otherwise as
    extend_attention, without the LSE. Returns out [B, H, Dv].
    """
    plan = slots if isinstance(slots, ExtendPlan) else plan_decode(slots)
    return _run(plan, q, k_pool, v_pool, scale, window, logit_cap, out)[0]


def _run(
    plan: ExtendPlan,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    window: int | None,
    logit_cap: float,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    _check(plan, q, k_pool, v_pool, logit_cap, out)
    rows, heads, _ = q.shape
    kv_heads, value_dim = v_pool.shape[1:]
    direct = out is not None and out.dtype == torch.float32
    if out is not None and direct:
        acc = out
    else:
        acc = torch.empty(rows, heads, value_dim)
        if plan.row_total < rows:
            acc.zero_() if out is None else acc.copy_(out)
    lse = torch.full((rows, heads), -math.inf)
    q32 = q.float()
    for p in plan.passes(window, heads // kv_heads):
        _run_pass(p, q32, k_pool, v_pool, scale, logit_cap, acc, lse)
    if direct:
        return acc, lse
    if out is None:
        return acc.to(q.dtype), lse
    return out.copy_(acc), lse


def _run_pass(
    p: Pass,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    logit_cap: float,
    acc: Tensor,
    lse: Tensor,
) -> None:
    kv_heads = k_pool.shape[1]
    group = q.shape[1] // kv_heads
    k, v = (
        _take(pool, p.keys).float().view(p.batch, p.keys_each, kv_heads, -1).transpose(1, 2)
        for pool in (k_pool, v_pool)
    )
    # [batch, kv head, row, query head of the kv head, D]
    rows = _take(q, p.rows).reshape(p.batch, p.rows_each, kv_heads, group, -1).transpose(1, 2)
    # Folded rows make one tall matrix product a kv head; a 2-d mask or the causal flag needs one a head.
    rows = rows.flatten(2, 3).unsqueeze(2) if p.folded else rows.transpose(2, 3)
    part, part_lse = attend(rows, k, v, scale=scale, mask=p.mask, causal=p.causal, logit_cap=logit_cap)
    if p.folded:
        part = part.reshape(p.batch, kv_heads, p.rows_each, group, -1).transpose(1, 2)
        part_lse = part_lse.reshape(p.batch, kv_heads, p.rows_each, group).transpose(1, 2)
    else:
        part, part_lse = part.movedim(3, 1), part_lse.movedim(3, 1)
    part = part.reshape(p.batch * p.rows_each, kv_heads * group, -1)
    part_lse = part_lse.reshape(p.batch * p.rows_each, kv_heads * group)
    if p.kept is not None:
        part, part_lse = part.index_select(0, p.kept), part_lse.index_select(0, p.kept)
    if p.fresh:
        acc[p.targets], lse[p.targets] = part, part_lse
    elif isinstance(p.targets, slice):
        merge_into(acc[p.targets], lse[p.targets], part, part_lse)
    else:
        old, old_lse = acc.index_select(0, p.targets), lse.index_select(0, p.targets)
        merge_into(old, old_lse, part, part_lse)
        acc.index_copy_(0, p.targets, old)
        lse.index_copy_(0, p.targets, old_lse)


def _take(x: Tensor, index: Index) -> Tensor:
    return x[index] if isinstance(index, slice) else x.index_select(0, index)


def _check(plan: ExtendPlan, q: Tensor, k_pool: Tensor, v_pool: Tensor, logit_cap: float, out: Tensor | None) -> None:
    if q.dim() != 3 or k_pool.dim() != 3 or v_pool.dim() != 3:
        raise ValueError("q must be [rows, heads, dim], k_pool and v_pool [slots, kv heads, dim]")
    for name, x in (("q", q), ("k_pool", k_pool), ("v_pool", v_pool)):
        if x.dtype not in _DTYPES or x.device.type != "cpu":
            raise TypeError(f"{name} must be a float32 or bfloat16 CPU tensor, got {x.dtype} on {x.device}")
    if q.shape[2] != k_pool.shape[2] or k_pool.shape[:2] != v_pool.shape[:2] or q.shape[1] % k_pool.shape[1]:
        shapes = f"q {tuple(q.shape)}, k_pool {tuple(k_pool.shape)}, v_pool {tuple(v_pool.shape)}"
        raise ValueError(
            f"shapes do not fit: {shapes}; the pools need equal slots and kv heads, "
            "q the keys' dim and a multiple of their heads"
        )
    if q.shape[0] < plan.row_end or k_pool.shape[0] < plan.slot_end:
        raise ValueError(
            f"the plan reaches row {plan.row_end - 1} of {q.shape[0]} in q and slot {plan.slot_end - 1} of "
            f"{k_pool.shape[0]} in the pool; plan again from this batch's requests"
        )
    if logit_cap < 0.0:
        raise ValueError(f"logit_cap must be 0 (off) or positive, got {logit_cap}")
    wanted = (*q.shape[:2], v_pool.shape[2])
    if out is not None and (out.shape != wanted or out.dtype not in _DTYPES):
        raise ValueError(f"out must be [N, H, Dv] = {wanted}, got {tuple(out.shape)} {out.dtype}")
