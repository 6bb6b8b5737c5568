"""Messages that come back: read as they were sent, and refused when this model cannot read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from recording_engine import HIDDEN, VOCABULARY, RecordingEngine, rows

from cb_sglang import wire
from cb_sglang.content import Part
from cb_sglang.errors import InvalidRequestError
from cb_sglang.message_payload import MessagePayload
from cb_sglang.payload import to_base64
from cb_sglang.received import received_part
from cb_sglang.rows import Rows

ORIGIN = {"model_fingerprint": "model", "tokenizer_fingerprint": "tokenizer"}
CONTENT: dict[str, dict[str, Any]] = {
    "token_ids": {"token_ids": (5, 6, 7)},
    "mixed": {"token_ids": (5, 0, 7), "rows": rows(1.0).at([1])},
    "embeddings": {"rows": rows(1.0, 2.0, 3.0)},
    "text": {"text": "abc"},
}
PARTS = {
    "token_ids": Part([5, 6, 7]),
    "mixed": Part([5, 0, 7], rows(1.0).at([1])),
    "embeddings": Part([0, 0, 0], rows(1.0, 2.0, 3.0)),
    "text": Part([107, 108, 109]),
}


def payload(encoding: Any, **changes: Any) -> MessagePayload:
    facts: dict[str, Any] = {"id": "m", "sender": "s", "index": 0, "query_hash": "q", "sender_positions": 9}
    return MessagePayload(
        **{**facts, **ORIGIN, "encoding": encoding, "positions": (0, 4, 5), **CONTENT[encoding], **changes}
    )


def message(encoding: Any, **changes: Any) -> wire.ReceivedMessage:
    """As the API returns it. ``changes`` are made in its payload too, where it has one."""
    sent = payload(encoding, **changes)
    fields: dict[str, Any] = {"encoding": encoding, **ORIGIN, **changes, "text": sent.text}
    fields["token_ids"] = None if sent.token_ids is None else list(sent.token_ids)
    fields["payload"] = to_base64(sent) if sent.rows is not None else None
    return wire.ReceivedMessage(**fields)


def read(received: wire.ReceivedMessage) -> Part:
    return asyncio.run(received_part(RecordingEngine(), received, "inherits[3]"))  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", CONTENT)
def test_every_encoding_is_read_as_it_was_sent(encoding: str) -> None:
    assert read(message(encoding)) == PARTS[encoding]


@pytest.mark.parametrize("origin", ORIGIN)
@pytest.mark.parametrize("encoding", CONTENT)
def test_only_text_can_be_read_by_another_model(encoding: str, origin: str) -> None:
    foreign = message(encoding, **{origin: "another"})
    if encoding == "text":
        assert read(foreign) == PARTS["text"]
        return
    with pytest.raises(
        InvalidRequestError, match=f"another {origin.split('_')[0]} .* ask its sender for encoding text"
    ):
        read(foreign)


def test_the_payload_s_own_origin_counts() -> None:
    """What a message says beside its payload can be made up more easily than a payload."""
    foreign = message("mixed", model_fingerprint="another")
    with pytest.raises(InvalidRequestError, match="another model"):
        read(foreign.model_copy(update=ORIGIN))


EMPTY = payload("mixed", positions=(), token_ids=(), rows=Rows((), "float32", HIDDEN, b""))
WIDE = payload("embeddings", rows=Rows((0, 1, 2), "float32", HIDDEN + 1, bytes(12 * (HIDDEN + 1))))
REFUSED: dict[str, tuple[Callable[[], wire.ReceivedMessage], str]] = {
    "id beyond the vocabulary": (lambda: message("token_ids", token_ids=(5, VOCABULARY, 6)), "not in the vocabulary"),
    "the same among rows": (lambda: message("mixed", token_ids=(5, 0, VOCABULARY)), "not in the vocabulary"),
    "empty text": (lambda: message("text", text=""), "text is empty"),
    "no base64": (lambda: message("mixed").model_copy(update={"payload": "?"}), "base64"),
    "no safetensors": (lambda: message("mixed").model_copy(update={"payload": "AAAA"}), "safetensors"),
    "rows of another width": (
        lambda: message("embeddings").model_copy(update={"payload": to_base64(WIDE)}),
        f"rows of {HIDDEN + 1} numbers; this model takes {HIDDEN}",
    ),
    "nothing in it": (lambda: message("mixed").model_copy(update={"payload": to_base64(EMPTY)}), "no positions"),
    "text for rows": (
        lambda: message("mixed").model_copy(update={"payload": to_base64(payload("text"))}),
        "no rows",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(name: str) -> None:
    made, problem = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        read(made())
    assert caught.value.param == "inherits[3]"


def test_mixed_without_rows_is_tokens_alone() -> None:
    plain = message("mixed", token_ids=(5, 6, 7), rows=Rows((), "float32", HIDDEN, b""))
    assert read(plain) == PARTS["token_ids"]
