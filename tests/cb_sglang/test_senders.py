"""What a sender is: its identity, its rows, its private ranges."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_sglang.errors import InvalidRequestError
from cb_sglang.rows import Rows
from cb_sglang.senders import (
    RegisteredSender,
    SenderContent,
    digest,
    new_sender,
    pack_int32,
    unpack_int32,
)

ROWS = Rows((1, 2), "bfloat16", 2, bytes(range(8)))


def sender(tenant: str = "a", model: str = "model", id_key: bytes = b"key", **content: Any) -> RegisteredSender:
    content.setdefault("input_ids", [5, 0, 0, 7, 9])
    return new_sender(tenant, model, SenderContent(**content), id_key=id_key, created=1.0)


def rows(count: int, first: int = 0, hidden: int = 2) -> Rows:
    return Rows(tuple(range(first, first + count)), "bfloat16", hidden, bytes(2 * hidden * count))


def test_same_content_is_the_same_sender() -> None:
    first, again = sender(rows=ROWS, private=[(3, 4), (0, 2)]), sender(rows=ROWS, private=[(0, 1), (1, 2), (3, 4)])
    assert first == again
    assert first.id.startswith("snd_") and len(first.id) == 36
    assert (len(first), list(first.input_ids), first.row_bytes) == (5, [5, 0, 0, 7, 9], 8)
    assert first.private == ((0, 2), (3, 4))


def test_what_differs_differs_in_id_and_fingerprint() -> None:
    made = [
        sender(),
        sender(model="another"),
        sender(input_ids=[5, 0, 0, 7]),
        sender(input_ids=[5, 0, 0, 7, 9, 0]),
        sender(input_ids=[0, 5, 0, 7, 9]),
        sender(inherited=1),
        sender(latent=1),
        sender(private=[(0, 1)]),
        sender(private=[(0, 2)]),
        sender(rows=ROWS),
        sender(rows=Rows((1, 2), "float16", 2, ROWS.data)),
        sender(rows=Rows((1,), "bfloat16", 4, ROWS.data)),
        sender(rows=Rows((1, 2), "bfloat16", 2, ROWS.data[::-1])),
    ]
    assert len({one.id for one in made}) == len({one.fingerprint for one in made}) == len(made)


def test_an_id_tells_nothing_of_other_tenants() -> None:
    mine, yours, other_server = sender(), sender(tenant="b"), sender(id_key=b"other")
    assert len({mine.id, yours.id, other_server.id}) == 3
    assert mine.fingerprint == yours.fingerprint == other_server.fingerprint
    assert mine.fingerprint[:32] not in mine.id


def test_an_extension_is_another_sender_of_the_same_content() -> None:
    alone, extension = sender(), sender(parent="snd_before")
    assert alone.id != extension.id and alone.fingerprint == extension.fingerprint
    assert extension.parent == "snd_before"


def test_nothing_of_the_content_is_in_the_repr() -> None:
    assert "777" not in repr(sender(input_ids=[777]))


def test_latent_rows_come_later_and_change_no_id() -> None:
    bare = sender(latent=3)
    assert (len(bare), list(bare.input_ids)[5:], bare.complete) == (8, [0, 0, 0], False)
    full = bare.with_latent_rows(rows(3))
    assert full.complete and full.id == bare.id
    assert full.rows == rows(3, first=5)
    both = sender(latent=3, rows=ROWS)
    assert not both.complete
    joined = both.with_latent_rows(rows(3)).rows
    assert joined is not None and joined.positions == (1, 2, 5, 6, 7) and joined.data == ROWS.data + bytes(12)
    assert sender().complete


def test_latent_rows_must_be_the_missing_ones() -> None:
    bare = sender(latent=3, rows=ROWS)
    for wrong in (rows(2), rows(4), rows(3, first=1), rows(3, hidden=4), Rows((0, 1, 2), "float16", 2, bytes(12))):
        with pytest.raises(InvalidRequestError, match="latent rows"):
            bare.with_latent_rows(wrong)
    for complete in (bare.with_latent_rows(rows(3)), sender()):
        with pytest.raises(InvalidRequestError, match="where 0 are missing"):
            complete.with_latent_rows(rows(3))


@pytest.mark.parametrize(
    "content",
    [
        {"input_ids": []},
        {"input_ids": [-1]},
        {"input_ids": [1 << 31]},
        {"inherited": -1},
        {"inherited": 6},
        {"latent": -1},
        {"latent": 1 << 31},
        {"private": [(0, 6)]},
        {"private": [(-1, 2)]},
        {"private": [(2, 2)]},
        {"private": [(3, 1), (0, 2)]},
        {"rows": Rows((0,), "float32", 1, bytes(4))},  # has a token id
        {"rows": Rows((5,), "float32", 1, bytes(4)), "latent": 1},  # would pass for the latent row
        {"input_ids": [], "latent": 2},
    ],
)
def test_content_that_contradicts_itself(content: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        sender(**content)


def test_a_sender_cannot_be_put_together_wrongly() -> None:
    parts: dict[str, Any] = dict(id="snd_1", tenant="a", fingerprint="f", created=1.0)
    RegisteredSender(**parts, input_ids=array("i", [1, 0]), private=((0, 1),), latent=1)
    for wrong in (
        dict(input_ids=array("i", [1, 2]), latent=1),
        dict(input_ids=array("i", [1, 2]), private=((1, 2), (0, 1))),
        dict(input_ids=array("i", [1, 2]), private=((0, 1), (1, 2))),
        dict(input_ids=array("i", [0]), rows=rows(2)),
    ):
        with pytest.raises(InvalidRequestError):
            RegisteredSender(**parts, **wrong)


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1)))
def test_int32_there_and_back(numbers: list[int]) -> None:
    packed = pack_int32(numbers)
    assert packed == b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)
    assert list(unpack_int32(packed)) == numbers


def test_int32_of_odd_length() -> None:
    with pytest.raises(InvalidRequestError, match="7 bytes"):
        unpack_int32(bytes(7))


def test_digest_knows_where_a_part_ends() -> None:
    assert len({digest(b"ab", b"c"), digest(b"a", b"bc"), digest(b"abc"), digest(b"abc", b"")}) == 4
