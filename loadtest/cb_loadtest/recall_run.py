"""The measuring part of a recall run: contexts become senders, units become messages, finished units are journalled.

A case that fails is noted and left out; the run ends early only when the server is gone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from cb_loadtest.cases import Case
from cb_loadtest.documents import Document, register_text
from cb_loadtest.evidence import AlignmentError, evidence_recall
from cb_loadtest.recall_answers import AnswerError, AnswerUnit, answer_units, measure_answer
from cb_loadtest.recall_journal import Journal, Record
from cb_loadtest.recall_plan import Plan, Unit, as_query, units
from cb_sglang.client import APIConnectionError, APIError, CacheBack, Message, Query
from cb_sglang.errors import CacheBackError, CapacityError, InvalidRequestError, SenderNotFoundError
from cb_sglang.wire import MAX_QUERIES

MAX_FAILURES = 10_000
_BUSY_TRIES = 8
_BUSY_SECONDS = 30.0


class MeasureError(RuntimeError):
    """A message breaks the budget law or does not fit its sender, so its recall would say nothing."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What could not be measured, and why; ``selector`` and ``size`` are None when the whole case failed."""

    case: str
    selector: str | None
    size: str | None
    error: str


@dataclass(slots=True)
class Failures:
    """At most ``MAX_FAILURES`` of them in detail; ``count`` counts them all."""

    items: list[Failure] = field(default_factory=list)
    count: int = 0

    def add(self, case: Case, what: Unit | AnswerUnit | None, error: Exception) -> None:
        self.count += 1
        if len(self.items) < MAX_FAILURES:
            selector = what.selector.label if what is not None and what.selector is not None else None
            size = what.size.label if what is not None and what.size is not None else None
            self.items.append(Failure(case.id, selector, size, f"{type(error).__name__}: {error}"[:1_000]))


def unit_count(plan: Plan, cases: Sequence[Case]) -> int:
    """How many units a run has to measure, finished ones included."""
    return sum(len(units(plan, case)) + len(answer_units(plan, case)) for case in cases)


class Runner:
    """Measures the plan for cases, one after the other.

    on_unit(count): called with the number of units that are finished, failed or already in the journal.
    on_case(text):  called with what is being done.
    """

    def __init__(
        self,
        client: CacheBack,
        plan: Plan,
        journal: Journal,
        *,
        on_unit: Callable[[int], None] = lambda count: None,
        on_case: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.failures = Failures()
        self._client = client
        self._plan = plan
        self._journal = journal
        self._on_unit = on_unit
        self._on_case = on_case
        self._documents: dict[str, Document] = {}
        self._foreign: frozenset[str] = frozenset()
        self._open: set[str] = set()  # keys of the present case's units that are neither measured nor failed

    def run(self, cases: Sequence[Case]) -> list[Record]:
        """The records of all units of ``cases`` that are measured now or were before, in the order of the cases.

        Raises APIConnectionError when the server is gone; what was measured is in the journal.
        """
        self._foreign = frozenset(sender.id for sender in self._client.list_senders())
        uses = Counter(context.text for case in cases for context in case.contexts)
        try:
            for case in _by_document(cases):
                self._case(case)
                uses.subtract(context.text for context in case.contexts)
                self._forget([context.text for context in case.contexts if not uses[context.text]])
        finally:
            self._forget(list(self._documents))
        return self._records(cases)

    def _records(self, cases: Sequence[Case]) -> list[Record]:
        done = self._journal.records
        keys: list[str] = []
        for case in cases:
            keys += [unit.key for unit in units(self._plan, case)]
            keys += [unit.key for unit in answer_units(self._plan, case)]
        return [done[key] for key in keys if key in done]

    def _case(self, case: Case) -> None:
        """Measure what is missing of one case. Raises APIConnectionError when the server is gone."""
        done = self._journal.records
        recall, answers = units(self._plan, case), answer_units(self._plan, case)
        keys = {unit.key for unit in recall} | {unit.key for unit in answers}
        self._open = {key for key in keys if key not in done}
        self._on_unit(len(keys) - len(self._open))
        if not self._open:
            return
        self._on_case(case.id)
        for last_try in (False, True):
            try:
                self._recall(case, [unit for unit in recall if unit.key in self._open])
                self._answers(case, [unit for unit in answers if unit.key in self._open])
                break
            except SenderNotFoundError as error:
                # A server forgets senders (a restart, an expiry): register again, once.
                self._documents.clear()
                if last_try:
                    self.failures.add(case, None, error)
            except APIConnectionError as error:
                if not self._alive():
                    raise
                self.failures.add(case, None, error)
                break
            except (CacheBackError, AlignmentError) as error:
                self.failures.add(case, None, error)
                break
        self._on_unit(len(self._open))

    def _close(self, unit: Unit | AnswerUnit) -> None:
        """Count a unit that is measured, or has failed for good."""
        self._open.discard(unit.key)
        self._on_unit(1)

    def _recall(self, case: Case, pending: Sequence[Unit]) -> None:
        if not pending:
            return
        queries: dict[int, Query] = {}
        for number, unit in enumerate(pending):
            try:
                queries[number] = as_query(unit.fields())
            except InvalidRequestError as error:
                self.failures.add(case, unit, error)
                self._close(unit)
        documents = [self._document(context.text) for context in case.contexts]
        parts: dict[int, list[Message]] = {number: [] for number in queries}
        for document in documents:
            asked = list(parts)
            for index, outcome in ask(self._client, document, [queries[number] for number in asked]):
                number = asked[index]
                unit = pending[number]
                if isinstance(outcome, Message):
                    parts[number].append(outcome)
                    if len(parts[number]) < len(documents):
                        continue
                    try:
                        self._journal.add(unit.key, recall_record(case, unit, documents, parts[number]))
                    except MeasureError as error:
                        self.failures.add(case, unit, error)
                else:
                    self.failures.add(case, unit, outcome)
                del parts[number]
                self._close(unit)

    def _answers(self, case: Case, pending: Sequence[AnswerUnit]) -> None:
        if not pending:
            return
        documents = [self._document(context.text) for context in case.contexts]
        assert self._plan.answer is not None
        for unit in pending:
            self._on_case(f"{case.id}: answer from {unit.source}")
            try:
                self._journal.add(unit.key, measure_answer(self._client, self._plan.answer, case, unit, documents))
            except (APIConnectionError, SenderNotFoundError):
                raise
            except (CacheBackError, AnswerError) as error:
                self.failures.add(case, unit, error)
            self._close(unit)

    def _document(self, text: str) -> Document:
        if text not in self._documents:
            self._documents[text] = register_text(self._client, text)
        return self._documents[text]

    def _forget(self, texts: Sequence[str]) -> None:
        """Delete senders that were not there before this run, so that it leaves no trace at the server."""
        for text in texts:
            document = self._documents.pop(text, None)
            if document is not None and document.sender.id not in self._foreign:
                with suppress(CacheBackError):
                    self._client.delete_sender(document.sender)

    def _alive(self) -> bool:
        with suppress(CacheBackError):
            return self._client.health()
        return False


def _by_document(cases: Sequence[Case]) -> list[Case]:
    """Cases over the same documents next to each other, so that each document is held for a short time."""
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(tuple(context.text for context in case.contexts), []).append(case)
    return [case for group in groups.values() for case in group]


def recall_record(case: Case, unit: Unit, documents: Sequence[Document], messages: Sequence[Message]) -> Record:
    """What a unit's messages, one a context, keep of the case's gold tokens. Raises MeasureError."""
    kept: set[int] = set()
    gold: set[int] = set()
    start = 0  # the contexts' positions one after the other
    for number, (document, message) in enumerate(zip(documents, messages, strict=True)):
        check_message(message, len(document.ids), unit)
        spans = [(span.start, span.end) for span in case.gold if span.context == number]
        kept.update(start + position for position in message.positions)
        gold.update(start + token for token in document.tokens.tokens_over(spans))
        start += len(document.ids)
    if not gold:
        raise MeasureError("no token covers the gold spans")
    recall = evidence_recall(kept, gold)
    return {
        "measure": "recall",
        "case": case.id,
        "selector": unit.selector.label,
        "size": unit.size.label,
        "wording": unit.wording,
        "irrelevant": unit.irrelevant,
        "recall": recall,
        "all_gold": recall == 1.0,
        "gold_tokens": len(gold),
        "kept": len(kept),
        "positions": start,
    }


def check_message(message: Message, total: int, unit: Unit) -> None:
    """Raises MeasureError unless the message keeps exactly what the budget law says, in order."""
    positions = message.positions
    if message.sender_positions != total or any(not 0 <= position < total for position in positions):
        raise MeasureError(f"the message does not fit its sender of {total} positions")
    if any(before >= after for before, after in pairwise(positions)):
        raise MeasureError("the message's positions are not ascending")
    expected = unit.size.positions(total)
    if len(positions) != expected:
        raise MeasureError(f"the message keeps {len(positions)} positions; the budget law says {expected} of {total}")


def ask(
    client: CacheBack, document: Document, queries: Sequence[Query]
) -> Iterator[tuple[int, Message | CacheBackError]]:
    """One message, or the error instead of it, for every query; ``(index, outcome)`` as they come.

    Asks for all in as few calls as the server's bound allows. A call that fails is split, so that one bad query
    costs only itself. Raises APIConnectionError and SenderNotFoundError, which splitting does not help.
    """
    indices = list(range(len(queries)))
    batches = [indices[start : start + MAX_QUERIES] for start in range(0, len(indices), MAX_QUERIES)][::-1]
    busy = 0
    while batches:
        batch = batches.pop()
        missing = dict.fromkeys(batch)
        try:
            asked = [queries[index] for index in batch]
            for message in client.stream_messages(document.sender, asked, encoding="token_ids"):
                del missing[batch[message.index]]
                yield batch[message.index], message
        except (APIConnectionError, SenderNotFoundError):
            raise
        except CacheBackError as error:
            left = list(missing)
            if isinstance(error, CapacityError) and busy < _BUSY_TRIES:
                busy += 1
                time.sleep(min(getattr(error, "retry_after", None) or 1.0, _BUSY_SECONDS))
                batches.append(left)
            elif (culprit := _culprit(error, batch)) in missing:
                left.remove(culprit)
                batches += [left] * bool(left)
                yield culprit, error
            elif len(left) == 1:
                yield left[0], error
            else:
                half = len(left) // 2
                batches += [part for part in (left[half:], left[:half]) if part]


def _culprit(error: CacheBackError, batch: Sequence[int]) -> int:
    """The query that a stream's error is about; -1 when it does not say."""
    index = error.index if isinstance(error, APIError) else None
    return batch[index] if index is not None and 0 <= index < len(batch) else -1
