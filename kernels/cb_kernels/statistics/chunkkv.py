"""ChunkKV (Liu et al. 2025): smoothed attention of the sender's last 32 prompt rows, kept whole chunks at a time.

Cost: as SnapKV. Memory: [T] numbers, and [Hkv, T] of each layer whose window is still incomplete (all layers if
chunked prefill cuts the window in two).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cb_kernels.errors import ScoringInputError
from cb_kernels.statistics.attention import DEFAULT_SCRATCH_BYTES
from cb_kernels.statistics.window import WindowStatistic


class ChunkKv(WindowStatistic):
    """Mean over rows, average-pool (5 wide, zero padding, divisor 5), mean in the head group, then over KV heads and
    layers, for the columns before the window. Latent columns are 0.

    The window's own columns get the mean over layers of (the layer's largest smoothed score of any KV head) + 1, as
    in the paper authors' implementation; those maxima are the ``peaks``. The selector takes the means of chunks.
    """

    name: ClassVar[str] = "chunkkv"
    POOL: ClassVar[int] = 5

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
        window: int = WindowStatistic.WINDOW,
        pool: int = POOL,
    ) -> None:
        """As ``WindowStatistic``; ``pool`` is the odd width of the average-pool."""
        if pool < 1 or pool % 2 == 0:
            raise ScoringInputError(f"pool must be odd and at least 1; got {pool}")
        self.pool = pool
        super().__init__(
            sender_len=sender_len,
            latent_len=latent_len,
            heads=heads,
            kv_heads=kv_heads,
            layers=layers,
            device=device,
            chunk=chunk,
            scratch_bytes=scratch_bytes,
            window=window,
        )
        self.peaks = torch.zeros(layers, device=self.device)

    def _rows(self) -> tuple[int, int | None]:
        self._open: dict[int, Tensor] = {}
        self._scores = torch.zeros(self.sender_len, dtype=torch.float64, device=self.device)
        return super()._rows()

    def _add_sums(self, layer: int, head: int, sums: Tensor) -> None:
        if layer not in self._open:
            self._open[layer] = torch.zeros(self.kv_heads, self.first, device=self.device)
        self._open[layer][head] += sums[: self.first]

    def _close_layer(self, layer: int) -> None:
        sums = self._open.pop(layer)
        if self.first == 0:  # a prompt no longer than the window
            return
        mean = sums / (self.group_size * (self._prompt_len - self.first))
        # The pool is linear: it may as well follow the mean in the head group.
        smooth = torch.nn.functional.avg_pool1d(mean[None], self.pool, stride=1, padding=self.pool // 2)[0]
        self._scores[: self.first] += smooth.mean(dim=0)
        self.peaks[layer] = smooth.max()

    def _result(self) -> Tensor:
        scores = self._scores / self.layers
        scores[self.first : self._prompt_len] = self.peaks.double().mean() + 1.0
        return scores

    @property
    def _prompt_len(self) -> int:
        return self.sender_len - self.latent_len
