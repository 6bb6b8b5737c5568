"""H2O (Zhang et al. 2023): positions that gathered the most attention in the sender's own prefill."""

from __future__ import annotations

from torch import Tensor

from cb_kernels.selectors.registry import Needs, SelectorContext, selector


@selector("h2o", needs=Needs.STATISTIC, statistic="h2o", options=())
def h2o(context: SelectorContext) -> Tensor:
    """The accumulated attention mass, not pooled; float32 [T]."""
    return context.require_statistic()
