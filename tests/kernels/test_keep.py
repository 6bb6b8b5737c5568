"""Properties of the keep law, and equality of the batched form with the plain one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_kernels.errors import BudgetError
from cb_kernels.keep import KeepResult, check_budget, coverage_budgets, keep_positions, keep_positions_reference

EXAMPLES = settings(max_examples=80, deadline=None)

# Few distinct values, so that spans tie exactly; signed zeros, denormals, sink-like peaks, non-finite scores.
TIED = st.sampled_from(torch.tensor([0.0, -0.0, 1.0, 0.5, -1.0, 1e-40, 2e-40, 1e30, 3.4e38]).tolist())
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ANY = st.floats(width=32)


@dataclass(frozen=True)
class Query:
    scores: list[float]
    budget: int
    protected: list[int]
    excluded: list[int]

    @property
    def kept_protected(self) -> list[int]:
        return sorted(set(self.protected) - set(self.excluded))


@st.composite
def queries(draw: st.DrawFn, *, exclude: bool = True) -> Query:
    length = draw(st.integers(1, 70))
    element = draw(st.sampled_from(["tied", "equal", "finite", "any"]))
    if element == "equal":
        scores = [draw(TIED)] * length
    else:
        values = {"tied": TIED, "finite": FINITE, "any": ANY}[element]
        scores = draw(st.lists(values, min_size=length, max_size=length))
    places = st.integers(0, length - 1)
    protected = draw(st.sets(places, max_size=6)) | {0}
    excluded = draw(st.sets(places, max_size=12)) if exclude else set()
    least = max(1, len(protected - excluded))
    budget = draw(st.integers(least, max(least, length + 5)))
    return Query(scores, budget, sorted(protected), sorted(excluded))


def _plain(query: Query, span: int) -> list[int]:
    return keep_positions_reference(query.scores, query.budget, query.protected, query.excluded, span)


@dataclass(frozen=True)
class Batch:
    scores: torch.Tensor
    lengths: torch.Tensor
    budgets: torch.Tensor
    protected: torch.Tensor
    excluded: torch.Tensor


def _tensors(batch: list[Query], *, filler: float = float("nan"), extra: int = 0) -> Batch:
    width = max(len(q.scores) for q in batch) + extra
    scores = torch.full((len(batch), width), filler)
    protected = torch.ones(len(batch), width, dtype=torch.bool)  # beyond the length: must be ignored
    excluded = torch.zeros(len(batch), width, dtype=torch.bool)
    for i, query in enumerate(batch):
        length = len(query.scores)
        scores[i, :length] = torch.tensor(query.scores)
        protected[i, :length] = False
        protected[i, query.protected] = True
        excluded[i, query.excluded] = True
    lengths = torch.tensor([len(q.scores) for q in batch])
    return Batch(scores, lengths, torch.tensor([q.budget for q in batch]), protected, excluded)


def _batched(batch: list[Query], span: int, *, filler: float = float("nan"), extra: int = 0) -> KeepResult:
    given = _tensors(batch, filler=filler, extra=extra)
    return keep_positions(
        given.scores,
        given.lengths,
        given.budgets,
        max_budget=max(q.budget for q in batch),
        protected=given.protected,
        excluded=given.excluded,
        span=span,
    )


@EXAMPLES
@given(queries(), st.sampled_from([1, 3, 16, 100]))
def test_the_law_holds(query: Query, span: int) -> None:
    kept = _plain(query, span)
    length = len(query.scores)
    assert len(kept) == min(query.budget, length - len(query.excluded))
    assert kept == sorted(set(kept)) and all(0 <= p < length for p in kept)
    assert set(query.kept_protected) <= set(kept)
    assert not set(kept) & set(query.excluded)
    # Beyond the protected positions every span is whole, untouched or, at most once, partial.
    partial = 0
    for start in range(0, length, span):
        free = set(range(start, min(start + span, length))) - set(query.protected) - set(query.excluded)
        taken = free & set(kept)
        if taken and taken != free:
            partial += 1
            run = sorted(free)
            first = run.index(min(taken))
            assert sorted(taken) == run[first : first + len(taken)]
    assert partial <= 1


@EXAMPLES
@given(st.lists(queries(), min_size=1, max_size=5), st.sampled_from([1, 3, 16, 100]))
def test_batched_equals_plain(batch: list[Query], span: int) -> None:
    result = _batched(batch, span)
    for i, query in enumerate(batch):
        want = _plain(query, span)
        count = int(result.count[i])
        assert result.positions[i, :count].tolist() == want
        assert bool((result.positions[i, count:] == -1).all())
        assert result.mask[i].nonzero().flatten().tolist() == want


@EXAMPLES
@given(st.lists(queries(), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_order_and_padding_of_the_batch_change_nothing(batch: list[Query], random: object) -> None:
    order = list(range(len(batch)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight = _batched(batch, 16)
    shuffled = _batched([batch[i] for i in order], 16, filler=float("inf"), extra=37)
    assert torch.equal(straight.positions[order], shuffled.positions)
    assert not bool(shuffled.mask[:, straight.mask.shape[1] :].any())


@EXAMPLES
@given(queries(exclude=False))
def test_no_mask_equals_an_empty_mask(query: Query) -> None:
    protected = torch.zeros(1, len(query.scores), dtype=torch.bool)
    protected[0, query.protected] = True
    result = keep_positions(
        torch.tensor([query.scores]),
        torch.tensor([len(query.scores)], dtype=torch.int32),
        torch.tensor([query.budget], dtype=torch.int32),
        max_budget=query.budget,
        protected=protected,
    )
    assert result.mask[0].nonzero().flatten().tolist() == _plain(query, 16)


@EXAMPLES
@given(queries(), st.floats(width=32))
def test_excluded_scores_cannot_be_read_off(query: Query, secret: float) -> None:
    changed = [secret if p in query.excluded else s for p, s in enumerate(query.scores)]
    other = Query(changed, query.budget, query.protected, query.excluded)
    assert _plain(query, 16) == _plain(other, 16)


# --- coverage

# Quarters, so that every sum is exact in any order; -1 holds nothing.
MASSES = st.sampled_from([0.0, -1.0, 0.25, 0.5, 1.0, 4.0])


@st.composite
def covered_queries(draw: st.DrawFn) -> Query:
    query = draw(queries())
    scores = draw(st.lists(MASSES, min_size=len(query.scores), max_size=len(query.scores)))
    return Query(scores, query.budget, query.protected, query.excluded)


def _covering_reference(query: Query, coverage: float, span: int) -> int:
    """Grow the budget by whole spans, as the keep law takes them, until what is kept holds the share."""
    usable = [p for p in range(len(query.scores)) if p not in query.excluded]
    wanted = coverage * sum(max(0.0, query.scores[p]) for p in usable)

    def held(budget: int) -> float:
        if budget < 1:
            return 0.0
        kept = keep_positions_reference(query.scores, budget, query.protected, query.excluded, span)
        return sum(max(0.0, query.scores[p]) for p in kept)

    def is_whole(budget: int) -> bool:
        """Whether a budget is met without cutting a span."""
        kept = keep_positions_reference(query.scores, budget, query.protected, query.excluded, span)
        for start in range(0, len(query.scores), span):
            free = set(range(start, start + span)) & set(usable) - set(query.kept_protected)
            if free & set(kept) not in (free, set()):
                return False
        return True

    least = len(query.kept_protected)
    sizes = [n for n in range(max(1, least), len(usable) + 1) if is_whole(n)]
    found = least if held(least) >= wanted else next(n for n in sizes if held(n) >= wanted)
    return max(1, min(found, query.budget))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(covered_queries(), min_size=1, max_size=3),
    st.sampled_from([1, 3, 16, 100]),
    st.sampled_from([0.25, 0.5, 0.75, 1.0]),
)
def test_coverage_is_the_smallest_budget_of_whole_spans(batch: list[Query], span: int, coverage: float) -> None:
    given = _tensors(batch)
    found = coverage_budgets(
        given.scores,
        given.lengths,
        given.budgets,
        torch.full((len(batch),), coverage),
        protected=given.protected,
        excluded=given.excluded,
        span=span,
    )
    assert found.tolist() == [_covering_reference(query, coverage, span) for query in batch]


@EXAMPLES
@given(queries(), st.floats(0.0, 1.0, exclude_min=True, width=32))
def test_coverage_of_any_scores_is_a_budget_that_can_be_kept(query: Query, coverage: float) -> None:
    """Also of NaN, infinities and huge scores; more coverage never takes fewer positions."""
    given = _tensors([query, query])
    both = coverage_budgets(
        given.scores,
        given.lengths,
        given.budgets,
        torch.tensor([coverage, 1.0]),
        protected=given.protected,
        excluded=given.excluded,
    ).tolist()
    least = max(1, len(query.kept_protected))
    assert least <= both[0] <= both[1] <= max(least, query.budget)


def test_coverage_by_hand() -> None:
    scores = torch.zeros(1, 64)
    scores[0, 20:24], scores[0, 50] = 1.0, 2.0
    protected = torch.zeros(1, 64, dtype=torch.bool)
    protected[0, 0] = True

    def budget(coverage: float, cap: int = 64) -> int:
        lengths, caps = torch.tensor([64]), torch.tensor([cap])
        return int(coverage_budgets(scores, lengths, caps, torch.tensor([coverage]), protected=protected))

    assert budget(0.6) == 17, "position 0 and the second span, 4 of 6"
    assert budget(0.7) == 33, "and the fourth"
    assert budget(1.0) == 33, "the others hold nothing"
    assert budget(0.7, cap=20) == 20
    scores[0] = 0.0
    assert budget(1.0) == 1, "there is nothing to hold"


def test_by_hand() -> None:
    scores = [0.0] * 48
    scores[20], scores[40] = 1.0, 2.0
    # Position 0, then 8 around the peak at 40: centres at 39.5 and 40.5 are as near, the lower start wins.
    assert keep_positions_reference(scores, 9, [0]) == [0, *range(36, 44)]
    # A peak at a span's edge: the run is clipped to the span.
    scores[40], scores[32] = 0.0, 2.0
    assert keep_positions_reference(scores, 5, [0]) == [0, 32, 33, 34, 35]
    # The whole third span, then 3 of the second.
    assert keep_positions_reference(scores, 20, [0]) == [0, 19, 20, 21, *range(32, 48)]
    # A protected peak pulls the run towards it.
    assert keep_positions_reference(scores, 4, [0, 32, 33]) == [0, 32, 33, 34]
    # Fragments: the run skips what is taken.
    assert keep_positions_reference(scores, 6, [0, 33], [34], span=16) == [0, 32, 33, 35, 36, 37]


def test_budgets_are_checked() -> None:
    check_budget(3, 10, 3)
    check_budget(99, 10, 3)
    with pytest.raises(BudgetError, match="use at least 4"):
        check_budget(3, 10, 4)
    with pytest.raises(BudgetError, match="at least 1"):
        check_budget(0, 10, 0)
    with pytest.raises(BudgetError, match="at least one position"):
        check_budget(1, 0, 0)
    with pytest.raises(BudgetError, match="use at least 2"):
        keep_positions_reference([1.0, 2.0, 3.0], 1, [0, 2])
    with pytest.raises(BudgetError, match="must lie in"):
        keep_positions_reference([1.0, 2.0], 2, [0, 2])
    with pytest.raises(BudgetError, match="span"):
        keep_positions_reference([1.0, 2.0], 2, [0], span=0)


def test_batched_shapes_are_checked() -> None:
    scores, ints, mask = torch.rand(2, 8), torch.tensor([8, 8]), torch.zeros(2, 8, dtype=torch.bool)
    with pytest.raises(BudgetError, match="protected"):
        keep_positions(scores, ints, ints, max_budget=8, protected=mask[:, :4])
    with pytest.raises(BudgetError, match="excluded"):
        keep_positions(scores, ints, ints, max_budget=8, protected=mask, excluded=mask.int())
    with pytest.raises(BudgetError, match="lengths and budgets"):
        keep_positions(scores, ints[:1], ints, max_budget=8, protected=mask)
    with pytest.raises(BudgetError, match="max_budget"):
        keep_positions(scores, ints, ints, max_budget=0, protected=mask)
    with pytest.raises(BudgetError, match="scores"):
        keep_positions(scores[0], ints, ints, max_budget=8, protected=mask)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_plain_without_a_sync() -> None:
    generator = torch.Generator().manual_seed(5)
    scores = torch.randint(0, 4, (16, 333), generator=generator).float() / 3
    scores[:, ::7] = -0.0
    budgets = torch.randint(1, 340, (16,), generator=generator)
    protected = torch.zeros(16, 333, dtype=torch.bool)
    protected[:, 0] = True
    arguments = [t.cuda() for t in (scores, torch.full((16,), 333), budgets, protected)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = keep_positions(arguments[0], arguments[1], arguments[2], max_budget=340, protected=arguments[3])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for i in range(16):
        want = keep_positions_reference(scores[i].tolist(), int(budgets[i]), [0])
        assert result.positions[i, : len(want)].tolist() == want
