"""Mean query attention: SnapKV's idea with the receiver's query as the observation window."""

from __future__ import annotations

from torch import Tensor

from cb_kernels.moments import mean_query_score, pin_first
from cb_kernels.selectors.registry import SelectorContext, selector


@selector("mean_query")
def mean_query(context: SelectorContext) -> Tensor:
    """``maxpool7(votes)`` with position 0 pinned to the maximum; float32 [T]."""
    return pin_first(mean_query_score(context.moments))
