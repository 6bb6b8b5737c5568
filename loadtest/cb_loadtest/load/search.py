"""The knee: the largest load that holds the objective, by doubling and bisection, with noise in mind."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

BORDERLINE = 0.15
"""A p99 within this share of the objective is measured again, until one answer has two votes."""
LEAST_PACE = 0.95
"""A load is only held when requests end at this share of the rate they arrive at; below, the backlog grows."""
PACE_BLUR = 0.03
"""A pace this near to LEAST_PACE is measured again too."""
_VOTES = 2
_RATE_STEP = 1.1  # rates are told apart down to this factor


@dataclass(frozen=True, slots=True)
class Probe:
    """One measured load. ``p99_ms`` counts failed requests as endless, so it is infinite beyond 1 % of them.

    ``pace``: rate of completions over rate of arrivals, in an open loop; a closed one cannot fall behind.
    """

    level: float
    p99_ms: float
    requests: int
    failed: int
    per_s: float
    pace: float = 1.0


@dataclass(slots=True)
class Knee:
    """``level``: the largest load that held, None when the smallest did not. ``ended``: why the search ended."""

    level: float | None = None
    p99_ms: float | None = None
    ended: str = "found"
    probes: list[Probe] = field(default_factory=list)


class _Enough(Exception):
    """No probe may be made any more; the text says why."""


class KneeSearch:
    """Asks ``measure`` for loads between ``lowest`` and ``highest``; whole ones if ``whole``.

    measure:    None when the measurement was cut short; that ends the search.
    max_probes: bound of measurements, repeated ones included.
    out_of_time: asked before each; a text ends the search with it.
    """

    def __init__(
        self,
        measure: Callable[[float], Awaitable[Probe | None]],
        *,
        slo_ms: float,
        lowest: float,
        highest: float,
        whole: bool,
        max_probes: int,
        out_of_time: Callable[[], str | None],
    ) -> None:
        self._measure, self._slo_ms, self._whole = measure, slo_ms, whole
        self._lowest, self._highest = lowest, highest
        self._max_probes, self._out_of_time = max_probes, out_of_time
        self._knee = Knee()

    async def run(self) -> Knee:
        try:
            self._knee.ended = await self._search()
        except _Enough as enough:
            self._knee.ended = str(enough)
        return self._knee

    async def _search(self) -> str:
        low, high = self._lowest, self._lowest
        while await self._holds(high):
            if high >= self._highest:
                return "the largest load allowed still holds"
            low, high = high, min(2 * high, self._highest)
        if high == self._lowest:
            return "the smallest load does not hold"
        while not self._close(low, high):
            middle = self._between(low, high)
            if await self._holds(middle):
                low = middle
            else:
                high = middle
        return "found"

    async def _holds(self, level: float) -> bool:
        """One measurement, or when it is a close thing the majority of two or three."""
        seen: list[Probe] = []
        held, wanted = 0, 1
        while max(held, len(seen) - held) < wanted:
            seen.append(await self._probe(level))
            held += self._spare(seen[-1]) >= 0
            wanted = _VOTES if abs(self._spare(seen[0])) < 1 else 1
        if held == wanted:
            self._knee.level = level
            self._knee.p99_ms = sorted(probe.p99_ms for probe in seen)[len(seen) // 2]
        return held == wanted

    def _spare(self, probe: Probe) -> float:
        """By how much the worse of the two criteria holds, in blurs: below 0 it fails, within 1 it could flip."""
        return min((1 - probe.p99_ms / self._slo_ms) / BORDERLINE, (probe.pace - LEAST_PACE) / PACE_BLUR)

    async def _probe(self, level: float) -> Probe:
        if len(self._knee.probes) >= self._max_probes:
            raise _Enough(f"all {self._max_probes} probes are used up")
        reason = self._out_of_time()
        if reason is not None:
            raise _Enough(reason)
        probe = await self._measure(level)
        if probe is None:
            raise _Enough(self._out_of_time() or "cut short")
        self._knee.probes.append(probe)
        return probe

    def _close(self, low: float, high: float) -> bool:
        return high - low <= 1 if self._whole else high / low <= _RATE_STEP

    def _between(self, low: float, high: float) -> float:
        return float((low + high) // 2) if self._whole else math.sqrt(low * high)


def pace(times: list[tuple[float, float]]) -> float:
    """Rate of completions over rate of arrivals, of requests as (due, ended); 1 for fewer than two.

    By the mean times of the earlier and the later half, so that the slowest request at an end does not decide.
    """
    half = len(times) // 2
    if half == 0:
        return 1.0
    ordered = sorted(times)
    (due, ended), (later_due, later_ended) = (np.mean(part, axis=0) for part in (ordered[:half], ordered[-half:]))
    return float((later_due - due) / (later_ended - ended)) if later_ended > ended else 1.0


def p99_with_failures(milliseconds: list[float], failed: int) -> float:
    """Nearest-rank 99th percentile, failed requests counted as endless; infinite without requests."""
    count = len(milliseconds) + failed
    rank = math.ceil(0.99 * count)
    return sorted(milliseconds)[rank - 1] if 0 < rank <= len(milliseconds) else math.inf
