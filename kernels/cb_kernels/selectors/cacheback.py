"""The paper's selector (arXiv 2609.32046): pooled votes, corrected where a few rows lean on a position."""

from __future__ import annotations

from torch import Tensor

from cb_kernels.moments import cacheback_score
from cb_kernels.selectors.registry import Needs, SelectorContext, selector


@selector("cacheback", needs=Needs.QUERY_ROWS, options=("order", "alpha", "sink_free"))
def cacheback(context: SelectorContext) -> Tensor:
    """``maxpool7(votes) * rho^alpha`` with ``rho = (Rr/E)^(1/(order-1))``; float32 [T]."""
    options = context.options
    return cacheback_score(context.require_moments(), order=options.order, alpha=options.alpha)
