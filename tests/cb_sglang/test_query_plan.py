"""One query of a call, resolved: whose option counts, what may be kept, and which span scores may be told."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_engine import RecordingEngine, positions_of

from cb_sglang import wire
from cb_sglang.errors import BudgetError, InvalidRequestError
from cb_sglang.query_plan import QueryPlan, merged_options, plan_query, public_span_scores
from cb_sglang.runs import Runs, union
from cb_sglang.seam.engine import Context
from cb_sglang.senders import RegisteredSender
from cb_sglang.spec import ScoringSpec, read_spec
from cb_sglang.templates import DEFAULT_TEMPLATE

TOTAL = 100


def sender(*, latent: int = 0, inherited: int = 0) -> RegisteredSender:
    ids = array("i", [5] * (TOTAL - latent) + [0] * latent)
    return RegisteredSender(
        id="snd_1", tenant="alice", fingerprint="f", input_ids=ids, inherited=inherited, latent=latent, created=0.0
    )


def plan(asked: RegisteredSender, excluded: Runs = (), **options: Any) -> QueryPlan:
    async def find(index: int, query: wire.Query) -> Runs:
        return excluded

    request = wire.MessagesRequest(queries=[[7, 8]], **options)
    engine = RecordingEngine()
    return asyncio.run(plan_query(engine, DEFAULT_TEMPLATE, asked, request, 0, find))  # type: ignore[arg-type]


def test_a_ratio_is_of_what_is_not_inherited() -> None:
    assert plan(sender(inherited=20), ratio=4.0).asked == 20 + 20
    assert plan(sender(inherited=20)).asked == 20 + 10
    assert plan(sender(inherited=20), budget=30).asked == 30


@pytest.mark.parametrize(
    ("latent", "excluded", "budget", "asked", "minimum"),
    [
        (0, (), 100, 100, 1),
        (0, ((10, 30),), 100, 80, 1),
        # Position 0 is excluded, so that no place is held for it.
        (0, ((0, 99),), 100, 1, 1),
        (3, (), 4, 4, 4),
        (3, ((0, 1),), 3, 3, 3),
        # A latent row that was sent already need not be kept again.
        (3, ((0, 98),), 50, 2, 2),
        (3, ((98, 100),), 2, 2, 2),
    ],
)
def test_budgets_lie_between_what_is_kept_always_and_what_may_be(
    latent: int, excluded: Runs, budget: int, asked: int, minimum: int
) -> None:
    found = plan(sender(latent=latent), excluded, budget=budget)
    assert (found.asked, found.budget, found.minimum) == (asked, asked, minimum)


def test_budgets_that_cannot_hold_the_latent_rows_are_refused() -> None:
    with pytest.raises(BudgetError, match="ask for at least 4") as caught:
        plan(sender(latent=3), budget=3)
    assert caught.value.param == "budget"
    with pytest.raises(BudgetError) as caught:
        plan(sender(latent=30), ratio=8.0)
    assert caught.value.param == "ratio"
    with pytest.raises(InvalidRequestError, match="no position is left"):
        plan(sender(latent=3), ((0, TOTAL),))


runs = st.lists(st.tuples(st.integers(0, TOTAL), st.integers(0, TOTAL)), max_size=5).map(union)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20), runs, st.integers(1, 120))
def test_every_plan_is_a_spec_that_the_scheduler_takes(latent: int, excluded: Runs, budget: int) -> None:
    """What is planned here is checked again over there, where it is untrusted: the two must agree."""
    try:
        found = plan(sender(latent=latent), excluded, budget=budget, coverage=None)
    except InvalidRequestError:
        protected = {0, *range(TOTAL - latent, TOTAL)} - set(positions_of(excluded))
        assert budget < len(protected) or len(positions_of(excluded)) == TOTAL
        return
    for granted in {found.minimum, found.asked}:
        context, spec = found.granted(granted).request(sender(latent=latent), Context([5] * TOTAL))
        assert read_spec(spec.to_wire(), input_len=len(context.input_ids)) == spec
        assert isinstance(spec, ScoringSpec) and spec.budget == granted and spec.excluded_runs == excluded


def test_options_of_the_query_replace_those_of_the_call_one_by_one() -> None:
    call = wire.MessagesRequest(
        queries=["q"],
        ratio=4.0,
        exclude=["msg_" + "0" * 32],
        encoding="text",
        selector="bm25",
        selector_options=wire.SelectorOptions(seed=7),
        span_scores=True,
    )
    inherited = merged_options(call, "who?")
    assert inherited == wire.Query(
        query="who?",
        **{name: getattr(call, name) for name in wire.Query.model_fields if name != "query"},
    )
    own = wire.Query(query=[5], coverage=0.5, exclude=[], selector_options=wire.SelectorOptions(alpha=1.0))
    found = merged_options(call, own)
    assert (found.ratio, found.coverage, found.exclude, found.encoding) == (None, 0.5, [], "text")
    assert found.selector_options == wire.SelectorOptions(alpha=1.0), "one object, not the two mixed"
    assert (found.query, found.selector, found.span_scores) == ([5], "bm25", True)


def test_equal_queries_have_equal_hashes() -> None:
    first, again = plan(sender()), plan(sender(latent=2), budget=9)
    assert first.query_hash == again.query_hash and len(first.query_hash) == 64


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 96), st.integers(1, 8)), max_size=4).map(
        lambda found: union((start, start + length) for start, length in found)
    ),
)
def test_span_scores_next_to_private_positions_are_not_told(scores: list[float], private: Runs) -> None:
    found = public_span_scores(scores, private, 16)
    assert len(found) == len(scores)
    for n, (score, told) in enumerate(zip(scores, found, strict=True)):
        # Max-pooling, 7 wide, carries a score 3 positions on; position 0 is pinned to the highest score of all.
        reached = set(range(n * 16 - 3, (n + 1) * 16 + 3)) & set(positions_of(private))
        assert told == (None if reached or (private and n == 0) else score)
