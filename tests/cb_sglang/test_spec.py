"""The spec that a request carries into the scheduler, where it is read as untrusted input."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_sglang.errors import InvalidRequestError
from cb_sglang.spec import (
    EMBEDDING_KEY,
    LATENT_KEY,
    PIN_KEY,
    STATISTIC_KEY,
    WIRE_KEY,
    EmbeddingSpec,
    LatentSpec,
    PinSpec,
    ScoringSpec,
    Spec,
    StatisticSpec,
    protected_and_available,
    read_spec,
)

SPEC = ScoringSpec(sender_len=100, vote_start=3, vote_stop=9, budget=13)
MEASURE = StatisticSpec(sender_len=100, statistic="snapkv", first_row=68)

KEYS = [WIRE_KEY, STATISTIC_KEY, LATENT_KEY, EMBEDDING_KEY, PIN_KEY]


def scoring(**changes: Any) -> dict[str, Any]:
    return {WIRE_KEY: {**SPEC.to_wire()[WIRE_KEY], **changes}}


def statistic(**changes: Any) -> dict[str, Any]:
    return {STATISTIC_KEY: {**MEASURE.to_wire()[STATISTIC_KEY], **changes}}


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, latent_len=12, selector="mean_query", want_scores=True, order=3.0, alpha=0.0, sink_free=True),
        replace(SPEC, sender_len=1, vote_start=0, vote_stop=1, budget=1),
        replace(SPEC, coverage=0.9, excluded=[0, 1, 20, 30, 99, 100]),
        replace(SPEC, budget=87, latent_len=3, excluded=[10, 20, 98, 100]),
        MEASURE,
        replace(MEASURE, latent_len=5, chunk_start=10, chunk_stop=90),
        LatentSpec(step=0),
        LatentSpec(step=119),
        EmbeddingSpec(token_ids=[0, 5, 5, 262_144]),
        PinSpec(pin_id="snd_1", hold=True, token="t"),
    ],
)
def test_round_trip_through_json(spec: Spec) -> None:
    assert read_spec(json.loads(json.dumps(spec.to_wire())), input_len=120) == spec


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, [], "cacheback", 5, {WIRE_KEY.upper(): {}}])
def test_ordinary_requests_have_none(params: object) -> None:
    assert read_spec(params, input_len=120) is None


@pytest.mark.parametrize("raw", [None, 5, "x", [], [["sender_len", 3]], {}, {"sender_len": 3}, {"surprise": 1}, {5: 1}])
@pytest.mark.parametrize("key", KEYS)
def test_what_is_no_spec(key: str, raw: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"custom_params.{key}"):
        read_spec({key: raw}, input_len=120)


@pytest.mark.parametrize("name", ["sender_len", "vote_start", "vote_stop", "budget", "latent_len"])
@pytest.mark.parametrize("value", [-1, 1 << 31, 1 << 70, 1.0, "5", None, True, [5], {}])
def test_lengths_are_bounded_integers(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError):
        read_spec(scoring(**{name: value}), input_len=120)


@pytest.mark.parametrize(
    "changes",
    [
        {"selector": 5},
        {"selector": None},
        {"selector": "s" * 300},
        {"want_scores": 1},
        {"want_scores": "yes"},
        {"sink_free": 0},
        {"order": "2"},
        {"order": float("nan")},
        {"alpha": float("inf")},
        {"alpha": True},
        {"coverage": "1"},
        {"coverage": float("nan")},
        {"excluded": None},
        {"excluded": (1, 2)},
        {"excluded": [1, "2"]},
        {"excluded": [True, 2]},
        {"excluded": [-1, 2]},
        {"excluded": [1.0, 2]},
        {"excluded": [1, 1 << 31]},
        {"surprise": 1},
        {"wire_key": "x"},
    ],
    ids=str,
)
def test_other_fields_have_their_types(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        read_spec(scoring(**changes), input_len=120)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sender_len": 0}, "at least one query token"),
        ({"sender_len": 120}, "at least one query token"),
        ({"vote_start": 9}, "non-empty range within the query"),
        ({"vote_start": 10, "vote_stop": 9}, "non-empty range within the query"),
        ({"vote_stop": 21}, "non-empty range within the query"),
        ({"budget": 0}, "budget must lie between the 1 positions"),
        ({"budget": 101}, "budget must lie between"),
        ({"latent_len": 13}, "budget must lie between the 14 positions"),
        ({"latent_len": 100}, "at least one other sender position"),
        ({"coverage": 1.5}, "coverage must lie between 0 and 1"),
        ({"coverage": -0.5}, "coverage must lie between 0 and 1"),
        ({"excluded": [5]}, "borders of ascending runs"),
        ({"excluded": [9, 5]}, "borders of ascending runs"),
        ({"excluded": [5, 9, 9, 12]}, "borders of ascending runs"),
        ({"excluded": [5, 5]}, "borders of ascending runs"),
        ({"excluded": [90, 101]}, "borders of ascending runs within the sender"),
        ({"excluded": [0, 90]}, "the 10 that may be"),
        ({"excluded": [0, 100]}, "the 0 that may be"),
        # A latent row is kept unless it is excluded.
        ({"excluded": [1, 95], "latent_len": 13}, "the 6 that may be"),
    ],
)
def test_scoring_specs_fit_their_request(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        read_spec(scoring(**changes), input_len=120)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (LatentSpec(step=120), "needs a sender before it"),
        (LatentSpec(step=-1), "type int"),
        (EmbeddingSpec(token_ids=[]), "between 1 and"),
        (EmbeddingSpec(token_ids=[-1]), "list"),
        (EmbeddingSpec(token_ids=[5] * 4), "between 1 and 3 embeddings"),
        (PinSpec(pin_id="x" * 257, hold=True, token="t"), "type str"),
        (PinSpec(pin_id="x", hold=1, token="t"), "type bool"),  # type: ignore[arg-type]
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_other_kinds_are_bounded_too(monkeypatch: pytest.MonkeyPatch, spec: Spec, problem: str) -> None:
    monkeypatch.setattr("cb_sglang.spec.MAX_EMBEDDING_ROWS", 3)
    with pytest.raises(InvalidRequestError, match=problem):
        read_spec(spec.to_wire(), input_len=120)


@pytest.mark.parametrize(
    ("latent", "excluded", "protected", "available"),
    [
        (0, (), 1, 100),
        (3, (), 4, 100),
        (3, ((0, 1),), 3, 99),
        (3, ((98, 100),), 2, 98),
        (0, ((0, 100),), 0, 0),
        (99, ((50, 60),), 90, 90),
    ],
)
def test_what_is_kept_always_and_what_may_be(
    latent: int, excluded: tuple[tuple[int, int], ...], protected: int, available: int
) -> None:
    assert protected_and_available(100, latent, excluded) == (protected, available)


@pytest.mark.parametrize(
    "changes",
    [
        {"sender_len": 0},
        {"sender_len": 121},
        {"first_row": 120},
        {"first_row": -1},
        {"chunk_start": 5, "chunk_stop": 4},
        {"chunk_stop": 101},
        {"latent_len": 100},
        {"statistic": 5},
        {"surprise": 1},
    ],
    ids=str,
)
def test_statistic_specs_fit_their_request(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        read_spec(statistic(**changes), input_len=120)


def test_the_limits_themselves_fit() -> None:
    assert read_spec(scoring(vote_start=0, vote_stop=20, budget=100), input_len=120) is not None
    assert read_spec(scoring(latent_len=12), input_len=120) is not None
    assert read_spec(statistic(sender_len=120, first_row=119, chunk_stop=120), input_len=120) is not None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
kinds = (ScoringSpec, StatisticSpec, LatentSpec, EmbeddingSpec, PinSpec)
fields = st.sampled_from([*{name for kind in kinds for name in kind.__slots__}, "surprise"])
values = json_values | st.integers(0, 130) | st.lists(st.integers(0, 130), max_size=6)


@given(st.sampled_from(KEYS), st.dictionaries(fields, values) | json_values)
def test_anything_is_read_or_refused(key: str, raw: Any) -> None:
    """Whatever JSON holds: a spec that fits, or the one error; nothing else may come out of here."""
    try:
        spec = read_spec({key: raw}, input_len=120)
    except InvalidRequestError:
        return
    assert spec is not None
    assert 0 <= (spec.match_limit or 0) < 120
    if isinstance(spec, ScoringSpec):
        kept = set(range(spec.sender_len)) - {p for run in spec.excluded_runs for p in range(*run)}
        assert 1 <= spec.budget <= len(kept)


def test_the_query_s_rows_never_come_from_the_cache_nor_go_into_it() -> None:
    assert SPEC.match_limit == SPEC.insert_limit == SPEC.sender_len
    assert (MEASURE.match_limit, MEASURE.insert_limit) == (MEASURE.first_row, MEASURE.sender_len)
    # A latent row goes on from the cache, and what carries a lookup is not kept.
    assert (LatentSpec(3).match_limit, LatentSpec(3).insert_limit) == (None, None)
    assert (EmbeddingSpec([5]).match_limit, EmbeddingSpec([5]).insert_limit) == (None, 0)
