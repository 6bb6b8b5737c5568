"""The fused moment kernel: from queries, the paged key pool and the LSE to votes, energy and row energy.

    p = exp2(scale * log2(e) * q . k - lse * log2(e))        the attention, never stored
    A = mean of p over the query heads of a KV head
    moment_kernel, per row block: sum_i A, sum_i maxpool7(A_i)^2    one writer each, no atomics
    fold_kernel: row-block sums -> votes, energy, row_energy        added to the plan's, layer by layer

Keys are read straight from the pool through ``kv_indices``, so page size and slot order do not matter, and
slots that no index names are never touched. Formulas: arXiv 2609.32046, section 2 of the design page.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cb_kernels.errors import ScoringInputError
from cb_kernels.moments import ENERGY_SCALE, max_pool7
from cb_kernels.plan import ScoringPlan
from cb_kernels.triton_kernels import INTERPRETED, LOG2E, fold_kernel, moment_kernel
from cb_kernels.triton_schedule import Schedule, SplitFold, schedule_for
from cb_kernels.triton_tiling import Tiling, next_power_of_two

FOLD_TILE = 256


def score_layer_triton(
    plan: ScoringPlan,
    layer: int,
    q: Tensor,
    k_pool: Tensor,
    lse: Tensor,
    *,
    scale: float,
    tiling: Tiling | None = None,
) -> None:
    """Accumulate one scored layer into ``plan``. Two launches on the current stream, no host sync.

    ``q`` [N, H, D] and ``k_pool`` [slots, Hkv, D]: bfloat16, float16 or float32, the same for both, of any
    strides but 1 along D. ``lse`` float32 [N, H], natural log. Contract as in ``score_layer``; ``tiling`` is
    for benchmarks and tests.

    Raises ``ScoringInputError`` if the tensors do not fit the plan or the kernel.
    """
    plan.check_layer(layer, q, k_pool, lse)
    if q.dtype != k_pool.dtype:
        raise ScoringInputError(
            f"q is {q.dtype} but the key pool is {k_pool.dtype}: start the engine with kv_cache_dtype=auto"
        )
    if k_pool.stride(2) != 1:
        raise ScoringInputError(f"the key pool must be contiguous along head_dim; strides {k_pool.stride()}")
    q = q if q.stride(2) == 1 else q.contiguous()
    lse = lse if lse.stride(1) == 1 else lse.contiguous()
    schedule = schedule_for(plan, k_pool.dtype, tiling)
    for launch in schedule.launches:
        grid = (launch.work.shape[0], plan.kv_heads, launch.tiles)
        moment_kernel[grid](
            q,
            k_pool,
            lse,
            plan.kv_indices,
            launch.work,
            schedule.scratch,
            q.stride(0),
            q.stride(1),
            k_pool.stride(0),
            k_pool.stride(1),
            lse.stride(0),
            scale * LOG2E,
            **moment_constants(
                schedule.tiling, plan.kv_heads, schedule.group, plan.head_dim, plan.sink_free, launch.add
            ),
            num_warps=schedule.tiling.warps,
        )
        if launch.fold is not None:
            fold_kernel[(-(-launch.fold_length // FOLD_TILE), launch.fold.shape[0])](
                schedule.scratch,
                launch.fold,
                plan.votes,
                plan.energy,
                plan.row_energy,
                KV_HEADS=plan.kv_heads,
                GROUP=schedule.group,
                TILE=FOLD_TILE,
            )
        for split in launch.splits:
            _fold_split(plan, layer, schedule, split)
    plan.layers_done = layer + 1


def moment_constants(
    tiling: Tiling, kv_heads: int, group: int, head_dim: int, sink_free: bool, add: bool
) -> dict[str, Any]:
    """The compile-time constants of ``moment_kernel``."""
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_PAD": next_power_of_two(group),
        "DIM": head_dim,
        "DIM_PAD": next_power_of_two(head_dim),
        "DIM_CHUNK": min(tiling.dim_chunk, next_power_of_two(head_dim)),
        "BLOCK_ROWS": tiling.block_rows,
        "LANES": tiling.lanes,
        "HEADS_INNER": tiling.heads_inner,
        "FIRST": int(sink_free),
        "ADD": add,
        # The interpreter hands tl.dot the raw bits of bfloat16.
        "UPCAST": INTERPRETED,
        "STAGES": tiling.stages,
    }


def _fold_split(plan: ScoringPlan, layer: int, schedule: Schedule, split: SplitFold) -> None:
    """``fold_kernel`` for a query that continues in another forward pass; rare, so in plain torch.

    Its energy needs the sums over all rows, which are complete in the last pass only; the moments of
    the passes before it are never returned.
    """
    segment = plan.segments[split.segment]
    carry = segment.carry
    assert carry is not None
    length, group = segment.sender_len, schedule.group
    size = split.blocks * 2 * plan.kv_heads * length
    sums = schedule.scratch[split.sums_offset : split.sums_offset + size]
    attention, pooled = sums.view(split.blocks, 2, plan.kv_heads, length).sum(dim=0).unbind(0)
    row_sums = carry.row_sums[layer].add_(attention, alpha=1.0 / group)
    carry.row_energy.add_(pooled.sum(dim=0), alpha=1.0 / group**2)
    row_mean = row_sums / segment.total_rows
    columns = plan.columns(split.segment)
    plan.votes[columns].add_(row_mean.mean(dim=0), alpha=1.0 / ENERGY_SCALE)
    plan.energy[columns].add_(max_pool7(row_mean).square_().sum(dim=0))
