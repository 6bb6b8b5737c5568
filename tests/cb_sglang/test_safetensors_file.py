"""The safetensors container: what we write others can read, and no header gets away with a lie."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_sglang.errors import InvalidRequestError
from cb_sglang.safetensors_file import CHECKSUM, DTYPE_BYTES, SafetensorsFile, Tensor

BOUNDS = {"max_bytes": 1 << 20, "max_header_bytes": 1 << 16, "max_entries": 1 << 10}
FILE = SafetensorsFile(
    {"format": "x", "note": 'quote " and é'},
    {"ids": Tensor("I32", (3,), bytes(12)), "rows": Tensor("BF16", (2, 1), b"abcd"), "none": Tensor("U8", (0, 7), b"")},
)


def read(data: bytes, **bounds: int) -> SafetensorsFile:
    return SafetensorsFile.from_bytes(data, **{**BOUNDS, **bounds})


def with_header(header: dict[str, Any] | bytes, tensors: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


def entry(dtype: Any = "U8", shape: Any = (2,), offsets: Any = (0, 2), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


_names = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=12)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    rows, columns = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    size = rows * columns * DTYPE_BYTES[dtype]
    return Tensor(dtype, (rows, columns), draw(st.binary(min_size=size, max_size=size)))


files = st.builds(
    SafetensorsFile,
    st.dictionaries(_names, _names, max_size=4),
    st.dictionaries(_names.filter(lambda name: name != "__metadata__"), tensors(), max_size=4),
)


@given(files)
@settings(max_examples=50, deadline=None)
def test_round_trip_and_the_library_reads_the_same(file: SafetensorsFile) -> None:
    data = file.to_bytes()
    again = read(data)
    assert (again.metadata, again.tensors) == (file.metadata, file.tensors)
    assert again.to_bytes() == data and again.checksum() == file.checksum()
    theirs = {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in safetensors.deserialize(data)}
    assert theirs == {name: (t.dtype, t.shape, t.data) for name, t in file.tensors.items()}


def test_a_file_of_the_library_is_read() -> None:
    from safetensors.numpy import save

    numpy = pytest.importorskip("numpy")
    data = save({"a": numpy.arange(6, dtype="<i4").reshape(2, 3), "b": numpy.ones(3, "<f2")}, {"format": "np"})
    file = read(data)
    assert file.metadata == {"format": "np"}
    assert (file.tensors["a"].dtype, file.tensors["a"].shape) == ("I32", (2, 3))
    assert bytes(file.tensors["b"].data) == numpy.ones(3, "<f2").tobytes()


def test_tensors_are_aligned_to_their_elements() -> None:
    data = FILE.to_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(
        item["data_offsets"][0] % DTYPE_BYTES[item["dtype"]] == 0 for name, item in header.items() if name[0] != "_"
    )


@pytest.mark.parametrize(
    "changed",
    [
        SafetensorsFile({**FILE.metadata, "format": "y"}, FILE.tensors),
        SafetensorsFile({**FILE.metadata, "more": ""}, FILE.tensors),
        SafetensorsFile(FILE.metadata, {**FILE.tensors, "ids": Tensor("F32", (3,), bytes(12))}),
        SafetensorsFile(FILE.metadata, {**FILE.tensors, "ids": Tensor("I32", (3, 1), bytes(12))}),
        SafetensorsFile(FILE.metadata, {**FILE.tensors, "ids": Tensor("I32", (3,), bytes(11) + b"\1")}),
        SafetensorsFile(FILE.metadata, {**FILE.tensors, "none": Tensor("U8", (7, 0), b"")}),
    ],
)
def test_checksum_depends_on_every_part(changed: SafetensorsFile) -> None:
    assert changed.checksum() != FILE.checksum()
    assert SafetensorsFile({**FILE.metadata, CHECKSUM: "any"}, FILE.tensors).checksum() == FILE.checksum()


def test_every_truncation_is_refused() -> None:
    data = FILE.to_bytes()
    for size in range(len(data)):
        with pytest.raises(InvalidRequestError):
            read(data[:size])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "0 bytes are no safetensors file"),
        (struct.pack("<Q", 1 << 63), "at most 65536"),
        (struct.pack("<Q", (1 << 64) - 1) + b"{}", "at most 65536"),
        (struct.pack("<Q", 65_536) + b"{}", "cut off"),
        (with_header(b" {}"), "does not start with {"),
        (with_header(b"[]"), "does not start with {"),
        (with_header(b""), "does not start with {"),
        (with_header(b"{}x"), "not valid JSON"),
        (with_header(b"{"), "not valid JSON"),
        (with_header(b'{"a":"\xff"}'), "not valid JSON"),
        (with_header(b'{"a":' + b"9" * 5_000 + b"}"), "not valid JSON"),
        (with_header({"__metadata__": {"a": 1}}), "object of strings"),
        (with_header({"__metadata__": ["a"]}), "object of strings"),
        (with_header({"__metadata__": None}), "object of strings"),
        (with_header({"__metadata__": {"a": "\ud800"}}), "printable"),
        (with_header({"__metadata__": {"a\0": "b"}}), "printable"),
        (with_header(b'{"__metadata__":{"a":"1","a":"1"}}'), "twice"),
        (
            with_header(
                b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}", b"ab"
            ),
            "twice",
        ),
        (with_header({"a": 1}), "exactly dtype, shape and data_offsets"),
        (with_header({"a": {"dtype": "U8", "shape": [2]}}, b"ab"), "exactly dtype"),
        (with_header({"a": entry(more=1)}, b"ab"), "exactly dtype"),
        (with_header({"a": entry(dtype="F64", shape=(1,), offsets=(0, 8))}, bytes(8)), "one of the dtypes"),
        (with_header({"a": entry(dtype=["U8"])}, b"ab"), "one of the dtypes"),
        (with_header({"a": entry(shape=2)}, b"ab"), "shape"),
        (with_header({"a": entry(shape=(-2,))}, b"ab"), "shape"),
        (with_header({"a": entry(shape=(2.0,))}, b"ab"), "shape"),
        (with_header({"a": entry(shape=(2, True))}, b"ab"), "shape"),
        (with_header(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,2]}}', b"ab"), "shape"),
        (with_header({"a": entry(shape=(2, 1, 1, 1, 1))}, b"ab"), "shape"),
        (with_header({"a": entry(shape=(0, 1 << 31), offsets=(0, 0))}), "shape"),
        (with_header({"a": entry(shape=(3,))}, b"ab"), "2 bytes, which do not fit"),
        (with_header({"a": entry(shape=(1 << 30, 1 << 30, 1 << 30))}, b"ab"), "do not fit"),
        (with_header({"a": entry(offsets=(2, 0))}, b"ab"), "-2 bytes"),
        (with_header({"a": entry(offsets=(0, 1, 2))}, b"ab"), "two integers"),
        (with_header({"a": entry(offsets=(0, "2"))}, b"ab"), "two integers"),
        (with_header({"a": entry(shape=(1 << 30,), offsets=(0, 1 << 30))}, b"ab"), "cut off"),
        (with_header({"a": entry()}, b"abc"), "1 bytes that belong to no tensor"),
        (with_header({"a": entry(offsets=(1, 3))}, b"abc"), "gap"),
        (with_header({"a": entry(), "b": entry(offsets=(1, 3))}, b"abc"), "overlaps"),
        (with_header({"a": entry(), "b": entry()}, b"ab"), "overlaps"),
        (with_header({"a": entry(), "b": entry(offsets=(3, 5))}, b"abcde"), "gap"),
    ],
)
def test_lies_are_named(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        read(data)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' + b"[" * 60_000,
        b'{"a":' * 10_000,
        b'{"a":[' + b"[]," * 20_000 + b"0]}",
        b'{"__metadata__":{' + b",".join(b'"%05d":""' % n for n in range(5_000)) + b"}}",
    ],
)
def test_a_crowded_header_is_refused_before_it_is_parsed(header: bytes) -> None:
    data = with_header(header)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match="entries"):
            read(data)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
    finally:
        tracemalloc.stop()
    with pytest.raises(InvalidRequestError):  # and where so many are allowed, nothing else gets out
        read(with_header(header[:-1]), max_entries=1 << 20)


def test_bounds_are_inclusive() -> None:
    data = FILE.to_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = data[8 : 8 + length]
    entries = sum(header.count(mark) for mark in (b",", b"[", b"{"))
    exact = {"max_bytes": len(data), "max_header_bytes": length, "max_entries": entries}
    assert read(data, **exact).tensors == FILE.tensors
    for name, bound in exact.items():
        with pytest.raises(InvalidRequestError, match=f"at most {bound - 1} are accepted"):
            read(data, **{name: bound - 1})


_keys = st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a", "b"])
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.floats() | st.sampled_from(["U8", "I32", "a", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3),
    max_leaves=12,
)
_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "I32", "F64"]),
        "shape": st.lists(st.integers(0, 3), max_size=2),
        "data_offsets": st.lists(st.integers(0, 8), min_size=2, max_size=2),
    }
)


def check_against_the_library(data: bytes) -> None:
    """Refused with our error, or read by the safetensors library as well."""
    try:
        file = read(data)
    except InvalidRequestError:
        return
    assert file.tensors.keys() == {name for name, _ in safetensors.deserialize(data)}


@given(st.dictionaries(st.sampled_from("abc"), _entries | _json, max_size=3), st.binary(max_size=8))
@settings(deadline=None)
def test_what_we_accept_the_library_accepts(header: dict[str, Any], tensors: bytes) -> None:
    check_against_the_library(with_header(header, tensors))


@given(st.binary(max_size=200), st.integers(0, 250))
@settings(deadline=None)
def test_arbitrary_bytes(tail: bytes, length: int) -> None:
    for data in (tail, struct.pack("<Q", length) + tail, with_header(b'{"a":' + tail), with_header(tail)):
        check_against_the_library(data)
