"""An engine whose scoring and prefill times were measured by ``cb-loadtest capacity``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from cb_loadtest.planning.engine import Roofline
from cb_sglang.errors import InvalidRequestError

MAX_FIT_BYTES = 16 << 20
_KEYS = ("fixed", "per_row", "per_row_position")


class FitError(InvalidRequestError):
    """A file holds no service model, or one that gives no sensible times."""

    code = "invalid_fit"


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """seconds = fixed + per_row * rows + per_row_position * rows * positions, rows counted over a whole batch."""

    fixed: float
    per_row: float
    per_row_position: float

    def seconds(self, rows: int, positions: int) -> float:
        return self.fixed + rows * (self.per_row + self.per_row_position * positions)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What a capacity file says of an engine, in seconds.

    reader_fixed, reader_per_position: of a receiver's prefill; None where it was not measured.
    pool_positions:                    of its KV pool; None where the server did not tell.
    """

    scoring: ServiceModel
    reader_fixed: float | None = None
    reader_per_position: float | None = None
    pool_positions: int | None = None


def read_fit(path: Path) -> MeasuredCosts:
    """The ``service_model`` of a capacity file, and its pool. Raises FitError."""
    try:
        if path.stat().st_size > MAX_FIT_BYTES:
            raise FitError(f"{path} is longer than {MAX_FIT_BYTES} bytes; it is no capacity file", param="fit")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FitError(f"{path} cannot be read: {error}", param="fit") from None
    model = content.get("service_model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not all(_is_cost(model.get(key)) for key in _KEYS):
        raise FitError(
            f"{path} must hold service_model with {', '.join(_KEYS)}: seconds, none negative; write it with "
            "cb-loadtest capacity",
            param="fit",
        )
    scoring = ServiceModel(*(float(model[key]) for key in _KEYS))
    if scoring.per_row + scoring.per_row_position <= 0:
        raise FitError(f"{path} says that rows cost nothing; measure again with longer queries", param="fit")
    setting = content.get("curve_setting")
    pool = setting.get("pool") if isinstance(setting, dict) else None
    return MeasuredCosts(
        scoring,
        reader_fixed=_cost(model.get("reader_fixed")),
        reader_per_position=_cost(model.get("reader_per_position")),
        pool_positions=pool if isinstance(pool, int) and pool > 0 else None,
    )


def _is_cost(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _cost(value: object) -> float | None:
    return float(value) if _is_cost(value) else None


@dataclass(frozen=True, slots=True)
class FittedEngine:
    """Scoring, prefill and pool as measured; decoding and context length from model and GPU, since the fit has none.

    A prefill over cached positions is charged like a query's rows over a sender, which is what they are.
    """

    costs: MeasuredCosts
    base: Roofline

    @property
    def name(self) -> str:
        return f"{self.base.name}, scoring and prefill as measured"

    @property
    def pool_positions(self) -> int:
        return self.costs.pool_positions or self.base.pool_positions

    @property
    def context_length(self) -> int:
        return self.base.context_length

    def scoring_seconds(self, *, queries: int, rows: int, positions: int) -> float:
        return self.costs.scoring.seconds(queries * rows, positions)

    def prefill_seconds(self, *, rows: int, past: int = 0) -> float:
        costs = self.costs
        if costs.reader_fixed is None or costs.reader_per_position is None:
            return costs.scoring.seconds(rows, past + (rows + 1) // 2)
        return costs.reader_fixed + rows * (costs.reader_per_position + costs.scoring.per_row_position * past)

    def decode_seconds(self, *, sequences: int, positions: int, tokens: int) -> float:
        return self.base.decode_seconds(sequences=sequences, positions=positions, tokens=tokens)
