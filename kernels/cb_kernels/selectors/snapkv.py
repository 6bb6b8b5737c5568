"""SnapKV (Li et al. 2024), with max-pool 7: what the sender's own last rows look at."""

from __future__ import annotations

from torch import Tensor

from cb_kernels.moments import max_pool7
from cb_kernels.selectors.registry import Needs, SelectorContext, selector


@selector("snapkv", needs=Needs.STATISTIC, statistic="snapkv", options=())
def snapkv(context: SelectorContext) -> Tensor:
    """``maxpool7`` of the mean attention of the sender's last 32 prompt rows; float32 [T]."""
    return max_pool7(context.require_statistic())
