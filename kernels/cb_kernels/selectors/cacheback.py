"""The paper's selector (arXiv 2609.32046): pooled votes, corrected where a few rows lean on a position."""

from __future__ import annotations

from torch import Tensor

from cb_kernels.moments import cacheback_score, pin_first
from cb_kernels.selectors.registry import SelectorContext, selector


@selector("cacheback")
def cacheback(context: SelectorContext) -> Tensor:
    """``maxpool7(votes) * (Rr/E)^2`` with position 0 pinned to the maximum; float32 [T]."""
    return pin_first(cacheback_score(context.moments))
