"""The table of selectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from cb_kernels.errors import ScoringInputError
from cb_kernels.moments import Moments


@dataclass(frozen=True, slots=True)
class SelectorContext:
    """What a selector may look at: the query's moments over the T sender positions."""

    moments: Moments


Selector: TypeAlias = Callable[[SelectorContext], Tensor]
_SELECTORS: dict[str, Selector] = {}


def selector(name: str) -> Callable[[Selector], Selector]:
    """Register a function under ``name``. Raises ValueError when the name is taken."""

    def register(function: Selector) -> Selector:
        if name in _SELECTORS:
            raise ValueError(f"selector {name!r} is registered already")
        _SELECTORS[name] = function
        return function

    return register


def get(name: str) -> Selector:
    """The selector of that name. Raises ScoringInputError naming those that exist."""
    if name not in _SELECTORS:
        raise ScoringInputError(f"unknown selector {name!r}; choose one of {', '.join(names())}")
    return _SELECTORS[name]


def names() -> list[str]:
    """Every registered name, sorted."""
    return sorted(_SELECTORS)
