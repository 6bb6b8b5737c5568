"""From kept positions to what a receiver can read, in any encoding."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cb_sglang import wire
from cb_sglang.message_payload import MessagePayload
from cb_sglang.payload import to_base64
from cb_sglang.query_plan import QueryPlan, public_span_scores
from cb_sglang.rows import Rows
from cb_sglang.runs import runs_of
from cb_sglang.seam.engine import Engine, Scored
from cb_sglang.senders import RegisteredSender
from cb_sglang.spec import SPAN

GAP = " [...] "


@dataclass(frozen=True, slots=True)
class Made:
    """A message in the forms of the wire: JSON, and what goes into a safetensors file."""

    message: wire.Message
    payload: MessagePayload


async def make_message(
    engine: Engine,
    sender: RegisteredSender,
    plan: QueryPlan,
    scored: Scored,
    *,
    grant: wire.GrantReport,
    miss: wire.CacheMiss | None,
    queue_seconds: float,
    started: float,
) -> Made:
    """The message of one query. Raises EngineError.

    miss: why the sender had to be prefilled before its queries, if it had. started: when the call began (perf_counter).
    """
    encoding = plan.options.encoding or ("token_ids" if sender.rows is None else "mixed")
    token_ids, rows, text = None, None, None
    if encoding == "text":
        text = await engine.tokenizing(decode_text, engine.tokenizer, sender, scored.positions)
    else:
        token_ids, rows = await _content(engine, sender, scored.positions, encoding)
    payload = MessagePayload(
        id=f"msg_{uuid.uuid4().hex}",
        sender=sender.id,
        index=scored.index,
        encoding=encoding,
        model_fingerprint=engine.fingerprint,
        tokenizer_fingerprint=engine.tokenizer_fingerprint,
        query_hash=plan.query_hash,
        sender_positions=len(sender),
        positions=tuple(scored.positions),
        token_ids=token_ids,
        rows=rows,
        text=text,
    )
    in_whole_pages = len(sender) // engine.page_size * engine.page_size
    packed = None if rows is None else await engine.tokenizing(to_base64, payload)
    options, wrapped = plan.options, plan.wrapped
    chosen = options.budget is None and options.coverage is None
    ratio = (wire.DEFAULT_RATIO if options.ratio is None else options.ratio) if chosen else None
    scores = scored.span_scores
    message = wire.Message(
        id=payload.id,
        sender=sender.id,
        index=scored.index,
        encoding=encoding,
        selector=plan.selector.name,
        sender_positions=len(sender),
        query_positions=len(wrapped.input_ids),
        voting_positions=wrapped.vote_stop - wrapped.vote_start,
        cached_positions=scored.cached_positions,
        cache_miss=miss or ("evicted" if scored.cached_positions < in_whole_pages else None),
        budget=wire.BudgetReport(
            ratio=ratio, budget=options.budget, coverage=options.coverage, positions=len(scored.positions)
        ),
        positions=scored.positions,
        spans=list(payload.spans),
        token_ids=None if token_ids is None else list(token_ids),
        text=text,
        payload=packed,
        payload_bytes=payload.payload_bytes,
        size=_size(engine, sender, payload),
        grant=grant,
        model_fingerprint=payload.model_fingerprint,
        tokenizer_fingerprint=payload.tokenizer_fingerprint,
        query_hash=payload.query_hash,
        span_scores=None if scores is None else public_span_scores(scores, sender.private, SPAN),
        timings=wire.Timings(
            queue_seconds=queue_seconds,
            engine_seconds=scored.seconds,
            total_seconds=time.perf_counter() - started,
        ),
    )
    return Made(message, payload)


async def _content(
    engine: Engine, sender: RegisteredSender, positions: Sequence[int], encoding: wire.Encoding
) -> tuple[tuple[int, ...] | None, Rows | None]:
    """The token ids and rows of a message in one of the encodings that have them."""
    token_ids = tuple(sender.input_ids[p] for p in positions)
    if encoding == "token_ids":
        return token_ids, None
    own = sender.rows
    with_rows = frozenset(own.positions) if own is not None else frozenset()
    at = [n for n, p in enumerate(positions) if p in with_rows]
    kept = None if own is None else own.take([positions[n] for n in at])
    if encoding == "mixed":
        if kept is None:
            return token_ids, Rows((), engine.row_dtype, engine.hidden_size, b"")
        return token_ids, kept.at(at)
    looked_up = await engine.embeddings(token_ids)
    if kept is None:
        return None, looked_up
    size, data = looked_up.row_bytes, bytearray(looked_up.data)
    for number, n in enumerate(at):
        data[n * size : (n + 1) * size] = kept.data[number * size : (number + 1) * size]
    return None, Rows(looked_up.positions, looked_up.dtype, looked_up.hidden, bytes(data))


def decode_text(tokenizer: Any, sender: RegisteredSender, positions: Sequence[int]) -> str:
    """The kept spans as text, in order, with a mark at every gap (the ``text`` encoding). A row has no text."""
    with_rows = frozenset(sender.rows.positions) if sender.rows is not None else frozenset()
    spans = runs_of(p for p in positions if p not in with_rows)
    texts = (tokenizer.decode(list(sender.input_ids[a:b]), skip_special_tokens=True) for a, b in spans)
    return GAP.join(text for text in texts if text)


def _size(engine: Engine, sender: RegisteredSender, payload: MessagePayload) -> wire.SizeReport:
    size = max(1, payload.payload_bytes)
    return wire.SizeReport(
        payload_bytes=payload.payload_bytes,
        against_full_kv=len(sender) * engine.kv_bytes / size,
        against_embeddings=len(payload.positions) * engine.embedding_bytes / size,
    )
