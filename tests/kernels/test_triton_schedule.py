"""How the batch is cut for the GPU: host arithmetic, checked without Triton."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_kernels.errors import ScoringInputError
from cb_kernels.plan import QuerySegment, plan_scoring
from cb_kernels.triton_schedule import schedule_for
from cb_kernels.triton_tiling import (
    MIN_STEPS,
    TARGET_STEPS,
    check_shape,
    default_tiling,
    lane_steps,
    steps_for_device,
)


@given(st.integers(1, 300_000), st.sampled_from([16, 64, 128]), st.integers(5, 80))
def test_lanes_cover_the_sender_evenly(length: int, lanes: int, target: int) -> None:
    steps, tiles = lane_steps(length, lanes, target)
    assert 1 <= steps <= target
    assert (tiles - 1) * lanes * steps < length <= tiles * lanes * steps
    # Never more than one step a lane too many in each of the fewest possible tiles.
    assert tiles * lanes * steps - length < tiles * lanes


def test_short_work_is_cut_finer_until_the_device_is_busy() -> None:
    assert steps_for_device([50_000], 16 * 8, 64, TARGET_STEPS, 132) == TARGET_STEPS
    alone = steps_for_device([50_000], 8, 64, TARGET_STEPS, 132)
    assert MIN_STEPS <= alone < TARGET_STEPS
    assert steps_for_device([10], 1, 64, TARGET_STEPS, 132) == MIN_STEPS


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_row_is_scored_once_within_the_scratch(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 3000), min_size=1, max_size=3))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    segments: list[QuerySegment] = []
    row = 0
    for sender, rows in data.draw(
        st.lists(st.tuples(st.integers(0, len(lengths) - 1), st.integers(1, 300)), min_size=1, max_size=9)
    ):
        segments.append(QuerySegment(row, rows, starts[sender], lengths[sender], rows))
        row += rows
    plan = plan_scoring(
        segments,
        heads=8,
        kv_heads=4,
        head_dim=64,
        layers=1,
        kv_indices=torch.arange(sum(lengths)),
        device="cpu",
        scratch_bytes=1 << 20,
        backend="triton",
    )
    schedule = schedule_for(plan, torch.bfloat16)
    assert schedule_for(plan, torch.bfloat16) is schedule
    assert schedule.scratch.numel() * 4 <= 1 << 20
    seen: list[int] = []
    folded: list[int] = []
    for launch in schedule.launches:
        spans: list[tuple[int, int]] = []
        for first, rows, _, length, steps, offset in launch.work.tolist():
            seen += range(first, first + rows)
            spans.append((offset, offset + 2 * 4 * length))
            assert launch.tiles * schedule.tiling.lanes * steps >= length
        spans.sort()
        # No two programs of a launch write the same sums.
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        if launch.fold is not None:
            folded += launch.fold[:, 4].tolist()
    assert sorted(seen) == list(range(row))
    assert sorted(folded) == sorted(plan.offsets)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "message"),
    [
        (7, 2, 64, torch.bfloat16, "multiple of 2"),
        (32, 2, 64, torch.bfloat16, "up to 8 query heads"),
        (8, 8, 576, torch.bfloat16, "head sizes of 16 to 256"),
        (8, 8, 64, torch.float8_e4m3fn, "kv_cache_dtype=auto"),
    ],
)
def test_other_models_are_refused(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ScoringInputError, match=message):
        check_shape(heads, kv_heads, head_dim, dtype)


def test_short_queries_get_small_blocks() -> None:
    assert default_tiling(4, 128, torch.bfloat16, [7, 5]).block_rows == 8
    assert default_tiling(4, 128, torch.bfloat16, [15]).block_rows == 16
    assert default_tiling(4, 128, torch.bfloat16, [32, 64]).block_rows == 32
    assert default_tiling(8, 128, torch.bfloat16, [32]).block_rows == 16
