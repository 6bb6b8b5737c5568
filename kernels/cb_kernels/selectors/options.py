"""What a request may set about its selector."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cb_kernels.errors import ScoringInputError
from cb_kernels.moments import check_order

MAX_ALPHA = 16.0
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class SelectorOptions:
    """Options of one request. Selectors ignore those that are not theirs (``SelectorEntry.options``).

    * ``order``: exponent p of the energies, 1 < p <= 8. Other values than 2 need the CPU kernel.
    * ``alpha``: exponent of the concentration rho, 0 .. 16; 0 leaves the plain votes.
    * ``sink_free``: leave position 0's attention out before pooling.
    * ``seed``: of ``random``, 0 .. 2^63 - 1.

    Raises ``ScoringInputError`` for values of another type or out of bounds.
    """

    order: float = 2.0
    alpha: float = 2.0
    sink_free: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_order(_number("order", self.order))
        if not 0.0 <= _number("alpha", self.alpha) <= MAX_ALPHA:
            raise ScoringInputError(f"alpha must lie in 0..{MAX_ALPHA:g} (the paper uses 2); got {self.alpha}")
        if not isinstance(self.sink_free, bool):
            raise ScoringInputError(f"sink_free must be true or false; got {self.sink_free!r}")
        if type(self.seed) is not int or not 0 <= self.seed <= MAX_SEED:
            raise ScoringInputError(f"seed must be an integer in 0..2^63-1; got {self.seed!r}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ScoringInputError(f"{name} must be a finite number; got {value!r}")
    return value
