"""ChunkKV (Liu et al. 2025): whole chunks by the attention of the sender's own last rows."""

from __future__ import annotations

from torch import Tensor

from cb_kernels.selectors.registry import Needs, SelectorContext, selector
from cb_kernels.selectors.spans import span_means, spread


@selector("chunkkv", needs=Needs.STATISTIC, statistic="chunkkv", options=())
def chunkkv(context: SelectorContext) -> Tensor:
    """The mean of the smoothed attention over each chunk of 16, the same for its positions; float32 [T]."""
    return spread(span_means(context.require_statistic()), context.length)
