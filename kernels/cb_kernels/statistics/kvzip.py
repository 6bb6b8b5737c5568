"""KVzip (Kim et al. 2025): what the model looks at when it is made to repeat the text.

The caller appends to the sender, one chunk of its positions at a time, a tail that asks for the chunk's text and
gives it (``kvzip_tail``); the tail's rows vote. Cost: a forward pass over about as many tokens as the sender has,
each seeing the whole sender, plus attention of the tail's rows on their chunk once more. Memory: one block of rows,
and ``layers * Hkv * 2,000`` numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from cb_kernels.errors import ScoringInputError
from cb_kernels.statistics.attention import attention_blocks
from cb_kernels.statistics.base import Statistic, check_lengths

CHUNK_SIZE = 2000
PREVIOUS_TOKENS = 8
_FIRST_POSITION = 1
"""Chunks leave out position 0: it is the sink, every row sees it, and it scores 0."""


class KvZip(Statistic):
    """Softmax over [position 0, the chunk, the tail's own visible rows]; the largest weight over the head group and
    the tail's rows; mean over KV heads and layers. 0 outside the chunk: add up the results of all chunks.

    Rows are those from position ``sender_len`` on. Ranks may be averaged only if no KV head is split or copied over
    ranks.
    """

    name: ClassVar[str] = "kvzip"
    needs_chunk: ClassVar[bool] = True

    @classmethod
    def first_row(cls, sender_len: int, latent_len: int) -> int:
        """``sender_len``: the tail's first row."""
        return sender_len

    def _rows(self) -> tuple[int, int | None]:
        assert self.chunk is not None  # needs_chunk
        start, stop = self.chunk
        if not _FIRST_POSITION <= start < stop <= self.sender_len - self.latent_len:
            raise ScoringInputError(
                f"chunk must be a non-empty range within 1..{self.sender_len - self.latent_len} (see kvzip_chunks); "
                f"got {self.chunk}"
            )
        self._best = torch.zeros(self.layers, self.kv_heads, stop - start, device=self.device)
        return self.sender_len, None

    def _accumulate(self, layer: int, q: Tensor, k: Tensor, scale: float, first_position: int) -> None:
        assert self.chunk is not None
        start, stop = self.chunk
        for head, queries in self._heads_of(q):
            of_head = k[:, head]
            keys = torch.cat([of_head[:1], of_head[start:stop], of_head[self.sender_len :]])
            before = 1 + stop - start + first_position - self.sender_len
            best = self._best[layer, head]
            for weights in attention_blocks(
                queries, keys, scale=scale, before=before, scratch_bytes=self.scratch_bytes
            ):
                torch.maximum(best, weights[..., 1 : 1 + stop - start].amax(dim=(0, 1)), out=best)

    def _result(self) -> Tensor:
        assert self.chunk is not None
        scores = torch.zeros(self.sender_len, device=self.device)
        scores[slice(*self.chunk)] = self._best.mean(dim=(0, 1))
        return scores


def kvzip_chunks(sender_len: int, latent_len: int, size: int = CHUNK_SIZE) -> list[tuple[int, int]]:
    """The chunks (start, stop) of a sender: positions 1 .. the first latent row, ``size`` at a time.

    Empty if the sender has no position but the first. Raises ``ScoringInputError`` for impossible lengths.
    """
    check_lengths(sender_len, latent_len)
    if size < 1:
        raise ScoringInputError(f"a chunk needs at least one position; got size {size}")
    end = sender_len - latent_len
    return [(start, min(start + size, end)) for start in range(_FIRST_POSITION, end, size)]


def kvzip_tail(instruction_ids: Sequence[int], sender_ids: Sequence[int], chunk: tuple[int, int]) -> list[int]:
    """The token ids to append to the sender: the instruction, the 8 tokens before the chunk (from the second chunk
    on), the chunk's tokens.

    ``sender_ids`` [T] are the sender's ids; latent rows' placeholders are never used, since no chunk holds them.
    Raises ``ScoringInputError`` for a chunk outside the sender.
    """
    start, stop = chunk
    if not _FIRST_POSITION <= start < stop <= len(sender_ids):
        raise ScoringInputError(f"chunk must be a non-empty range within 1..{len(sender_ids)}; got {chunk}")
    previous = sender_ids[max(_FIRST_POSITION, start - PREVIOUS_TOKENS) : start]
    return [*instruction_ids, *previous, *sender_ids[start:stop]]
