"""The contract of every statistic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from cb_kernels.errors import ScoringInputError
from cb_kernels.statistics.attention import DEFAULT_SCRATCH_BYTES, MIN_SCRATCH_BYTES


class Statistic(ABC):
    """One number per sender position, measured on rows that are the sender's own, not a query's.

    Life: construct, ``add`` for each scored layer of one or more forward passes, ``finish`` once. A pass that fails
    half way leaves the object unusable: drop it and start again.

    * Which rows: ``first_row`` names the first position whose row counts. The forward passes must run the rows from
      there to the sender's last (KVzip: of its tail); a prefix that came out of a cache has no rows to show.
    * ``add`` may be called several times for a layer with consecutive row ranges (chunked prefill). Rows that do not
      count are ignored, so whole prefills can be handed over as they come.
    * Memory is bounded: attention exists one block of rows of one KV head at a time (``scratch_bytes``, but never
      less than one row), besides accumulators of at most ``layers * kv_heads * sender_len`` numbers.
    * Tensor parallelism: each rank constructs with the heads it holds. Every statistic is a mean over heads or KV
      heads, so the ranks' ``finish`` vectors are averaged; ranks must hold equally many heads. Maxima over heads are in
      ``peaks``.
    """

    name: ClassVar[str]
    needs_chunk: ClassVar[bool] = False
    """True for a statistic of one chunk of the sender; the results of all chunks are added up."""

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
    ) -> None:
        """``sender_len`` is T, its last ``latent_len`` positions are latent rows. ``heads`` and ``kv_heads`` are this
        rank's. ``chunk`` (start, stop) goes with ``needs_chunk``.

        Raises ``ScoringInputError`` for numbers that do not fit together.
        """
        check_lengths(sender_len, latent_len)
        if min(heads, kv_heads, layers) < 1 or heads % kv_heads:
            raise ScoringInputError(
                f"heads={heads}, kv_heads={kv_heads}, layers={layers}: all must be positive and heads a multiple of "
                "kv_heads"
            )
        if scratch_bytes < MIN_SCRATCH_BYTES:
            raise ScoringInputError(f"scratch_bytes must be at least {MIN_SCRATCH_BYTES}; got {scratch_bytes}")
        if self.needs_chunk != (chunk is not None):
            raise ScoringInputError(f"{self.name} {'needs a' if self.needs_chunk else 'takes no'} chunk")
        self.sender_len, self.latent_len = sender_len, latent_len
        self.heads, self.kv_heads, self.layers = heads, kv_heads, layers
        self.device = torch.device(device)
        self.chunk = chunk
        self.scratch_bytes = scratch_bytes
        self.first, self.stop = self._rows()
        self._next = [self.first] * layers
        self._finished = False
        self.peaks = torch.zeros(0, device=self.device)
        """Maxima over this rank's heads that ``finish`` reads, float32 [n]; n = 0 if there are none. Each rank must
        have put in the largest of all ranks before."""

    @classmethod
    @abstractmethod
    def first_row(cls, sender_len: int, latent_len: int) -> int:
        """The first position whose row this statistic needs."""

    @abstractmethod
    def _rows(self) -> tuple[int, int | None]:
        """The positions (first, stop) whose rows count; stop is None where only the last ``add`` knows it."""

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def add(self, layer: int, q: Tensor, k: Tensor, *, scale: float, first_position: int) -> None:
        """Take in rows of one layer. No host sync.

        ``layer`` counts scored layers. ``q`` [n, H, D] holds post-RoPE, unscaled queries of the positions
        ``first_position .. first_position + n``, ``k`` [first_position + n, Hkv, D] the keys of positions 0 .. there;
        a row sees the keys up to its own position. Any floating dtype; computed in float32.

        Raises ``ScoringInputError`` for shapes that do not fit and for rows that are missing or come twice.
        """
        self._check_add(layer, q, k, first_position)
        begin = max(first_position, self.first)
        end = first_position + q.shape[0]
        if self.stop is not None:
            end = min(end, self.stop)
        if begin >= end:
            return
        if begin != self._next[layer]:
            raise ScoringInputError(
                f"{self.name}: layer {layer} must go on with the row of position {self._next[layer]}, got {begin}; "
                f"run the rows from position {self.first} on, in order and each once"
            )
        self._accumulate(layer, q[begin - first_position : end - first_position], k[:end], scale, begin)
        self._next[layer] = end
        if end == self.stop:
            self._close_layer(layer)

    def finish(self) -> Tensor:
        """This rank's result, float32 [sender_len]; of several ranks, the mean is wanted.

        Raises ``ScoringInputError`` if rows are missing or it was called before.
        """
        if self._finished:
            raise ScoringInputError(f"{self.name} is already finished; construct a new one for the next sender")
        wanted = self.stop if self.stop is not None else max(*self._next, self.first + 1)
        if any(reached != wanted for reached in self._next):
            raise ScoringInputError(
                f"{self.name} needs the rows from position {self.first} up to (not including) {wanted} in all "
                f"{self.layers} scored layers; one layer has got no further than {min(self._next)}"
            )
        self._finished = True
        return self._result().float()

    @abstractmethod
    def _accumulate(self, layer: int, q: Tensor, k: Tensor, scale: float, first_position: int) -> None:
        """``add`` after the checks; all rows count."""

    def _close_layer(self, layer: int) -> None:
        """Called when a layer has seen its last row, if that row is known. Nothing to do by default."""
        return

    @abstractmethod
    def _result(self) -> Tensor:
        """[sender_len], any floating dtype."""

    def _heads_of(self, q: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(KV head, its queries [g, n, D])."""
        for head in range(self.kv_heads):
            yield head, q[:, head * self.group_size : (head + 1) * self.group_size].transpose(0, 1)

    def _check_add(self, layer: int, q: Tensor, k: Tensor, first_position: int) -> None:
        if self._finished:
            raise ScoringInputError(f"{self.name} is already finished; construct a new one for the next sender")
        if not 0 <= layer < self.layers:
            raise ScoringInputError(f"layer must lie in 0..{self.layers - 1}; got {layer}")
        if q.ndim != 3 or q.shape[0] < 1 or q.shape[1] != self.heads:
            raise ScoringInputError(f"q must be [n, {self.heads}, head_dim] with n >= 1; got {tuple(q.shape)}")
        want = (first_position + q.shape[0], self.kv_heads, q.shape[2])
        if first_position < 0 or tuple(k.shape) != want:
            raise ScoringInputError(
                f"rows {first_position}..{first_position + q.shape[0] - 1} need k {want}, the keys of all positions up "
                f"to the last row; got {tuple(k.shape)}"
            )


def check_lengths(sender_len: int, latent_len: int) -> None:
    """Raise ``ScoringInputError`` unless a sender can have these lengths: at least one position is no latent row."""
    if sender_len < 1 or not 0 <= latent_len < sender_len:
        raise ScoringInputError(
            f"sender_len must be at least 1 and latent_len in 0..sender_len-1; got {sender_len} and {latent_len}"
        )
