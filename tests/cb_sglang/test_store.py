"""Senders on disk: everything comes back as it was, and what is damaged does not come back."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_sglang.database import Database
from cb_sglang.errors import CapacityError
from cb_sglang.registry import Lease
from cb_sglang.rows import Rows
from cb_sglang.senders import RegisteredSender, SenderContent, new_sender
from cb_sglang.store import SenderStore, StoredSender

FOREVER = Lease(None, None)


def sender(tenant: str = "a", created: float = 1.0, **content: Any) -> RegisteredSender:
    return new_sender(tenant, "model", SenderContent(**content), id_key=b"key", created=created)


def full_sender() -> RegisteredSender:
    """One with every field in use."""
    rows = Rows((0, 2), "bfloat16", 2, bytes(range(8)))
    bare = sender(input_ids=[0, 9, 0, 2**31 - 1], rows=rows, inherited=3, latent=2, private=[(1, 2)], parent="snd_p")
    return bare.with_latent_rows(Rows((0, 1), "bfloat16", 2, bytes(8)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "senders.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    with closing(Database(path)) as opened:
        yield opened


def store(database: Database, model: str = "model", **limits: int) -> SenderStore:
    return SenderStore(database, model_fingerprint=model, **limits)


def reopened(database: Database, path: Path) -> list[StoredSender]:
    database.close()
    with closing(Database(path)) as again:
        return store(again).load(0.0)


def test_everything_comes_back_oldest_first(database: Database, path: Path) -> None:
    saved = [
        StoredSender(full_sender(), Lease(60.0, 1_060.0)),
        StoredSender(sender("b", created=3.5, input_ids=[1, 2]), FOREVER),
        StoredSender(sender("a", created=2.0, input_ids=[1, 2]), Lease(1.5, 7.25)),
    ]
    for one in saved:
        store(database).save(one.sender, one.lease)
    assert reopened(database, path) == [saved[0], saved[2], saved[1]]


def test_in_memory_works_the_same() -> None:
    with closing(Database(None)) as database:
        store(database).save(full_sender(), FOREVER)
        assert store(database).load(0.0) == [StoredSender(full_sender(), FOREVER)]


def test_saved_again_only_the_lease_changes(database: Database) -> None:
    senders = store(database)
    senders.save(full_sender(), Lease(5.0, 5.0))
    senders.save(full_sender(), Lease(9.0, 9.0))
    assert senders.load(0.0) == [StoredSender(full_sender(), Lease(9.0, 9.0))]


def test_renewals(database: Database) -> None:
    senders = store(database)
    one, other = sender(input_ids=[1]), sender(input_ids=[2], created=2.0)
    senders.save(one, Lease(5.0, 5.0))
    senders.save(other, Lease(5.0, 5.0))
    senders.renew({one.id: Lease(5.0, 50.0), "snd_gone": Lease(1.0, 1.0)})
    assert [found.lease for found in senders.load(0.0)] == [Lease(5.0, 50.0), Lease(5.0, 5.0)]


def test_pins_come_back(database: Database, path: Path) -> None:
    senders = store(database)
    one, other = sender(input_ids=[1]), sender(input_ids=[2], created=2.0)
    for each in (one, other):
        senders.save(each, FOREVER)
        senders.pin(each.id, True)
    senders.pin(other.id, False)
    senders.pin("snd_gone", True)
    senders.save(one, Lease(5.0, 5.0))  # registered again
    assert [(found.sender, found.pinned) for found in reopened(database, path)] == [(one, True), (other, False)]


def test_a_file_of_version_1_is_taken_over(database: Database, path: Path) -> None:
    store(database).save(full_sender(), Lease(5.0, 5.0))
    database.close()
    with closing(sqlite3.connect(path)) as other:
        other.execute("ALTER TABLE senders DROP COLUMN pinned")
        other.execute("PRAGMA user_version = 1")
        other.commit()
    for _ in range(2):
        assert reopened(database, path) == [StoredSender(full_sender(), Lease(5.0, 5.0))]


def test_expired_ones_are_deleted(database: Database) -> None:
    senders = store(database)
    kept = sender(input_ids=[2])
    senders.save(sender(input_ids=[1]), Lease(5.0, 5.0))
    senders.save(kept, Lease(5.0, 5.5))
    assert senders.load(5.0) == [StoredSender(kept, Lease(5.0, 5.5))]
    assert len(senders.load(0.0)) == 1


def test_what_is_removed_is_overwritten(database: Database, path: Path) -> None:
    senders = store(database)
    secret = bytes(range(1, 9)) * 600
    private = sender(input_ids=[0], rows=Rows((0,), "float16", len(secret) // 2, secret))
    senders.save(private, FOREVER)
    senders.save(sender(input_ids=[3]), FOREVER)
    senders.remove([private.id, "snd_absent"])
    assert [found.sender.input_ids.tolist() for found in reopened(database, path)] == [[3]]
    assert secret[:64] not in path.read_bytes()


def test_senders_of_other_models_stay_within_bounds(database: Database) -> None:
    for n in range(6):
        store(database, "other").save(sender(input_ids=[n] * 10, created=float(n)), FOREVER)
    mine = store(database)
    mine.save(sender(input_ids=[100], created=-1.0), FOREVER)
    assert [found.sender.input_ids.tolist() for found in mine.load(0.0)] == [[100]]
    assert mine.unloaded_senders == 6
    by_number, by_size = store(database, max_unloaded_senders=4), store(database, max_unloaded_bytes=2 * 40)
    for bounded, left in ((by_number, 4), (by_size, 2)):
        assert len(bounded.load(0.0)) == 1 and bounded.unloaded_senders == left
    newest = [found.sender.created for found in store(database, "other").load(0.0)]
    assert newest == [4.0, 5.0]


@pytest.mark.parametrize(
    "damage",
    [
        "tenant = 'b'",
        "fingerprint = 'f'",
        "created = 2.0",
        "inherited = 0",
        "latent = 1",
        "private = '[]'",
        "parent = NULL",
        "row_dtype = 'float16'",
        "row_hidden = 1",
        "row_positions = x'00'",
        "row_data = zeroblob(16)",
        "row_data = NULL",
        "input_ids = zeroblob(24)",
        "input_ids = x'000000'",
        "digest = x''",
        "ttl = 0.0",
        "ttl = NULL",
        "private = CAST(x'ff' AS TEXT)",
    ],
)
def test_a_damaged_sender_is_left_out(
    database: Database, path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    good, bad = sender(input_ids=[1]), full_sender()
    store(database).save(good, FOREVER)
    store(database).save(bad, Lease(10.0, 10.0))
    with database.transaction() as db:
        db.execute(f"UPDATE senders SET {damage} WHERE id = ?", (bad.id,))
    with caplog.at_level(logging.ERROR, logger="cb_sglang.store"):
        assert store(database).load(0.0) == [StoredSender(good, FOREVER)]
    assert "row 2 of the store is damaged and left out" in caplog.text
    # Registered anew, it is whole again.
    anew = new_sender("a", "model", SenderContent(input_ids=[1, 2]), id_key=b"key", created=9.0)
    store(database).save(anew, FOREVER)
    assert anew in [found.sender for found in reopened(database, path)]


def test_a_damaged_sender_is_replaced_when_it_is_registered_again(database: Database) -> None:
    store(database).save(full_sender(), FOREVER)
    with database.transaction() as db:
        db.execute("UPDATE senders SET row_data = zeroblob(16)")
    bare = sender(
        created=5.0,
        input_ids=[0, 9, 0, 2**31 - 1],
        rows=Rows((0, 2), "bfloat16", 2, bytes(range(8))),
        inherited=3,
        latent=2,
        private=[(1, 2)],
        parent="snd_p",
    )
    again = bare.with_latent_rows(Rows((0, 1), "bfloat16", 2, bytes(8)))
    assert again.id == full_sender().id
    store(database).save(again, FOREVER)
    assert store(database).load(0.0) == [StoredSender(again, FOREVER)]


def test_a_sender_too_large_for_sqlite(database: Database) -> None:
    with database.transaction() as db:
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)
    store(database).save(sender(input_ids=[1] * 2_000), FOREVER)
    with pytest.raises(CapacityError, match="does not fit the 10000 bytes"):
        store(database).save(sender(input_ids=[1] * 3_000), FOREVER)
    assert len(store(database).load(0.0)) == 1


@given(position=st.integers(0, 10_000_000), bit=st.integers(0, 7))
def test_no_flipped_bit_of_the_contents_is_served(position: int, bit: int) -> None:
    columns = ("fingerprint", "private", "row_positions", "row_data", "input_ids", "digest")
    with closing(Database(None)) as database:
        store(database).save(full_sender(), FOREVER)
        with database.transaction() as db:
            column = columns[position % len(columns)]
            (value,) = db.execute(f"SELECT CAST({column} AS BLOB) FROM senders").fetchone()
            flipped = bytearray(value)
            flipped[position // len(columns) % len(value)] ^= 1 << bit
            kind = "TEXT" if column in ("fingerprint", "private") else "BLOB"
            db.execute(f"UPDATE senders SET {column} = CAST(? AS {kind})", (bytes(flipped),))
        assert store(database).load(0.0) == []
