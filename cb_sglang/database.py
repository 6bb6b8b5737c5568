"""The one SQLite file of a server: opening it, its schema, transactions, and whether rows are as they were written.

What is kept in it is in store.py (senders) and audit.py (who got which positions).
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from asyncio import Future, get_running_loop
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from cb_sglang.errors import InvalidRequestError, StoreError
from cb_sglang.senders import digest

P = ParamSpec("P")
T = TypeVar("T")

VERSION = 2
BUSY_SECONDS = 5.0
# In each table, the digest covers the columns before it.
_SCHEMA = (
    """CREATE TABLE senders (
        id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, model TEXT NOT NULL, fingerprint TEXT NOT NULL,
        created REAL NOT NULL, inherited INTEGER NOT NULL, latent INTEGER NOT NULL, private TEXT NOT NULL, parent TEXT,
        row_dtype TEXT, row_hidden INTEGER, row_positions BLOB, row_data BLOB, input_ids BLOB NOT NULL,
        digest BLOB NOT NULL, ttl REAL, expires REAL, pinned INTEGER NOT NULL DEFAULT 0
    ) STRICT""",
    """CREATE TABLE audit (
        n INTEGER PRIMARY KEY AUTOINCREMENT,
        message TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, sender TEXT NOT NULL, receiver TEXT, sent REAL NOT NULL,
        encoding TEXT NOT NULL, spans BLOB NOT NULL, excluded BLOB NOT NULL, digest BLOB NOT NULL
    ) STRICT""",
    "CREATE INDEX audit_of_sender ON audit (tenant, sender, n)",
    "CREATE INDEX audit_of_tenant ON audit (tenant, n)",
    f"PRAGMA user_version = {VERSION}",
)
# From the version before each to it.
_MIGRATIONS = {2: "ALTER TABLE senders ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0"}


class Database:
    """One file for one server process; ``path=None`` keeps all in memory, for as long as the process lives.

    Raises StoreError when the file cannot be opened, is another server's, is of a newer version or of something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.Lock()
        self._connection = _open(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cacheback-store")

    def run(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call what blocks on a transaction from an event loop, on one thread of our own, in the order of the calls.

        Submitted at once; await what it returns. A call that is cancelled before its turn does not run; one that is
        cancelled later comes to its end.
        """
        return get_running_loop().run_in_executor(self._thread, partial(method, *args, **kwargs))

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Blocks. All in it is on the disk when it is left, or nothing where it is left by an exception.

        Raises StoreError when SQLite fails.
        """
        try:
            with self._lock, self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
        except sqlite3.Error as error:
            raise StoreError(f"the store of senders failed: {error}; look after its disk and its file") from error

    def close(self) -> None:
        """Wait for the calls under way and close the file. What was committed is safe without it."""
        self._thread.shutdown()
        with self._lock:
            self._connection.close()


def with_digest(columns: Sequence[Any]) -> tuple[Any, ...]:
    """The columns (bytes, text, numbers, None), and a digest of them behind."""
    parts = (column if isinstance(column, bytes) else json.dumps(column).encode() for column in columns)
    return (*columns, digest(*parts))


def checked(row: Sequence[Any]) -> Sequence[Any]:
    """The columns before the digest. Raises InvalidRequestError when it is not theirs."""
    if with_digest(row[:-1])[-1] != row[-1]:
        raise InvalidRequestError("its digest does not match")
    return row[:-1]


def _open(path: Path | None) -> sqlite3.Connection:
    try:
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite gives its log the mode that the file has.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            path.chmod(0o600)
        connection = sqlite3.connect(
            path or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(connection)
        except BaseException:
            connection.close()
            raise
    except (sqlite3.Error, OSError) as error:
        busy = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
        reason = "another server uses it; give each server a store of its own" if busy else error
        raise StoreError(f"the store of senders {path} cannot be opened: {reason}") from error
    except StoreError as error:
        raise StoreError(f"the store of senders {path} {error.message}; move it away or name another") from None
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    # Damaged text shall fail its row's digest, not the query.
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    # One process at a time; what a commit acknowledges is on the disk; what is deleted is overwritten.
    for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
        connection.execute(f"PRAGMA {setting}").fetchall()
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise StoreError(f"was written by a newer cb-sglang (format {version}; this one reads {VERSION})")
    if version == 0:
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
            raise StoreError("is a database of something else")
        for statement in _SCHEMA:
            connection.execute(statement)
    elif version < VERSION:
        for newer in range(version + 1, VERSION + 1):
            connection.execute(_MIGRATIONS[newer])
        connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")
