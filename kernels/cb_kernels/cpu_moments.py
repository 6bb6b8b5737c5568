"""The scoring pass on a CPU, in torch.

The sender's positions are walked in blocks. For each block the keys are gathered from the pool once and met
by all voting rows of all queries on that sender:

    logits (one batched GEMM, the row's LSE folded in) -> exp2 in place -> group mean -> row sums
                                                                       -> max-pool 7 -> powers -> row sums

Logits live in one [Hkv, g * rows, block] buffer, positions innermost, reused for every block. The six
attention columns a pool window still needs from the previous block are kept: no logit is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cb_kernels.errors import ScoringInputError
from cb_kernels.moments import ENERGY_SCALE, POOL_REACH, POOL_WIDTH
from cb_kernels.plan import QuerySegment, ScoringPlan, SenderGroup

_HALO = POOL_WIDTH - 1
_WORKSPACE = "cpu_moments"

# Found by measuring on two AVX2 cores. A block of logits takes up to 4 MB; the time is flat around these
# values and rises where blocks are short in positions (GEMM and pool like long rows). Large blocks also mean
# few parallel regions, each of which waits for the slowest thread on a busy machine.
_BLOCK_LOGITS = 1 << 20
_CHUNK_LOGIT_ROWS = 1024
_BLOCK_STEP = 64
_MAX_BLOCK = 1024
_MAX_PADDING = 0.125


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive voting rows of one segment."""

    segment: int
    row_start: int
    row_count: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Pieces that go through the GEMM together, each padded to ``rows`` rows."""

    pieces: tuple[_Piece, ...]
    rows: int
    flat_rows: Tensor  # int64 [pieces * rows]; padding repeats a real row
    padding: Tensor | None  # bool [pieces * rows, 1], or None where there is none

    @property
    def width(self) -> int:
        return len(self.pieces) * self.rows


@dataclass(frozen=True, slots=True)
class _Walk:
    """How one sender is walked: the slots, the block length and the chunks of rows."""

    slots: Tensor  # int64 [T]
    first_slot: int | None  # set where the slots are consecutive, so that no gather is needed
    length: int
    block: int
    chunks: tuple[_Chunk, ...]


def score_layer_cpu(plan: ScoringPlan, layer: int, q: Tensor, k_pool: Tensor, lse: Tensor, *, scale: float) -> None:
    """Accumulate one scored layer into ``plan``; arguments as in ``score_layer``. All tensors on the CPU."""
    plan.check_layer(layer, q, k_pool, lse)
    if plan.device.type != "cpu":
        raise ScoringInputError(f"score_layer_cpu needs a plan on the CPU; this one is on {plan.device}")
    walks: list[_Walk] = plan.workspace.get(_WORKSPACE) or [_plan_walk(plan, g) for g in plan.groups]
    plan.workspace[_WORKSPACE] = walks
    plan.sum_a.zero_()
    plan.sum_p.zero_()
    for walk in walks:
        _walk_sender(plan, walk, q, k_pool, lse, scale)
    plan.fold_layer(layer)


def _walk_sender(plan: ScoringPlan, walk: _Walk, q: Tensor, k_pool: Tensor, lse: Tensor, scale: float) -> None:
    kv_heads, group, block = plan.kv_heads, plan.group_size, walk.block
    queries = [_chunk_queries(plan, chunk, q, scale) for chunk in walk.chunks]
    biases = [_chunk_bias(plan, chunk, lse) for chunk in walk.chunks]
    halos = [torch.zeros(kv_heads, chunk.width, _HALO) for chunk in walk.chunks]
    # Row sums of each piece; pooled ones trail by the pool's reach, hence the few more columns.
    sums_a = [torch.empty(kv_heads, len(c.pieces), walk.length) for c in walk.chunks]
    sums_p = [torch.empty(kv_heads, len(c.pieces), walk.length + _HALO) for c in walk.chunks]
    widest = max(chunk.width for chunk in walk.chunks)
    logit_buffer = torch.empty(kv_heads * group * widest * block)
    pool_buffers = [torch.empty(kv_heads * widest * (block + _HALO + POOL_REACH)) for _ in range(3)]

    for start in range(0, walk.length, block):
        count = min(block, walk.length - start)
        keys = _block_keys(walk, k_pool, start, count)  # [Hkv, D, count]
        last = start + count == walk.length
        pooled_count = count + POOL_REACH if last else count
        for index, chunk in enumerate(walk.chunks):
            width, pieces = chunk.width, len(chunk.pieces)
            logits = _view(logit_buffer, kv_heads, group * width, count)
            torch.baddbmm(biases[index], queries[index], keys, out=logits)
            torch.exp2(logits, out=logits)

            # [halo of six | this block | three zeros after the sender's last position]
            attention = _view(pool_buffers[0], kv_heads, width, _HALO + pooled_count)
            fresh = attention[:, :, _HALO : _HALO + count]
            _sum_group(logits.view(kv_heads, group, width, count), fresh)
            attention[:, :, :_HALO] = halos[index]
            if last:
                attention[:, :, _HALO + count :] = 0
            if start == 0 and plan.sink_free:
                fresh[:, :, 0] = 0
            halos[index].copy_(attention[:, :, count : count + _HALO])
            torch.sum(
                fresh.view(kv_heads, pieces, chunk.rows, count),
                dim=2,
                out=sums_a[index][:, :, start : start + count],
            )

            two = _view(pool_buffers[1], kv_heads, width, pooled_count + 5)
            torch.maximum(attention[:, :, :-1], attention[:, :, 1:], out=two)
            four = _view(pool_buffers[2], kv_heads, width, pooled_count + 3)
            torch.maximum(two[:, :, :-2], two[:, :, 2:], out=four)
            pooled = _view(pool_buffers[1], kv_heads, width, pooled_count)
            torch.maximum(four[:, :, :-3], four[:, :, 3:], out=pooled)
            plan.power_(pooled)
            torch.sum(
                pooled.view(kv_heads, pieces, chunk.rows, pooled_count),
                dim=2,
                out=sums_p[index][:, :, start : start + pooled_count],
            )

    for index, chunk in enumerate(walk.chunks):
        for at, piece in enumerate(chunk.pieces):
            columns = plan.columns(piece.segment)
            plan.sum_a[:, columns] += sums_a[index][:, at]
            plan.sum_p[:, columns] += sums_p[index][:, at, POOL_REACH : POOL_REACH + walk.length]


def _chunk_queries(plan: ScoringPlan, chunk: _Chunk, q: Tensor, scale: float) -> Tensor:
    """[Hkv, g * width, D] float32, scaled to logits of base 2."""
    rows = q.index_select(0, chunk.flat_rows).float().mul_(scale * math.log2(math.e))
    grouped = rows.view(chunk.width, plan.kv_heads, plan.group_size, plan.head_dim)
    return grouped.permute(1, 2, 0, 3).reshape(plan.kv_heads, -1, plan.head_dim)


def _chunk_bias(plan: ScoringPlan, chunk: _Chunk, lse: Tensor) -> Tensor:
    """[Hkv, g * width, 1]: minus the LSE in base 2, plus the factor 256 / g of the scaled group mean.

    Padding rows get minus infinity: their attention is exactly 0.
    """
    bias = lse.index_select(0, chunk.flat_rows).mul_(-math.log2(math.e))
    bias.add_(math.log2(ENERGY_SCALE / plan.group_size))
    if chunk.padding is not None:
        bias.masked_fill_(chunk.padding, float("-inf"))
    return bias.t().reshape(plan.kv_heads, -1, 1)


def _block_keys(walk: _Walk, k_pool: Tensor, start: int, count: int) -> Tensor:
    """The keys of positions ``start .. start + count`` as float32 [Hkv, D, count]."""
    if walk.first_slot is not None:
        first = walk.first_slot + start
        keys = k_pool[first : first + count]
    else:
        keys = k_pool.index_select(0, walk.slots[start : start + count])
    return keys.float().permute(1, 2, 0)


def _sum_group(weights: Tensor, out: Tensor) -> None:
    """Sum ``weights`` [Hkv, g, width, count] over g into ``out`` [Hkv, width, count]."""
    group = weights.shape[1]
    if group == 1:
        out.copy_(weights[:, 0])
        return
    torch.add(weights[:, 0], weights[:, 1], out=out)
    for head in range(2, group):
        out.add_(weights[:, head])


def _view(buffer: Tensor, *shape: int) -> Tensor:
    """The front of a flat buffer in the given shape."""
    return buffer[: math.prod(shape)].view(shape)


def _plan_walk(plan: ScoringPlan, group: SenderGroup) -> _Walk:
    slots = plan.kv_indices[group.kv_start : group.kv_start + group.sender_len].to(torch.int64)
    consecutive = bool((slots[1:] - slots[:-1] == 1).all())
    heads = plan.heads
    # Scratch: logits (H floats a row and position), three pool buffers (Hkv floats each).
    budget = plan.scratch_bytes // 4 // (heads + 3 * plan.kv_heads)
    row_limit = max(1, min(_CHUNK_LOGIT_ROWS // heads, budget // (_BLOCK_STEP + 2 * _HALO)))
    chunks = _pack_rows([(index, plan.segments[index]) for index in group.members], row_limit)
    widest = max(chunk.width for chunk in chunks)
    block = min(_BLOCK_LOGITS // (heads * widest), budget // widest - 2 * _HALO, _MAX_BLOCK)
    block = max(_BLOCK_STEP, block // _BLOCK_STEP * _BLOCK_STEP)  # GEMM is slower on odd lengths
    return _Walk(
        slots=slots,
        first_slot=int(slots[0]) if consecutive else None,
        length=group.sender_len,
        block=block,
        chunks=chunks,
    )


def _pack_rows(segments: Sequence[tuple[int, QuerySegment]], row_limit: int) -> tuple[_Chunk, ...]:
    """Cut segments at ``row_limit`` rows and pack pieces of similar size, with little padding, in chunks."""
    pieces = [
        _Piece(index, segment.row_start + done, min(row_limit, segment.row_count - done))
        for index, segment in segments
        for done in range(0, segment.row_count, row_limit)
    ]
    pieces.sort(key=lambda piece: piece.row_count, reverse=True)
    chunks: list[list[_Piece]] = []
    filled = 0
    for piece in pieces:
        if chunks:
            rows = chunks[-1][0].row_count
            width = rows * (len(chunks[-1]) + 1)
            filled += piece.row_count
            if width <= row_limit and width - filled <= _MAX_PADDING * width:
                chunks[-1].append(piece)
                continue
        chunks.append([piece])
        filled = piece.row_count
    return tuple(_make_chunk(chunk) for chunk in chunks)


def _make_chunk(pieces: list[_Piece]) -> _Chunk:
    rows = pieces[0].row_count
    starts = torch.tensor([piece.row_start for piece in pieces])[:, None]
    counts = torch.tensor([piece.row_count for piece in pieces])[:, None]
    within = torch.arange(rows)[None, :]
    padding = (within >= counts).reshape(-1, 1)
    flat_rows = (starts + torch.minimum(within, counts - 1)).reshape(-1)
    return _Chunk(tuple(pieces), rows, flat_rows, padding if bool(padding.any()) else None)
