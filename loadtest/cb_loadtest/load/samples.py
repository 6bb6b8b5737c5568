"""Measured numbers in bounded memory, and what is said of them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable

import numpy as np

MAX_SAMPLES = 1_000_000
PERCENTILES = (50, 90, 95, 99)


class Samples:
    """Numbers; all of them up to ``limit``, beyond it a uniform sample of ``limit`` (reservoir, seeded)."""

    def __init__(self, limit: int = MAX_SAMPLES) -> None:
        self.count = 0
        self._limit = limit
        self._kept = array("d")
        self._draw = random.Random(0)

    def add(self, value: float) -> None:
        self.count += 1
        if len(self._kept) < self._limit:
            self._kept.append(value)
            return
        place = self._draw.randrange(self.count)
        if place < self._limit:
            self._kept[place] = value

    def extend(self, values: Iterable[float]) -> None:
        for value in values:
            self.add(value)

    def percentile(self, percent: float) -> float | None:
        """Interpolated, as NumPy and SGLang's benchmark do; None without samples."""
        return float(np.percentile(np.asarray(self._kept), percent)) if self._kept else None

    def milliseconds(self) -> dict[str, float | None]:
        """Seconds, described in milliseconds: n, mean, max and the percentiles. None where there is nothing."""
        if not self._kept:
            return {"n": 0, "mean": None, "max": None, **{f"p{p}": None for p in PERCENTILES}}
        values = np.asarray(self._kept) * 1_000
        found = np.percentile(values, PERCENTILES)
        named = {f"p{p}": round(float(v), 3) for p, v in zip(PERCENTILES, found, strict=True)}
        return {"n": self.count, "mean": round(float(values.mean()), 3), "max": round(float(values.max()), 3), **named}

    def benchmark_keys(self, name: str) -> dict[str, float | None]:
        """The same under the keys of ``sglang.benchmark.serving``: ``mean_NAME_ms``, ``p99_NAME_ms``, ..."""
        described = self.milliseconds()
        deviation = float(np.std(np.asarray(self._kept)) * 1_000) if self._kept else None
        return {
            f"mean_{name}_ms": described["mean"],
            f"median_{name}_ms": described["p50"],
            f"std_{name}_ms": None if deviation is None else round(deviation, 3),
            **{f"p{p}_{name}_ms": described[f"p{p}"] for p in PERCENTILES[1:]},
        }
