"""Selectors that need no query rows: scored here, in the HTTP process, and what they measure kept with the sender.

``streaming_llm`` and ``random`` look at nothing, ``bm25`` at the spans' words, ``snapkv``, ``chunkkv``, ``h2o`` and
``kvzip`` at statistics of the sender's own rows: those take one pass in the engine a sender, however many queries come.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from cb_kernels import selectors, statistics
from cb_kernels.keep import coverage_budgets, keep_positions
from cb_kernels.selectors.spans import span_means
from cb_sglang.errors import InvalidRequestError
from cb_sglang.masks import run_masks
from cb_sglang.query_plan import QueryPlan
from cb_sglang.seam.engine import Context, Engine
from cb_sglang.senders import RegisteredSender
from cb_sglang.single_flight import SingleFlight
from cb_sglang.spec import SPAN, StatisticSpec

MAX_KEPT_POSITIONS = 16_000_000
KVZIP_INSTRUCTION = "\n\nRepeat the previous context exactly.\n\n"


class SenderMeasurements:
    """What was measured of senders, least recently used first out, bounded in positions (4 bytes each).

    ``context_of`` gives a sender as the engine takes it.
    """

    def __init__(
        self,
        engine: Engine,
        context_of: Callable[[RegisteredSender], Context],
        max_positions: int = MAX_KEPT_POSITIONS,
    ) -> None:
        self._engine = engine
        self._context_of = context_of
        self._max_positions = max_positions
        self._kept: OrderedDict[tuple[str, str], Tensor] = OrderedDict()
        self._flights: SingleFlight[Tensor] = SingleFlight()

    async def statistic(self, sender: RegisteredSender, name: str) -> Tensor:
        """The named statistic of a sender, float32 [T]. Callers that ask at once share one pass."""
        key = (sender.id, name)
        if key not in self._kept:
            self._kept[key] = await self._flights.run(f"{sender.id} {name}", lambda: self._measure(sender, name))
        self._kept.move_to_end(key)
        found = self._kept[key]
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > self._max_positions:
            self._kept.popitem(last=False)
        return found

    def has(self, sender: RegisteredSender, name: str) -> bool:
        """Whether the statistic has been measured and is still kept."""
        return (sender.id, name) in self._kept

    async def span_texts(self, sender: RegisteredSender) -> list[str]:
        """The text of each 16-position span, for the text baseline."""
        return await self._engine.tokenizing_long(_span_texts, self._engine, sender)

    def forget(self, sender_id: str) -> None:
        """Drop what is kept of a sender."""
        for key in [key for key in self._kept if key[0] == sender_id]:
            del self._kept[key]

    async def _measure(self, sender: RegisteredSender, name: str) -> Tensor:
        context, total = self._context_of(sender), len(sender)
        if name == "kvzip":
            if sender.rows is not None:
                raise InvalidRequestError(
                    "kvzip repeats the sender's tokens, and this sender has continuous rows; choose another selector",
                    param="selector",
                )
            instruction = await self._engine.tokenizing(_plain_ids, self._engine, KVZIP_INSTRUCTION)
            passes = [
                (context.followed_by(statistics.kvzip_tail(instruction, context.input_ids, chunk)), chunk)
                for chunk in statistics.kvzip_chunks(total, 0)
            ]
        else:
            passes = [(context, (0, 0))]
        first_row = statistics.get(name).first_row(total, sender.latent)
        requests = [
            (
                tokens,
                StatisticSpec(
                    total, name, first_row, latent_len=sender.latent, chunk_start=chunk[0], chunk_stop=chunk[1]
                ),
            )
            for tokens, chunk in passes
        ]
        scores = torch.zeros(total)
        async for part in self._engine.measure(requests):
            scores += torch.tensor(part)
        return scores


async def select_without_query_rows(
    measurements: SenderMeasurements, sender: RegisteredSender, plan: QueryPlan, query: str | None
) -> tuple[list[int], list[float]]:
    """Kept positions, ascending, and the mean score of every span."""
    entry = plan.selector
    statistic = None if entry.statistic is None else await measurements.statistic(sender, entry.statistic)
    texts = await measurements.span_texts(sender) if entry.needs is selectors.Needs.TEXT else None
    context = selectors.SelectorContext(
        length=len(sender),
        latent_len=sender.latent,
        options=plan.selector_options,
        statistic=statistic,
        query=query,
        span_texts=texts,
    )
    return await asyncio.to_thread(_cut, context, plan)


def _cut(context: selectors.SelectorContext, plan: QueryPlan) -> tuple[list[int], list[float]]:
    scores, total = plan.selector(context), context.length
    lengths, budgets = torch.tensor([total]), torch.tensor([plan.budget])
    protected = run_masks([((0, 1), (total - context.latent_len, total))], total)
    excluded = run_masks([plan.excluded], total)
    if plan.options.coverage is not None:
        coverage = torch.tensor([plan.options.coverage])
        budgets = coverage_budgets(
            scores[None], lengths, budgets, coverage, protected=protected, excluded=excluded, span=SPAN
        )
    kept = keep_positions(
        scores[None],
        lengths,
        budgets,
        max_budget=plan.budget,
        protected=protected,
        excluded=excluded,
        span=SPAN,
    )
    return kept.positions[0, : int(kept.count)].tolist(), span_means(scores, SPAN).tolist()


def _span_texts(engine: Engine, sender: RegisteredSender) -> list[str]:
    ids = list(sender.input_ids)
    with_rows = frozenset(sender.rows.positions) if sender.rows is not None else frozenset()
    spans = (range(start, min(start + SPAN, len(ids))) for start in range(0, len(ids), SPAN))
    return [
        engine.tokenizer.decode([ids[p] for p in span if p not in with_rows], skip_special_tokens=True)
        for span in spans
    ]


def _plain_ids(engine: Engine, text: str) -> list[int]:
    return list(engine.tokenizer.encode(text, add_special_tokens=False))
