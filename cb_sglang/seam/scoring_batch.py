"""Our side of one SGLang extend batch: queries scored, senders measured.

Life of a pass: ``plan`` when SGLang makes the ForwardBatch (host lengths only); ``begin`` before the model runs
(slots are written by then); ``score`` after each full-attention layer; ``finish`` after the last one leaves each
complete request's result on its ScoringTask. A request split by chunked prefill keeps its sums in its task.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cb_kernels import selectors, statistics
from cb_kernels.errors import BudgetError, ScoringInputError
from cb_kernels.moments import Moments
from cb_kernels.plan import Carry, QuerySegment, ScoringPlan, plan_scoring
from cb_kernels.score import score_layer
from cb_sglang.errors import CacheBackError
from cb_sglang.seam.latent import row_result
from cb_sglang.seam.layers import ScoredLayers
from cb_sglang.seam.row_lse import RowLse, SeenRows
from cb_sglang.seam.selecting import select
from cb_sglang.seam.shared_prefix import Prefix
from cb_sglang.seam.task import ScoringTask, selector_options
from cb_sglang.spec import EmbeddingSpec, LatentSpec, ScoringSpec, StatisticSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one request that fall into this forward pass.

    pool_row: the request's row in req_to_token. row_start, row_count: within the batch's flat q. position: the sequence
    position of the first of them.
    """

    task: ScoringTask
    pool_row: int
    row_start: int
    row_count: int
    position: int


@dataclass(frozen=True, slots=True)
class _QueryRows(_Rows):
    """One row set of one query. ``sender_key`` is equal where the sender's positions lie in the same slots."""

    name: str
    first: bool
    total: int
    sender_key: Hashable

    @property
    def spec(self) -> ScoringSpec:
        assert isinstance(self.task.spec, ScoringSpec)
        return self.task.spec

    @property
    def accumulation(self) -> tuple[float, bool]:
        """Row sets of equal order and sink handling are accumulated in one kernel plan."""
        effective = selectors.get(self.spec.selector).effective(selector_options(self.spec))
        return effective.order, effective.sink_free


@dataclass(frozen=True, slots=True)
class _LastRow:
    """A request that asks for rows, at its last token: its place among the batch's requests and rows."""

    task: ScoringTask
    request: int
    row: int


@dataclass(slots=True)
class ScoringBatch:
    """Our side of one ForwardBatch."""

    queries: list[_QueryRows]
    senders: list[_Rows]
    lasts: list[_LastRow]
    prefixes: list[Prefix] = field(default_factory=list)
    """What each request of the batch, ours or not, has in the cache."""
    lse: torch.Tensor | None = None
    """Natural-log LSE [rows, heads] of the layer that just ran, left here by a backend that has it."""
    _runner: Any = None
    _layers: ScoredLayers | None = None
    _row_lse: RowLse | None = None
    _plans: list[tuple[ScoringPlan, list[_QueryRows]]] = field(default_factory=list)

    @classmethod
    def plan(cls, schedule_batch: Any) -> ScoringBatch | None:
        """Find the rows of ours in this extend batch. Host work only; None when there are none."""
        scoring, row = cls([], [], []), 0
        lengths = zip(schedule_batch.reqs, schedule_batch.prefix_lens, schedule_batch.extend_lens, strict=False)
        for number, (req, prefix, extend) in enumerate(lengths):
            task = ScoringTask.of(req)
            if task is not None and task.spec is not None and task.result is None:
                scoring._add(task, req, row, prefix, extend)
                if isinstance(task.spec, LatentSpec | EmbeddingSpec) and prefix + extend >= task.input_len:
                    scoring.lasts.append(_LastRow(task, number, row + extend - 1))
            scoring.prefixes.append(_prefix(req, task, prefix))
            row += extend
        return scoring if scoring.queries or scoring.senders or scoring.lasts else None

    @property
    def wants_hidden(self) -> bool:
        """Whether the forward pass must hand out each request's last hidden row."""
        return any(isinstance(last.task.spec, LatentSpec) for last in self.lasts)

    def _add(self, task: ScoringTask, req: Any, row: int, prefix: int, extend: int) -> None:
        for name, (start, stop) in task.row_sets().items():
            low, high = max(start, prefix), min(stop, prefix + extend)
            if low < high:
                rows = (task, req.kv.req_pool_idx, row + low - prefix, high - low, low)
                key = _sender_key(req, task.spec.sender_len)  # type: ignore[union-attr]
                self.queries.append(_QueryRows(*rows, name, low == start, stop - start, key))
        if isinstance(task.spec, StatisticSpec):
            low = max(task.spec.first_row, prefix)
            if low < prefix + extend:
                self.senders.append(_Rows(task, req.kv.req_pool_idx, row + low - prefix, prefix + extend - low, low))

    def begin(self, runner: Any) -> None:
        """Lay out the kernels' plans; the pool slots of every sender are known now."""
        self._runner = runner
        if not self.queries and not self.senders:
            return
        try:
            self._layers = ScoredLayers.of(runner)
            groups: dict[tuple[float, bool], list[_QueryRows]] = {}
            for rows in self.queries:
                groups.setdefault(rows.accumulation, []).append(rows)
            for (order, sink_free), members in groups.items():
                plan = self._plan_group(members, order=order, sink_free=sink_free)
                self._plans.append((plan, members))
            for sender in self.senders:
                self._begin_statistic(sender)
        except Exception as error:
            self._fail(error)

    def _plan_group(self, members: list[_QueryRows], *, order: float, sink_free: bool) -> ScoringPlan:
        layers, device = self.layers, self._runner.req_to_token_pool.req_to_token.device
        segments: list[QuerySegment] = []
        slots: list[torch.Tensor] = []
        starts: dict[Hashable, int] = {}
        offset = 0
        for rows in members:
            sender_len = rows.spec.sender_len
            if rows.sender_key not in starts:
                starts[rows.sender_key] = offset
                slots.append(self._slots(rows.pool_row, sender_len))
                offset += sender_len
            segments.append(
                QuerySegment(
                    row_start=rows.row_start,
                    row_count=rows.row_count,
                    kv_start=starts[rows.sender_key],
                    sender_len=sender_len,
                    total_rows=rows.total,
                    carry=self._carry(rows, device),
                )
            )
        return plan_scoring(
            segments,
            heads=layers.heads,
            kv_heads=layers.kv_heads,
            head_dim=layers.head_dim,
            layers=len(layers.ordinal),
            kv_indices=torch.cat(slots),
            device=device,
            sink_free=sink_free,
            order=order,
        )

    def _carry(self, rows: _QueryRows, device: torch.device) -> Carry | None:
        carries = rows.task.carries
        if rows.first:
            # Also after a retraction: the query starts again from its first row.
            carries.pop(rows.name, None)
            if rows.row_count < rows.total:
                carries[rows.name] = Carry.empty(
                    layers=len(self.layers.ordinal),
                    kv_heads=self.layers.kv_heads,
                    sender_len=rows.spec.sender_len,
                    device=device,
                )
        return carries.get(rows.name)

    def _begin_statistic(self, rows: _Rows) -> None:
        spec, layers = rows.task.spec, self.layers
        assert isinstance(spec, StatisticSpec)
        if rows.position == spec.first_row:
            measure = statistics.get(spec.statistic)
            rows.task.statistic = measure(
                sender_len=spec.sender_len,
                latent_len=spec.latent_len,
                heads=layers.heads,
                kv_heads=layers.kv_heads,
                layers=len(layers.ordinal),
                device=self._runner.req_to_token_pool.req_to_token.device,
                chunk=(spec.chunk_start, spec.chunk_stop) if measure.needs_chunk else None,
            )

    def score(self, layer: Any, q: torch.Tensor) -> None:
        """Accumulate one layer, if it is a scored one. ``q`` is post-RoPE, [rows, heads * head_dim]."""
        lse, self.lse = self.lse, None
        if self._layers is None or layer.layer_id not in self._layers.ordinal:
            return
        try:
            ordinal = self._layers.ordinal[layer.layer_id]
            rows = q.view(-1, self._layers.heads, self._layers.head_dim)
            k_pool = self._runner.token_to_kv_pool.get_key_buffer(layer.layer_id)
            if self._plans and lse is None:
                lse = self._missing_lse(rows)(rows, k_pool, layer.scaling)
            for plan, _ in self._plans:
                assert lse is not None
                score_layer(plan, ordinal, rows, k_pool, lse, scale=layer.scaling)
            for sender in self.senders:
                self._measure(sender, ordinal, rows, k_pool, layer.scaling)
        except Exception as error:
            self._fail(error)

    def _missing_lse(self, q: torch.Tensor) -> RowLse:
        """Planned at the first layer whose backend left no LSE."""
        if self._row_lse is None:
            ranges: dict[int, list[_QueryRows]] = {}
            for rows in self.queries:
                ranges.setdefault(rows.pool_row, []).append(rows)
            seen = []
            for pool_row, sets in ranges.items():
                start = min(r.row_start for r in sets)
                last = max(sets, key=lambda r: r.row_start + r.row_count)
                slots = self._slots(pool_row, last.position + last.row_count)
                seen.append(SeenRows(start, last.row_start + last.row_count - start, slots))
            self._row_lse = RowLse(self.layers, seen, total_rows=q.shape[0], dtype=q.dtype)
        return self._row_lse

    def _slots(self, pool_row: int, length: int) -> torch.Tensor:
        """The pool slots of a request's first positions."""
        table: torch.Tensor = self._runner.req_to_token_pool.req_to_token
        return table[pool_row, :length]

    def _measure(self, rows: _Rows, ordinal: int, q: torch.Tensor, k_pool: torch.Tensor, scale: float) -> None:
        statistic = rows.task.statistic
        if statistic is None:
            raise ScoringInputError("the sender's first rows were never seen")
        slots = self._slots(rows.pool_row, rows.position + rows.row_count)
        own = q[rows.row_start : rows.row_start + rows.row_count]
        statistic.add(ordinal, own, k_pool[slots.long()], scale=scale, first_position=rows.position)

    def finish(self, hidden_states: torch.Tensor | None) -> None:
        """Turn what is complete into results. ``hidden_states``: [requests or rows, hidden], where they were wanted."""
        for last in self.lasts:
            self._give_rows(last, hidden_states)
        if self._layers is None:
            return
        try:
            done: list[Moments] = []
            touched: dict[int, ScoringTask] = {}
            for plan, members in self._plans:
                for rows, moments in zip(members, plan.finish(), strict=True):
                    if moments is not None:
                        rows.task.carries.pop(rows.name, None)
                        rows.task.moments[rows.name] = moments
                        done.append(moments)
                        touched[id(rows.task)] = rows.task
            self._layers.all_reduce([part for m in done for part in (m.votes, m.energy, m.row_energy)])
            for moments in done:
                # Votes are a mean over heads; every rank has averaged over its own, equally many.
                moments.votes.div_(self._layers.ranks)
            select([task for task in touched.values() if task.moments.keys() == task.row_sets().keys()])
            self._finish_statistics()
        except Exception as error:
            self._fail(error)

    def _give_rows(self, last: _LastRow, hidden_states: torch.Tensor | None) -> None:
        spec, hidden = last.task.spec, None
        assert isinstance(spec, LatentSpec | EmbeddingSpec)
        try:
            if hidden_states is not None:
                # One row a request, unless the server was started to keep all of them.
                every = self.lasts[-1].row < len(hidden_states)
                hidden = hidden_states[last.row if every else last.request]
            last.task.settle(row_result(self._runner, spec, hidden))
        except Exception as error:
            last.task.settle({"error": _describe(error)})

    def _finish_statistics(self) -> None:
        for rows in self.senders:
            task = rows.task
            if rows.position + rows.row_count == task.input_len and task.statistic is not None:
                if len(task.statistic.peaks):
                    self.layers.all_reduce([task.statistic.peaks], torch.distributed.ReduceOp.MAX)
                scores = task.statistic.finish()
                self.layers.all_reduce([scores])
                task.result = {"scores": (scores / self.layers.ranks).tolist()}
                task.statistic = None

    @property
    def layers(self) -> ScoredLayers:
        """The scored layers of the runner this pass runs on; set by ``begin``."""
        assert self._layers is not None
        return self._layers

    def _fail(self, error: Exception) -> None:
        """A failed scoring pass must never take the scheduler down: its requests answer with the error instead."""
        self._layers = None
        message = _describe(error)
        for rows in (*self.queries, *self.senders):
            rows.task.settle({"error": message})


def _describe(error: Exception) -> str:
    """Log an error of a pass; what its requests are told of it."""
    expected = isinstance(error, CacheBackError | ScoringInputError | BudgetError)
    logger.error("scoring pass failed: %s", error, exc_info=None if expected else error)
    return str(error) if expected else "internal error in the scoring pass"


_active: ScoringBatch | None = None


def active() -> ScoringBatch | None:
    """Our side of the forward pass that is running in this process, if it has one.

    A module variable, because SGLang's runners hand the model a copy of the ForwardBatch (eager_runner.py), and one
    process runs one forward pass at a time.
    """
    return _active


@contextmanager
def activated(scoring: ScoringBatch) -> Iterator[None]:
    """Make ``scoring`` the active one while the model runs."""
    global _active
    _active = scoring
    try:
        yield
    finally:
        _active = None


def _prefix(req: Any, task: ScoringTask | None, length: int) -> Prefix:
    """Comparable to another's where it is exactly a sender's positions, in the same slots."""
    if task is not None and isinstance(task.spec, ScoringSpec) and length == task.spec.sender_len:
        return Prefix(_sender_key(req, length), length)
    return Prefix(object(), length)


def _sender_key(req: Any, sender_len: int) -> Hashable:
    """Equal for requests whose sender positions lie in the same pool slots, so that K is read once for them.

    Only the radix tree can vouch for that: both requests' rows are tree-owned up to T and end on the same node.
    """
    if req.kv is not None and req.kv.cache_protected_len == sender_len:
        return (req.last_node, sender_len)  # a NodeId, i.e. an int: compared by value
    return object()
