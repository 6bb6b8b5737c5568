"""One query of a call, resolved: its tokens, selector, what must not be kept, and how many positions to ask for."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from cb_kernels import selectors
from cb_sglang import wire
from cb_sglang.budget import positions_for_budget, positions_for_ratio
from cb_sglang.content import check_ids
from cb_sglang.errors import BudgetError, CacheBackError, ContextLengthError, InvalidRequestError
from cb_sglang.runs import Runs, overlap
from cb_sglang.seam.engine import Context, Engine
from cb_sglang.senders import RegisteredSender
from cb_sglang.spec import ScoringSpec, protected_and_available
from cb_sglang.templates import WrappedQuery, wrap_query

T = TypeVar("T")
DEFAULT_SELECTOR = "cacheback"


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """Ready to be answered: by the engine if the selector scores the query's rows, else from the sender.

    asked:    positions by the budget law, at most those that may be kept. ``budget``: those that were granted.
    minimum:  positions that are always kept; no budget may be smaller.
    excluded: positions that are never kept.
    """

    index: int
    wrapped: WrappedQuery
    options: wire.Query
    selector: selectors.SelectorEntry
    selector_options: selectors.SelectorOptions
    excluded: Runs
    asked: int
    minimum: int
    budget: int

    @property
    def needs_engine(self) -> bool:
        return self.selector.needs in (selectors.Needs.QUERY_ROWS, selectors.Needs.QUERY_AND_CUE_ROWS)

    @property
    def query_hash(self) -> str:
        """SHA-256 (hex) of the query's tokens."""
        return hashlib.sha256(",".join(map(str, self.wrapped.input_ids)).encode()).hexdigest()

    def granted(self, budget: int) -> QueryPlan:
        """The same with another budget."""
        return replace(self, budget=budget)

    def request(self, sender: RegisteredSender, context: Context) -> tuple[Context, ScoringSpec]:
        """The scoring pass over ``context``, the sender's."""
        spec = ScoringSpec(
            sender_len=len(sender),
            vote_start=self.wrapped.vote_start,
            vote_stop=self.wrapped.vote_stop,
            budget=self.budget,
            latent_len=sender.latent,
            selector=self.selector.name,
            order=self.selector_options.order,
            alpha=self.selector_options.alpha,
            sink_free=self.selector_options.sink_free,
            want_scores=bool(self.options.span_scores),
            coverage=self.options.coverage or 0.0,
            excluded=[border for run in self.excluded for border in run],
        )
        return context.followed_by(self.wrapped.input_ids), spec


async def plan_query(
    engine: Engine,
    template: str,
    sender: RegisteredSender,
    request: wire.MessagesRequest,
    index: int,
    excluded: Callable[[int, wire.Query], Awaitable[Runs]],
) -> QueryPlan:
    """Resolve one query's options, tokens, voting rows and budget.

    ``template`` is the server's; ``excluded`` finds what a query's options bar besides the sender's private positions.

    Raises InvalidRequestError, BudgetError and ContextLengthError naming the field at fault.
    """
    where = f"queries[{index}]"
    options = merged_options(request, request.queries[index])
    wrapped = await _wrapped(engine, template, options, request, index)
    total, length = len(sender), len(sender) + len(wrapped.input_ids)
    if length > engine.max_input:
        raise ContextLengthError(
            f"sender ({total}) and query ({len(wrapped.input_ids)}) come to {length} positions; this server takes "
            f"at most {engine.max_input}; shorten the query",
            param=where,
        )
    check_encoding(options.encoding, sender, _named(request, index, "encoding"))
    try:
        barred = await excluded(index, options)
    except CacheBackError as error:
        error.param = _named(request, index, error.param) if error.param else where
        raise
    minimum, available = protected_and_available(total, sender.latent, barred)
    if available < 1:
        raise InvalidRequestError(
            "no position is left to send: each is private, or excluded because the receiver has it", param=where
        )
    asked = min(_asked(options, sender), available)
    if asked < minimum:
        raise BudgetError(
            f"a budget of {asked} positions cannot hold the {minimum} that are always kept (position 0 and the "
            f"sender's latent rows); ask for at least {minimum}",
            param=_named(request, index, "budget" if options.budget is not None else "ratio"),
        )
    name = options.selector or DEFAULT_SELECTOR
    if name not in selectors.names():
        raise InvalidRequestError(
            f"unknown selector {name!r}; choose one of {', '.join(selectors.names())}",
            param=_named(request, index, "selector"),
        )
    entry = selectors.get(name)
    given = options.selector_options or wire.SelectorOptions()
    return QueryPlan(
        index=index,
        wrapped=wrapped,
        options=options,
        selector=entry,
        selector_options=selectors.SelectorOptions(**dict(given)),
        excluded=barred,
        asked=asked,
        minimum=max(1, minimum),
        budget=asked,
    )


def merged_options(request: wire.MessagesRequest, query: str | list[int] | wire.Query) -> wire.Query:
    """The query's own options, completed by the call's. A query's own kind of budget replaces the call's whichever."""
    own = query if isinstance(query, wire.Query) else wire.Query(query=query)
    inherited = {name: getattr(request, name) for name in wire.Query.model_fields if name != "query"}
    if own.ratio is not None or own.budget is not None or own.coverage is not None:
        inherited.update(ratio=None, budget=None, coverage=None)
    given = {name: value for name, value in own.model_dump().items() if value is not None}
    return wire.Query(**{**inherited, **given})


def check_encoding(encoding: wire.Encoding | None, sender: RegisteredSender, where: str) -> None:
    """Raises InvalidRequestError for token ids of a sender whose positions do not all have one."""
    if encoding == "token_ids" and sender.rows is not None:
        raise InvalidRequestError(
            "this sender has continuous rows, which have no token ids; ask for mixed or embeddings", param=where
        )


def _asked(options: wire.Query, sender: RegisteredSender) -> int:
    if options.coverage is not None:
        return len(sender)
    if options.budget is not None:
        return positions_for_budget(len(sender), options.budget)
    ratio = wire.DEFAULT_RATIO if options.ratio is None else options.ratio
    return positions_for_ratio(len(sender), sender.inherited, ratio)


async def _wrapped(
    engine: Engine, template: str, options: wire.Query, request: wire.MessagesRequest, index: int
) -> WrappedQuery:
    where = f"queries[{index}]"
    if not isinstance(options.query, str):
        check_ids(options.query, engine.vocab_size, where)
        return WrappedQuery(options.query, 0, len(options.query))
    own = options.query_template if options.query_template is not None else template
    tokenizer = engine.tokenizer
    try:
        return await engine.tokenizing(wrap_query, tokenizer, options.query, own)
    except CacheBackError as error:
        error.param = _named(request, index, error.param) if error.param else where
        raise


def _named(request: wire.MessagesRequest, index: int, option: str) -> str:
    """An option as the caller wrote it: the query's own, or the call's."""
    own = request.queries[index]
    is_own = isinstance(own, wire.Query) and getattr(own, option) is not None
    return f"queries[{index}].{option}" if is_own else option


def public_span_scores(scores: list[float], private: Runs, span: int, reach: int = 3) -> list[float | None]:
    """Mean scores by span, without those that a private position has a part in.

    Max-pooling carries a score ``reach`` positions on, and position 0 is pinned to the best score of all.
    """
    return [
        None if private and (n == 0 or overlap(private, n * span - reach, (n + 1) * span + reach)) else score
        for n, score in enumerate(scores)
    ]
