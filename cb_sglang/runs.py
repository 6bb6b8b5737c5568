"""Sets of positions as ascending, disjoint half-open runs [start, stop): short where positions cluster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Runs: TypeAlias = tuple[tuple[int, int], ...]


def runs_of(positions: Iterable[int]) -> Runs:
    """Ascending positions as maximal runs of neighbours."""
    return union((p, p + 1) for p in positions)


def union(runs: Iterable[tuple[int, int]]) -> Runs:
    """Runs in any order, overlapping or not, as maximal ones. Empty runs vanish."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(run for run in runs if run[0] < run[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def size(runs: Runs) -> int:
    """How many positions there are."""
    return sum(stop - start for start, stop in runs)


def overlap(runs: Runs, start: int, stop: int) -> int:
    """How many of the positions lie in [start, stop)."""
    return sum(max(0, min(b, stop) - max(a, start)) for a, b in runs)


def shifted(runs: Runs, offset: int) -> Runs:
    """Every run ``offset`` later."""
    return tuple((start + offset, stop + offset) for start, stop in runs)
