"""The capacity curve: receivers of one sender against its length and the ratio, from the fitted costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cb_loadtest.load.workload import MAX_CONCURRENCY
from cb_loadtest.planning.fit import ServiceModel
from cb_sglang.budget import positions_for_ratio


@dataclass(frozen=True, slots=True)
class ReceiverCost:
    """Seconds for a receiver to read what it was given: ``fixed`` once, then for each position."""

    fixed: float
    per_position: float


@dataclass(frozen=True, slots=True)
class CurveSetting:
    """What the curve holds fixed.

    slo_s:        objective, in seconds.
    rows:         query tokens of a receiver.
    prompt:       tokens of a receiver's own prompt.
    calibration:  measured p99 at the knee over the model's time there: queueing and noise, which the fit has not.
    uncalibrated: why calibration is 1 instead; None where it was measured.
    pool:         positions of the server's KV pool, None where it is not known.
    measured:     shortest and longest sender that the model was fitted to.
    """

    slo_s: float
    rows: int
    prompt: int
    calibration: float
    pool: int | None
    measured: tuple[int, int]
    uncalibrated: str | None = None


def calibrate(seconds: float | None, p99_ms: float | None, *, answering: bool) -> tuple[float, str | None]:
    """``calibration`` and ``uncalibrated``; ``seconds`` is the model's time for the load whose p99 was measured."""
    if answering:
        # Their p99 holds the receivers' prefills and decodes, which do not grow with the sender as scoring does.
        return 1.0, "receivers answer, and the knee's p99 includes their answers; the fit is of messages only"
    if seconds is None or p99_ms is None:
        return 1.0, "no number of receivers is known for which the objective was held"
    return max(1.0, p99_ms / 1_000 / seconds), None


def capacity_curve(
    model: ServiceModel,
    reader: ReceiverCost,
    setting: CurveSetting,
    lengths: Sequence[int],
    ratios: Sequence[float],
) -> list[dict[str, Any]]:
    """A point for every length and ratio.

    ``receivers`` get their messages within the objective. ``receivers_on_this_server`` also have them read by the
    same engine, which is where the ratio counts. Each says what limits it: ``latency``, ``memory``, or ``bound``
    (MAX_CONCURRENCY).
    """
    return [_point(model, reader, setting, positions, ratio) for positions in lengths for ratio in ratios]


def _point(
    model: ServiceModel, reader: ReceiverCost, setting: CurveSetting, positions: int, ratio: float
) -> dict[str, Any]:
    kept = positions_for_ratio(positions, 0, ratio)
    query = setting.rows * (model.per_row + model.per_row_position * positions)
    reading = (kept + setting.prompt) * reader.per_position
    messages, messages_limit = _most(setting, positions, model.fixed, query, setting.rows)
    served, served_limit = _most(
        setting, positions, model.fixed + reader.fixed, query + reading, setting.rows + kept + setting.prompt
    )
    low, high = setting.measured
    return {
        "positions": positions,
        "ratio": ratio,
        "kept": kept,
        "receivers": messages,
        "limit": messages_limit,
        "receivers_on_this_server": served,
        "limit_on_this_server": served_limit,
        "extrapolated": not low <= positions <= high,
    }


def _most(setting: CurveSetting, positions: int, fixed: float, each: float, room: int) -> tuple[int, str]:
    """The largest number of receivers; ``each`` costs seconds, and ``room`` positions of the pool."""
    spare = setting.slo_s / setting.calibration - fixed
    by_latency = MAX_CONCURRENCY if each <= 0 else max(0, math.floor(spare / each + 1e-9))
    by_memory = MAX_CONCURRENCY if setting.pool is None else max(0, (setting.pool - positions) // room)
    return min((by_latency, "latency"), (by_memory, "memory"), (MAX_CONCURRENCY, "bound"))
