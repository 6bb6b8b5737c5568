"""SIGKILL during registrations: what was acknowledged is there after the restart, whole, and nothing half is."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import registrar

from cb_sglang.database import Database
from cb_sglang.store import SenderStore

KILLS = 20


def test_no_acknowledged_sender_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "senders.db"
    command = [sys.executable, registrar.__file__, str(path), str(KILLS), "1"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120)
    acknowledged = [int(line) for line in ran.stdout.splitlines()]
    rounds = {number // registrar.NUMBERS_A_ROUND for number in acknowledged}
    assert len(rounds) >= KILLS // 4 and len(acknowledged) > len(rounds)
    with closing(Database(path)) as database:
        store = SenderStore(database, model_fingerprint="model")
        found = {int(one.sender.created): one.sender for one in store.load(0.0)}
        assert store.unloaded_senders == 0
    assert set(acknowledged) <= found.keys()
    # In each round, one more may have been committed that was not yet acknowledged.
    assert len(found) <= len(acknowledged) + KILLS
    assert all(sender == registrar.numbered(number) for number, sender in found.items())
    with closing(sqlite3.connect(path)) as plain:
        assert plain.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
