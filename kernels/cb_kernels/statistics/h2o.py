"""H2O (Zhang et al. 2023): the attention mass a position has gathered over the whole sender.

Cost: the attention of every sender row is computed a second time (the engine's own kernel keeps none), so about one
more attention forward over the sender, ``O(H * T^2 * D)``; and the sender must be prefilled with no part of it taken
from the cache. Memory: one block of rows, and [T] numbers.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cb_kernels.statistics.attention import attention_blocks
from cb_kernels.statistics.base import Statistic


class H2o(Statistic):
    """``sum_l (1/H) sum_h sum_{i >= j} A[l, h, i, j]``, all T rows voting (latent ones too); 0 on latent columns."""

    name: ClassVar[str] = "h2o"

    @classmethod
    def first_row(cls, sender_len: int, latent_len: int) -> int:
        """0: every row votes."""
        return 0

    def _rows(self) -> tuple[int, int | None]:
        # float64, so that neither the order of chunks nor 10^5 rows on the sink leave a trace in float32.
        self._mass = torch.zeros(self.sender_len, dtype=torch.float64, device=self.device)
        return 0, self.sender_len

    def _accumulate(self, layer: int, q: Tensor, k: Tensor, scale: float, first_position: int) -> None:
        for head, queries in self._heads_of(q):
            blocks = attention_blocks(
                queries, k[:, head], scale=scale, before=first_position, scratch_bytes=self.scratch_bytes
            )
            for weights in blocks:
                self._mass[: weights.shape[2]] += weights.sum(dim=(0, 1))

    def _result(self) -> Tensor:
        mass = self._mass / self.heads
        mass[self.sender_len - self.latent_len :] = 0
        return mass
