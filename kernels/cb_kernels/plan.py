"""What one extend batch has to score, laid out once from lengths the host knows.

A ``ScoringPlan`` is built before the forward pass, handed to ``score_layer`` once per scored layer, and
finished after it. Kernels only write the row sums ``sum_a`` and ``sum_p``; ``fold_layer`` turns them into
moments, so that every backend shares one epilogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from cb_kernels.errors import ScoringInputError
from cb_kernels.moments import ENERGY_SCALE, POOL_REACH, Moments, check_order, energy_scale, max_pool7

Backend = Literal["auto", "cpu", "triton"]

MIN_SCRATCH_BYTES = 1 << 20


@dataclass(slots=True)
class Carry:
    """Sums kept between the forward passes of one query that chunked prefill has split.

    Make it with ``Carry.empty`` before the first pass and put the same object into each pass's segment. A
    forward pass that fails half way leaves it unusable: drop it and start the query again.

    * ``row_sums``: per scored layer float32 [Hkv, T], 256 times the sum over rows of group-mean attention.
    * ``row_energy``: float32 [T], sum over layers, KV heads and rows of the plan's ``power`` of pooled attention.
    * ``rows_done``: voting rows in finished passes.
    """

    row_sums: list[Tensor]
    row_energy: Tensor
    rows_done: int = 0

    @classmethod
    def empty(cls, *, layers: int, kv_heads: int, sender_len: int, device: torch.device | str) -> Carry:
        """A carry that has seen no rows. Takes ``4 * sender_len * (layers * kv_heads + 1)`` bytes."""
        return cls(
            row_sums=[torch.zeros(kv_heads, sender_len, dtype=torch.float32, device=device) for _ in range(layers)],
            row_energy=torch.zeros(sender_len, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class QuerySegment:
    """The voting rows of one query in one forward pass, and the sender they vote on.

    * ``row_start``, ``row_count``: the rows in the batch's flat ``q``.
    * ``kv_start``: sender position t is pool slot ``kv_indices[kv_start + t]``.
    * ``sender_len``: T.
    * ``total_rows``: voting rows of the whole query, the R of the formulas.
    * ``carry``: needed exactly when the query is split (``row_count < total_rows``).
    """

    row_start: int
    row_count: int
    kv_start: int
    sender_len: int
    total_rows: int
    carry: Carry | None = None


@dataclass(frozen=True, slots=True)
class SenderGroup:
    """Segments that read the same sender; its keys are read once for all of them."""

    kv_start: int
    sender_len: int
    members: tuple[int, ...]


@dataclass(slots=True)
class ScoringPlan:
    """The layout and the accumulators of one batch. Build it with ``plan_scoring``.

    Segment s owns columns ``offsets[s] .. offsets[s] + sender_len`` of every flat buffer. Between segments
    lie gaps of zeros as wide as the pool's reach, so that one pool over the flat buffer serves all segments;
    kernels must leave the gaps alone.

    What a kernel writes for each layer, for every segment, KV head c and position t, where A_i is the
    group-mean attention of row i (position 0 zeroed if ``sink_free``) and i runs over the segment's rows:

    * ``sum_a`` float32 [Hkv, width]: ``256 * sum_i A_i[c, t]``
    * ``sum_p`` float32 [Hkv, width]: ``sum_i (256 * maxpool7(A_i)[c, t])^2``; for an order other than 2, which
      only the CPU kernel takes, ``sum_i power(256 * maxpool7(A_i)[c, t])``

    Both are overwritten in full; then the kernel calls ``fold_layer``.
    """

    segments: tuple[QuerySegment, ...]
    groups: tuple[SenderGroup, ...]
    offsets: tuple[int, ...]
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    kv_indices: Tensor
    device: torch.device
    sink_free: bool
    order: float
    scratch_bytes: int
    backend: Backend
    sum_a: Tensor
    sum_p: Tensor
    votes: Tensor
    energy: Tensor
    row_energy: Tensor
    inverse_rows: Tensor
    workspace: dict[str, Any] = field(default_factory=dict)
    """Whatever a kernel prepares once per plan, under its own name."""
    layers_done: int = 0
    finished: bool = False

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def columns(self, segment: int) -> slice:
        """The columns of a segment in the flat buffers."""
        start = self.offsets[segment]
        return slice(start, start + self.segments[segment].sender_len)

    def power_(self, pooled: Tensor) -> Tensor:
        """From pooled attention times 256 to a term of the energies, in place."""
        if self.order == 2.0:
            return pooled.mul_(pooled)
        return pooled.mul_(energy_scale(self.order) / ENERGY_SCALE).pow_(self.order)

    def check_layer(self, layer: int, q: Tensor, k_pool: Tensor, lse: Tensor) -> None:
        """Raise ``ScoringInputError`` unless these tensors are the next layer of this plan."""
        if self.finished or layer != self.layers_done or layer >= self.layers:
            raise ScoringInputError(
                f"layers come once each, in order: expected layer {self.layers_done} of {self.layers}"
                f"{' (plan already finished)' if self.finished else ''}, got {layer}"
            )
        if q.ndim != 3 or tuple(q.shape[1:]) != (self.heads, self.head_dim):
            raise ScoringInputError(f"q must be [N, {self.heads}, {self.head_dim}]; got {tuple(q.shape)}")
        if k_pool.ndim != 3 or tuple(k_pool.shape[1:]) != (self.kv_heads, self.head_dim):
            raise ScoringInputError(
                f"k_pool must be [slots, {self.kv_heads}, {self.head_dim}]; got {tuple(k_pool.shape)}"
            )
        if tuple(lse.shape) != (q.shape[0], self.heads) or lse.dtype != torch.float32:
            raise ScoringInputError(
                f"lse must be float32 [{q.shape[0]}, {self.heads}]; got {lse.dtype} {tuple(lse.shape)}"
            )
        for name, tensor in (("q", q), ("k_pool", k_pool)):
            if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ScoringInputError(
                    f"{name} is {tensor.dtype}; scoring reads float32, bfloat16 or float16 (no quantised KV)"
                )
        for name, tensor in (("q", q), ("k_pool", k_pool), ("lse", lse)):
            if tensor.device != self.device:
                raise ScoringInputError(f"{name} is on {tensor.device}; the plan is on {self.device}")
        last_row = max(s.row_start + s.row_count for s in self.segments)
        if last_row > q.shape[0]:
            raise ScoringInputError(f"segments reach row {last_row}; q has {q.shape[0]} rows")

    def add_carries(self, layer: int) -> None:
        """Add the row sums of one layer to the carries, and what the carries held to ``sum_a``. No host sync."""
        for index, segment in enumerate(self.segments):
            carry = segment.carry
            if carry is not None:
                columns = self.columns(index)
                carry.row_sums[layer].add_(self.sum_a[:, columns])
                self.sum_a[:, columns] = carry.row_sums[layer]
                carry.row_energy.add_(self.sum_p[:, columns].sum(dim=0))

    def fold_layer(self, layer: int) -> None:
        """Add the row sums of one layer to the moments (and to the carries). No host sync."""
        self.add_carries(layer)
        # One KV head at a time keeps the temporaries at a single row of the flat buffers.
        for head in range(self.kv_heads):
            row_mean = self.sum_a[head] * self.inverse_rows
            self.votes.add_(row_mean, alpha=1.0 / (ENERGY_SCALE * self.kv_heads))
            self.energy.add_(self.power_(max_pool7(row_mean)))
            self.row_energy.addcmul_(self.sum_p[head], self.inverse_rows)
        self.layers_done = layer + 1

    def finish(self) -> list[Moments | None]:
        """The moments of each segment, in order; None where rows of the query are still to come.

        The tensors are views of the plan's buffers. Raises ``ScoringInputError`` if a layer is missing or the
        plan was finished before.
        """
        if self.finished:
            raise ScoringInputError("this plan is already finished; build a new one for the next batch")
        if self.layers_done != self.layers:
            raise ScoringInputError(f"only {self.layers_done} of {self.layers} scored layers have been seen")
        self.finished = True
        results: list[Moments | None] = []
        for index, segment in enumerate(self.segments):
            columns = self.columns(index)
            row_energy = self.row_energy[columns]
            carry = segment.carry
            if carry is not None:
                carry.rows_done += segment.row_count
                if carry.rows_done < segment.total_rows:
                    results.append(None)
                    continue
                row_energy = carry.row_energy / segment.total_rows
            results.append(Moments(self.votes[columns], self.energy[columns], row_energy))
        return results


def plan_scoring(
    segments: Sequence[QuerySegment],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int,
    kv_indices: Tensor,
    device: torch.device | str,
    sink_free: bool = False,
    order: float = 2.0,
    scratch_bytes: int = 256 << 20,
    backend: Backend = "auto",
) -> ScoringPlan:
    """Lay out one extend batch.

    ``kv_indices`` is 1-D int32 or int64 on ``device``. ``layers`` counts scored layers. ``sink_free`` zeroes
    the attention on position 0 before pooling. ``order`` is the exponent of the energies; other values than 2 are
    for the CPU kernel only, and all passes of a split query need the same. ``scratch_bytes`` bounds a kernel's
    blocks of logits; the accumulators come on top, ``4 * (2 * kv_heads + 4)`` bytes per segment and sender position
    (up to twice that while the CPU kernel runs). ``backend`` "auto" takes Triton on CUDA and the CPU kernel
    elsewhere; "triton" forces Triton (on a CPU, its interpreter).

    Raises ``ScoringInputError`` for lengths that do not fit together and for an order the backend cannot take.
    """
    check_order(order)
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if min(heads, kv_heads, head_dim, layers) < 1 or heads % kv_heads:
        raise ScoringInputError(
            f"heads={heads}, kv_heads={kv_heads}, head_dim={head_dim}, layers={layers}: all must be positive "
            "and heads a multiple of kv_heads"
        )
    if kv_indices.ndim != 1 or kv_indices.dtype not in (torch.int32, torch.int64):
        raise ScoringInputError(
            f"kv_indices must be 1-D int32 or int64; got {kv_indices.dtype} {tuple(kv_indices.shape)}"
        )
    if kv_indices.device != device:
        raise ScoringInputError(f"kv_indices is on {kv_indices.device}; the plan is for {device}")
    if scratch_bytes < MIN_SCRATCH_BYTES:
        raise ScoringInputError(f"scratch_bytes must be at least {MIN_SCRATCH_BYTES}; got {scratch_bytes}")
    if backend not in ("auto", "cpu", "triton"):
        raise ScoringInputError(f'backend must be "auto", "cpu" or "triton"; got {backend!r}')
    if order != 2.0 and (backend == "triton" or (backend == "auto" and device.type == "cuda")):
        raise ScoringInputError(f"the Triton kernel accumulates energies of order 2 only; got order {order}: use 2")
    if not segments:
        raise ScoringInputError("nothing to score: segments is empty")

    offsets: list[int] = []
    members: dict[tuple[int, int], list[int]] = {}
    column = POOL_REACH
    for index, segment in enumerate(segments):
        _check_segment(index, segment, kv_heads=kv_heads, layers=layers, slots=kv_indices.numel())
        offsets.append(column)
        column += segment.sender_len + POOL_REACH
        members.setdefault((segment.kv_start, segment.sender_len), []).append(index)
    _check_carries(segments)

    # Kernels write through pointers: the type must not depend on torch's default.
    zeros = partial(torch.zeros, dtype=torch.float32, device=device)
    inverse_rows = zeros(column)
    for offset, segment in zip(offsets, segments, strict=True):
        inverse_rows[offset : offset + segment.sender_len].fill_(1.0 / segment.total_rows)
    return ScoringPlan(
        segments=tuple(segments),
        groups=tuple(SenderGroup(start, length, tuple(m)) for (start, length), m in members.items()),
        offsets=tuple(offsets),
        width=column,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        kv_indices=kv_indices,
        device=device,
        sink_free=sink_free,
        order=float(order),
        scratch_bytes=scratch_bytes,
        backend=backend,
        sum_a=zeros(kv_heads, column),
        sum_p=zeros(kv_heads, column),
        votes=zeros(column),
        energy=zeros(column),
        row_energy=zeros(column),
        inverse_rows=inverse_rows,
    )


def _check_segment(index: int, segment: QuerySegment, *, kv_heads: int, layers: int, slots: int) -> None:
    where = f"segment {index}"
    if segment.row_start < 0 or segment.row_count < 1 or segment.sender_len < 1 or segment.kv_start < 0:
        raise ScoringInputError(f"{where} needs row_start, kv_start >= 0 and row_count, sender_len >= 1")
    if segment.kv_start + segment.sender_len > slots:
        raise ScoringInputError(
            f"{where} reads kv_indices up to {segment.kv_start + segment.sender_len}; there are {slots}"
        )
    carry = segment.carry
    if carry is None:
        if segment.row_count != segment.total_rows:
            raise ScoringInputError(
                f"{where} has {segment.row_count} of {segment.total_rows} rows: a split query needs a Carry"
            )
        return
    if carry.rows_done + segment.row_count > segment.total_rows:
        raise ScoringInputError(
            f"{where} brings {segment.row_count} rows after {carry.rows_done}; total_rows is {segment.total_rows}"
        )
    shape = (kv_heads, segment.sender_len)
    if len(carry.row_sums) != layers or any(tuple(s.shape) != shape for s in carry.row_sums):
        raise ScoringInputError(f"{where}: its Carry was made for other layers, KV heads or sender length")


def _check_carries(segments: Sequence[QuerySegment]) -> None:
    """Two segments on one carry would each count the other's rows."""
    carries = [id(s.carry) for s in segments if s.carry is not None]
    if len(carries) != len(set(carries)):
        raise ScoringInputError("two segments of one batch share a Carry; give each query its own")
