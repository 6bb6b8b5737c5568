"""The CPU scoring pass against the float64 definition, over the shapes a batch can take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cb_kernels.cpu_moments as cpu_moments
from cb_kernels.cpu_native_build import SWITCH, native_library
from cb_kernels.errors import ScoringInputError
from cb_kernels.moments import Moments
from cb_kernels.plan import Carry, QuerySegment, ScoringPlan, plan_scoring
from cb_kernels.reference import layer_lse, layer_moments
from cb_kernels.score import score_layer

RTOL = 1e-5


@pytest.fixture(scope="module", autouse=True, params=["compiled", "torch"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test here runs on both ways to score on a CPU; in one thread, since its shapes are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setenv(SWITCH, "0")
        elif native_library() is None:
            pytest.skip("no compiled kernel on this machine (see the log for what it lacks)")
        yield request.param
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Shape:
    """``queries``: (sender, voting rows, own rows before them) of each."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    senders: list[int]
    queries: list[tuple[int, int, int]]
    index_dtype: torch.dtype = torch.int32
    consecutive: bool = False
    sink_free: bool = False
    dtype: torch.dtype = torch.float32


class Problem:
    """A batch over a paged pool whose unused slots are NaN, and what the definition says about it."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        total = sum(shape.senders)
        slots = torch.arange(5, 5 + total)
        if not shape.consecutive:
            slots = torch.randperm(total + 40, generator=generator)[:total]
        self.kv_indices = slots.to(shape.index_dtype)
        self.starts = [sum(shape.senders[:i]) for i in range(len(shape.senders))]
        self.scale = shape.head_dim**-0.5
        self.pools: list[Tensor] = []
        self.queries: list[Tensor] = []
        self.lses: list[Tensor] = []
        self.expected: list[Moments] = []
        self.segments: list[QuerySegment] = []
        row = 3  # rows of other requests come first
        for sender, rows, _ in shape.queries:
            self.segments.append(QuerySegment(row, rows, self.starts[sender], shape.senders[sender], rows))
            row += rows + 2
        for _ in range(shape.layers):
            self._add_layer(row, slots, generator)

    def _add_layer(self, row_total: int, slots: Tensor, generator: torch.Generator) -> None:
        shape = self.shape
        pool = torch.full((len(slots) + 50, shape.kv_heads, shape.head_dim), float("nan"), dtype=shape.dtype)
        pool[slots] = torch.randn(len(slots), shape.kv_heads, shape.head_dim, generator=generator).to(shape.dtype)
        q = torch.full((row_total, shape.heads, shape.head_dim), float("nan"), dtype=shape.dtype)
        lse = torch.full((row_total, shape.heads), float("nan"))
        for index, (segment, (_, rows, before)) in enumerate(zip(self.segments, shape.queries, strict=True)):
            mine = slice(segment.row_start, segment.row_start + rows)
            k_own = torch.randn(rows + before, shape.kv_heads, shape.head_dim, generator=generator)
            q[mine] = (1.5 * torch.randn(rows, shape.heads, shape.head_dim, generator=generator)).to(shape.dtype)
            k_sender = pool[slots[segment.kv_start : segment.kv_start + segment.sender_len]]
            lse[mine] = layer_lse(q[mine], k_sender, k_own, scale=self.scale, own_visible=before)
            moments = layer_moments(
                q[mine], k_sender, k_own, scale=self.scale, own_visible=before, sink_free=shape.sink_free
            )
            if len(self.expected) <= index:
                self.expected.append(moments)
            else:
                self.expected[index] = self.expected[index] + moments
        self.pools.append(pool)
        self.queries.append(q)
        self.lses.append(lse)

    def plan(self, segments: list[QuerySegment] | None = None, **options: int) -> ScoringPlan:
        shape = self.shape
        return plan_scoring(
            self.segments if segments is None else segments,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            layers=shape.layers,
            kv_indices=self.kv_indices,
            device="cpu",
            sink_free=shape.sink_free,
            **options,
        )

    def run(self, plan: ScoringPlan) -> list[Moments | None]:
        for layer in range(self.shape.layers):
            score_layer(plan, layer, self.queries[layer], self.pools[layer], self.lses[layer], scale=self.scale)
        return plan.finish()


def assert_moments(got: Moments | None, want: Moments, rtol: float = RTOL) -> None:
    assert got is not None
    for name in ("votes", "energy", "row_energy"):
        torch.testing.assert_close(
            getattr(got, name), getattr(want, name), rtol=rtol, atol=1e-37, msg=lambda m, n=name: f"{n}: {m}"
        )


def check(problem: Problem, **options: int) -> None:
    for got, want in zip(problem.run(problem.plan(**options)), problem.expected, strict=True):
        assert_moments(got, want)


SHAPES = {
    "one row, one position": Shape(2, 2, 32, 1, [1], [(0, 1, 0)]),
    "short of the pool": Shape(4, 2, 32, 2, [5], [(0, 3, 2)]),
    "gemma": Shape(4, 1, 256, 3, [700], [(0, 24, 3), (0, 32, 0)]),
    "qwen, ragged": Shape(8, 4, 64, 2, [1100], [(0, 24 + i % 9, i) for i in range(7)], torch.int64),
    "g=8": Shape(16, 2, 128, 1, [2000], [(0, 32, 0), (0, 1, 0)]),
    "g=3": Shape(6, 2, 64, 1, [130], [(0, 17, 0)]),
    "300 rows": Shape(8, 1, 32, 1, [333], [(0, 300, 5)]),
    "several senders": Shape(4, 2, 32, 2, [64, 1, 513, 129], [(2, 7, 0), (0, 5, 1), (2, 40, 0), (1, 2, 0), (3, 9, 4)]),
    "consecutive slots": Shape(4, 2, 64, 2, [1030, 65], [(1, 8, 0), (0, 8, 0)], consecutive=True),
    "sink free": Shape(4, 2, 32, 2, [1, 600], [(1, 12, 0), (0, 3, 0), (1, 30, 2)], sink_free=True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_matches_the_definition(name: str) -> None:
    check(Problem(SHAPES[name]))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_matches_the_definition_on_random_shapes(data: st.DataObject) -> None:
    kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    senders = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=3))
    query = st.tuples(st.integers(0, len(senders) - 1), st.integers(1, 70), st.integers(0, 4))
    shape = Shape(
        heads=kv_heads * data.draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([32, 64, 80])),
        layers=data.draw(st.integers(1, 2)),
        senders=senders,
        queries=data.draw(st.lists(query, min_size=1, max_size=5)),
        index_dtype=data.draw(st.sampled_from([torch.int32, torch.int64])),
        consecutive=data.draw(st.booleans()),
        sink_free=data.draw(st.booleans()),
    )
    check(Problem(shape, seed=data.draw(st.integers(0, 1000))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_pools_are_read_exactly(dtype: torch.dtype) -> None:
    """The kernel computes in float32 on the very values stored."""
    check(Problem(Shape(4, 2, 64, 1, [300], [(0, 20, 0)], dtype=dtype)))


@pytest.mark.parametrize("length", [257, 258, 259, 261, 515, 516, 517])
def test_lengths_around_the_compiled_block_of_258(length: int) -> None:
    check(Problem(Shape(4, 2, 32, 1, [length], [(0, 5, 0), (0, 6, 0), (0, 7, 0), (0, 1, 0)])))


@pytest.mark.parametrize("block_logits", [1, 1 << 14])
def test_block_and_chunk_sizes_change_nothing(monkeypatch: pytest.MonkeyPatch, path: str, block_logits: int) -> None:
    """Many short blocks (the last one single) and rows cut into many chunks: seams must not show."""
    if path != "torch":
        pytest.skip("the compiled kernel's block is fixed")
    monkeypatch.setattr(cpu_moments, "_BLOCK_LOGITS", block_logits)
    monkeypatch.setattr(cpu_moments, "_CHUNK_LOGIT_ROWS", 28)
    for length in (64 * 5, 64 * 5 + 1, 64 * 5 + 2, 64 * 5 - 1):
        check(Problem(Shape(4, 2, 32, 1, [length], [(0, 50, 0), (0, 7, 0), (0, 6, 0), (0, 1, 0)])))


def test_a_small_scratch_is_enough() -> None:
    problem = Problem(Shape(16, 4, 32, 1, [900], [(0, 300, 0), (0, 90, 0)]))
    check(problem, scratch_bytes=1 << 20)
    with pytest.raises(ScoringInputError, match="scratch_bytes"):
        problem.plan(scratch_bytes=1000)


def test_keys_are_read_once_for_all_queries_of_a_sender(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    if path != "torch":
        pytest.skip("nothing to count from here: an item of the compiled kernel holds all queries of its sender")
    read: list[int] = []
    original: Callable[..., Tensor] = cpu_moments._block_keys

    def counting(walk: object, k_pool: Tensor, start: int, count: int) -> Tensor:
        read.append(count)
        return original(walk, k_pool, start, count)

    monkeypatch.setattr(cpu_moments, "_block_keys", counting)
    problem = Problem(Shape(8, 2, 32, 1, [777], [(0, 30, 0) for _ in range(16)]))
    check(problem)
    assert sum(read) == 777


def test_order_of_the_batch_changes_nothing() -> None:
    problem = Problem(SHAPES["several senders"])
    straight = problem.run(problem.plan())
    backward = problem.run(problem.plan(problem.segments[::-1]))[::-1]
    for one, other in zip(straight, backward, strict=True):
        assert one is not None
        assert_moments(other, one, rtol=2e-6)


def test_one_row_is_its_own_mean() -> None:
    """Both energies of a single voting row are the same number, or rounding would decide between equal scores."""
    problem = Problem(Shape(8, 2, 16, 3, [190], [(0, 1, 0)]))
    (moments,) = problem.run(problem.plan())
    assert moments is not None and torch.equal(moments.energy, moments.row_energy)


def test_unused_slots_and_rows_are_never_read() -> None:
    """Problem fills them with NaN; other values there give the same bits."""
    problem = Problem(SHAPES["several senders"])
    before = problem.run(problem.plan())
    for tensors in (problem.pools, problem.queries, problem.lses):
        for i, tensor in enumerate(tensors):
            tensors[i] = torch.nan_to_num(tensor, nan=7.0)
    for one, other in zip(before, problem.run(problem.plan()), strict=True):
        assert one is not None and other is not None
        assert torch.equal(one.votes, other.votes) and torch.equal(one.row_energy, other.row_energy)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.booleans())
def test_a_split_query_equals_the_whole(parts: list[int], sink_free: bool) -> None:
    """Query 1 comes in several forward passes, query 0 whole with the first of them."""
    rows = sum(parts)
    problem = Problem(Shape(4, 2, 32, 2, [90, 200], [(0, 4, 0), (1, rows, 1)], sink_free=sink_free))
    whole, split = problem.segments
    carry = Carry.empty(layers=2, kv_heads=2, sender_len=200, device="cpu")
    done = 0
    for number, count in enumerate(parts):
        part = replace(split, row_start=split.row_start + done, row_count=count, carry=carry)
        done += count
        results = problem.run(problem.plan([whole, part] if number == 0 else [part]))
        if number == 0:
            assert_moments(results[0], problem.expected[0])
        if done < rows:
            assert results[-1] is None
        else:
            assert_moments(results[-1], problem.expected[1])
    assert carry.rows_done == rows


def test_a_plan_is_used_once_in_order() -> None:
    problem = Problem(SHAPES["short of the pool"])
    plan = problem.plan()
    with pytest.raises(ScoringInputError, match="expected layer 0"):
        score_layer(plan, 1, problem.queries[1], problem.pools[1], problem.lses[1], scale=1.0)
    with pytest.raises(ScoringInputError, match="only 0 of 2"):
        plan.finish()
    problem.run(plan)
    with pytest.raises(ScoringInputError, match="already finished"):
        plan.finish()
    with pytest.raises(ScoringInputError, match="already finished"):
        score_layer(plan, 2, problem.queries[1], problem.pools[1], problem.lses[1], scale=1.0)


def test_tensors_that_do_not_fit_are_refused() -> None:
    problem = Problem(SHAPES["short of the pool"])
    q, pool, lse = problem.queries[0], problem.pools[0], problem.lses[0]
    bad: list[tuple[Tensor, Tensor, Tensor, str]] = [
        (q[:, :2], pool, lse, "q must be"),
        (q, pool[..., :8], lse, "k_pool must be"),
        (q, pool, lse.double(), "lse must be"),
        (q, pool, lse[1:], "lse must be"),
        (q, pool.to(torch.float8_e4m3fn), lse, "no quantised KV"),
        (q[:4], pool, lse[:4], "segments reach row"),
        (q, pool.to("meta"), lse, "k_pool is on meta"),
    ]
    for bad_q, bad_pool, bad_lse, message in bad:
        with pytest.raises(ScoringInputError, match=message):
            score_layer(problem.plan(), 0, bad_q, bad_pool, bad_lse, scale=1.0)


def test_plans_that_do_not_add_up_are_refused() -> None:
    problem = Problem(SHAPES["short of the pool"])
    (segment,) = problem.segments
    carry = Carry.empty(layers=2, kv_heads=2, sender_len=5, device="cpu")
    bad = [
        ([], "segments is empty"),
        ([replace(segment, row_count=0)], "row_count"),
        ([replace(segment, sender_len=6)], "kv_indices up to 6"),
        ([replace(segment, total_rows=9)], "needs a Carry"),
        ([replace(segment, total_rows=2, carry=carry)], "total_rows is 2"),
        ([replace(segment, sender_len=4, carry=carry)], "Carry was made for other"),
        ([replace(segment, total_rows=9, carry=carry)] * 2, "share a Carry"),
    ]
    for segments, message in bad:
        with pytest.raises(ScoringInputError, match=message):
            problem.plan(segments)
    with pytest.raises(ScoringInputError, match="multiple of kv_heads"):
        plan_scoring([segment], heads=3, kv_heads=2, head_dim=8, layers=1, kv_indices=problem.kv_indices, device="cpu")
    with pytest.raises(ScoringInputError, match="int32 or int64"):
        plan_scoring([segment], heads=4, kv_heads=2, head_dim=8, layers=1, kv_indices=torch.zeros(9), device="cpu")
    with pytest.raises(ScoringInputError, match="backend"):
        plan_scoring(
            [segment],
            heads=4,
            kv_heads=2,
            head_dim=8,
            layers=1,
            kv_indices=problem.kv_indices,
            device="cpu",
            backend="tpu",  # type: ignore[arg-type]
        )
