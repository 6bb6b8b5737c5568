"""The three ways for a receiver to learn what a sender knows, each as one timed request.

message:      the server cuts a message from the sender's cache; nothing is decoded.
text_report:  the sender writes a report of as many tokens as the message has positions.
full_context: the receiver prefills the whole context.

A receiver reads what it was given behind a beginning of its own, of as many tokens in all three. In front of a
message of text these are as many words instead, which are a few tokens more.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pydantic import BaseModel, Field

from cb_loadtest.load.content import Question, SenderText
from cb_loadtest.load.transport import Link, Meta
from cb_loadtest.load.workload import Receivers
from cb_sglang.client import calls
from cb_sglang.client.calls import Answer, Call, parse
from cb_sglang.client.errors import APIResponseError
from cb_sglang.wire import Timings

TOKEN_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, complete. ``preamble`` are the receiver's own first tokens, with the tokenizer's ``bos``.

    ``preamble_text`` are as many words instead, for a message of text.
    """

    link: Link
    sender_id: str
    sender: SenderText
    question: Question
    receivers: Receivers
    answering: bool
    preamble: Sequence[int]
    preamble_text: str


@dataclass(slots=True)
class Outcome:
    """What a request came to; times on the loop's clock.

    message_at:  the receiver has what it needs: the message, the report, or the prefilled context.
    sender_positions, cached_positions: of the sender's prefix, and how many needed no prefill.
    kept, payload_bytes: positions and bytes that went to the receiver.
    receiver_cached_tokens: of the receiver's prompt; None when nobody read one.
    server:      the server's own seconds, where it tells them.
    """

    message_at: float
    ended_at: float
    sender_positions: int
    cached_positions: int
    kept: int
    payload_bytes: int
    input_tokens: int
    output_tokens: int = 0
    first_token_at: float | None = None
    answer_gaps: list[float] = field(default_factory=list)
    asked: int | None = None
    grant_limit: str | None = None
    receiver_cached_tokens: int | None = None
    server: Timings | None = None


Way = Callable[[Ask], Awaitable[Outcome]]


class Grant(BaseModel):
    asked: int | None = None
    granted: int | None = None
    limit: str | None = None


class CutMessage(BaseModel):
    """What the generator reads of a message; a server may say less, or more."""

    sender_positions: int
    query_positions: int
    cached_positions: int
    positions: list[int]
    token_ids: list[int] | None = None
    text: str | None = None
    payload_bytes: int | None = None
    grant: Grant | None = None
    timings: Timings | None = None

    @property
    def bytes(self) -> int:
        """Payload, as the server counts it, else of the encoding."""
        if self.payload_bytes is not None:
            return self.payload_bytes
        return TOKEN_ID_BYTES * len(self.positions) if self.text is None else len(self.text.encode())


class _Cut(BaseModel):
    data: list[CutMessage] = Field(min_length=1)


class Generated(BaseModel):
    """What the generator reads of ``/generate``."""

    output_ids: list[int]
    meta_info: Meta = Meta()


async def message(ask: Ask) -> Outcome:
    receivers = ask.receivers
    options = receivers.model_dump(include={"ratio", "budget", "encoding", "policy"})
    (got,) = await cut_messages(ask.link, ask.sender_id, [ask.question.text], options)
    now = _now()
    outcome = Outcome(
        message_at=now,
        ended_at=now,
        sender_positions=got.sender_positions,
        cached_positions=min(got.cached_positions, got.sender_positions),
        kept=len(got.positions),
        payload_bytes=got.bytes,
        input_tokens=got.sender_positions + got.query_positions,
        asked=None if got.grant is None else got.grant.asked,
        grant_limit=None if got.grant is None else got.grant.limit,
        server=got.timings,
    )
    if ask.answering:
        if got.text is not None:
            given = ask.preamble_text + got.text
            await _answer(ask, outcome, f'"text":{json.dumps(given + ask.question.prompt)}')
        else:
            await _answer(ask, outcome, _reading(ask, _json(got.token_ids or [])))
    return outcome


async def text_report(ask: Ask) -> Outcome:
    tokens = ask.receivers.kept(len(ask.sender.ids))
    body = _generate_body(_input_ids(ask.sender.json_ids, ask.question.json_report_ids), tokens, stream=False)
    report = await ask.link.run(_generate(body))
    if len(report.output_ids) != tokens:
        raise APIResponseError(f"the report has {len(report.output_ids)} tokens, not {tokens}; its time says nothing")
    now = _now()
    outcome = Outcome(
        message_at=now,
        ended_at=now,
        sender_positions=len(ask.sender.ids),
        cached_positions=min(report.meta_info.cached_tokens, len(ask.sender.ids)),
        kept=tokens,
        payload_bytes=TOKEN_ID_BYTES * tokens,
        input_tokens=len(ask.sender.ids) + ask.question.report_length,
        output_tokens=tokens,
    )
    if ask.answering:
        await _answer(ask, outcome, _reading(ask, _json(report.output_ids)))
    return outcome


async def full_context(ask: Ask) -> Outcome:
    sender = ask.sender
    outcome = Outcome(
        message_at=0.0,
        ended_at=0.0,
        sender_positions=len(sender.ids),
        cached_positions=0,
        kept=len(sender.ids),
        payload_bytes=TOKEN_ID_BYTES * len(sender.ids),
        input_tokens=0,
    )
    tokens = ask.receivers.max_new_tokens if ask.answering else 1
    times = await ask.link.stream(_generate_body(_reading(ask, sender.json_ids), tokens, stream=True))
    if times.completion_tokens != tokens:
        raise _short(times.completion_tokens, tokens)
    outcome.message_at, outcome.ended_at = times.first, times.last
    outcome.cached_positions = max(0, min(times.cached_tokens - len(ask.preamble), len(sender.ids)))
    outcome.receiver_cached_tokens = times.cached_tokens
    outcome.input_tokens, outcome.output_tokens = times.prompt_tokens, tokens
    if ask.answering:
        outcome.first_token_at, outcome.answer_gaps = times.first, times.gaps
    return outcome


WAYS: Mapping[str, Way] = MappingProxyType(
    {"message": message, "text_report": text_report, "full_context": full_context}
)


async def cut_messages(
    link: Link, sender_id: str, queries: Sequence[str | Sequence[int]], options: Mapping[str, object]
) -> list[CutMessage]:
    """One message a query. Raises APIResponseError when the numbers differ, and what ``Link.run`` raises."""
    given = {name: value for name, value in options.items() if value is not None}
    call = calls.create_messages(sender_id, queries, given)
    cut = await link.run(Call(call.method, call.path, _read_cut, call.body))
    if len(cut.data) != len(queries):
        raise APIResponseError(f"{len(queries)} queries were answered by {len(cut.data)} messages")
    return cut.data


async def prefill(link: Link, json_ids: str) -> Generated:
    """Put a prompt into the cache, and time nothing but that: one token is decoded."""
    return await link.run(_generate(_generate_body(_input_ids(json_ids), 1, stream=False)))


async def _answer(ask: Ask, outcome: Outcome, content: str) -> None:
    """The receiver reads ``content`` and answers; what that took goes into ``outcome``."""
    tokens = ask.receivers.max_new_tokens
    times = await ask.link.stream(_generate_body(content, tokens, stream=True))
    if times.completion_tokens != tokens:
        raise _short(times.completion_tokens, tokens)
    outcome.first_token_at, outcome.ended_at, outcome.answer_gaps = times.first, times.last, times.gaps
    outcome.receiver_cached_tokens = times.cached_tokens
    outcome.input_tokens += times.prompt_tokens
    outcome.output_tokens += tokens


def _short(got: int, wanted: int) -> APIResponseError:
    return APIResponseError(f"the answer has {got} tokens, not {wanted}; its time says nothing")


def _generate(body: bytes) -> Call[Generated]:
    return Call("POST", "/generate", _read_generated, body)


def generate_stream_body(json_ids: str, tokens: int) -> bytes:
    """A body of ``/generate`` that streams exactly ``tokens`` tokens."""
    return _generate_body(_input_ids(json_ids), tokens, stream=True)


def _generate_body(content: str, tokens: int, *, stream: bool) -> bytes:
    """Greedy, exactly ``tokens`` tokens. ``content`` is JSON already: senders are rendered once, not per request."""
    params = f'{{"max_new_tokens":{tokens},"temperature":0,"ignore_eos":true}}'
    return f'{{{content},"sampling_params":{params},"stream":{"true" if stream else "false"}}}'.encode()


def _reading(ask: Ask, json_given: str) -> str:
    """A receiver's prompt: its beginning, the token ids it was given, the question."""
    return _input_ids(_json(ask.preamble), json_given, ask.question.json_prompt_ids)


def _input_ids(*parts: str) -> str:
    return f'"input_ids":[{",".join(part for part in parts if part)}]'


def _json(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


def _read_cut(answer: Answer) -> _Cut:
    return parse(_Cut, answer.body, status=answer.status)


def _read_generated(answer: Answer) -> Generated:
    return parse(Generated, answer.body, status=answer.status)


def _now() -> float:
    return asyncio.get_running_loop().time()
