"""Random scoring batches over a paged pool, and what the float64 definition says about them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cb_kernels.moments import Moments
from cb_kernels.plan import QuerySegment, ScoringPlan, plan_scoring
from cb_kernels.reference import layer_lse, layer_moments
from cb_kernels.triton_lse import LseSegment
from cb_kernels.triton_moments import score_layer_triton
from cb_kernels.triton_tiling import Tiling

SUMS = ("votes", "energy", "row_energy")


@dataclass(frozen=True)
class Query:
    """``length`` shortens the sender for this query; ``before`` counts own rows that do not vote."""

    rows: int
    sender: int = 0
    length: int | None = None
    before: int = 0


@dataclass(frozen=True)
class Shape:
    """``copies``: kv_indices holds one copy of the sender's slots per query, as SGLang lays it out."""

    queries: tuple[Query, ...]
    senders: tuple[int, ...] = (100,)
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 32
    layers: int = 1
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int32
    page: int = 1
    copies: bool = False
    sink_free: bool = False


class Problem:
    """Tensors of one batch on ``device``. Slots and rows that belong to no query hold NaN."""

    def __init__(self, shape: Shape, *, device: str = "cpu", seed: int = 0) -> None:
        self.shape, self.device = shape, device
        self.scale = shape.head_dim**-0.5
        generator = torch.Generator().manual_seed(seed)
        self.segments: list[QuerySegment] = []
        self.lse_segments: list[LseSegment] = []
        self.query_slots: list[Tensor] = []  # of the sender, then of the query's own rows
        self._lay_out(generator)
        self.pools: list[Tensor] = []
        self.queries: list[Tensor] = []
        self.lses: list[Tensor] = []
        self.expected: list[Moments] = []
        for _ in range(shape.layers):
            self._add_layer(generator)

    def _lay_out(self, generator: torch.Generator) -> None:
        shape = self.shape
        own = [query.rows + query.before for query in shape.queries]
        sizes = [*shape.senders, *own]
        pages = [-(-size // shape.page) for size in sizes]
        order = torch.randperm(sum(pages) + 3, generator=generator)
        self.slot_count = (sum(pages) + 3) * shape.page
        spaces: list[Tensor] = []
        at = 0
        for size, count in zip(sizes, pages, strict=True):
            first = order[at : at + count, None] * shape.page
            spaces.append((first + torch.arange(shape.page)).flatten()[:size])
            at += count
        senders, owns = spaces[: len(shape.senders)], spaces[len(shape.senders) :]
        indices: list[Tensor] = [] if shape.copies else list(senders)
        starts = [sum(shape.senders[:i]) for i in range(len(shape.senders))]
        row = 2  # rows of other requests come first
        for query, mine in zip(shape.queries, owns, strict=True):
            length = query.length or shape.senders[query.sender]
            start = starts[query.sender]
            if shape.copies:
                start = sum(len(part) for part in indices)
                indices += [senders[query.sender][:length], mine]
                seen = length + query.before + 1
                self.lse_segments.append(LseSegment(row, query.rows, start, seen))
            self.segments.append(QuerySegment(row, query.rows, start, length, query.rows))
            self.query_slots.append(torch.cat([senders[query.sender][:length], mine]))
            row += query.rows + 1
        self.row_count = row
        self.kv_indices = torch.cat(indices).to(shape.index_dtype).to(self.device)

    def _add_layer(self, generator: torch.Generator) -> None:
        shape, heads = self.shape, self.shape.kv_heads * self.shape.group
        pool = torch.full((self.slot_count, shape.kv_heads, shape.head_dim), float("nan"), dtype=shape.dtype)
        used = torch.unique(torch.cat(self.query_slots))
        pool[used] = torch.randn(len(used), *pool.shape[1:], generator=generator).to(shape.dtype)
        q = torch.full((self.row_count, heads, shape.head_dim), float("nan"), dtype=shape.dtype)
        lse = torch.full((self.row_count, heads), float("nan"))
        moments: list[Moments] = []
        for segment, query, slots in zip(self.segments, shape.queries, self.query_slots, strict=True):
            mine = slice(segment.row_start, segment.row_start + query.rows)
            q[mine] = (1.5 * torch.randn(query.rows, heads, shape.head_dim, generator=generator)).to(q.dtype)
            keys = pool[slots]
            k_sender, k_own = keys[: segment.sender_len], keys[segment.sender_len :]
            lse[mine] = layer_lse(q[mine], k_sender, k_own, scale=self.scale, own_visible=query.before)
            moments.append(
                layer_moments(
                    q[mine],
                    k_sender,
                    k_own,
                    scale=self.scale,
                    own_visible=query.before,
                    sink_free=shape.sink_free,
                )
            )
        if self.expected:
            moments = [old + new for old, new in zip(self.expected, moments, strict=True)]
        self.expected = moments
        self.pools.append(pool.to(self.device))
        self.queries.append(q.to(self.device))
        self.lses.append(lse.to(self.device))

    def plan(self, segments: list[QuerySegment] | None = None, *, scratch_bytes: int = 256 << 20) -> ScoringPlan:
        shape = self.shape
        return plan_scoring(
            self.segments if segments is None else segments,
            heads=shape.kv_heads * shape.group,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            layers=shape.layers,
            kv_indices=self.kv_indices,
            device=self.device,
            sink_free=shape.sink_free,
            scratch_bytes=scratch_bytes,
            backend="triton",
        )

    def run(self, plan: ScoringPlan, tiling: Tiling | None = None) -> list[Moments | None]:
        for layer in range(self.shape.layers):
            score_layer_triton(
                plan,
                layer,
                self.queries[layer],
                self.pools[layer],
                self.lses[layer],
                scale=self.scale,
                tiling=tiling,
            )
        return plan.finish()


def whole(segment: QuerySegment, first: int, count: int) -> QuerySegment:
    """Rows ``first`` .. ``first + count`` of a segment, as one part of a split query."""
    return replace(segment, row_start=segment.row_start + first, row_count=count)


def error(got: Moments | None, want: Moments) -> float:
    """The largest relative deviation in any of the three sums."""
    assert got is not None
    worst = 0.0
    for name in SUMS:
        value, truth = getattr(got, name).double().cpu(), getattr(want, name).double()
        assert value.shape == truth.shape and bool(torch.isfinite(value).all())
        worst = max(worst, float(((value - truth).abs() / truth.abs().clamp_min(1e-30)).max()))
    return worst


def same_bits(one: Moments | None, other: Moments | None) -> bool:
    assert one is not None and other is not None
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in SUMS)
