"""Messages over HTTP, without HTTP: planned, granted, admitted, scored, made, recorded."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, nullcontext
from dataclasses import replace

from cb_kernels import selectors
from cb_sglang import wire
from cb_sglang.admission import Admission
from cb_sglang.capacity import Grant, ReceiverNeed, grant
from cb_sglang.chat import Block
from cb_sglang.content import Part
from cb_sglang.errors import CacheBackError, CapacityError
from cb_sglang.grants import Grants, Receivers
from cb_sglang.merge import merge
from cb_sglang.messages import Made, decode_text, make_message
from cb_sglang.metrics import Metrics
from cb_sglang.query_plan import QueryPlan, plan_query
from cb_sglang.rows import PLACEHOLDER_ID
from cb_sglang.runs import Runs, union
from cb_sglang.seam.engine import Engine, Scored
from cb_sglang.selection import SenderMeasurements, select_without_query_rows
from cb_sglang.sender_service import SenderService, part_of
from cb_sglang.senders import RegisteredSender
from cb_sglang.settings import Settings
from cb_sglang.tenants import Tenant

logger = logging.getLogger(__name__)
_GROUPS = 4
"""So many groups of one call's queries fit into the engine's share of work at once."""


class MessageService:
    """One per server process; safe for concurrent calls on one event loop. Make it with ``start``."""

    def __init__(self, engine: Engine, settings: Settings, senders: SenderService) -> None:
        self.engine = engine
        self.settings = settings
        self.senders = senders
        self.measurements = SenderMeasurements(engine, senders.context)
        self.admission = Admission(settings.admission)
        self.grants = Grants(
            engine,
            pins_to_come=senders.pins_to_come,
            max_waiting=settings.admission.max_waiting,
            tenant_share=settings.admission.tenant_share,
        )
        self.metrics = Metrics()
        senders.on_upkeep = self._report_load

    @classmethod
    async def start(cls, engine: Engine, settings: Settings, secret: bytes) -> MessageService:
        """Raises StoreError."""
        # Files and a whole vocabulary are hashed: once, and not in the first message on the event loop.
        await engine.tokenizing(lambda: (engine.fingerprint, engine.tokenizer_fingerprint))
        return cls(engine, settings, await SenderService.start(engine, settings, secret))

    def messages(
        self,
        tenant: Tenant,
        sender_id: str,
        request: wire.MessagesRequest,
        *,
        one_of: Collection[str] = (),
        receivers: Receivers | None = None,
    ) -> AsyncGenerator[Made, None]:
        """One message a query, as they finish (``index`` tells which). Raises SenderNotFoundError at once.

        one_of:    the senders of a call of several, whose messages ``exclude`` may name besides this one's.
        receivers: for whom the messages are, where the caller has counted them in.

        Iterating raises what is wrong with a query, CapacityError, RateLimitError, EngineError, StoreError.
        """
        return self._messages(self.senders.registry.get(tenant.name, sender_id), request, one_of, receivers)

    async def transfers(self, tenant: Tenant, request: wire.TransfersRequest) -> AsyncGenerator[wire.Transfer, None]:
        """One message for every sender and query, as they finish; an error stands for its pair alone."""
        pairs = merge(
            *(
                self._transfer(tenant, request, sender_id, index)
                for sender_id in request.senders
                for index in range(len(request.queries))
            )
        )
        async with aclosing(pairs):
            async for transfer in pairs:
                yield transfer

    async def blocks(self, tenant: Tenant, wanted: wire.ChatExtension, query: str) -> tuple[list[Block], list[str]]:
        """What a chat is answered from: the messages that are given, or one of each sender; and their ids.

        Raises like ``messages``, for the first that fails.
        """
        if wanted.messages is not None:
            given = [
                await self._given(tenant, each, f"cacheback.messages[{n}]") for n, each in enumerate(wanted.messages)
            ]
            return [block for block, _ in given], [name for _, name in given if name]
        senders = wanted.senders or []
        receiver = wanted.receiver or wire.Receiver()
        receiver = receiver.model_copy(update={"senders": max(receiver.senders, len(senders))})
        request = _one_query(wanted, query).model_copy(update={"receiver": receiver})
        made: dict[str, Made] = {}
        with self.grants.receivers(tenant.name, 1, of_one=True) as one:
            sources = merge(*(self.messages(tenant, name, request, one_of=senders, receivers=one) for name in senders))
            async with aclosing(sources):
                async for each in sources:
                    made[each.message.sender] = each
        ordered = [made[name] for name in senders]
        return [_block(each) for each in ordered], [each.message.id for each in ordered]

    async def forget(self, tenant: Tenant, sender_id: str) -> None:
        """Delete a sender and what was measured of it. Raises SenderNotFoundError, StoreError."""
        await self.senders.forget(tenant, sender_id)
        self.measurements.forget(sender_id)

    async def capacity(self, tenant: Tenant) -> wire.Capacity:
        """The load now, and what this tenant's next receiver would be granted of a message as long as the window."""
        asked = self.engine.context_length
        need = ReceiverNeed(context_length=asked, prompt_positions=0, reserved_output=0)
        snapshot = await self.grants.snapshot(tenant.name, more=1)
        try:
            found = _shown(grant(asked, minimum=1, policy="share", snapshot=snapshot, receiver=need))
        except CapacityError as error:
            found = wire.GrantReport(asked=asked, granted=0, limit="pool", reason=error.message)
        engine, load = await self.engine.load(), self.admission.snapshot()
        return wire.Capacity(
            pool_positions=engine.pool_positions,
            used_positions=engine.used_positions,
            pinned_positions=self.senders.registry.usage().pinned_positions,
            context_length=snapshot.context_length,
            receivers=self.grants.waiting,
            running=load.running.requests,
            queued=load.queued.requests,
            grant=found,
        )

    @property
    def stopping(self) -> bool:
        """Whether new calls are to be refused because the server is on its way out."""
        return self.engine.stopping

    async def close(self) -> None:
        """Write what is yet to be written, and close the store; when no call is being answered any more."""
        await self.senders.close()

    # --- one call over one sender

    async def _messages(
        self,
        sender: RegisteredSender,
        request: wire.MessagesRequest,
        one_of: Collection[str],
        counted: Receivers | None,
    ) -> AsyncGenerator[Made, None]:
        started, now = time.perf_counter(), time.monotonic()
        # Refused before any work is done for it, where it is to be refused anyway.
        self.admission.check(tenant=sender.tenant, sender=sender.id, rows=len(request.queries), positions=len(sender))
        before: dict[int, Runs] = {}
        looked_up: dict[tuple[str | None, ...], Runs] = {}  # the queries of a call mostly exclude the same

        async def excluded(index: int, options: wire.Query) -> Runs:
            wanted = (options.since, *(options.exclude or ()))
            if wanted not in looked_up:
                looked_up[wanted] = await self.senders.sent_before(sender, options, one_of)
            before[index] = looked_up[wanted]
            return union([*sender.private, *before[index]])

        template = self.settings.query_template
        plans = [
            await plan_query(self.engine, template, sender, request, index, excluded)
            for index in range(len(request.queries))
        ]
        seconds = self.settings.admission.default_deadline if request.deadline is None else request.deadline
        with nullcontext(counted) if counted else self.grants.receivers(sender.tenant, len(plans)) as receivers:
            groups = self._groups(sender, [plan for plan in plans if plan.needs_engine])
            groups += [[plan] for plan in plans if not plan.needs_engine]
            outcomes = merge(*(self._answered(sender, group, request, receivers, now + seconds) for group in groups))
            async with aclosing(outcomes):
                async for plan, scored, granted, miss, queued in outcomes:
                    made = await make_message(
                        self.engine,
                        sender,
                        plan,
                        scored,
                        grant=_shown(granted),
                        miss=miss,
                        queue_seconds=queued,
                        started=started,
                    )
                    label = None if request.receiver is None else request.receiver.label
                    await self.senders.record(sender, made.message, label, before[plan.index], time.time())
                    self.metrics.message(made.message, sender.tenant)
                    yield made

    async def _answered(
        self,
        sender: RegisteredSender,
        plans: list[QueryPlan],
        request: wire.MessagesRequest,
        receivers: Receivers,
        deadline: float,
    ) -> AsyncGenerator[tuple[QueryPlan, Scored, Grant, wire.CacheMiss | None, float], None]:
        """A group of queries: granted one by one, then admitted together and scored as one engine batch.

        Grants come first: who waits for room in the pool must not hold a place that those who have it need.
        """
        grants = [
            await receivers.grant(
                plan.asked,
                plan.minimum,
                policy=request.policy,
                min_budget=request.min_budget,
                described=request.receiver,
                deadline=deadline,
            )
            for plan in plans
        ]
        granted = [plan.granted(found.granted) for plan, found in zip(plans, grants, strict=True)]
        rows = sum(self._rows(sender, plan) for plan in plans)
        async with self.admission.admit(
            tenant=sender.tenant,
            sender=sender.id,
            rows=rows,
            positions=len(sender),
            deadline=max(1e-3, deadline - time.monotonic()),
        ) as ticket:
            self._report_load()
            miss, queued = await self.senders.warm(sender), ticket.queued_seconds
            if granted[0].needs_engine:
                context = self.senders.context(sender)
                async with aclosing(self.engine.score([plan.request(sender, context) for plan in granted])) as batch:
                    async for scored in batch:
                        plan, lost = granted[scored.index], self.senders.missed(sender, scored.cached_positions)
                        yield plan, replace(scored, index=plan.index), grants[scored.index], miss or lost, queued
            else:
                yield granted[0], await self._selected(sender, granted[0]), grants[0], miss, queued

    def _report_load(self) -> None:
        registry = self.senders.registry
        self.metrics.load(self.admission.snapshot(), registry.usage(), tenants=registry.tenants)

    def _rows(self, sender: RegisteredSender, plan: QueryPlan) -> int:
        """Rows that the engine computes for a query: its own, or the sender's for a statistic yet to be measured."""
        statistic = plan.selector.statistic
        if plan.needs_engine or statistic is None or self.measurements.has(sender, statistic):
            return len(plan.wrapped.input_ids)
        return len(sender)

    def _groups(self, sender: RegisteredSender, plans: list[QueryPlan]) -> list[list[QueryPlan]]:
        """One call's queries in groups whose work, and so whose workspace in the engine, is bounded."""
        limits = self.settings.admission
        most_rows = min(limits.max_running_rows, limits.max_running_work // len(sender)) // _GROUPS
        groups: list[list[QueryPlan]] = []
        rows = 0
        for plan in plans:
            size = len(plan.wrapped.input_ids)
            if not groups or rows + size > most_rows:
                groups.append([])
                rows = 0
            groups[-1].append(plan)
            rows += size
        return groups

    async def _selected(self, sender: RegisteredSender, plan: QueryPlan) -> Scored:
        """A query whose selector does not look at its rows."""
        started = time.perf_counter()
        query = plan.options.query
        if plan.selector.needs is selectors.Needs.TEXT and not isinstance(query, str):
            query = await self.engine.tokenizing(self.engine.tokenizer.decode, query)
        positions, span_scores = await select_without_query_rows(
            self.measurements, sender, plan, query if isinstance(query, str) else None
        )
        return Scored(
            index=plan.index,
            positions=positions,
            span_scores=span_scores if plan.options.span_scores else None,
            cached_positions=len(sender),
            seconds=time.perf_counter() - started,
        )

    async def _transfer(
        self, tenant: Tenant, request: wire.TransfersRequest, sender_id: str, index: int
    ) -> AsyncGenerator[wire.Transfer, None]:
        """One pair. Pairs of one sender meet again in the engine's batch."""
        try:
            one = _one_query(request, request.queries[index])
            async with aclosing(self.messages(tenant, sender_id, one, one_of=request.senders)) as made:
                async for each in made:
                    message = each.message.model_copy(update={"index": index})
                    yield wire.Transfer(sender=sender_id, query=index, message=message)
        except CacheBackError as error:
            yield self._failed(sender_id, index, error)
        except Exception:
            logger.exception("unexpected error in a transfer")
            yield self._failed(sender_id, index, CacheBackError("internal error; the server's log has the details"))

    def _failed(self, sender_id: str, index: int, error: CacheBackError) -> wire.Transfer:
        self.metrics.error(error.code)
        param = error.param.replace("queries[0]", f"queries[{index}]") if error.param else None
        body = wire.ErrorBody(message=error.message, type=error.type, param=param, code=error.code)
        return wire.Transfer(sender=sender_id, query=index, error=body)

    # --- messages for a chat

    async def _given(self, tenant: Tenant, message: str | wire.ReceivedMessage, where: str) -> tuple[Block, str]:
        if isinstance(message, str):
            sender, positions, encoding = await self.senders.recall(tenant, message, where)
            if encoding == "text":
                text = await self.engine.tokenizing(decode_text, self.engine.tokenizer, sender, positions)
                return Block(sender.id, text, None), message
            return Block(sender.id, None, part_of(sender, positions)), message
        label = message.sender or "a sender"
        if message.encoding == "text":
            return Block(label, message.text, None), message.id
        return Block(label, None, await self.senders.received_one(tenant, message, where)), message.id


def _one_query(call: wire.TransfersRequest | wire.ChatExtension, query: wire.AnyQuery) -> wire.MessagesRequest:
    """One query with the options of a call of several senders."""
    options = {name: getattr(call, name) for name in wire.MessagesRequest.model_fields if name != "queries"}
    return wire.MessagesRequest(**{**options, "queries": [query], "stream": False})


def _block(made: Made) -> Block:
    payload = made.payload
    if payload.encoding == "text":
        return Block(payload.sender, payload.text, None)
    rows = payload.rows if payload.rows is not None and len(payload.rows) else None
    ids = [PLACEHOLDER_ID] * len(payload.positions) if payload.token_ids is None else list(payload.token_ids)
    return Block(payload.sender, None, Part(ids, rows))


def _shown(granted: Grant) -> wire.GrantReport:
    return wire.GrantReport(asked=granted.asked, granted=granted.granted, limit=granted.limit, reason=granted.reason)
