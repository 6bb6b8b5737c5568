"""Runs against plain sets of positions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_sglang.runs import Runs, overlap, runs_of, shifted, size, union

edges = st.integers(min_value=0, max_value=60)
any_runs = st.lists(st.tuples(edges, edges), max_size=12)


def positions(runs: list[tuple[int, int]] | Runs) -> set[int]:
    return {position for start, stop in runs for position in range(start, stop)}


@pytest.mark.parametrize(
    ("of", "runs"),
    [
        ([], ()),
        ([0], ((0, 1),)),
        ([0, 1, 2], ((0, 3),)),
        ([0, 2, 3, 9], ((0, 1), (2, 4), (9, 10))),
        ([7, 8], ((7, 9),)),
    ],
)
def test_by_hand(of: list[int], runs: Runs) -> None:
    assert runs_of(of) == runs


@given(st.sets(st.integers(min_value=0, max_value=200)).map(sorted))
def test_runs_of_positions_are_the_positions(of: list[int]) -> None:
    runs = runs_of(of)
    assert [p for start, stop in runs for p in range(start, stop)] == of
    assert all(before[1] < after[0] for before, after in pairwise(runs))


@given(any_runs)
def test_union_is_maximal_and_ascending_whatever_it_is_given(given_runs: list[tuple[int, int]]) -> None:
    found = union(given_runs)
    assert positions(found) == positions(given_runs)
    assert all(start < stop for start, stop in found)
    assert all(before[1] < after[0] for before, after in pairwise(found))
    assert size(found) == len(positions(found))
    assert union(reversed(found)) == found


@given(any_runs.map(union), edges, edges)
def test_overlap_counts_the_positions_within(runs: Runs, start: int, stop: int) -> None:
    assert overlap(runs, start, stop) == len(positions(runs) & set(range(start, stop)))


@given(any_runs.map(union), edges)
def test_shifted(runs: Runs, offset: int) -> None:
    assert positions(shifted(runs, offset)) == {p + offset for p in positions(runs)}
