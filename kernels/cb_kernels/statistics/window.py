"""What SnapKV and ChunkKV share: only the sender's last few prompt rows vote."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from cb_kernels.errors import ScoringInputError
from cb_kernels.statistics.attention import DEFAULT_SCRATCH_BYTES, attention_blocks
from cb_kernels.statistics.base import Statistic, check_lengths


class WindowStatistic(Statistic):
    """Sums of attention over the last ``window`` rows before the latent ones (all rows of a shorter prompt)."""

    WINDOW: ClassVar[int] = 32

    def __init__(
        self,
        *,
        sender_len: int,
        latent_len: int,
        heads: int,
        kv_heads: int,
        layers: int,
        device: torch.device | str,
        chunk: tuple[int, int] | None = None,
        scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
        window: int = WINDOW,
    ) -> None:
        """As ``Statistic``; ``window`` rows vote."""
        if window < 1:
            raise ScoringInputError(f"window must be at least 1 row; got {window}")
        self.window = window
        super().__init__(
            sender_len=sender_len,
            latent_len=latent_len,
            heads=heads,
            kv_heads=kv_heads,
            layers=layers,
            device=device,
            chunk=chunk,
            scratch_bytes=scratch_bytes,
        )

    @classmethod
    def first_row(cls, sender_len: int, latent_len: int) -> int:
        """The first of the last 32 prompt positions."""
        check_lengths(sender_len, latent_len)
        return max(0, sender_len - latent_len - cls.WINDOW)

    def _rows(self) -> tuple[int, int | None]:
        stop = self.sender_len - self.latent_len
        return max(0, stop - self.window), stop

    def _accumulate(self, layer: int, q: Tensor, k: Tensor, scale: float, first_position: int) -> None:
        for head, queries in self._heads_of(q):
            blocks = attention_blocks(
                queries, k[:, head], scale=scale, before=first_position, scratch_bytes=self.scratch_bytes
            )
            for weights in blocks:
                self._add_sums(layer, head, weights.sum(dim=(0, 1)))

    @abstractmethod
    def _add_sums(self, layer: int, head: int, sums: Tensor) -> None:
        """``sums`` float32 [seen]: attention of some rows of one KV head, summed over rows and query heads."""
