"""StreamingLLM (Xiao et al. 2023): the sink and the most recent positions."""

from __future__ import annotations

import torch
from torch import Tensor

from cb_kernels.selectors.registry import Needs, SelectorContext, selector


@selector("streaming_llm", needs=Needs.NOTHING, options=())
def streaming_llm(context: SelectorContext) -> Tensor:
    """Position j scores j; float32 [T]. The keep law always keeps the sink, position 0."""
    return torch.arange(context.length, dtype=torch.float32, device=context.device)
