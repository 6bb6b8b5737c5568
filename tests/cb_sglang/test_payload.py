"""Binary messages: every encoding comes back as it was; whatever was tampered with does not come back at all."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from payload_examples import ENCODINGS, example, payloads

from cb_sglang.errors import InvalidRequestError
from cb_sglang.message_payload import MessagePayload, PayloadEncoding
from cb_sglang.payload import (
    DEFAULT_LIMITS,
    decode_batch,
    decode_message,
    encode_batch,
    encode_message,
    from_base64,
    to_base64,
)
from cb_sglang.rows import Rows
from cb_sglang.safetensors_file import CHECKSUM, SafetensorsFile, Tensor

BATCH = tuple(example(encoding, index=n) for n, encoding in enumerate(ENCODINGS))
# Decoding makes Python integers of 4-byte numbers; small inputs also pay for the parsed header.
PEAK_PER_BYTE, PEAK_BASE = 20, 32 << 10


@contextmanager
def bounded_memory(data: bytes | bytearray) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= PEAK_PER_BYTE * len(data) + PEAK_BASE
    finally:
        tracemalloc.stop()


def ints(*values: int, dtype: str = "<i4") -> Tensor:
    return Tensor("I32", (len(values),), np.asarray(values, dtype=dtype).tobytes())


def forged(
    data: bytes, *, metadata: Mapping[str, str | None] | None = None, tensors: Mapping[str, Tensor | None] | None = None
) -> bytes:
    """The file with other metadata and tensors (None: without them), and a checksum that fits again."""
    file = SafetensorsFile.from_bytes(data, max_bytes=len(data), max_header_bytes=len(data), max_entries=len(data))
    facts = {key: value for key, value in {**file.metadata, **(metadata or {})}.items() if value is not None}
    parts = {name: tensor for name, tensor in {**file.tensors, **(tensors or {})}.items() if tensor is not None}
    if CHECKSUM not in (metadata or {}):
        facts[CHECKSUM] = SafetensorsFile(facts, parts).checksum()
    return SafetensorsFile(facts, parts).to_bytes()


@given(payloads())
@settings(deadline=None)
def test_round_trip(message: MessagePayload) -> None:
    data = encode_message(message)
    again = decode_message(data)
    assert again == message
    assert encode_message(again) == data
    assert from_base64(to_base64(message)) == message
    assert len(data) >= message.payload_bytes
    tensors = SafetensorsFile.from_bytes(data, max_bytes=len(data), max_header_bytes=len(data), max_entries=99).tensors
    assert np.frombuffer(tensors["spans"].data, "<i4").tolist() == [bound for span in message.spans for bound in span]


@given(st.lists(payloads(), max_size=3))
@settings(max_examples=40, deadline=None)
def test_round_trip_of_a_batch(messages: list[MessagePayload]) -> None:
    assert decode_batch(encode_batch(messages)) == tuple(messages)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_any_safetensors_reader_finds_positions_spans_and_content(encoding: PayloadEncoding) -> None:
    message = example(encoding)
    found = dict(safetensors.deserialize(encode_message(message)))
    assert np.frombuffer(found["positions"]["data"], "<i4").tolist() == list(message.positions)
    assert np.frombuffer(found["spans"]["data"], "<i4").reshape(-1, 2).tolist() == [[0, 2], [4, 6], [8, 9]]
    if message.token_ids is not None:
        assert np.frombuffer(found["token_ids"]["data"], "<i4").tolist() == list(message.token_ids)
    if message.rows is not None:
        assert bytes(found["rows"]["data"]) == message.rows.data
        assert found["rows"]["shape"] == [len(message.rows), message.rows.hidden]
    if message.text is not None:
        assert bytes(found["text"]["data"]).decode() == message.text


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_prefix_and_no_extension_is_a_message(encoding: PayloadEncoding) -> None:
    data = encode_message(example(encoding))
    for size in range(len(data)):
        with pytest.raises(InvalidRequestError):
            decode_message(data[:size])
    with pytest.raises(InvalidRequestError, match="belong to no tensor"):
        decode_message(data + b"\0")


@given(data=st.data(), message=payloads())
@settings(deadline=None)
def test_flipped_bits_are_noticed_in_little_memory(data: st.DataObject, message: MessagePayload) -> None:
    damaged = bytearray(encode_message(message))
    for bit in data.draw(st.sets(st.integers(0, 8 * len(damaged) - 1), min_size=1, max_size=4)):
        damaged[bit // 8] ^= 1 << bit % 8
    with bounded_memory(damaged), pytest.raises(InvalidRequestError):
        decode_message(bytes(damaged))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_byte_counts(encoding: PayloadEncoding) -> None:
    data = encode_message(example(encoding))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(InvalidRequestError):
            decode_message(bytes(damaged))


@given(st.lists(payloads(), min_size=1, max_size=2), st.data())
@settings(max_examples=50, deadline=None)
def test_truncated_batches_are_refused_in_little_memory(messages: list[MessagePayload], data: st.DataObject) -> None:
    whole = encode_batch(messages)
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with bounded_memory(part), pytest.raises(InvalidRequestError):
        decode_batch(part)


@given(payloads())
@settings(deadline=None)
def test_decoding_takes_little_memory(message: MessagePayload) -> None:
    data = encode_message(message)
    with bounded_memory(data):
        decode_message(data)


def test_memory_of_long_messages() -> None:
    scattered = tuple(range(0, 20_000, 2))
    tight = example("text", sender_positions=20_000, positions=tuple(range(20_000)))
    long = example("token_ids", sender_positions=20_000, positions=scattered, token_ids=tuple(range(10_000)))
    wide = example("embeddings", rows=Rows(tuple(range(5)), "float32", 20_000, bytes(400_000)))
    for message in (tight, long, wide, example("text", text="a" * 100_000 + "🐋")):
        data = encode_message(message)
        with bounded_memory(data):
            assert decode_message(data) == message


@pytest.mark.parametrize(
    ("encoding", "metadata", "says"),
    [
        ("text", {"format": None}, "lack format"),
        ("text", {"format": "pt"}, "not of format cacheback.message$"),
        ("text", {"format": "cacheback.batch"}, "it is a batch"),
        ("text", {"version": None}, "lack version"),
        ("text", {"version": "2"}, "newer cb-sglang"),
        ("text", {"version": "0"}, "no version 0"),
        ("text", {"version": "1.0"}, "decimal"),
        ("text", {"version": "01"}, "decimal"),
        ("text", {"sha256": None}, "lack sha256"),
        ("text", {"sha256": "0" * 64}, "damaged on its way"),
        ("text", {"id": None}, "lack id"),
        ("text", {"id": "two words"}, "^id must be"),
        ("text", {"encoding": "kv"}, "unknown encoding kv"),
        ("text", {"encoding": "token_ids"}, "needs token_ids"),
        ("token_ids", {"encoding": "text"}, "takes no token_ids"),
        ("token_ids", {"encoding": "mixed"}, "needs rows"),
        ("mixed", {"encoding": "embeddings"}, "takes no token_ids"),
        ("embeddings", {"encoding": "mixed"}, "lacks the tensor row_positions"),
        ("text", {"index": "-1"}, "index must be a decimal"),
        ("text", {"index": "٣"}, "index must be a decimal"),
        ("text", {"index": "9999999999"}, "index must be from 0"),
        ("text", {"index": "9" * 5_000}, "index must be a decimal"),
        ("text", {"sender_positions": "8"}, "sender's 8 positions"),
        ("text", {"note": "x"}, "holds note"),
    ],
)
def test_metadata_lies_are_named(encoding: PayloadEncoding, metadata: dict[str, str | None], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        decode_message(forged(encode_message(example(encoding)), metadata=metadata))


NAN = np.asarray([[np.nan] * 3] * 5, dtype="<f4").tobytes()


@pytest.mark.parametrize(
    ("encoding", "tensors", "says"),
    [
        ("text", {"positions": None}, "lacks the tensor positions"),
        ("text", {"positions": Tensor("F32", (5,), bytes(20))}, "positions must be I32"),
        ("text", {"positions": Tensor("I32", (5, 1), bytes(20))}, "in 1 dimension"),
        ("text", {"positions": ints(0, 1, 4, 5, 5)}, "must ascend"),
        ("text", {"positions": ints(-1, 1, 4, 5, 8)}, "sender's 9 positions"),
        ("text", {"positions": ints(0, 1, 4, 5, 9)}, "sender's 9 positions"),
        ("text", {"positions": ints(0, 1, 3, 5, 8)}, "spans are not the runs"),
        ("text", {"spans": None}, "lacks the tensor spans"),
        ("text", {"spans": Tensor("I32", (2, 3), ints(0, 2, 4, 6, 8, 9).data)}, "spans are not the runs"),
        ("text", {"spans": Tensor("I32", (0, 2), b"")}, "spans are not the runs"),
        ("text", {"text": Tensor("U8", (2,), b"\xc3(")}, "not valid UTF-8"),
        ("text", {"text": Tensor("U8", (3,), b"\xed\xa0\x80")}, "not valid UTF-8"),
        ("text", {"text": Tensor("I32", (1,), b"abcd")}, "text must be U8"),
        ("text", {"extra": ints(1)}, "holds extra"),
        ("text", {"0.positions": ints(1)}, "holds 0.positions"),
        ("token_ids", {"token_ids": ints(1, 2, 3, 4)}, "4 token_ids for 5 positions"),
        ("token_ids", {"token_ids": ints(*range(6))}, "6 numbers; at most 5"),
        ("token_ids", {"token_ids": ints(1, 2, 3, 4, -5)}, "from 0 to 2"),
        ("embeddings", {"rows": Tensor("F32", (5, 3), NAN)}, "finite"),
        ("embeddings", {"rows": Tensor("I32", (5, 3), bytes(60))}, "rows must be F32 or BF16 or F16"),
        ("embeddings", {"rows": Tensor("F32", (15,), bytes(60))}, "in 2 dimension"),
        ("embeddings", {"rows": Tensor("F32", (4, 3), bytes(48))}, "4 rows for 5 positions"),
        ("embeddings", {"rows": Tensor("F32", (6, 3), bytes(72))}, "6 rows for 5 positions"),
        ("embeddings", {"rows": Tensor("F32", (5, 0), b"")}, "not 5 rows of 0"),
        ("embeddings", {"rows": Tensor("F32", (2_000_000_000, 0), b"")}, "2000000000 rows for 5"),
        ("embeddings", {"rows": Tensor("F32", (0, 2_000_000_000), b"")}, "exceed 131072 bytes each"),
        ("embeddings", {"row_positions": ints(0, 1, 2, 3, 4)}, "holds row_positions"),
        ("mixed", {"row_positions": ints(0)}, "not 1 rows"),
        ("mixed", {"row_positions": ints(0, 1, 3)}, "3 numbers; at most 2"),
        ("mixed", {"row_positions": ints(3, 0)}, "must ascend"),
        ("mixed", {"row_positions": ints(-3, 0)}, "must ascend"),
        ("mixed", {"row_positions": ints(0, 5)}, "a row at 5"),
        ("mixed", {"row_positions": ints(0, 1)}, "must be 0"),
    ],
)
def test_tensor_lies_are_named_in_little_memory(
    encoding: PayloadEncoding, tensors: dict[str, Tensor | None], says: str
) -> None:
    data = forged(encode_message(example(encoding)), tensors=tensors)
    with bounded_memory(data), pytest.raises(InvalidRequestError, match=says):
        decode_message(data)


@pytest.mark.parametrize(
    ("forgery", "says"),
    [
        ({"metadata": {"messages": "3"}}, "holds 3.encoding"),
        ({"metadata": {"messages": "5"}}, "message 4: the file's metadata lack 4.id"),
        ({"metadata": {"messages": "1025"}}, "1025 messages; at most 1024"),
        ({"metadata": {"messages": None}}, "lack messages"),
        ({"metadata": {"1.id": None}}, "message 1: "),
        ({"metadata": {"format": "cacheback.message"}}, "it is one message"),
        ({"tensors": {"2.rows": None}}, "message 2: .* needs rows"),
        ({"tensors": {"positions": ints(1)}}, "holds positions"),
    ],
)
def test_batch_lies_name_the_message(forgery: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        decode_batch(forged(encode_batch(BATCH), **forgery))


def test_a_batch_and_a_message_are_not_taken_for_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="it is a batch"):
        decode_message(encode_batch(BATCH[:1]))
    with pytest.raises(InvalidRequestError, match="it is one message"):
        decode_batch(encode_message(BATCH[0]))


@pytest.mark.parametrize(
    ("bound", "exact"),
    [
        ("file_bytes", len(encode_batch(BATCH))),
        ("header_bytes", int.from_bytes(encode_batch(BATCH)[:8], "little")),
        ("messages", len(BATCH)),
        ("positions", sum(len(message.positions) for message in BATCH)),
        ("row_bytes", max(message.rows.row_bytes for message in BATCH if message.rows is not None)),
    ],
)
def test_limits_are_inclusive(bound: str, exact: int) -> None:
    data = encode_batch(BATCH)
    assert decode_batch(data, limits=replace(DEFAULT_LIMITS, **{bound: exact})) == BATCH
    with pytest.raises(InvalidRequestError, match=r"at most|exceed"):
        decode_batch(data, limits=replace(DEFAULT_LIMITS, **{bound: exact - 1}))


def test_the_longest_labels_of_the_most_messages_fit_the_default_limits() -> None:
    label = "a" * 256
    message = example(
        "mixed", id=label, sender=label, model_fingerprint=label, tokenizer_fingerprint=label, query_hash=label
    )
    messages = (message,) * DEFAULT_LIMITS.messages
    assert decode_batch(encode_batch(messages)) == messages


@pytest.mark.parametrize("text", ["a", "ab", "abc"])  # each needs another padding
@pytest.mark.parametrize("change", ["{}\n", " {}", "{}=", "{}AAAA=", "é{}", "-{}", "{}A"])
def test_base64_is_strict(text: str, change: str) -> None:
    message = example("text", text=text)
    assert from_base64(to_base64(message)) == message
    with pytest.raises(InvalidRequestError, match="base64"):
        from_base64(change.format(to_base64(message)))


def test_base64_is_bounded_before_it_is_decoded() -> None:
    text = to_base64(example("text"))
    small = replace(DEFAULT_LIMITS, file_bytes=30)
    with pytest.raises(InvalidRequestError, match="at most 40 are accepted"):
        from_base64(text, limits=small)
    with pytest.raises(InvalidRequestError, match="0 bytes are no safetensors file"):
        from_base64("")
