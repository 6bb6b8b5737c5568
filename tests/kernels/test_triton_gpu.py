"""The Triton kernels on a CUDA device, against the float64 definition. Needs torch and Triton only."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton_problem import Problem, Query, Shape, error, same_bits

from cb_kernels.plan import QuerySegment
from cb_kernels.score import score_layer
from cb_kernels.triton_lse import layer_lse_triton, plan_lse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QUERIES = (Query(32), Query(5), Query(70, before=3), Query(17, length=901))
SHAPES = {
    "Qwen3-8B": Shape(QUERIES, (4100,), kv_heads=8, group=4, head_dim=128, dtype=BF16, copies=True),
    "Qwen3-0.6B": Shape(QUERIES, (4100,), kv_heads=8, group=2, head_dim=128, dtype=BF16, layers=2),
    "Qwen3-32B": Shape(QUERIES, (4100,), kv_heads=8, group=8, head_dim=128, dtype=BF16, copies=True),
    "D=256": Shape(QUERIES, (2100,), kv_heads=1, group=4, head_dim=256, dtype=BF16, copies=True),
    "D=80, g=3": Shape(QUERIES, (1100,), kv_heads=2, group=3, head_dim=80, dtype=FP16, copies=True),
    "fp32": Shape(QUERIES, (1100,), kv_heads=2, group=4, head_dim=128, dtype=FP32, copies=True),
    "fp32, g=1, D=64": Shape(QUERIES, (1100,), kv_heads=2, group=1, head_dim=64, dtype=FP32),
    "short queries": Shape(
        (Query(3), Query(7)), (999,), kv_heads=4, group=4, head_dim=128, dtype=BF16, index_dtype=torch.int64
    ),
    "mixed senders": Shape(
        (Query(9, sender=1), Query(20), Query(6, sender=2), Query(1, sender=1)),
        (5000, 64, 1),
        kv_heads=2,
        group=4,
        head_dim=128,
        dtype=BF16,
        page=16,
    ),
    "sink free": Shape(QUERIES, (1100,), head_dim=64, dtype=BF16, sink_free=True),
}


def tolerance(dtype: torch.dtype) -> float:
    """Products of half-precision values are exact in float32; what is left is the order of the sums."""
    return 5e-5 if dtype == FP32 else 2e-4


@pytest.mark.parametrize("name", SHAPES)
def test_moments_match_the_definition(name: str) -> None:
    problem = Problem(SHAPES[name], device="cuda")
    results = problem.run(problem.plan())
    for got, want in zip(results, problem.expected, strict=True):
        assert error(got, want) < tolerance(problem.shape.dtype)
    again = problem.run(problem.plan())
    assert all(same_bits(one, other) for one, other in zip(results, again, strict=True))


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.copies])
def test_lse_matches_the_definition(name: str) -> None:
    problem = Problem(SHAPES[name], device="cuda")
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
    known = ~problem.lses[0].isnan()
    torch.testing.assert_close(lse[known], problem.lses[0][known], rtol=1e-5, atol=1e-4)


def test_rounds_through_a_small_scratch() -> None:
    problem = Problem(Shape((Query(9), Query(700)), (2000,), kv_heads=4, head_dim=64, dtype=BF16), device="cuda")
    for got, want in zip(problem.run(problem.plan(scratch_bytes=1 << 20)), problem.expected, strict=True):
        assert error(got, want) < tolerance(BF16)


def test_no_host_sync_inside_the_layer_loop() -> None:
    problem = Problem(
        Shape((Query(32), Query(5)), (700,), kv_heads=2, group=4, head_dim=128, dtype=BF16, layers=3),
        device="cuda",
    )
    problem.run(problem.plan())  # compiles
    plan = problem.plan()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layer in range(3):
            q, pool, lse = problem.queries[layer], problem.pools[layer], problem.lses[layer]
            score_layer(plan, layer, q, pool, lse, scale=problem.scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plan.finish()


def test_slots_beyond_two_billion_elements() -> None:
    """Offsets into a large pool do not fit 32 bits."""
    slots, length = (1 << 31) // (8 * 128) + 4096, 500
    if torch.cuda.mem_get_info()[0] < 3 * slots * 8 * 128 * 2 // 2:
        pytest.skip("not enough GPU memory")
    small = Problem(Shape((Query(8),), (length,), kv_heads=8, group=4, head_dim=128, dtype=BF16), device="cuda")
    pool = torch.empty(slots, 8, 128, dtype=BF16, device="cuda")
    shift = slots - small.slot_count
    pool[shift:] = small.pools[0]
    small.pools[0] = pool
    small.kv_indices = small.kv_indices + shift
    (segment,) = small.segments
    assert segment == QuerySegment(2, 8, 0, length, 8)
    (got,) = small.run(small.plan())
    assert error(got, small.expected[0]) < tolerance(BF16)
