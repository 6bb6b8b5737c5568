"""Causal attention of one KV head's queries, a block of rows at a time, in float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

DEFAULT_SCRATCH_BYTES = 32 << 20
MIN_SCRATCH_BYTES = 1 << 10


def attention_blocks(
    q: Tensor, keys: Tensor, *, scale: float, before: int, scratch_bytes: int = DEFAULT_SCRATCH_BYTES
) -> Iterator[Tensor]:
    """Softmax weights [g, b, seen] of consecutive blocks of b rows; ``seen`` is what the block's last row sees.

    ``q`` [g, n, D] are the query heads of one KV head, ``keys`` [before + n, D]. Row i sees
    ``keys[: before + i + 1]``; beyond that its weights are 0. A block's logits and weights together take at most
    ``scratch_bytes`` (or one row).
    """
    group, rows, dim = q.shape
    q = q.float() * scale
    transposed = keys.float().t()
    block = max(1, min(rows, scratch_bytes // (2 * 4 * group * (before + rows))))
    hidden = torch.ones(block, block, dtype=torch.bool, device=q.device).triu_(1)
    for start in range(0, rows, block):
        count = min(block, rows - start)
        seen = before + start + count
        logits = q[:, start : start + count].reshape(-1, dim) @ transposed[:, :seen]
        logits = logits.view(group, count, seen)
        logits[..., before + start :].masked_fill_(hidden[:count, :count], float("-inf"))
        yield torch.softmax(logits, dim=-1)
