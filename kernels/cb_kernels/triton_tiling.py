"""How the fused moment kernel cuts its work, and which shapes it takes.

One program of the kernel holds ``block_rows`` query rows of all query heads of one KV head and walks over
``lanes * steps`` consecutive sender positions: each lane owns ``steps`` neighbours and visits one of them
(and three more at either end, for the max-pool) per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cb_kernels.errors import ScoringInputError

POOL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MAX_GROUP = 8

# Walking six more steps than a lane owns costs 6 / steps; 60 makes that a tenth.
TARGET_STEPS = 60
# Below this the walk is mostly halo; not even an idle GPU is filled that way.
MIN_STEPS = 12
# Enough programs to give every multiprocessor four of them keeps it busy to the end.
PROGRAMS_PER_MULTIPROCESSOR = 4


@dataclass(frozen=True, slots=True)
class Tiling:
    """Compile-time constants of the moment kernel (and what the ``bench`` sweeps over).

    ``lanes`` and ``block_rows`` are powers of two; ``lanes`` is at least 16 (64 for Hopper's MMA). ``stages``
    is the depth of the software pipeline that fetches keys; ``warps`` the number of warps of a program.
    ``heads_inner`` orders the columns of the score tile by row, then head: on Blackwell, where a thread holds
    neighbouring columns, that keeps the sum over a group inside a thread; elsewhere head, then row, does.
    ``dim_chunk`` is how much of the head dimension one matrix product takes; chunks after the first are read
    again in every step.
    """

    lanes: int = 64
    block_rows: int = 32
    warps: int = 4
    stages: int = 3
    dim_chunk: int = MAX_HEAD_DIM
    heads_inner: bool = False
    target_steps: int = TARGET_STEPS


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value`` (>= 1)."""
    return 1 << (value - 1).bit_length()


def check_shape(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """The group size g = heads / kv_heads if the GPU kernels take this model, else ``ScoringInputError``."""
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ScoringInputError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    group = heads // kv_heads
    if group > MAX_GROUP:
        raise ScoringInputError(
            f"the Triton kernels take up to {MAX_GROUP} query heads per KV head; this model has {group}. "
            'Score with backend="cpu" or fewer heads per KV head.'
        )
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ScoringInputError(
            f"the Triton kernels take head sizes of {MIN_HEAD_DIM} to {MAX_HEAD_DIM}; this model has "
            f"{head_dim} (latent-attention (MLA) caches are not supported)"
        )
    if dtype not in POOL_DTYPES:
        raise ScoringInputError(
            f"the Triton kernels read bfloat16, float16 or float32 keys, not {dtype}: "
            "start the engine with kv_cache_dtype=auto"
        )
    return group


def default_tiling(group: int, head_dim: int, dtype: torch.dtype, row_counts: list[int], arch: int = 0) -> Tiling:
    """The tiling for a batch whose queries have ``row_counts`` voting rows each.

    ``arch`` is the compute capability (90 for Hopper), 0 off the GPU. Chosen so that nothing spills on
    sm_80, sm_90 and sm_100 (tests/kernels/test_triton_compile.py).
    """
    columns = next_power_of_two(group)
    exact = dtype == torch.float32  # three TF32 products a logit; only small tiles keep to the registers
    widest = 32 if exact else 64 if head_dim > 128 else 128
    # 32 rows of running maxima fit the register file, 64 do not.
    most = min(16 if exact else 32, widest // columns)
    least = min(most, max(8, 16 // columns))
    sizes = [size for size in (4, 8, 16, 32) if least <= size <= most]
    # Whole blocks are computed, so short queries want small ones; but small blocks fetch more keys per logit.
    work = {size: sum(-(-rows // size) * (size + 4) for rows in row_counts) for size in sizes}
    block_rows = min(sizes, key=lambda size: (work[size], -size))
    inner = 100 <= arch < 120  # consumer Blackwell (120) has no tensor memory
    if exact:
        return Tiling(block_rows=block_rows, warps=8, stages=1, dim_chunk=32, heads_inner=inner)
    return Tiling(block_rows=block_rows, stages=2 if head_dim > 128 else 3, heads_inner=inner)


def lane_steps(length: int, lanes: int, target: int) -> tuple[int, int]:
    """``(steps, tiles)`` that cover ``length`` positions evenly with at most ``target`` steps a lane."""
    tiles = -(-length // (lanes * target))
    steps = -(-length // (lanes * tiles))
    return steps, -(-length // (lanes * steps))


def steps_for_device(lengths: list[int], programs_per_tile: int, lanes: int, target: int, multiprocessors: int) -> int:
    """``target`` steps, or fewer if that would leave multiprocessors idle (one query over one short sender).

    ``programs_per_tile`` is work items x KV heads per average query; ``multiprocessors`` is 0 off the GPU.
    """
    wanted = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    longest = max(lengths)
    steps = target
    while steps > MIN_STEPS and lane_steps(longest, lanes, steps)[1] * programs_per_tile < wanted:
        steps = max(MIN_STEPS, steps * 3 // 4)
    return steps
