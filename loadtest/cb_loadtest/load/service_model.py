"""What a message costs: a linear model fitted to measured calls.

    seconds = fixed + per_row * rows + per_row_position * rows * positions

``rows`` are the query rows of all messages of one call, ``positions`` the sender's length. ``fixed`` is paid once a
call, so messages that share one are cheaper: the batch effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from cb_loadtest.planning.fit import ServiceModel

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured call: ``batch`` queries of ``rows`` tokens each over ``positions``, and its seconds."""

    batch: int
    rows: int
    positions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A service model and how well it describes the observations it came from (relative errors of seconds)."""

    model: ServiceModel
    median_error: float
    max_error: float
    batch_effect: dict[int, float]

    def report(self) -> dict[str, Any]:
        return {
            "fixed": self.model.fixed,
            "per_row": self.model.per_row,
            "per_row_position": self.model.per_row_position,
            "median_relative_error": self.median_error,
            "max_relative_error": self.max_error,
            "batch_effect": {str(batch): effect for batch, effect in self.batch_effect.items()},
        }


def fit_service_model(observations: Sequence[Observation]) -> Fit:
    """Least squares of the relative errors, no cost below 0. Raises ValueError for fewer than three observations."""
    if len(observations) < 3:
        raise ValueError(f"{len(observations)} observations do not determine three costs")
    rows = np.array([o.batch * o.rows for o in observations], dtype=np.float64)
    positions = np.array([o.positions for o in observations], dtype=np.float64)
    seconds = np.array([o.seconds for o in observations], dtype=np.float64)
    terms = np.stack([np.ones_like(rows), rows, rows * positions], axis=1)
    costs = fit_costs(terms, seconds)
    errors = np.abs(terms @ costs / seconds - 1)
    return Fit(
        ServiceModel(*map(float, costs)),
        float(np.median(errors)),
        float(errors.max()),
        batch_effect(observations),
    )


def fit_costs(terms: Floats, seconds: Floats) -> Floats:
    """The cost >= 0 of each term, by least squares of the relative errors. Raises ValueError for seconds of 0."""
    if not (seconds > 0).all():
        raise ValueError("a measured call took no time; no cost can be fitted to that")
    return _nonnegative_least_squares(terms / seconds[:, None], np.ones_like(seconds))


def _nonnegative_least_squares(terms: Floats, values: Floats) -> Floats:
    """Costs >= 0 that bring ``terms @ costs`` nearest to ``values``; for a handful of terms, by trying all subsets."""
    count = terms.shape[1]
    best, best_error = np.zeros(count), float(values @ values)
    for subset in range(1, 1 << count):
        used = [term for term in range(count) if subset >> term & 1]
        # Columns differ by many orders of magnitude (1 against rows x positions); scaled, they are well conditioned.
        scale = np.linalg.norm(terms[:, used], axis=0)
        found = np.linalg.lstsq(terms[:, used] / scale, values, rcond=None)[0] / scale
        residual = terms[:, used] @ found - values
        error = float(residual @ residual)
        if (found >= 0).all() and error < best_error:
            best = np.zeros(count)
            best[used] = found
            best_error = error
    return best


def batch_effect(observations: Sequence[Observation]) -> dict[int, float]:
    """Seconds per message in a batch, as a share of the seconds of a message alone; the median over equal queries."""
    alone = {(o.rows, o.positions): o.seconds for o in observations if o.batch == 1}
    shares: dict[int, list[float]] = {}
    for o in observations:
        if (o.rows, o.positions) in alone:
            shares.setdefault(o.batch, []).append(o.seconds / o.batch / alone[o.rows, o.positions])
    return {batch: median(found) for batch, found in sorted(shares.items())}
