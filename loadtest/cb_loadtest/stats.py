"""Means over cases with bootstrap confidence intervals.

Cases that ask about the same document are not independent, so two intervals are given: one resamples whole
documents with all their cases (the cautious one), the other resamples cases. A paired comparison is the same
estimate of the differences, case by case.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
REPLICATES = 10_000
_CHUNK_NUMBERS = 4_000_000  # bounds the memory of one step, whatever the number of clusters

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over ``n`` cases in ``clusters`` documents, with intervals at ``LEVEL``.

    ``by_document`` resamples documents, ``by_case`` cases; None where there are fewer than two to resample.
    """

    mean: float
    n: int
    clusters: int
    by_document: Interval | None
    by_case: Interval | None

    @property
    def clear(self) -> bool:
        """Whether the interval over documents leaves out 0."""
        return self.by_document is not None and not self.by_document[0] <= 0.0 <= self.by_document[1]


def estimate(
    values: Sequence[float], clusters: Sequence[Hashable], *, seed: int, replicates: int = REPLICATES
) -> Estimate:
    """The mean of ``values`` and its percentile intervals; ``clusters[i]`` is the document of ``values[i]``.

    The same arguments give the same numbers. Raises ValueError without values, for values that are not finite,
    and when the two sequences differ in length.
    """
    if not values or len(values) != len(clusters):
        raise ValueError(f"{len(values)} values in {len(clusters)} clusters; give at least one, and as many of both")
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError("the values must be finite numbers")
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    index = np.array([numbers[cluster] for cluster in clusters])
    sums: Floats = np.bincount(index, weights=array).astype(np.float64)
    sizes: Floats = np.bincount(index).astype(np.float64)
    return Estimate(
        mean=float(array.mean()),
        n=len(array),
        clusters=len(numbers),
        by_document=_interval(sums, sizes, seed, replicates),
        by_case=_interval(array, np.ones_like(array), seed, replicates),
    )


def estimate_difference(
    values: Mapping[str, float],
    base: Mapping[str, float],
    clusters: Mapping[str, Hashable],
    *,
    seed: int,
    replicates: int = REPLICATES,
) -> Estimate | None:
    """Mean of ``values[case] - base[case]`` over the cases that have both; None when there are none."""
    cases = [case for case in values if case in base]
    if not cases:
        return None
    differences = [values[case] - base[case] for case in cases]
    return estimate(differences, [clusters[case] for case in cases], seed=seed, replicates=replicates)


def _interval(sums: Floats, sizes: Floats, seed: int, replicates: int) -> Interval | None:
    """Percentiles of the mean when groups with these sums and sizes are drawn with replacement."""
    count = len(sums)
    if count < 2:
        return None
    generator = np.random.default_rng(seed)
    share = np.full(count, 1.0 / count)
    step = max(1, _CHUNK_NUMBERS // count)
    means = np.empty(replicates)
    for start in range(0, replicates, step):
        stop = min(start + step, replicates)
        drawn = generator.multinomial(count, share, size=stop - start)
        means[start:stop] = (drawn @ sums) / (drawn @ sizes)
    low, high = np.percentile(means, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)


def linked_clusters(members: Mapping[str, Iterable[Hashable]]) -> dict[str, int]:
    """A cluster number for every name; names that share a member, directly or over others, share the number."""
    parent: dict[str, str] = {name: name for name in members}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    first_with: dict[Hashable, str] = {}
    for name, things in members.items():
        for thing in things:
            parent[root(name)] = root(first_with.setdefault(thing, name))
    numbers: dict[str, int] = {}
    return {name: numbers.setdefault(root(name), len(numbers)) for name in members}
