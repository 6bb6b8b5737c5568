"""Mean query attention: SnapKV's idea with the receiver's query as the observation window."""

from __future__ import annotations

from torch import Tensor

from cb_kernels.moments import mean_query_score
from cb_kernels.selectors.registry import Needs, SelectorContext, selector


@selector("mean_query", needs=Needs.QUERY_ROWS, options=("sink_free",))
def mean_query(context: SelectorContext) -> Tensor:
    """``maxpool7(votes)``; float32 [T]."""
    return mean_query_score(context.require_moments())
