"""The scoring requests of one SGLang extend batch, from planning to kept positions.

Life of a pass: ``plan`` when SGLang makes the ForwardBatch (host lengths only); ``begin`` before the model runs
(slots are written by then); ``score`` after each full-attention layer; ``finish`` after the last one leaves each
complete query's result on its ScoringTask. A query split by chunked prefill carries its sums in its task.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from cb_kernels import selectors
from cb_kernels.errors import BudgetError, ScoringInputError
from cb_kernels.keep import keep_positions
from cb_kernels.moments import Moments
from cb_kernels.plan import Carry, QuerySegment, ScoringPlan, plan_scoring
from cb_kernels.score import score_layer

from cb_sglang.errors import CacheBackError
from cb_sglang.seam.layers import ScoredLayers
from cb_sglang.spec import SPAN, ScoringSpec

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ScoringTask:
    """One scoring request in the scheduler process. It hangs on SGLang's Req and dies with it."""

    spec: ScoringSpec | None
    carry: Carry | None = None
    result: dict[str, Any] | None = None

    @classmethod
    def of(cls, req: Any) -> ScoringTask | None:
        """The request's task, made on first sight; None for an ordinary request."""
        if not hasattr(req, "cacheback_task"):
            req.cacheback_task = cls._read(req)
        task: ScoringTask | None = req.cacheback_task
        return task

    @classmethod
    def _read(cls, req: Any) -> ScoringTask | None:
        try:
            spec = ScoringSpec.from_wire(
                req.sampling_params.custom_params, input_len=len(req.origin_input_ids)
            )
            if spec is not None:
                selectors.get(spec.selector)
        except (CacheBackError, ScoringInputError) as error:
            return cls(spec=None, result={"error": str(error)})
        return cls(spec=spec) if spec is not None else None


@dataclass(frozen=True, slots=True)
class _Member:
    """One query's voting rows in this forward pass."""

    task: ScoringTask
    spec: ScoringSpec
    request_index: int
    row_start: int
    row_count: int
    first: bool
    sender_key: object


@dataclass(slots=True)
class ScoringBatch:
    """The scoring side of one ForwardBatch."""

    members: list[_Member]
    lse: torch.Tensor | None = None
    """Natural-log LSE [rows, heads] of the layer that just ran, left here by a backend that has it."""
    _runner: Any = None
    _layers: ScoredLayers | None = None
    _plan: ScoringPlan | None = None

    @classmethod
    def plan(cls, schedule_batch: Any) -> ScoringBatch | None:
        """Find the voting rows in this extend batch. Host work only; None when there are none."""
        members, row = [], 0
        lengths = zip(
            schedule_batch.reqs, schedule_batch.prefix_lens, schedule_batch.extend_lens, strict=False
        )
        for index, (req, prefix, extend) in enumerate(lengths):
            task = ScoringTask.of(req)
            if task is not None and task.spec is not None and task.result is None:
                spec = task.spec
                first = spec.sender_len + spec.vote_start
                start = max(first, prefix)
                stop = min(spec.sender_len + spec.vote_stop, prefix + extend)
                if start < stop:
                    key = _sender_key(req, spec)
                    member = _Member(
                        task, spec, index, row + start - prefix, stop - start, start == first, key
                    )
                    members.append(member)
            row += extend
        return cls(members) if members else None

    def begin(self, runner: Any, forward_batch: Any) -> None:
        """Lay out the kernels' plan; the pool slots of every sender are known now."""
        try:
            layers = ScoredLayers.of(runner)
            table = runner.req_to_token_pool.req_to_token
            segments, slots, starts, offset = [], [], {}, 0
            for member in self.members:
                spec, key = member.spec, member.sender_key
                if key not in starts:
                    starts[key] = offset
                    pool_row = forward_batch.req_pool_indices[member.request_index]
                    slots.append(table[pool_row, : spec.sender_len])
                    offset += spec.sender_len
                segments.append(
                    QuerySegment(
                        row_start=member.row_start,
                        row_count=member.row_count,
                        kv_start=starts[key],
                        sender_len=spec.sender_len,
                        total_rows=spec.vote_stop - spec.vote_start,
                        carry=self._carry(member, layers, table.device),
                    )
                )
            self._plan = plan_scoring(
                segments,
                heads=layers.heads,
                kv_heads=layers.kv_heads,
                head_dim=layers.head_dim,
                layers=len(layers.ordinal),
                kv_indices=torch.cat(slots),
                device=table.device,
            )
            self._runner, self._layers = runner, layers
        except Exception as error:
            self._fail(error)

    def score(self, layer: Any, q: torch.Tensor, forward_batch: Any) -> None:
        """Accumulate one layer, if it is a scored one. ``q`` is post-RoPE, [rows, heads * head_dim]."""
        lse, self.lse = self.lse, None
        if self._plan is None or self._layers is None:
            return
        ordinal = self._layers.ordinal.get(layer.layer_id)
        if ordinal is None:
            return
        try:
            rows = q.view(-1, self._plan.heads, self._plan.head_dim)
            k_pool = self._runner.token_to_kv_pool.get_key_buffer(layer.layer_id)
            if lse is None:
                lse = self._layers.row_lse(self._runner, forward_batch, rows, k_pool, layer.scaling)
            score_layer(self._plan, ordinal, rows, k_pool, lse, scale=layer.scaling)
        except Exception as error:
            self._fail(error)

    def finish(self) -> None:
        """Turn complete queries' moments into kept positions."""
        if self._plan is None or self._layers is None:
            return
        try:
            done = [
                (member, moments)
                for member, moments in zip(self.members, self._plan.finish(), strict=True)
                if moments is not None
            ]
            if done:
                self._layers.all_reduce([moments for _, moments in done])
                select(done)
        except Exception as error:
            self._fail(error)

    def _carry(self, member: _Member, layers: ScoredLayers, device: torch.device) -> Carry | None:
        spec = member.spec
        if member.first:
            # Also after a retraction: the query starts again from its first row.
            member.task.carry = None
            if member.row_count < spec.vote_stop - spec.vote_start:
                member.task.carry = Carry.empty(
                    layers=len(layers.ordinal),
                    kv_heads=layers.kv_heads,
                    sender_len=spec.sender_len,
                    device=device,
                )
        return member.task.carry

    def _fail(self, error: Exception) -> None:
        """A failed scoring pass must never take the scheduler down: its queries answer with the error instead."""
        self._plan = None
        expected = isinstance(error, CacheBackError | ScoringInputError | BudgetError)
        logger.error("scoring pass failed: %s", error, exc_info=None if expected else error)
        for member in self.members:
            member.task.carry = None
            member.task.result = {"error": str(error) if expected else "internal error in the scoring pass"}


_active: ScoringBatch | None = None


def active() -> ScoringBatch | None:
    """The scoring side of the forward pass that is running in this process, if it has one.

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


def _sender_key(req: Any, spec: ScoringSpec) -> object:
    """Equal for requests whose sender positions lie in the same pool slots, so that K is read once for them.

    Only the radix tree can vouch for that: both requests' rows are tree-owned up to T and end on the same node.
    """
    if req.kv is not None and req.kv.cache_protected_len == spec.sender_len:
        return (id(req.last_node), spec.sender_len)
    return object()


def select(done: list[tuple[_Member, Moments]]) -> None:
    """Score, cut with the keep law, and leave positions (and span scores on request) on each task.

    The whole batch is cut on the device; one copy brings it to the host.
    """
    device = done[0][1].votes.device
    lengths = [member.spec.sender_len for member, _ in done]
    budgets = [member.spec.budget for member, _ in done]
    widest = max(lengths)
    scores = torch.zeros(len(done), widest, device=device)
    protected = torch.zeros(len(done), widest, dtype=torch.bool, device=device)
    for row, (member, moments) in enumerate(done):
        spec = member.spec
        context = selectors.SelectorContext(moments=moments)
        scores[row, : spec.sender_len] = selectors.get(spec.selector)(context)
        protected[row, 0] = True
        protected[row, spec.sender_len - spec.latent_len : spec.sender_len] = True
    kept = keep_positions(
        scores,
        torch.tensor(lengths, device=device),
        torch.tensor(budgets, device=device),
        protected=protected,
        excluded=None,
        span=SPAN,
        max_budget=max(budgets),
    )
    positions = kept.positions.cpu()
    for row, (member, _) in enumerate(done):
        spec = member.spec
        result: dict[str, Any] = {"positions": positions[row, : spec.budget].tolist()}
        if spec.want_scores:
            own = scores[row, : spec.sender_len].cpu()
            result["span_scores"] = [float(own[a : a + SPAN].mean()) for a in range(0, spec.sender_len, SPAN)]
        member.task.carry = None
        member.task.result = result
