"""Spans of 16 positions, as the keep law tiles them."""

from __future__ import annotations

import torch
from torch import Tensor

from cb_kernels.keep import DEFAULT_SPAN


def span_count(length: int, span: int = DEFAULT_SPAN) -> int:
    """How many spans cover ``length`` positions; the last may be short."""
    return -(-length // span)


def spread(values: Tensor, length: int, span: int = DEFAULT_SPAN) -> Tensor:
    """From one value a span to one a position: [spans] -> [length]."""
    return values.repeat_interleave(span)[:length]


def span_means(scores: Tensor, span: int = DEFAULT_SPAN) -> Tensor:
    """The mean score of each span, [T] -> [spans]; a short last span is averaged over what it has."""
    length = scores.shape[0]
    spans = span_count(length, span)
    sums = torch.nn.functional.pad(scores, (0, spans * span - length)).view(spans, span).sum(dim=1)
    counts = torch.full_like(sums, span)
    counts[-1] = length - (spans - 1) * span
    return sums / counts
