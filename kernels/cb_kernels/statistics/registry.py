"""The table of statistics."""

from __future__ import annotations

from cb_kernels.errors import ScoringInputError
from cb_kernels.statistics.base import Statistic
from cb_kernels.statistics.chunkkv import ChunkKv
from cb_kernels.statistics.h2o import H2o
from cb_kernels.statistics.kvzip import KvZip
from cb_kernels.statistics.snapkv import SnapKv

_STATISTICS: dict[str, type[Statistic]] = {
    H2o.name: H2o,
    SnapKv.name: SnapKv,
    ChunkKv.name: ChunkKv,
    KvZip.name: KvZip,
}


def get(name: str) -> type[Statistic]:
    """The statistic's class, to be constructed. Raises ScoringInputError naming those that exist."""
    if name not in _STATISTICS:
        raise ScoringInputError(f"unknown statistic {name!r}; choose one of {', '.join(names())}")
    return _STATISTICS[name]


def names() -> list[str]:
    """Every name, sorted."""
    return sorted(_STATISTICS)
