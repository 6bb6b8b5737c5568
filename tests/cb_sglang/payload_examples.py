"""Messages of every encoding for the tests of the wire form: one fixed example each, and any of them."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st

from cb_sglang.message_payload import MessagePayload, PayloadEncoding
from cb_sglang.rows import ITEM_BYTES, PLACEHOLDER_ID, RowDtype, Rows

LABELS = {
    "id": "msg_0a1b",
    "sender": "snd_2c3d",
    "model_fingerprint": "4e5f",
    "tokenizer_fingerprint": "6071",
    "query_hash": "8293",
}
ENCODINGS: tuple[PayloadEncoding, ...] = get_args(PayloadEncoding)
_FINITE = {"float32": (np.uint32, 0xFF7FFFFF), "bfloat16": (np.uint16, 0xFF7F), "float16": (np.uint16, 0xFBFF)}


def finite_bytes(data: bytes, dtype: RowDtype) -> bytes:
    """Any bit pattern made a finite number, by clearing the lowest bit of the exponent."""
    item, mask = _FINITE[dtype]
    return bytes(np.frombuffer(data, dtype=item) & item(mask))


def example(encoding: PayloadEncoding, /, **changes: Any) -> MessagePayload:
    """Five positions of a sender of nine, in three spans; rows are at 0 and 3 where only some have one."""
    facts: dict[str, Any] = {"index": 2, "sender_positions": 9, "positions": (0, 1, 4, 5, 8)}
    if encoding == "token_ids":
        facts["token_ids"] = (2, 70_000, 5, 5, (1 << 31) - 1)
    if encoding == "embeddings":
        facts["rows"] = Rows(tuple(range(5)), "bfloat16", 3, finite_bytes(bytes(range(30)), "bfloat16"))
    if encoding == "mixed":
        facts["token_ids"] = (PLACEHOLDER_ID, 7, 8, PLACEHOLDER_ID, 9)
        facts["rows"] = Rows((0, 3), "float32", 2, np.arange(4, dtype="<f4").tobytes())
    if encoding == "text":
        facts["text"] = "Señor 鯨 [...] 🐋"
    return MessagePayload(**{**LABELS, "encoding": encoding, **facts, **changes})


_labels = st.text("abcXYZ019._:/@+=-", min_size=1, max_size=80)
_token_ids = st.integers(min_value=0, max_value=(1 << 31) - 1)


@st.composite
def rows(draw: st.DrawFn, positions: tuple[int, ...]) -> Rows:
    """Rows at these positions, of any dtype and any finite numbers."""
    dtype: RowDtype = draw(st.sampled_from(get_args(RowDtype)))
    hidden = draw(st.integers(min_value=1, max_value=5))
    size = len(positions) * hidden * ITEM_BYTES[dtype]
    return Rows(positions, dtype, hidden, finite_bytes(draw(st.binary(min_size=size, max_size=size)), dtype))


@st.composite
def payloads(draw: st.DrawFn) -> MessagePayload:
    """A valid message of any encoding, also one that keeps nothing."""
    encoding: PayloadEncoding = draw(st.sampled_from(ENCODINGS))
    total = draw(st.sampled_from((1, 40, (1 << 31) - 1)))
    positions = tuple(sorted(draw(st.sets(st.integers(min_value=0, max_value=total - 1), max_size=40))))
    kept = len(positions)
    facts: dict[str, Any] = {name: draw(_labels) for name in LABELS}
    if encoding in ("token_ids", "mixed"):
        token_ids = draw(st.lists(_token_ids, min_size=kept, max_size=kept))
        if encoding == "mixed":
            places = tuple(n for n in range(kept) if draw(st.booleans()))
            token_ids = [PLACEHOLDER_ID if n in places else token for n, token in enumerate(token_ids)]
            facts["rows"] = draw(rows(places))
        facts["token_ids"] = tuple(token_ids)
    if encoding == "embeddings":
        facts["rows"] = draw(rows(tuple(range(kept))))
    if encoding == "text":
        facts["text"] = draw(st.text(max_size=60))
    index = draw(st.integers(min_value=0, max_value=(1 << 31) - 1))
    return MessagePayload(**facts, encoding=encoding, index=index, sender_positions=total, positions=positions)
