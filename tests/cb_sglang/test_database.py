"""The database file: who may read it, what is refused at opening, and all or nothing in a transaction."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from cb_sglang import database
from cb_sglang.database import Database
from cb_sglang.errors import StoreError


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "senders.db"
    with closing(Database(path)) as db, db.transaction() as connection:
        connection.execute("DELETE FROM senders")
        modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert modes == {"senders.db": 0o600, "senders.db-wal": 0o600}
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    Database(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("in_memory", [False, True])
def test_durable_settings(tmp_path: Path, in_memory: bool) -> None:
    with closing(Database(None if in_memory else tmp_path / "senders.db")) as db, db.transaction() as connection:
        found = [
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "secure_delete", "user_version")
        ]
    assert found == ["memory" if in_memory else "wal", 2, 1, database.VERSION]


def test_one_server_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "senders.db"
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.0)
    with closing(Database(path)), pytest.raises(StoreError, match="another server uses it") as caught:
        Database(path)
    assert (caught.value.status, caught.value.code) == (503, "store_unavailable")
    Database(path).close()


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "senders.db"
    Database(path).close()
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {database.VERSION + 1}")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"senders\.db was written by a newer cb-sglang \(format 3"):
        Database(path)
    assert path.read_bytes() == before


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="is a database of something else"):
        Database(path)
    path.write_bytes(b"not a database at all, but long enough to look at" * 100)
    with pytest.raises(StoreError, match="cannot be opened: file is not a database"):
        Database(path)
    with pytest.raises(StoreError, match="cannot be opened"):
        Database(tmp_path)
    with pytest.raises(StoreError, match="cannot be opened"):
        Database(path / "below")


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    path = tmp_path / "senders.db"
    path.touch()
    Database(path).close()
    Database(path).close()


def test_a_transaction_is_all_or_nothing(tmp_path: Path) -> None:
    insert = "INSERT INTO audit VALUES (?, ?, 'a', 's', NULL, 0.0, 'text', x'', x'', x'')"
    with closing(Database(tmp_path / "senders.db")) as db:
        with pytest.raises(KeyError), db.transaction() as connection:
            connection.execute(insert, (1, "m1"))
            raise KeyError
        with pytest.raises(StoreError, match="UNIQUE"), db.transaction() as connection:
            connection.execute(insert, (1, "m1"))
            connection.execute(insert, (2, "m1"))
        with db.transaction() as connection:
            assert connection.execute("SELECT count(*) FROM audit").fetchone() == (0,)


def test_calls_run_in_order_on_one_thread() -> None:
    db = Database(None)
    gate, ran = threading.Event(), []

    def work(number: int) -> int:
        gate.wait()
        ran.append((number, threading.get_ident()))
        return number

    async def calls() -> None:
        tasks = [db.run(work, number) for number in range(5)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.sleep(0)
        gate.set()
        assert await asyncio.gather(*tasks[:3], tasks[4]) == [0, 1, 2, 4]

    asyncio.run(calls())
    db.close()
    assert [number for number, _ in ran] == [0, 1, 2, 4]
    assert {thread for _, thread in ran}.isdisjoint({threading.get_ident()}) and len({t for _, t in ran}) == 1


def test_after_close() -> None:
    db = Database(None)
    db.close()
    with pytest.raises(StoreError, match="closed"), db.transaction():
        pass
