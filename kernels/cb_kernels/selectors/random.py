"""Spans drawn at random: the floor that any selector has to beat."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from cb_kernels.selectors.registry import Needs, SelectorContext, selector
from cb_kernels.selectors.spans import span_count, spread


@selector("random", needs=Needs.NOTHING, options=("seed",))
def random(context: SelectorContext) -> Tensor:
    """A number in [0, 1) for each span of 16, the same for its positions; float32 [T].

    Python's generator promises the same numbers from a seed on every machine and version; torch's does not.
    """
    generator = Random(context.options.seed)
    values = [generator.random() for _ in range(span_count(context.length))]
    return spread(torch.tensor(values, dtype=torch.float32, device=context.device), context.length)
