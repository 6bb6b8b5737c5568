"""A message in its binary form: one safetensors file for a message, or for all messages of a call.

Metadata, all strings: ``format``, ``version``, ``sha256`` (SafetensorsFile.checksum) and the labels and numbers of
MessagePayload. Tensors of a message of n positions and k rows:

    positions      I32 [n]                       always
    spans          I32 [runs, 2]                 always; the runs of ``positions``, [start, stop)
    token_ids      I32 [n]                       token_ids, mixed
    rows           F32, BF16 or F16 [k, hidden]  embeddings (k = n), mixed
    row_positions  I32 [k]                       mixed
    text           U8 [bytes]                    text; UTF-8

In a batch the names of message i start with ``i.``, and ``messages`` says how many there are.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cb_sglang.errors import InvalidRequestError
from cb_sglang.message_payload import LABELS, NUMBERS, MessagePayload, PayloadEncoding, utf8
from cb_sglang.rows import RowDtype, Rows
from cb_sglang.safetensors_file import CHECKSUM, DTYPE_BYTES, SafetensorsFile, Tensor

__all__ = [
    "DEFAULT_LIMITS",
    "MEDIA_TYPE",
    "MessagePayload",
    "PayloadEncoding",
    "PayloadLimits",
    "decode_batch",
    "decode_message",
    "encode_batch",
    "encode_message",
    "from_base64",
    "to_base64",
]

MEDIA_TYPE = "application/x-safetensors"
MESSAGE_FORMAT = "cacheback.message"
BATCH_FORMAT = "cacheback.batch"
VERSION = 1
Int64Array: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_ROW_DTYPES: dict[str, RowDtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_FILE_DTYPES = {ours: theirs for theirs, ours in _ROW_DTYPES.items()}
_NOT_BASE64 = "a binary message in JSON must be plain base64 with its padding, without white space"
_HEADER_ENTRIES = 64
"""Commas and opening brackets that the header has for one message, rounded up: a ``mixed`` one has 49."""


@dataclass(frozen=True, slots=True)
class PayloadLimits:
    """What a decoder takes. Bytes of the file and of its header, messages and kept positions in it, bytes of a row.

    A kept position with its token id takes about 80 bytes once decoded, 8 in the file; hence a bound of its own.
    """

    file_bytes: int = 256 << 20
    header_bytes: int = 4 << 20
    messages: int = 1024
    positions: int = 1 << 20
    row_bytes: int = 128 << 10


DEFAULT_LIMITS = PayloadLimits()


def encode_message(message: MessagePayload) -> bytes:
    """One message as a safetensors file; the same message gives the same bytes."""
    return _encode({"format": MESSAGE_FORMAT}, [("", message)])


def encode_batch(messages: Sequence[MessagePayload]) -> bytes:
    """All messages of a call as one safetensors file, in order."""
    facts = {"format": BATCH_FORMAT, "messages": str(len(messages))}
    return _encode(facts, ((f"{n}.", message) for n, message in enumerate(messages)))


def decode_message(data: bytes, *, limits: PayloadLimits = DEFAULT_LIMITS) -> MessagePayload:
    """Read a file of ``encode_message``. Raises InvalidRequestError for anything else, and beyond ``limits``."""
    contents = _open(data, MESSAGE_FORMAT, limits, messages=1)
    message = contents.take_message("")
    contents.check_empty()
    return message


def decode_batch(data: bytes, *, limits: PayloadLimits = DEFAULT_LIMITS) -> tuple[MessagePayload, ...]:
    """Read a file of ``encode_batch``. Raises InvalidRequestError for anything else, and beyond ``limits``."""
    contents = _open(data, BATCH_FORMAT, limits, messages=limits.messages)
    count = contents.take_number("messages")
    if count > limits.messages:
        raise InvalidRequestError(f"a batch of {count} messages; at most {limits.messages} are accepted")
    messages = tuple(contents.take_message(f"{n}.") for n in range(count))
    contents.check_empty()
    return messages


def to_base64(message: MessagePayload) -> str:
    """The file of ``encode_message`` for JSON, which never carries lists of floats."""
    return binascii.b2a_base64(encode_message(message), newline=False).decode()


def from_base64(text: str, *, limits: PayloadLimits = DEFAULT_LIMITS) -> MessagePayload:
    """Inverse of ``to_base64``. Raises InvalidRequestError, also for white space or missing padding."""
    most = _base64_length(limits.file_bytes)
    if len(text) > most:
        raise InvalidRequestError(f"{len(text)} characters of base64; at most {most} are accepted")
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise InvalidRequestError(_NOT_BASE64) from error
    # Strict mode still lets superfluous padding pass.
    if len(text) != _base64_length(len(data)):
        raise InvalidRequestError(_NOT_BASE64)
    return decode_message(data, limits=limits)


def _base64_length(size: int) -> int:
    return 4 * -(-size // 3)


def _encode(facts: dict[str, str], messages: Iterable[tuple[str, MessagePayload]]) -> bytes:
    metadata = {**facts, "version": str(VERSION)}
    tensors: dict[str, Tensor] = {}
    for prefix, message in messages:
        for name in (*LABELS, *NUMBERS, "encoding"):
            metadata[prefix + name] = str(getattr(message, name))
        tensors |= {prefix + name: tensor for name, tensor in _tensors(message).items()}
    metadata[CHECKSUM] = SafetensorsFile(metadata, tensors).checksum()
    return SafetensorsFile(metadata, tensors).to_bytes()


def _tensors(message: MessagePayload) -> dict[str, Tensor]:
    found = {"positions": _int32(message.positions), "spans": _int32(_spans(message.positions))}
    if message.token_ids is not None:
        found["token_ids"] = _int32(message.token_ids)
    if message.rows is not None:
        rows = message.rows
        found["rows"] = Tensor(_FILE_DTYPES[rows.dtype], (len(rows), rows.hidden), rows.data)
        if message.encoding == "mixed":
            found["row_positions"] = _int32(rows.positions)
    if message.text is not None:
        text = utf8(message.text)
        found["text"] = Tensor("U8", (len(text),), text)
    return found


def _int32(values: Sequence[int] | Int64Array) -> Tensor:
    array = np.asarray(values, dtype="<i4")
    return Tensor("I32", array.shape, array.tobytes())


def _spans(positions: Sequence[int]) -> Int64Array:
    """``MessagePayload.spans`` as an array [runs, 2], for a million positions in a few of their own sizes."""
    array = np.asarray(positions, dtype=np.int64)
    starts = array[np.diff(array, prepend=array[:1] - 2) != 1]
    stops = array[np.diff(array, append=array[-1:] + 2) != 1] + 1
    return np.stack((starts, stops), axis=1)


def _open(data: bytes, expected: str, limits: PayloadLimits, *, messages: int) -> _Contents:
    file = SafetensorsFile.from_bytes(
        data,
        max_bytes=limits.file_bytes,
        max_header_bytes=limits.header_bytes,
        max_entries=_HEADER_ENTRIES * (messages + 1),
    )
    contents = _Contents(file, limits)
    form = contents.take_string("format")
    if form != expected:
        hint = "; it is a batch" if form == BATCH_FORMAT else "; it is one message" if form == MESSAGE_FORMAT else ""
        raise InvalidRequestError(f"the safetensors file is not of format {expected}{hint}")
    version = contents.take_number("version")
    if version > VERSION:
        raise InvalidRequestError(f"version {version} was written by a newer cb-sglang; this one reads {VERSION}")
    if version != VERSION:
        raise InvalidRequestError(f"there is no version {version} of {expected}; this cb-sglang reads {VERSION}")
    if contents.take_string(CHECKSUM) != file.checksum():
        raise InvalidRequestError("the file was damaged on its way: its sha256 does not fit its content; send it again")
    return contents


class _Contents:
    """What is left to read of a file: every part is taken once, and nothing may remain."""

    def __init__(self, file: SafetensorsFile, limits: PayloadLimits) -> None:
        self._metadata = dict(file.metadata)
        self._tensors = dict(file.tensors)
        self._limits = limits
        self._positions_left = limits.positions

    def take_string(self, name: str) -> str:
        value = self._metadata.pop(name, None)
        if value is None:
            raise InvalidRequestError(f"the file's metadata lack {name}")
        return value

    def take_number(self, name: str) -> int:
        value = self.take_string(name)
        if not _NUMBER.fullmatch(value):
            raise InvalidRequestError(f"{name} must be a decimal number below 2^31 in the file's metadata")
        return int(value)

    def take_message(self, prefix: str) -> MessagePayload:
        try:
            return self._message(prefix)
        except InvalidRequestError as error:
            where = f"message {prefix.removesuffix('.')}: " if prefix else ""
            raise InvalidRequestError(where + error.message) from error

    def check_empty(self) -> None:
        """Raises InvalidRequestError when something was not taken."""
        for name in (*self._metadata, *self._tensors):
            raise InvalidRequestError(f"the file holds {name[:64]}, which has no place in it")

    def _message(self, prefix: str) -> MessagePayload:
        facts: dict[str, Any] = {name: self.take_string(prefix + name) for name in (*LABELS, "encoding")}
        facts |= {name: self.take_number(prefix + name) for name in NUMBERS}
        positions = self._take_ints(prefix + "positions", self._positions_left)
        self._positions_left -= len(positions)
        if prefix + "token_ids" in self._tensors:
            facts["token_ids"] = self._take_ints(prefix + "token_ids", len(positions))
        if prefix + "rows" in self._tensors:
            facts["rows"] = self._take_rows(prefix, len(positions), indexed=facts["encoding"] == "mixed")
        if prefix + "text" in self._tensors:
            facts["text"] = self._take_text(prefix)
        message = MessagePayload(positions=positions, **facts)
        spans = self._take(prefix + "spans", ("I32",), 2)
        claimed = np.frombuffer(spans.data, dtype="<i4").reshape(spans.shape)
        if not np.array_equal(claimed, _spans(message.positions)):
            raise InvalidRequestError("spans are not the runs of positions")
        return message

    def _take(self, name: str, dtypes: Iterable[str], dimensions: int) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise InvalidRequestError(f"the file lacks the tensor {name}")
        if tensor.dtype not in dtypes or len(tensor.shape) != dimensions:
            raise InvalidRequestError(f"{name} must be {' or '.join(dtypes)} in {dimensions} dimension(s)")
        return tensor

    def _take_ints(self, name: str, most: int) -> tuple[int, ...]:
        tensor = self._take(name, ("I32",), 1)
        if tensor.shape[0] > most:
            raise InvalidRequestError(f"{name} has {tensor.shape[0]} numbers; at most {most} can be here")
        return tuple(np.frombuffer(tensor.data, dtype="<i4").tolist())

    def _take_rows(self, prefix: str, kept: int, *, indexed: bool) -> Rows:
        tensor = self._take(prefix + "rows", _ROW_DTYPES, 2)
        count, hidden = tensor.shape
        if hidden * DTYPE_BYTES[tensor.dtype] > self._limits.row_bytes:
            raise InvalidRequestError(f"rows of {hidden} {tensor.dtype} exceed {self._limits.row_bytes} bytes each")
        # An empty row costs the file nothing, so the count is checked by itself.
        if count > kept:
            raise InvalidRequestError(f"{count} rows for {kept} positions; a position has one at most")
        positions = self._take_ints(prefix + "row_positions", count) if indexed else tuple(range(count))
        return Rows(positions, _ROW_DTYPES[tensor.dtype], hidden, bytes(tensor.data))

    def _take_text(self, prefix: str) -> str:
        try:
            return str(self._take(prefix + "text", ("U8",), 1).data, "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequestError("text is not valid UTF-8") from error
