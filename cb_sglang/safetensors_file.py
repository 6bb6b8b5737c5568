"""Safetensors files as bytes: written the same way every time, read without trusting any claim of theirs.

The layout is that of the safetensors format: the length of a JSON header in 8 bytes (little endian), the header, then
the raw tensors without a gap. The safetensors library would do for files of our own, but its reader takes duplicate
keys and unknown fields and has no bound on the number of entries, and its writer orders metadata at random.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cb_sglang.errors import InvalidRequestError

DTYPE_BYTES = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1}
"""The element types that we read and write, with their size; dense and little-endian, as the format has it."""
CHECKSUM = "sha256"
"""The metadata key that holds a file's checksum, and which the checksum leaves out."""
MAX_DIMENSION = (1 << 31) - 1
MAX_DIMENSIONS = 4
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """``data`` holds prod(``shape``) elements of ``dtype``, a key of DTYPE_BYTES."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """Metadata and tensors by name. Names and metadata are printable text."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, Tensor]

    def checksum(self) -> str:
        """SHA-256, in hex, of all metadata but CHECKSUM and of all tensors, each sorted by name.

        It finds damage, not forgery, and does not depend on the header's order or white space.
        """
        digest = hashlib.sha256()
        for key in sorted(self.metadata.keys() - {CHECKSUM}):
            digest.update(f"{key}\0{self.metadata[key]}\0".encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name}\0{tensor.dtype}\0{','.join(map(str, tensor.shape))}\0".encode())
            digest.update(tensor.data)
        return digest.hexdigest()

    def to_bytes(self) -> bytes:
        """The file. The same content gives the same bytes."""
        # Widest elements first, so that each tensor is aligned to its element size.
        ordered = sorted(self.tensors.items(), key=lambda item: (-DTYPE_BYTES[item[1].dtype], item[0]))
        header: dict[str, Any] = {_METADATA: dict(sorted(self.metadata.items()))}
        offset = 0
        for name, tensor in ordered:
            offsets = [offset, offset + len(tensor.data)]
            header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
            offset = offsets[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return b"".join([_LENGTH.pack(len(text)), text, *(tensor.data for _, tensor in ordered)])

    @classmethod
    def from_bytes(cls, data: bytes, *, max_bytes: int, max_header_bytes: int, max_entries: int) -> SafetensorsFile:
        """Read a file; the tensors are views into ``data``, nothing of theirs is copied.

        max_bytes, max_header_bytes: size of the file and of its header.
        max_entries: commas and opening brackets of the header, which bound what its JSON becomes in memory.

        Raises InvalidRequestError for anything but a valid file within these bounds.
        """
        if len(data) > max_bytes:
            raise InvalidRequestError(f"a safetensors file of {len(data)} bytes; at most {max_bytes} are accepted")
        start = _data_start(data, max_header_bytes)
        metadata, table = _parse_header(data[_LENGTH.size : start], max_entries)
        return cls(metadata, _cut(memoryview(data)[start:], table))


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _data_start(data: bytes, max_header_bytes: int) -> int:
    if len(data) < _LENGTH.size:
        raise InvalidRequestError(f"{len(data)} bytes are no safetensors file; it starts with 8 bytes of header length")
    (length,) = _LENGTH.unpack_from(data)
    if length > max_header_bytes:
        raise InvalidRequestError(f"a safetensors header of {length} bytes; at most {max_header_bytes} are accepted")
    start = _LENGTH.size + int(length)
    if start > len(data):
        raise InvalidRequestError(f"the safetensors file is cut off: header of {length} bytes, file of {len(data)}")
    return start


def _parse_header(header: bytes, max_entries: int) -> tuple[dict[str, str], dict[str, _Entry]]:
    entries = sum(header.count(mark) for mark in (b",", b"[", b"{"))
    if entries > max_entries:
        raise InvalidRequestError(f"a safetensors header of {entries} entries; at most {max_entries} are accepted")
    if not header.startswith(b"{"):
        raise InvalidRequestError("the safetensors header does not start with {")
    try:
        table = json.loads(header.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("the safetensors header is not valid JSON") from error
    metadata = table.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidRequestError(f"{_METADATA} must be an object of strings")
    if not all(text.isprintable() for text in (*table, *metadata, *metadata.values())):
        raise InvalidRequestError("names and metadata of a safetensors file must be printable text")
    return metadata, {name: _parse_entry(name, entry) for name, entry in table.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InvalidRequestError("a key stands twice in the safetensors header")
    return found


def _parse_entry(name: str, entry: object) -> _Entry:
    label = f"tensor {name[:64]}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InvalidRequestError(f"{label} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise InvalidRequestError(f"{label} must have one of the dtypes {', '.join(DTYPE_BYTES)}")
    if not _are_sizes(shape, MAX_DIMENSION) or len(shape) > MAX_DIMENSIONS:
        raise InvalidRequestError(f"{label} has a shape that is not up to {MAX_DIMENSIONS} integers from 0 to 2^31 - 1")
    if not _are_sizes(offsets, MAX_DIMENSION) or len(offsets) != 2:
        raise InvalidRequestError(f"{label} has data_offsets that are not two integers from 0 to 2^31 - 1")
    start, stop = offsets
    if stop - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise InvalidRequestError(f"{label} has {stop - start} bytes, which do not fit its shape and dtype {dtype}")
    return _Entry(dtype, tuple(shape), start, stop)


def _are_sizes(value: object, most: int) -> bool:
    # JSON's true is an int to isinstance.
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= most for item in value)


def _cut(data: memoryview, table: dict[str, _Entry]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    reached = 0
    for name, entry in sorted(table.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != reached:
            what = "overlaps the one before" if entry.start < reached else "leaves a gap before it"
            raise InvalidRequestError(f"tensor {name[:64]} {what} in the safetensors file")
        reached = entry.stop
        if reached > len(data):
            raise InvalidRequestError(f"the safetensors file is cut off: tensor {name[:64]} ends after its last byte")
        tensors[name] = Tensor(entry.dtype, entry.shape, data[entry.start : entry.stop])
    if reached != len(data):
        raise InvalidRequestError(f"the safetensors file has {len(data) - reached} bytes that belong to no tensor")
    return tensors
