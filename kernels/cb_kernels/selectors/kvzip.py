"""KVzip (Kim et al. 2025): positions the model needs in order to repeat the text."""

from __future__ import annotations

from torch import Tensor

from cb_kernels.selectors.registry import Needs, SelectorContext, selector


@selector("kvzip", needs=Needs.STATISTIC, statistic="kvzip", options=())
def kvzip(context: SelectorContext) -> Tensor:
    """The reconstruction scores of all chunks, added up; float32 [T]."""
    return context.require_statistic()
