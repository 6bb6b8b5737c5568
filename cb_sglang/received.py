"""Messages that come back: as the lead of a new sender, or into a receiver's prompt."""

from __future__ import annotations

from cb_sglang import wire
from cb_sglang.content import Part, check_ids
from cb_sglang.errors import CacheBackError, InvalidRequestError
from cb_sglang.message_payload import MessagePayload
from cb_sglang.payload import from_base64
from cb_sglang.rows import PLACEHOLDER_ID
from cb_sglang.seam.engine import Engine


async def received_part(engine: Engine, message: wire.ReceivedMessage, where: str) -> Part:
    """A message as a piece of a sequence. ``where`` is its place in the request.

    Raises InvalidRequestError for one that this model cannot read, or whose payload is not what it says.
    """
    try:
        if message.encoding == "text":
            assert message.text is not None
            tokenizer = engine.tokenizer
            ids = await engine.tokenizing_long(_plain_ids, tokenizer, message.text)
            if not ids:
                raise InvalidRequestError("the message's text is empty")
            return Part(ids)
        payload = None if message.payload is None else await engine.tokenizing_long(from_base64, message.payload)
        _check_origin(engine, message if payload is None else payload)
        if payload is None or message.encoding == "token_ids":
            assert message.token_ids is not None
            check_ids(message.token_ids, engine.vocab_size, where)
            return Part(message.token_ids)
        return _from_payload(engine, payload, where)
    except CacheBackError as error:
        error.param = error.param or where
        raise


def _plain_ids(tokenizer: object, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))  # type: ignore[attr-defined]


def _from_payload(engine: Engine, payload: MessagePayload, where: str) -> Part:
    if payload.rows is None or not payload.positions:
        raise InvalidRequestError("the payload holds no rows or no positions; send the message as it was returned")
    if payload.rows.hidden != engine.hidden_size:
        raise InvalidRequestError(f"rows of {payload.rows.hidden} numbers; this model takes {engine.hidden_size}")
    if payload.token_ids is None:
        return Part([PLACEHOLDER_ID] * len(payload.positions), payload.rows)
    check_ids(payload.token_ids, engine.vocab_size, where)
    return Part(list(payload.token_ids), payload.rows if len(payload.rows) else None)


def _check_origin(engine: Engine, message: wire.ReceivedMessage | MessagePayload) -> None:
    for what, ours in (("tokenizer", engine.tokenizer_fingerprint), ("model", engine.fingerprint)):
        if getattr(message, f"{what}_fingerprint") != ours:
            raise InvalidRequestError(
                f"this message was made with another {what} than the one served here, and its encoding "
                f"({message.encoding}) depends on it; ask its sender for encoding text"
            )
