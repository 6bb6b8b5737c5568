"""From a plan to kernel launches: which program computes what, and where its sums go.

Plain host arithmetic over lengths the plan already knows, done once per batch; the result is kept in
``plan.workspace``. No Triton here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cb_kernels.errors import ScoringInputError
from cb_kernels.plan import ScoringPlan
from cb_kernels.triton_tiling import Tiling, check_shape, default_tiling, lane_steps, steps_for_device

WORK_COLUMNS = 6
FOLD_COLUMNS = 6
WORKSPACE_KEY = "triton"


@dataclass(frozen=True, slots=True)
class SplitFold:
    """A query that chunked prefill has split: its row-block sums go to its Carry, not to the moments."""

    segment: int
    sums_offset: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of the moment kernel, and what can be folded once it is done.

    * ``work`` int64 [n, 6]: first row, rows, kv_start, T, steps per lane, offset in the scratch.
    * ``tiles``: the most tiles any item needs.
    * ``add``: add to the sums of the launch before (more row blocks of one query than the scratch holds).
    * ``fold`` int64 [m, 6]: offset in the scratch, row blocks, T, rows of the query, column in the plan's
      flat buffers, unused. ``fold_length`` is the largest T among them.
    """

    work: Tensor
    tiles: int
    add: bool
    fold: Tensor | None
    fold_length: int
    splits: tuple[SplitFold, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """All launches of one layer (the same for every layer) and the scratch they share, float32."""

    tiling: Tiling
    group: int
    launches: tuple[Launch, ...]
    scratch: Tensor


@dataclass(slots=True)
class _Draft:
    """A launch in the making, on the host."""

    work: list[list[int]]
    fold: list[list[int]]
    splits: list[SplitFold]
    floats: int = 0
    tiles: int = 0
    add: bool = False

    @classmethod
    def empty(cls, *, add: bool = False) -> _Draft:
        return cls([], [], [], add=add)


def schedule_for(plan: ScoringPlan, dtype: torch.dtype, tiling: Tiling | None = None) -> Schedule:
    """The plan's schedule for keys of ``dtype``, built at the first call and kept in the plan.

    ``tiling`` overrides the default one; it only counts at the first call. Raises ``ScoringInputError`` for a
    model the kernels do not take, or if ``plan.scratch_bytes`` cannot hold the sums of one row block.
    """
    schedule = plan.workspace.get(WORKSPACE_KEY)
    if schedule is None:
        schedule = _build(plan, dtype, tiling)
        plan.workspace[WORKSPACE_KEY] = schedule
    assert isinstance(schedule, Schedule)
    return schedule


def _build(plan: ScoringPlan, dtype: torch.dtype, tiling: Tiling | None) -> Schedule:
    group = check_shape(plan.heads, plan.kv_heads, plan.head_dim, dtype)
    if tiling is None:
        rows = [segment.row_count for segment in plan.segments]
        tiling = default_tiling(group, plan.head_dim, dtype, rows, compute_capability(plan.device))
    drafts = _draft_launches(plan, tiling)
    floats = max(draft.floats for draft in drafts)
    launches = tuple(_upload(draft, plan.device) for draft in drafts)
    return Schedule(tiling, group, launches, torch.empty(floats, dtype=torch.float32, device=plan.device))


def _draft_launches(plan: ScoringPlan, tiling: Tiling) -> list[_Draft]:
    capacity = plan.scratch_bytes // 4
    target = _target_steps(plan, tiling)
    drafts: list[_Draft] = [_Draft.empty()]
    # Queries of one sender stay next to each other, so that its keys come from memory once.
    for index in (member for group in plan.groups for member in group.members):
        segment = plan.segments[index]
        length = segment.sender_len
        floats = 2 * plan.kv_heads * length
        if floats > capacity:
            raise ScoringInputError(
                f"scratch_bytes={plan.scratch_bytes} is too small for a sender of {length} positions and "
                f"{plan.kv_heads} KV heads: give at least {4 * floats}"
            )
        blocks = -(-segment.row_count // tiling.block_rows)
        if drafts[-1].floats + min(blocks, capacity // floats) * floats > capacity:
            drafts.append(_Draft.empty())
        start = drafts[-1].floats
        room = (capacity - start) // floats
        steps, tiles = lane_steps(length, tiling.lanes, target)
        for block in range(blocks):
            if block and block % room == 0:
                # A query too large for the scratch: go over the same sums again, adding.
                drafts.append(_Draft.empty(add=True))
            draft = drafts[-1]
            row = block * tiling.block_rows
            offset = start + (block % room) * floats
            rows = min(tiling.block_rows, segment.row_count - row)
            draft.work.append([segment.row_start + row, rows, segment.kv_start, length, steps, offset])
            draft.floats = max(draft.floats, offset + floats)
            draft.tiles = max(draft.tiles, tiles)
        kept = min(blocks, room)
        if segment.carry is None:
            column = plan.offsets[index]
            drafts[-1].fold.append([start, kept, length, segment.row_count, column, 0])
        else:
            drafts[-1].splits.append(SplitFold(index, start, kept))
        if drafts[-1].add:
            drafts.append(_Draft.empty())
    return [draft for draft in drafts if draft.work]


def _target_steps(plan: ScoringPlan, tiling: Tiling) -> int:
    if plan.device.type != "cuda":
        return tiling.target_steps
    items = sum(-(-segment.row_count // tiling.block_rows) for segment in plan.segments)
    processors = torch.cuda.get_device_properties(plan.device).multi_processor_count
    lengths = [segment.sender_len for segment in plan.segments]
    return steps_for_device(lengths, items * plan.kv_heads, tiling.lanes, tiling.target_steps, processors)


def compute_capability(device: torch.device) -> int:
    """90 for Hopper, 100 for Blackwell, and so on; 0 off the GPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def _upload(draft: _Draft, device: torch.device) -> Launch:
    return Launch(
        work=to_device(draft.work, device),
        tiles=draft.tiles,
        add=draft.add,
        fold=to_device(draft.fold, device) if draft.fold else None,
        fold_length=max((row[2] for row in draft.fold), default=0),
        splits=tuple(draft.splits),
    )


def to_device(rows: list[list[int]], device: torch.device) -> Tensor:
    """An int64 table on ``device``; on CUDA from pinned memory, so that the host does not wait."""
    table = torch.tensor(rows, dtype=torch.int64)
    if device.type == "cuda":
        return table.pin_memory().to(device, non_blocking=True)
    return table
