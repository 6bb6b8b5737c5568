"""The spec that a request carries into the scheduler, where it is read as untrusted input."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_sglang.errors import InvalidRequestError
from cb_sglang.spec import STATISTIC_KEY, WIRE_KEY, ScoringSpec, StatisticSpec, read_spec

SPEC = ScoringSpec(sender_len=100, vote_start=3, vote_stop=9, budget=13)
MEASURE = StatisticSpec(sender_len=100, statistic="snapkv", first_row=68)


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
        MEASURE,
        replace(MEASURE, latent_len=5, chunk_start=10, chunk_stop=90),
    ],
)
def test_round_trip_through_json(spec: ScoringSpec | StatisticSpec) -> None:
    assert read_spec(json.loads(json.dumps(spec.to_wire())), input_len=120) == spec


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, [], "cacheback", 5, {WIRE_KEY.upper(): {}}])
def test_ordinary_requests_have_none(params: object) -> None:
    assert read_spec(params, input_len=120) is None


@pytest.mark.parametrize("raw", [None, 5, "x", [], [["sender_len", 3]], {}, {"sender_len": 3}, {"surprise": 1}, {5: 1}])
@pytest.mark.parametrize("key", [WIRE_KEY, STATISTIC_KEY])
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
    ],
)
def test_scoring_specs_fit_their_request(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        read_spec(scoring(**changes), input_len=120)


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
fields = st.sampled_from([*ScoringSpec.__slots__, *StatisticSpec.__slots__, "surprise"])


@given(
    st.sampled_from([WIRE_KEY, STATISTIC_KEY]), st.dictionaries(fields, json_values | st.integers(0, 130)) | json_values
)
def test_anything_is_read_or_refused(key: str, raw: Any) -> None:
    """Whatever JSON holds: a spec that fits, or the one error; nothing else may come out of here."""
    try:
        spec = read_spec({key: raw}, input_len=120)
    except InvalidRequestError:
        return
    assert spec is not None and 1 <= spec.sender_len <= 120 and 0 <= spec.match_limit < 120


def test_the_query_s_rows_never_come_from_the_cache() -> None:
    assert SPEC.match_limit == SPEC.sender_len
    assert MEASURE.match_limit == MEASURE.first_row
