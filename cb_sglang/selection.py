"""Selectors that need no query rows: scored here, in the HTTP process, and what they measure kept with the sender.

``streaming_llm`` and ``random`` look at nothing, ``bm25`` at the spans' words, ``snapkv``, ``chunkkv``, ``h2o`` and
``kvzip`` at statistics of the sender's own rows: those take one pass in the engine a sender, however many queries come.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from cb_kernels import selectors, statistics
from cb_kernels.keep import keep_positions
from cb_kernels.selectors.spans import span_means
from cb_sglang.seam.engine import Engine
from cb_sglang.senders import RegisteredSender
from cb_sglang.single_flight import SingleFlight
from cb_sglang.spec import SPAN, StatisticSpec

MAX_KEPT_POSITIONS = 16_000_000
KVZIP_INSTRUCTION = "\n\nRepeat the previous context exactly.\n\n"


class SenderMeasurements:
    """What was measured of senders, least recently used first out, bounded in positions (4 bytes each)."""

    def __init__(self, engine: Engine, max_positions: int = MAX_KEPT_POSITIONS) -> None:
        self._engine = engine
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

    async def span_texts(self, sender: RegisteredSender) -> list[str]:
        """The text of each 16-position span, for the text baseline."""
        return await self._engine.tokenizing(_span_texts, self._engine, sender.input_ids)

    def forget(self, sender_id: str) -> None:
        """Drop what is kept of a sender."""
        for key in [key for key in self._kept if key[0] == sender_id]:
            del self._kept[key]

    async def _measure(self, sender: RegisteredSender, name: str) -> Tensor:
        ids, total = list(sender.input_ids), len(sender)
        if name == "kvzip":
            instruction = await self._engine.tokenizing(_plain_ids, self._engine, KVZIP_INSTRUCTION)
            passes = [
                ([*ids, *statistics.kvzip_tail(instruction, ids, chunk)], chunk)
                for chunk in statistics.kvzip_chunks(total, 0)
            ]
        else:
            passes = [(ids, (0, 0))]
        first_row = statistics.get(name).first_row(total, 0)
        requests = [
            (tokens, StatisticSpec(total, name, first_row, chunk_start=chunk[0], chunk_stop=chunk[1]))
            for tokens, chunk in passes
        ]
        scores = torch.zeros(total)
        async for part in self._engine.measure(requests):
            scores += torch.tensor(part)
        return scores


async def select_without_query_rows(
    measurements: SenderMeasurements,
    sender: RegisteredSender,
    *,
    entry: selectors.SelectorEntry,
    options: selectors.SelectorOptions,
    query: str | None,
    budget: int,
) -> tuple[list[int], list[float]]:
    """Kept positions, ascending, and the mean score of every span."""
    statistic = None if entry.statistic is None else await measurements.statistic(sender, entry.statistic)
    texts = await measurements.span_texts(sender) if entry.needs is selectors.Needs.TEXT else None
    context = selectors.SelectorContext(
        length=len(sender), options=options, statistic=statistic, query=query, span_texts=texts
    )
    return await asyncio.to_thread(_cut, entry, context, budget)


def _cut(
    entry: selectors.SelectorEntry, context: selectors.SelectorContext, budget: int
) -> tuple[list[int], list[float]]:
    scores = entry(context)
    protected = torch.zeros(1, context.length, dtype=torch.bool)
    protected[0, 0] = True
    kept = keep_positions(
        scores[None],
        torch.tensor([context.length]),
        torch.tensor([budget]),
        max_budget=budget,
        protected=protected,
        span=SPAN,
    )
    return kept.positions[0, :budget].tolist(), span_means(scores, SPAN).tolist()


def _span_texts(engine: Engine, input_ids: Sequence[int]) -> list[str]:
    starts = range(0, len(input_ids), SPAN)
    return [engine.tokenizer.decode(list(input_ids[a : a + SPAN]), skip_special_tokens=True) for a in starts]


def _plain_ids(engine: Engine, text: str) -> list[int]:
    return list(engine.tokenizer.encode(text, add_special_tokens=False))
