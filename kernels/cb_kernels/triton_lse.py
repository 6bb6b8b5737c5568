"""Log-sum-exp of the logits, for attention backends that do not return it: one extra pass over the keys.

The keys of a row are cut into splits that run side by side; a last reduction over the splits joins them, so
that one query over one long sender still fills a GPU. No atomics, no host sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cb_kernels.errors import ScoringInputError
from cb_kernels.triton_kernels import INTERPRETED, LOG2E, lse_kernel
from cb_kernels.triton_schedule import to_device
from cb_kernels.triton_tiling import (
    PROGRAMS_PER_MULTIPROCESSOR,
    Tiling,
    check_shape,
    default_tiling,
    next_power_of_two,
)

LSE_TILE = 64
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class LseSegment:
    """Rows of one query. Row i sees ``kv_indices[kv_start : kv_start + seen + i]``, itself last.

    ``seen`` counts the sender's positions, the query's own earlier rows, and the first row itself, so it is
    T + 1 for a query that starts right behind its sender.
    """

    row_start: int
    row_count: int
    kv_start: int
    seen: int


@dataclass(frozen=True, slots=True)
class LsePlan:
    """The layout of one batch; build it with ``plan_lse``. The same for every layer."""

    work: Tensor
    kv_indices: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    tiling: Tiling
    partial: Tensor


def plan_lse(
    segments: Sequence[LseSegment],
    *,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_indices: Tensor,
    scratch_bytes: int = 64 << 20,
) -> LsePlan:
    """Lay out one batch of ``rows`` = N rows on the device of ``kv_indices`` (1-D int32 or int64).

    ``kv_indices`` must reach over each query's own rows, not only over its sender. ``scratch_bytes`` bounds
    the float32 [splits, N, H] partial results. Raises ``ScoringInputError`` for lengths that do not fit.
    """
    group = check_shape(heads, kv_heads, head_dim, dtype)
    if kv_indices.ndim != 1 or kv_indices.dtype not in (torch.int32, torch.int64):
        raise ScoringInputError(
            f"kv_indices must be 1-D int32 or int64; got {kv_indices.dtype} {tuple(kv_indices.shape)}"
        )
    if not segments:
        raise ScoringInputError("no rows to take an LSE of: segments is empty")
    for index, segment in enumerate(segments):
        end = segment.kv_start + segment.seen + segment.row_count - 1
        if min(segment.row_start, segment.kv_start) < 0 or min(segment.row_count, segment.seen) < 1:
            raise ScoringInputError(f"segment {index} needs row_start, kv_start >= 0, row_count, seen >= 1")
        if end > kv_indices.numel() or segment.row_start + segment.row_count > rows:
            raise ScoringInputError(
                f"segment {index} reaches row {segment.row_start + segment.row_count} of {rows} and index "
                f"{end} of {kv_indices.numel()}: kv_indices must cover the query's own rows too"
            )
    device = kv_indices.device
    counts = [segment.row_count for segment in segments]
    tiling = default_tiling(group, head_dim, dtype, counts)
    block_rows = tiling.block_rows
    blocks = sum(-(-count // block_rows) for count in counts)
    splits = _splits(segments, blocks * kv_heads, rows * heads * 4, scratch_bytes, device)
    work: list[list[int]] = []
    for segment in sorted(segments, key=lambda s: s.kv_start):
        for row in range(0, segment.row_count, block_rows):
            taken = min(block_rows, segment.row_count - row)
            seen = segment.seen + row
            per_split = -(-(seen + taken - 1) // (splits * LSE_TILE)) * LSE_TILE
            work.append([segment.row_start + row, taken, segment.kv_start, seen, per_split, 0])
    # Rows that belong to no query keep minus infinity.
    partial = torch.full((splits, rows, heads), float("-inf"), dtype=torch.float32, device=device)
    return LsePlan(to_device(work, device), kv_indices, heads, kv_heads, head_dim, rows, tiling, partial)


def layer_lse_triton(plan: LsePlan, q: Tensor, k_pool: Tensor, *, scale: float) -> Tensor:
    """Natural-log LSE of ``scale * q . k`` over all a row sees, float32 [N, H]; -inf for rows of no segment.

    ``q`` [N, H, D], ``k_pool`` [slots, Hkv, D]: bfloat16, float16 or float32, the same for both. The pool
    must already hold the batch's own keys.
    """
    if tuple(q.shape) != (plan.rows, plan.heads, plan.head_dim):
        raise ScoringInputError(f"q must be [{plan.rows}, {plan.heads}, {plan.head_dim}]; got {tuple(q.shape)}")
    if k_pool.ndim != 3 or tuple(k_pool.shape[1:]) != (plan.kv_heads, plan.head_dim):
        raise ScoringInputError(f"k_pool must be [slots, {plan.kv_heads}, {plan.head_dim}]; got {tuple(k_pool.shape)}")
    if q.dtype != k_pool.dtype:
        raise ScoringInputError(
            f"q is {q.dtype} but the key pool is {k_pool.dtype}: start the engine with kv_cache_dtype=auto"
        )
    if k_pool.stride(2) != 1:
        raise ScoringInputError(f"the key pool must be contiguous along head_dim; strides {k_pool.stride()}")
    q = q if q.stride(2) == 1 else q.contiguous()
    partial = plan.partial
    lse_kernel[(plan.work.shape[0], plan.kv_heads, partial.shape[0])](
        q,
        k_pool,
        plan.kv_indices,
        plan.work,
        partial,
        q.stride(0),
        q.stride(1),
        k_pool.stride(0),
        k_pool.stride(1),
        partial.stride(1),
        partial.stride(0),
        scale * LOG2E,
        **lse_constants(plan.heads // plan.kv_heads, plan.head_dim, plan.tiling),
        num_warps=plan.tiling.warps,
    )
    # A copy, so that the next layer may write the partial results again.
    return partial[0].clone() if partial.shape[0] == 1 else torch.logsumexp(partial, dim=0)


def lse_constants(group: int, head_dim: int, tiling: Tiling) -> dict[str, Any]:
    """The compile-time constants of ``lse_kernel``."""
    return {
        "GROUP": group,
        "GROUP_PAD": next_power_of_two(group),
        "DIM": head_dim,
        "DIM_PAD": next_power_of_two(head_dim),
        "DIM_CHUNK": min(tiling.dim_chunk, next_power_of_two(head_dim)),
        "BLOCK_ROWS": tiling.block_rows,
        "TILE": LSE_TILE,
        "UPCAST": INTERPRETED,
        "STAGES": tiling.stages,
    }


def _splits(
    segments: Sequence[LseSegment],
    programs: int,
    bytes_per_split: int,
    scratch_bytes: int,
    device: torch.device,
) -> int:
    """Enough splits to fill the GPU, none shorter than four tiles, all within the scratch."""
    if device.type != "cuda":
        wanted = 2
    else:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        wanted = -(-PROGRAMS_PER_MULTIPROCESSOR * processors // programs)
    longest = max(segment.seen + segment.row_count - 1 for segment in segments)
    most = min(MAX_SPLITS, max(1, longest // (4 * LSE_TILE)), max(1, scratch_bytes // bytes_per_split))
    return max(1, min(wanted, most))
