"""Statistics: what the sender's own rows say about its positions, for selectors that need no query.

One file and one class each, all with the contract of ``Statistic`` (base.py). They are fed during a forward pass
over the sender, layer by layer, once per sender; the result is kept with the sender.

What each costs per sender, beyond the prefill itself, is said in its file.
"""

from __future__ import annotations

from cb_kernels.statistics.base import Statistic
from cb_kernels.statistics.chunkkv import ChunkKv
from cb_kernels.statistics.h2o import H2o
from cb_kernels.statistics.kvzip import KvZip, kvzip_chunks, kvzip_tail
from cb_kernels.statistics.registry import get, names
from cb_kernels.statistics.snapkv import SnapKv

__all__ = [
    "ChunkKv",
    "H2o",
    "KvZip",
    "SnapKv",
    "Statistic",
    "get",
    "kvzip_chunks",
    "kvzip_tail",
    "names",
]
