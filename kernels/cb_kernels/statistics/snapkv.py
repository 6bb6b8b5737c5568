"""SnapKV (Li et al. 2024), with max-pool 7: the mean attention of the sender's last 32 prompt rows.

Cost: 32 rows against T keys a layer; a warm sender needs just these rows run again. Memory: [T] numbers.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cb_kernels.statistics.window import WindowStatistic


class SnapKv(WindowStatistic):
    """``sum_l mean_{h, i} A[l, h, i, j]`` over the window's rows, not pooled.

    The selector pools, because the maximum of an average over ranks is wanted, not the average of maxima.
    """

    name: ClassVar[str] = "snapkv"

    def _rows(self) -> tuple[int, int | None]:
        self._votes = torch.zeros(self.sender_len, dtype=torch.float64, device=self.device)
        return super()._rows()

    def _add_sums(self, layer: int, head: int, sums: Tensor) -> None:
        self._votes[: sums.shape[0]] += sums

    def _result(self) -> Tensor:
        return self._votes / (self.heads * min(self.window, self.sender_len - self.latent_len))
