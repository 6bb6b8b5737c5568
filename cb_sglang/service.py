"""Senders and messages on one engine: everything the HTTP layer offers, without HTTP."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cb_kernels import selectors

from cb_sglang import wire
from cb_sglang.budget import positions_for_budget, positions_for_ratio
from cb_sglang.errors import CacheBackError, ContextLengthError, InvalidRequestError
from cb_sglang.messages import decode_text, runs
from cb_sglang.seam.engine import Engine, Scored
from cb_sglang.senders import RegisteredSender, SenderRegistry
from cb_sglang.spec import ScoringSpec
from cb_sglang.templates import DEFAULT_TEMPLATE, WrappedQuery, check_template, wrap_query

T = TypeVar("T")


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
    """One query, ready for the engine."""

    wrapped: WrappedQuery
    options: wire.Query
    spec: ScoringSpec


class MessageService:
    """One per server process; safe for concurrent calls on one event loop."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.senders = SenderRegistry(max_senders=settings.max_senders, max_positions=settings.max_positions)
        self._prefills: dict[str, asyncio.Task[int]] = {}

    async def register(self, request: wire.SenderRequest) -> wire.Sender:
        """Prefill a sender and make it addressable. The same content gets the same id and is prefilled once.

        Raises InvalidRequestError, ContextLengthError, CapacityError, EngineError.
        """
        input_ids = await self._sender_ids(request)
        # One query token and one output position must still fit behind it.
        if len(input_ids) > self.engine.max_input - 1:
            raise ContextLengthError(
                f"the sender has {len(input_ids)} positions; this server takes at most {self.engine.max_input - 1}, "
                "so that a query fits behind it"
            )
        sender = self.senders.make(self.engine.fingerprint, input_ids)
        self.senders.check_room(sender)
        cached = await self._prefill_once(sender)
        self.senders.add(sender)
        return report(sender, cached)

    def messages(self, sender_id: str, request: wire.MessagesRequest) -> AsyncIterator[wire.Message]:
        """One message a query, as they finish (``index`` tells which). Raises SenderNotFoundError at once."""
        return self._messages(self.senders.get(sender_id), request)

    async def _messages(
        self, sender: RegisteredSender, request: wire.MessagesRequest
    ) -> AsyncIterator[wire.Message]:
        started = time.perf_counter()
        plans = [await self._plan(sender, request, index) for index in range(len(request.queries))]
        batch = [([*sender.input_ids, *plan.wrapped.input_ids], plan.spec) for plan in plans]
        async for scored in self.engine.score(batch):
            yield await self._message(sender, plans[scored.index], scored, started)

    async def _plan(self, sender: RegisteredSender, request: wire.MessagesRequest, index: int) -> _Plan:
        """Resolve one query's options, tokens, voting rows and budget."""
        where = f"queries[{index}]"
        options = _merged(request, request.queries[index])
        if isinstance(options.query, str):
            template = _first(options.query_template, self.settings.query_template)
            tokenizer = self.engine.tokenizer
            wrapped = await _at(where, self.engine.tokenizing(wrap_query, tokenizer, options.query, template))
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
        selector = _first(options.selector, "cacheback")
        if selector not in selectors.names():
            raise InvalidRequestError(
                f"unknown selector {selector!r}; choose one of {', '.join(selectors.names())}",
                param="selector",
            )
        spec = ScoringSpec(
            sender_len=total,
            vote_start=wrapped.vote_start,
            vote_stop=wrapped.vote_stop,
            budget=budget,
            selector=selector,
            want_scores=bool(options.span_scores),
        )
        return _Plan(wrapped, options, spec)

    async def _message(
        self, sender: RegisteredSender, plan: _Plan, scored: Scored, started: float
    ) -> wire.Message:
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
            selector=plan.spec.selector,
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

    async def _prefill_once(self, sender: RegisteredSender) -> int:
        """Single flight: callers that register the same content at once share one prefill."""
        running = self._prefills.get(sender.id)
        if running is None:
            running = asyncio.create_task(self.engine.prefill(list(sender.input_ids)))
            self._prefills[sender.id] = running
            running.add_done_callback(lambda _: self._prefills.pop(sender.id, None))
        return await asyncio.shield(running)


def report(sender: RegisteredSender, cached: int | None = None) -> wire.Sender:
    """A sender as the API shows it; ``cached`` positions are known only where it was just prefilled."""
    return wire.Sender(
        id=sender.id,
        positions=len(sender),
        cached_positions=cached,
        fingerprint=sender.fingerprint,
        created=sender.created,
    )


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
        ids = tokenizer.apply_chat_template(
            turns, tokenize=True, add_generation_prompt=False, return_dict=False
        )
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
