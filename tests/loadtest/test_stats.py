"""Bootstrap estimates against numbers that are known otherwise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_loadtest.stats import estimate, estimate_difference, linked_clusters


def test_mean_and_normal_interval() -> None:
    values = [float(v) for v in np.random.default_rng(1).normal(0.4, 0.2, size=400)]
    found = estimate(values, range(400), seed=0)
    assert found.mean == pytest.approx(np.mean(values)) and (found.n, found.clusters) == (400, 400)
    half = 1.96 * np.std(values, ddof=1) / math.sqrt(400)
    assert found.by_case == pytest.approx((found.mean - half, found.mean + half), abs=0.1 * half)
    assert found.by_document == found.by_case  # every case its own document


def test_two_values_have_a_known_distribution() -> None:
    # Means 0, 0.5 and 1 with probabilities 1/4, 1/2, 1/4: both ends of the interval are the extremes.
    found = estimate([0.0, 1.0], ["a", "b"], seed=3)
    assert found.mean == 0.5 and found.by_document == (0.0, 1.0)


def test_whole_documents_are_drawn() -> None:
    # Two documents, alike within: over documents only 0, 0.5 and 1 can come out, over cases much less varies.
    values, documents = [0.0] * 50 + [1.0] * 50, ["a"] * 50 + ["b"] * 50
    found = estimate(values, documents, seed=0)
    assert found.clusters == 2 and found.by_document == (0.0, 1.0)
    assert found.by_case is not None and 0.38 < found.by_case[0] < 0.42 and 0.58 < found.by_case[1] < 0.62


def test_documents_weigh_by_their_cases() -> None:
    # A draw of both documents has mean 10/11, not the mean of the two documents' means.
    found = estimate([0.0] + [1.0] * 10, ["a"] + ["b"] * 10, seed=0, replicates=2_000)
    assert found.mean == pytest.approx(10 / 11)
    assert found.by_document == (0.0, 1.0)


def test_coverage_of_the_interval_over_documents() -> None:
    # Cases of one document share its level, so an interval that took them as independent would be too narrow.
    generator = np.random.default_rng(7)
    inside = {"by_document": 0, "by_case": 0}
    for seed in range(120):
        levels = generator.normal(0.0, 1.0, size=30)
        values = [float(level + e) for level in levels for e in generator.normal(0.0, 0.3, size=6)]
        found = estimate(values, [n for n in range(30) for _ in range(6)], seed=seed, replicates=400)
        for name in inside:
            low, high = getattr(found, name)
            inside[name] += low <= 0.0 <= high
    assert 104 <= inside["by_document"] <= 120  # about 95 %
    assert inside["by_case"] < 85


def test_one_document_has_no_interval_over_documents() -> None:
    found = estimate([0.2, 0.4], ["a", "a"], seed=0)
    assert found.by_document is None and found.by_case == (pytest.approx(0.2), pytest.approx(0.4)) and not found.clear
    assert estimate([0.2], ["a"], seed=0).by_case is None


def test_the_same_seed_gives_the_same_numbers() -> None:
    values = [float(v) for v in np.random.default_rng(2).random(60)]
    documents = [n // 2 for n in range(60)]
    assert estimate(values, documents, seed=5) == estimate(values, documents, seed=5)
    assert estimate(values, documents, seed=5).by_document != estimate(values, documents, seed=6).by_document


def test_blocks_do_not_change_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    values, documents = [0.1, 0.7, 0.3, 0.9, 0.2], [0, 0, 1, 2, 2]
    whole = estimate(values, documents, seed=5)
    monkeypatch.setattr("cb_loadtest.stats._CHUNK_NUMBERS", 7)
    found = estimate(values, documents, seed=5)
    # Sums of other shapes round otherwise, on some processors.
    assert (found.by_case, found.by_document) == (pytest.approx(whole.by_case), pytest.approx(whole.by_document))


def test_paired_differences() -> None:
    base = {f"c{n}": 0.1 * n for n in range(8)}
    better = {case: value + 0.05 for case, value in base.items()} | {"only here": 1.0}
    clusters = {case: n // 2 for n, case in enumerate(better)}
    found = estimate_difference(better, base, clusters, seed=0)
    assert found is not None and found.n == 8 and found.mean == pytest.approx(0.05)
    # The levels differ widely between cases; the paired difference does not.
    assert (
        found.by_document == pytest.approx((0.05, 0.05))
        and found.by_case == pytest.approx((0.05, 0.05))
        and found.clear
    )
    opposite = estimate_difference(base, better, clusters, seed=0)
    assert opposite is not None and opposite.mean == pytest.approx(-0.05) and opposite.clear
    assert estimate_difference({"x": 1.0}, base, clusters, seed=0) is None


@pytest.mark.parametrize("values, clusters", [([], []), ([1.0], [1, 2]), ([math.nan, 1.0], [1, 2]), ([math.inf], [1])])
def test_unusable_values(values: list[float], clusters: list[int]) -> None:
    with pytest.raises(ValueError):
        estimate(values, clusters, seed=0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4)), min_size=1, max_size=30))
def test_intervals_lie_within_the_values(pairs: list[tuple[float, int]]) -> None:
    values, clusters = [v for v, _ in pairs], [c for _, c in pairs]
    found = estimate(values, clusters, seed=1, replicates=50)
    for interval in (found.by_document, found.by_case):
        if interval is not None:
            assert min(values) - 1e-9 <= interval[0] <= interval[1] <= max(values) + 1e-9


def test_linked_clusters() -> None:
    members = {"a": ["x"], "b": ["y"], "c": ["x", "z"], "d": ["z"], "e": ["w", "y"], "f": []}
    found = linked_clusters(members)
    assert found == {"a": 0, "b": 1, "c": 0, "d": 0, "e": 1, "f": 2}
