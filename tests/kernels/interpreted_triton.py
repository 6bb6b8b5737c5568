"""The Triton kernels in Triton's interpreter. Run by test_triton_interpreter.py in a process of its own, since
TRITON_INTERPRET must be set before any kernel is defined:

    TRITON_INTERPRET=1 pytest tests/kernels/interpreted_triton.py
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("set TRITON_INTERPRET=1 before Python starts")

from test_golden import CASES, _layers, _load, _tolerances
from triton_problem import SUMS, Problem, Query, Shape, error, same_bits, whole

from cb_kernels.errors import ScoringInputError
from cb_kernels.plan import Carry, QuerySegment, plan_scoring
from cb_kernels.reference import layer_lse
from cb_kernels.score import score_layer
from cb_kernels.triton_lse import layer_lse_triton, plan_lse
from cb_kernels.triton_tiling import Tiling

RTOL = 1e-5
# Small, so that a short sender already has several tiles, lanes and row blocks; the interpreter is slow.
SMALL = Tiling(lanes=16, block_rows=16, target_steps=5)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (Query(5), Query(18), Query(1, before=3))
SHAPES = {
    "one position": Shape((Query(3),), senders=(1,)),
    "shorter than the pool's window": Shape((Query(3, before=1),), senders=(5,)),
    "exactly one tile": Shape((Query(8),), senders=(80,)),
    "one more than a tile": Shape((Query(8),), senders=(81,)),
    "ragged, two layers": Shape(RAGGED, layers=2),
    "bf16 g=4 D=128": Shape(RAGGED, kv_heads=1, group=4, head_dim=128, dtype=BF16),
    "fp16 g=1 D=64": Shape(
        (Query(5), Query(17)), kv_heads=2, group=1, head_dim=64, dtype=FP16, index_dtype=torch.int64
    ),
    "fp32 g=8 D=128": Shape((Query(19),), kv_heads=1, group=8, head_dim=128),
    "bf16 g=8 D=256": Shape((Query(9),), kv_heads=1, group=8, head_dim=256, dtype=BF16),
    "g=3 D=80": Shape((Query(9), Query(2)), group=3, head_dim=80, dtype=BF16),
    "g=5 D=96": Shape((Query(9),), group=5, head_dim=96),
    "g=7 D=64": Shape((Query(9),), kv_heads=1, group=7, head_dim=64),
    "different T on one sender": Shape((Query(8), Query(9, length=33), Query(4, length=3), Query(20))),
    "mixed senders": Shape(
        (Query(8, sender=1), Query(5), Query(17, sender=2), Query(3, sender=1)), senders=(50, 85, 7), kv_heads=1
    ),
    "a copy of the indices per query": Shape(
        (Query(8), Query(5, length=99, before=2)), copies=True, index_dtype=torch.int64
    ),
    "pages of 16": Shape((Query(8), Query(5, sender=1)), senders=(90, 30), page=16),
    "pages of 64, copies": Shape((Query(8), Query(5)), senders=(90,), page=64, copies=True),
    "sink free": Shape((Query(8), Query(3, sender=1)), senders=(90, 1), sink_free=True, layers=2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_matches_the_definition(name: str) -> None:
    problem = Problem(SHAPES[name])
    for got, want in zip(problem.run(problem.plan(), SMALL), problem.expected, strict=True):
        if problem.shape.sink_free and len(want.votes) == 1:
            assert got is not None and float(got.votes.abs().max()) == 0.0
        else:
            assert error(got, want) < RTOL


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_default_tilings_match_the_definition(group: int, dtype: torch.dtype) -> None:
    problem = Problem(Shape((Query(24), Query(3)), senders=(130,), kv_heads=1, group=group, head_dim=64, dtype=dtype))
    for got, want in zip(problem.run(problem.plan()), problem.expected, strict=True):
        assert error(got, want) < RTOL


@pytest.mark.parametrize("tiling", [replace(SMALL, heads_inner=True), replace(SMALL, dim_chunk=16)])
def test_the_other_column_order_and_head_chunks(tiling: Tiling) -> None:
    problem = Problem(Shape((Query(20),), group=3, head_dim=48))
    for got, want in zip(problem.run(problem.plan(), tiling), problem.expected, strict=True):
        assert error(got, want) < RTOL


@pytest.mark.parametrize("case", CASES)
def test_golden_vectors(case: str) -> None:
    tensors, meta = _load(case)
    length, rows, heads = int(meta["T"]), int(meta["R"]), int(meta["heads"])
    slots = torch.randperm(length + 9, generator=torch.Generator().manual_seed(1))[:length]
    plan = plan_scoring(
        [QuerySegment(0, rows, 0, length, rows)],
        heads=heads,
        kv_heads=int(meta["kv_heads"]),
        head_dim=int(meta["head_dim"]),
        layers=int(meta["layers"]),
        kv_indices=slots,
        device="cpu",
        backend="triton",
    )
    scale = float(meta["scaling"])
    for layer, (q, k_sender, k_own) in enumerate(_layers(tensors, meta)):
        pool = torch.full((length + 9, *k_sender.shape[1:]), float("nan"), dtype=k_sender.dtype)
        pool[slots] = k_sender
        lse = layer_lse(q, k_sender, k_own, scale=scale, own_visible=0)
        score_layer(plan, layer, q, pool, lse, scale=scale)
    (moments,) = plan.finish()
    rtol, _, atol = _tolerances(case)
    for name in SUMS:
        torch.testing.assert_close(getattr(moments, name), tensors[name], rtol=rtol, atol=atol)


MIXED = SHAPES["mixed senders"]


def test_order_of_the_batch_changes_no_bit() -> None:
    problem = Problem(MIXED)
    straight = problem.run(problem.plan(), SMALL)
    backward = problem.run(problem.plan(problem.segments[::-1]), SMALL)[::-1]
    assert all(same_bits(one, other) for one, other in zip(straight, backward, strict=True))


def test_neighbours_in_the_batch_change_no_bit() -> None:
    problem = Problem(MIXED)
    together = problem.run(problem.plan(), SMALL)
    for segment, moments in zip(problem.segments, together, strict=True):
        (alone,) = problem.run(problem.plan([segment]), SMALL)
        assert same_bits(alone, moments)


def test_unused_slots_and_rows_change_no_bit_and_gaps_stay_zero() -> None:
    """NaN in slots and rows of nobody (as Problem leaves it) or 7: the same result."""
    problem = Problem(MIXED)
    plan = problem.plan()
    before = problem.run(plan, SMALL)
    for tensors in (problem.pools, problem.queries, problem.lses):
        tensors[:] = [torch.nan_to_num(tensor, nan=7.0) for tensor in tensors]
    assert all(same_bits(a, b) for a, b in zip(before, problem.run(problem.plan(), SMALL), strict=True))
    gap = torch.ones(plan.width, dtype=torch.bool)
    for index in range(len(plan.segments)):
        gap[plan.columns(index)] = False
    for buffer in (plan.votes, plan.energy, plan.row_energy):
        assert float(buffer[gap].abs().max()) == 0.0


@pytest.mark.parametrize("parts", [(1, 18, 2), (20, 20)])
def test_a_split_query_equals_the_whole(parts: tuple[int, ...]) -> None:
    problem = Problem(Shape((Query(4), Query(sum(parts), sender=1)), senders=(20, 60), layers=2))
    first, split = problem.segments
    carry = Carry.empty(layers=2, kv_heads=2, sender_len=60, device="cpu")
    done = 0
    for number, count in enumerate(parts):
        part = replace(whole(split, done, count), carry=carry)
        done += count
        results = problem.run(problem.plan([first, part] if number == 0 else [part]), SMALL)
        if number == 0:
            assert error(results[0], problem.expected[0]) < RTOL
        if done < sum(parts):
            assert results[-1] is None
    assert error(results[-1], problem.expected[1]) < RTOL


def test_a_query_larger_than_the_scratch_goes_in_rounds() -> None:
    """Room for the sums of three row blocks; the large query has seven."""
    problem = Problem(Shape((Query(9), Query(100), Query(7), Query(3)), senders=(60,)))
    plan = problem.plan()
    plan.scratch_bytes = 3 * 2 * 2 * 60 * 4 + 100
    for got, want in zip(problem.run(plan, SMALL), problem.expected, strict=True):
        assert error(got, want) < RTOL
    schedule = plan.workspace["triton"]
    assert schedule.scratch.numel() * 4 <= plan.scratch_bytes
    assert [launch.add for launch in schedule.launches] == [False, False, True, True, False]
    tight = problem.plan()
    tight.scratch_bytes = 900
    with pytest.raises(ScoringInputError, match="give at least 960"):
        problem.run(tight, SMALL)


LSE_SHAPES = {
    "ragged bf16": Shape(RAGGED, copies=True, dtype=BF16, group=4, kv_heads=1, head_dim=64),
    "long enough for two splits": Shape(
        (Query(20, before=5), Query(3, length=7)), senders=(700,), copies=True, index_dtype=torch.int64
    ),
    "g=3 D=80": Shape((Query(9),), copies=True, group=3, head_dim=80),
    "one position": Shape((Query(1), Query(2)), senders=(1,), copies=True),
}


@pytest.mark.parametrize("name", LSE_SHAPES)
def test_lse_matches_the_definition(name: str) -> None:
    problem = Problem(LSE_SHAPES[name])
    shape = problem.shape
    plan = plan_lse(
        problem.lse_segments,
        rows=problem.row_count,
        heads=shape.kv_heads * shape.group,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        kv_indices=problem.kv_indices,
    )
    lse = layer_lse_triton(plan, problem.queries[0], problem.pools[0], scale=problem.scale)
    again = layer_lse_triton(plan, problem.queries[0], problem.pools[0], scale=problem.scale)
    assert torch.equal(lse, again)
    assert plan.partial.shape[0] == (2 if name == "long enough for two splits" else 1)
    known = ~problem.lses[0].isnan()
    torch.testing.assert_close(lse[known], problem.lses[0][known], rtol=1e-6, atol=2e-6)
    assert bool((lse[~known] == float("-inf")).all())


def test_what_the_kernel_cannot_take_is_refused() -> None:
    problem = Problem(Shape((Query(3),), senders=(20,)))
    q, pool, lse = problem.queries[0], problem.pools[0], problem.lses[0]
    with pytest.raises(ScoringInputError, match="kv_cache_dtype=auto"):
        score_layer(problem.plan(), 0, q.half(), pool, lse, scale=1.0)
    with pytest.raises(ScoringInputError, match="contiguous along head_dim"):
        flipped = pool.transpose(0, 2).contiguous().transpose(0, 2)
        score_layer(problem.plan(), 0, q, flipped, lse, scale=1.0)
