"""Senders and messages on one engine: everything the HTTP layer offers, without HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cb_kernels import selectors
from cb_sglang import wire
from cb_sglang.budget import positions_for_budget, positions_for_ratio
from cb_sglang.errors import CacheBackError, ContextLengthError, InvalidRequestError
from cb_sglang.merge import merge
from cb_sglang.messages import decode_text, runs
from cb_sglang.seam.engine import Engine, Scored
from cb_sglang.selection import SenderMeasurements, select_without_query_rows
from cb_sglang.senders import RegisteredSender, SenderRegistry
from cb_sglang.single_flight import SingleFlight
from cb_sglang.spec import ScoringSpec
from cb_sglang.templates import DEFAULT_TEMPLATE, WrappedQuery, check_template, wrap_query

T = TypeVar("T")
DEFAULT_SELECTOR = "cacheback"


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator sets. ``max_positions`` bounds the token ids held for all senders together."""

    query_template: str = DEFAULT_TEMPLATE
    max_senders: int = 4_096
    max_positions: int = 64_000_000

    def __post_init__(self) -> None:
        check_template(self.query_template)


@dataclass(frozen=True, slots=True)
class _Plan:
    """One query, ready to be answered: by the engine if its selector scores the query's rows, else from the sender."""

    index: int
    wrapped: WrappedQuery
    options: wire.Query
    selector: selectors.SelectorEntry
    selector_options: selectors.SelectorOptions
    budget: int

    @property
    def needs_engine(self) -> bool:
        return self.selector.needs in (selectors.Needs.QUERY_ROWS, selectors.Needs.QUERY_AND_CUE_ROWS)

    def request(self, sender: RegisteredSender) -> tuple[list[int], ScoringSpec]:
        """The scoring pass."""
        spec = ScoringSpec(
            sender_len=len(sender),
            vote_start=self.wrapped.vote_start,
            vote_stop=self.wrapped.vote_stop,
            budget=self.budget,
            selector=self.selector.name,
            order=self.selector_options.order,
            alpha=self.selector_options.alpha,
            sink_free=self.selector_options.sink_free,
            want_scores=bool(self.options.span_scores),
        )
        return [*sender.input_ids, *self.wrapped.input_ids], spec


class MessageService:
    """One per server process; safe for concurrent calls on one event loop."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.senders = SenderRegistry(max_senders=settings.max_senders, max_positions=settings.max_positions)
        self.measurements = SenderMeasurements(engine)
        self._prefills: SingleFlight[int] = SingleFlight()

    async def register(self, request: wire.SenderRequest) -> wire.Sender:
        """Prefill a sender and make it addressable. The same content gets the same id and is prefilled once.

        Raises InvalidRequestError, ContextLengthError, CapacityError, EngineError.
        """
        input_ids = await self._sender_ids(request)
        # One query token and one output position must still fit behind it.
        if len(input_ids) > self.engine.max_input - 1:
            raise ContextLengthError(
                f"the sender has {len(input_ids)} positions; this server takes at most {self.engine.max_input - 1}, "
                "so that a query fits behind it",
                param=request.given[0],
            )
        sender = self.senders.make(self.engine.fingerprint, input_ids)
        self.senders.check_room(sender)
        cached = await self._prefills.run(sender.id, lambda: self.engine.prefill(list(sender.input_ids)))
        self.senders.add(sender)
        return report(sender, cached)

    def forget(self, sender_id: str) -> None:
        """Delete a sender and what was measured of it. Raises SenderNotFoundError."""
        self.senders.remove(sender_id)
        self.measurements.forget(sender_id)

    def messages(self, sender_id: str, request: wire.MessagesRequest) -> AsyncGenerator[wire.Message, None]:
        """One message a query, as they finish (``index`` tells which). Raises SenderNotFoundError at once."""
        return self._messages(self.senders.get(sender_id), request)

    async def _messages(
        self, sender: RegisteredSender, request: wire.MessagesRequest
    ) -> AsyncGenerator[wire.Message, None]:
        started = time.perf_counter()
        plans = [await self._plan(sender, request, index) for index in range(len(request.queries))]
        outcomes = merge(
            self._scored(sender, [plan for plan in plans if plan.needs_engine]),
            *(self._selected(sender, plan) for plan in plans if not plan.needs_engine),
        )
        async with aclosing(outcomes):
            async for scored in outcomes:
                yield await self._message(sender, plans[scored.index], scored, started)

    async def _scored(self, sender: RegisteredSender, plans: list[_Plan]) -> AsyncGenerator[Scored, None]:
        """Queries whose rows are scored, as one engine batch."""
        if plans:
            async with aclosing(self.engine.score([plan.request(sender) for plan in plans])) as batch:
                async for scored in batch:
                    yield replace(scored, index=plans[scored.index].index)

    async def _selected(self, sender: RegisteredSender, plan: _Plan) -> AsyncGenerator[Scored, None]:
        """A query whose selector does not look at its rows."""
        started = time.perf_counter()
        query = plan.options.query
        if plan.selector.needs is selectors.Needs.TEXT and not isinstance(query, str):
            query = await self.engine.tokenizing(self.engine.tokenizer.decode, query)
        positions, span_scores = await select_without_query_rows(
            self.measurements,
            sender,
            entry=plan.selector,
            options=plan.selector_options,
            query=query if isinstance(query, str) else None,
            budget=plan.budget,
        )
        yield Scored(
            index=plan.index,
            positions=positions,
            span_scores=span_scores if plan.options.span_scores else None,
            cached_positions=len(sender),
            seconds=time.perf_counter() - started,
        )

    async def _plan(self, sender: RegisteredSender, request: wire.MessagesRequest, index: int) -> _Plan:
        """Resolve one query's options, tokens, voting rows and budget."""
        where = f"queries[{index}]"
        options = _merged(request, request.queries[index])
        if isinstance(options.query, str):
            template = _first(options.query_template, self.settings.query_template)
            tokenizer = self.engine.tokenizer
            try:
                wrapped = await self.engine.tokenizing(wrap_query, tokenizer, options.query, template)
            except CacheBackError as error:
                error.param = _named(request, index, error.param) if error.param else where
                raise
        else:
            self._check_ids(options.query, where)
            wrapped = WrappedQuery(options.query, 0, len(options.query))
        total, length = len(sender), len(sender) + len(wrapped.input_ids)
        if length > self.engine.max_input:
            raise ContextLengthError(
                f"sender ({total}) and query ({len(wrapped.input_ids)}) come to {length} positions; this server takes "
                f"at most {self.engine.max_input}; shorten the query",
                param=where,
            )
        if options.budget is not None:
            budget = positions_for_budget(total, options.budget)
        else:
            budget = positions_for_ratio(total, 0, _first(options.ratio, wire.DEFAULT_RATIO))
        name = _first(options.selector, DEFAULT_SELECTOR)
        if name not in selectors.names():
            raise InvalidRequestError(
                f"unknown selector {name!r}; choose one of {', '.join(selectors.names())}",
                param=_named(request, index, "selector"),
            )
        given = _first(options.selector_options, wire.SelectorOptions())
        return _Plan(index, wrapped, options, selectors.get(name), selectors.SelectorOptions(**dict(given)), budget)

    async def _message(self, sender: RegisteredSender, plan: _Plan, scored: Scored, started: float) -> wire.Message:
        spans = runs(scored.positions)
        encoding = plan.options.encoding or "token_ids"
        token_ids, text = None, None
        if encoding == "token_ids":
            token_ids = [sender.input_ids[p] for p in scored.positions]
        else:
            text = await self.engine.tokenizing(decode_text, self.engine.tokenizer, sender.input_ids, spans)
        options, wrapped = plan.options, plan.wrapped
        ratio = None if options.budget is not None else _first(options.ratio, wire.DEFAULT_RATIO)
        return wire.Message(
            id=f"msg_{uuid.uuid4().hex}",
            sender=sender.id,
            index=scored.index,
            encoding=encoding,
            selector=plan.selector.name,
            sender_positions=len(sender),
            query_positions=len(wrapped.input_ids),
            voting_positions=wrapped.vote_stop - wrapped.vote_start,
            cached_positions=scored.cached_positions,
            budget=wire.BudgetReport(ratio=ratio, budget=options.budget, positions=len(scored.positions)),
            positions=scored.positions,
            spans=spans,
            token_ids=token_ids,
            text=text,
            span_scores=scored.span_scores,
            timings=wire.Timings(engine_seconds=scored.seconds, total_seconds=time.perf_counter() - started),
        )

    async def _sender_ids(self, request: wire.SenderRequest) -> list[int]:
        if request.input_ids is not None:
            self._check_ids(request.input_ids, "input_ids")
            return request.input_ids
        tokenizer = self.engine.tokenizer
        if request.prompt is not None:
            return await self.engine.tokenizing(tokenizer.encode, request.prompt)
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidRequestError(
                "this model has no chat template; send the content as prompt or input_ids", param="messages"
            )
        turns = [turn.model_dump() for turn in request.messages or []]
        return await _at("messages", self.engine.tokenizing(_apply_chat_template, tokenizer, turns))

    def _check_ids(self, input_ids: Sequence[int], where: str) -> None:
        highest = max(input_ids)
        if highest >= self.engine.vocab_size:
            raise InvalidRequestError(
                f"token id {highest} is not in the vocabulary of {self.engine.vocab_size}", param=where
            )


def report(sender: RegisteredSender, cached: int | None = None) -> wire.Sender:
    """A sender as the API shows it; ``cached`` positions are known only where it was just prefilled."""
    return wire.Sender(
        id=sender.id,
        positions=len(sender),
        cached_positions=cached,
        fingerprint=sender.fingerprint,
        created=sender.created,
    )


def _named(request: wire.MessagesRequest, index: int, option: str) -> str:
    """An option as the caller wrote it: the query's own, or the call's."""
    own = request.queries[index]
    is_own = isinstance(own, wire.Query) and getattr(own, option) is not None
    return f"queries[{index}].{option}" if is_own else option


def _merged(request: wire.MessagesRequest, query: str | list[int] | wire.Query) -> wire.Query:
    """The query's own options, completed by the call's. A query's ratio or budget replaces the call's whichever."""
    own = query if isinstance(query, wire.Query) else wire.Query(query=query)
    inherited = {name: getattr(request, name) for name in wire.Query.model_fields if name != "query"}
    if own.ratio is not None or own.budget is not None:
        inherited.update(ratio=None, budget=None)
    given = {name: value for name, value in own.model_dump().items() if value is not None}
    return wire.Query(**{**inherited, **given})


def _apply_chat_template(tokenizer: Any, turns: list[dict[str, str]]) -> list[int]:
    try:
        ids = tokenizer.apply_chat_template(turns, tokenize=True, add_generation_prompt=False, return_dict=False)
    except Exception as error:
        # Templates are programs: what they refuse (roles out of order, say) they raise as errors of their own.
        raise InvalidRequestError(f"the model's chat template refused these messages: {error}") from error
    return list(ids)


async def _at(where: str, work: Awaitable[T]) -> T:
    """Await ``work``; an error of ours that names no field is about ``where``."""
    try:
        return await work
    except CacheBackError as error:
        error.param = error.param or where
        raise


def _first(value: T | None, default: T) -> T:
    return default if value is None else value
