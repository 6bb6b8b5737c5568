"""Senders on disk, so that a restart loses none.

A registration is acknowledged in this order, and then no crash loses it: ``SenderRegistry.add``; await
``database.run(store.save, ...)``, also for a sender that was there (its first save may still be under way); answer.
When the save of one that was not there fails, ``SenderRegistry.remove``. What ``expire`` returns goes to ``remove``
before anything else is awaited: registered anew meanwhile, it would be deleted.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cb_sglang.database import Database, checked, with_digest
from cb_sglang.errors import CapacityError, InvalidRequestError
from cb_sglang.registry import Lease
from cb_sglang.rows import Rows
from cb_sglang.senders import RegisteredSender, pack_int32, unpack_int32

logger = logging.getLogger(__name__)
_COLUMNS = (
    "id, tenant, model, fingerprint, created, inherited, latent, private, parent, "
    "row_dtype, row_hidden, row_positions, row_data, input_ids, digest"
)
_ROW_OVERHEAD = 1_024


@dataclass(frozen=True, slots=True)
class StoredSender:
    sender: RegisteredSender
    lease: Lease
    pinned: bool = False


class SenderStore:
    """The senders of one model in a database. Blocks: on an event loop, ``await database.run(store.method, ...)``.

    Senders of other models, and damaged ones, stay in the file without being loaded: the newest
    ``max_unloaded_senders`` in ``max_unloaded_bytes``. Every method raises StoreError when SQLite fails.
    """

    def __init__(
        self,
        database: Database,
        *,
        model_fingerprint: str,
        max_unloaded_senders: int = 4_096,
        max_unloaded_bytes: int = 8 << 30,
    ) -> None:
        self._database = database
        self._model = model_fingerprint
        self._max_unloaded_senders = max_unloaded_senders
        self._max_unloaded_bytes = max_unloaded_bytes
        self.unloaded_senders = 0

    def save(self, sender: RegisteredSender, lease: Lease) -> None:
        """Write a sender with its lease, or only the lease where the sender is there. Raises CapacityError on size."""
        row = _row(sender, self._model)
        with self._database.transaction() as db:
            most = db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)
            if sum(len(column) for column in row if isinstance(column, bytes | str)) + _ROW_OVERHEAD > most:
                raise CapacityError(f"the sender does not fit the {most} bytes that the store takes; register less")
            known = db.execute(
                "UPDATE senders SET ttl = ?, expires = ? WHERE id = ? AND digest = ?",
                (lease.ttl, lease.expires, sender.id, row[-1]),
            )
            if not known.rowcount:
                slots = ", ".join("?" * (len(row) + 2))
                db.execute(
                    f"INSERT OR REPLACE INTO senders ({_COLUMNS}, ttl, expires) VALUES ({slots})",
                    (*row, lease.ttl, lease.expires),
                )

    def renew(self, leases: Mapping[str, Lease]) -> None:
        """Write leases by sender id (``SenderRegistry.take_renewed``); one that is not in the file is passed over."""
        with self._database.transaction() as db:
            db.executemany(
                "UPDATE senders SET ttl = ?, expires = ? WHERE id = ?",
                ((lease.ttl, lease.expires, sender_id) for sender_id, lease in leases.items()),
            )

    def pin(self, sender_id: str, pinned: bool) -> None:
        """Write whether a sender is to be pinned; one that is not in the file is passed over."""
        with self._database.transaction() as db:
            db.execute("UPDATE senders SET pinned = ? WHERE id = ?", (int(pinned), sender_id))

    def remove(self, sender_ids: Iterable[str]) -> None:
        """Delete these senders, and overwrite what the file held of them."""
        with self._database.transaction() as db:
            db.executemany("DELETE FROM senders WHERE id = ?", ((sender_id,) for sender_id in sender_ids))

    def load(self, now: float) -> list[StoredSender]:
        """This model's senders whose lease is not over, oldest first; for the start of the server.

        A damaged one is left out with a line in the log. Deletes what is expired, and the oldest of what is not loaded
        as far as it exceeds its bounds.
        """
        loaded: dict[int, StoredSender] = {}
        with self._database.transaction() as db:
            db.execute("DELETE FROM senders WHERE expires <= ?", (now,))
            own = db.execute("SELECT rowid FROM senders WHERE model = ? ORDER BY created, rowid", (self._model,))
            for (rowid,) in own.fetchall():
                try:
                    row = db.execute(f"SELECT {_COLUMNS}, ttl, expires, pinned FROM senders WHERE rowid = ?", (rowid,))
                    loaded[rowid] = _stored(row.fetchone())
                except (InvalidRequestError, sqlite3.Error) as damage:
                    logger.error("the sender in row %d of the store is damaged and left out: %s", rowid, damage)
            self._bound_unloaded(db, loaded)
        return list(loaded.values())

    def _bound_unloaded(self, db: sqlite3.Connection, loaded: Container[int]) -> None:
        kept = size = dropped = 0
        sizes = "length(input_ids) + ifnull(length(row_data), 0)"
        for rowid, row_bytes in db.execute(f"SELECT rowid, {sizes} FROM senders ORDER BY created DESC").fetchall():
            if rowid in loaded:
                continue
            if kept < self._max_unloaded_senders and size + row_bytes <= self._max_unloaded_bytes:
                kept, size = kept + 1, size + row_bytes
            else:
                db.execute("DELETE FROM senders WHERE rowid = ?", (rowid,))
                dropped += 1
        self.unloaded_senders = kept
        if kept or dropped:
            logger.info("senders of other models, or damaged: %d stay in the store, %d were dropped", kept, dropped)


def _row(sender: RegisteredSender, model: str) -> tuple[Any, ...]:
    rows = sender.rows
    of_rows = (rows.dtype, rows.hidden, pack_int32(rows.positions), rows.data) if rows else (None, None, None, None)
    return with_digest(
        (
            sender.id,
            sender.tenant,
            model,
            sender.fingerprint,
            float(sender.created),
            sender.inherited,
            sender.latent,
            json.dumps(sender.private),
            sender.parent,
            *of_rows,
            pack_int32(sender.input_ids),
        )
    )


def _stored(row: tuple[Any, ...]) -> StoredSender:
    """Raises InvalidRequestError for a row that is not as it was written."""
    *columns, ttl, expires, pinned = row
    sender_id, tenant, _, fingerprint, created, inherited, latent, private, parent, *of_rows, ids = checked(columns)
    dtype, hidden, positions, data = of_rows
    sender = RegisteredSender(
        id=sender_id,
        tenant=tenant,
        fingerprint=fingerprint,
        input_ids=unpack_int32(ids),
        rows=None if dtype is None else Rows(tuple(unpack_int32(positions)), dtype, hidden, data),
        inherited=inherited,
        latent=latent,
        private=tuple((start, stop) for start, stop in json.loads(private)),
        parent=parent,
        created=created,
    )
    return StoredSender(sender, Lease(ttl, expires), bool(pinned))
