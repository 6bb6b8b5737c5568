"""The receiver's answers of a recall run: from the full context, from messages, from text reports, from nothing.

Seconds run from the question to the end of the answer, with the senders prefilled: making the message or decoding
the report, then the receiver's own prefill and its answer. Calls for several contexts are made one after the other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cb_loadtest.cases import Case
from cb_loadtest.documents import Document
from cb_loadtest.evidence import reference_share
from cb_loadtest.recall_journal import Record
from cb_loadtest.recall_plan import AnswerPlan, Plan, Selector, Size, as_query, case_digest, key_of, message_fields
from cb_loadtest.receiver import reply
from cb_sglang.client import CacheBack

Source: TypeAlias = Literal["full", "message", "report", "nothing"]
REPORT_PROMPT = "\n\nA colleague asks: {query}\nReport, with every fact above that helps to answer:"


class AnswerError(RuntimeError):
    """An answer could not be measured as it should be; the message says why."""


@dataclass(frozen=True, slots=True)
class AnswerUnit:
    """One answer: ``selector`` for messages only, ``size`` for messages and reports, ``query`` as it is sent."""

    source: Source
    selector: Selector | None
    size: Size | None
    query: dict[str, Any]
    key: str


def answer_units(plan: Plan, case: Case) -> list[AnswerUnit]:
    """Every answer of the plan for one case; none without reference answers."""
    answer = plan.answer
    if answer is None or not case.answer:
        return []
    digest = case_digest(case)

    def unit(source: Source, selector: Selector | None = None, size: Size | None = None) -> AnswerUnit:
        query: dict[str, Any] = {}
        if selector is not None and size is not None:
            query = {**message_fields(selector, size, case=case, seed=plan.seed), "query": case.question}
            if plan.wordings[0] is not None:
                query["query_template"] = plan.wordings[0]
        asked = {
            "answer": source,
            "size": size.label if size is not None else None,
            "query": query,
            "prompt": answer.prompt,
            "max_new_tokens": answer.max_new_tokens,
        }
        return AnswerUnit(source, selector, size, query, key_of(digest, json.dumps(asked, sort_keys=True)))

    return [
        unit("full"),
        unit("nothing"),
        *(unit("message", selector, size) for selector in answer.selectors for size in answer.sizes),
        *(unit("report", None, size) for size in answer.sizes),
    ]


def measure_answer(
    client: CacheBack, answer: AnswerPlan, case: Case, unit: AnswerUnit, documents: Sequence[Document]
) -> Record:
    """Make what the receiver reads, let it answer, and score the answer. Raises AnswerError and the client's errors."""
    started = time.perf_counter()
    given = [token for document in documents for token in _given(client, case, unit, document)]
    before = time.perf_counter() - started
    made = reply(client, given, case.question, prompt=answer.prompt, max_new_tokens=answer.max_new_tokens)
    loose = reference_share(made.text, case.answer)
    return {
        "measure": "answer",
        "case": case.id,
        "source": unit.source,
        "selector": unit.selector.label if unit.selector is not None else None,
        "size": unit.size.label if unit.size is not None else None,
        "strict": float(loose == 1.0),
        "loose": loose,
        "seconds": before + made.seconds,
        "seconds_before_receiver": before,
        "given_tokens": len(given),
        "prompt_tokens": made.prompt_tokens,
        "cached_tokens": made.cached_tokens,
        "reply": made.text.strip()[:2_000],
    }


def _given(client: CacheBack, case: Case, unit: AnswerUnit, document: Document) -> list[int]:
    """Token ids that the receiver gets of one context."""
    if unit.source == "nothing":
        return []
    if unit.source == "full":
        return document.ids
    if unit.source == "message":
        (message,) = client.messages(document.sender, [as_query(unit.query)], encoding="token_ids")
        if message.token_ids is None:
            raise AnswerError("the server sent a message without token ids, although they were asked for")
        return message.token_ids
    assert unit.size is not None
    prompt = client.tokenize(REPORT_PROMPT.replace("{query}", case.question), add_special_tokens=False)
    # A report that ends early would be shorter than the message it is compared with.
    count = unit.size.positions(len(document.ids))
    report = client.generate(input_ids=[*document.ids, *prompt], max_new_tokens=count, ignore_eos=True)
    if len(report.output_ids) != count:
        raise AnswerError(f"the report has {len(report.output_ids)} tokens, not {count}")
    # The text, not the ids: a report is text, and special tokens that were decoded have no place in it.
    return client.tokenize(report.text)
