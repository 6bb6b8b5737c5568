"""The record of who got which positions of a sender and when; it also answers what a receiver has had already."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cb_sglang.database import Database, checked, with_digest
from cb_sglang.errors import InvalidRequestError
from cb_sglang.runs import Runs
from cb_sglang.senders import pack_int32, unpack_int32

logger = logging.getLogger(__name__)
_COLUMNS = "message, tenant, sender, receiver, sent, encoding, spans, excluded, digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """Which positions of a sender went to whom.

    receiver: the label that the caller gave, if any.
    sent:     seconds since the epoch.
    spans:    the positions as [start, stop) runs, ascending and apart.
    excluded: likewise, those that it could not get, as it had them from messages before.

    Raises InvalidRequestError when the runs are not ascending and apart.
    """

    message: str
    tenant: str
    sender: str
    receiver: str | None
    sent: float
    encoding: str
    spans: Runs
    excluded: Runs = ()

    def __post_init__(self) -> None:
        for ranges in (self.spans, self.excluded):
            edges = [edge for one in ranges for edge in one]
            if (edges and edges[0] < 0) or any(a >= b for a, b in pairwise(edges)):
                raise InvalidRequestError("the spans of a message must lie apart and in order")


class AuditLog:
    """Records of messages, the newest ``per_sender`` and ``total`` of them; they outlive the senders.

    One tenant has at most ``tenant_share`` of the total. Where all together have more than it, those with the most give
    way until they have the same; each keeps its newest, and at least one. These two bounds are enforced once in
    ``sweep_every`` records, as it takes a look at all of them.
    Blocks: on an event loop, ``await database.run(log.method, ...)``. Every method raises StoreError when SQLite fails.
    """

    def __init__(
        self,
        database: Database,
        *,
        per_sender: int = 1_000,
        total: int = 200_000,
        tenant_share: float = 1.0,
        sweep_every: int = 256,
    ) -> None:
        self._database = database
        self._per_tenant = max(1, int(total * tenant_share))
        self._per_sender = min(per_sender, self._per_tenant)
        self._total = total
        self._sweep_every = self._unswept = sweep_every

    def record(self, records: Sequence[AuditRecord]) -> None:
        """Add these, all or none, and forget the oldest beyond the bounds. StoreError for a message that is there."""
        with self._database.transaction() as db:
            db.executemany(f"INSERT INTO audit ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", map(_row, records))
            for tenant, sender in {(record.tenant, record.sender) for record in records}:
                _keep_newest(db, self._per_sender, "tenant = ? AND sender = ?", tenant, sender)
            self._unswept += len(records)
            if self._unswept >= self._sweep_every:
                held = dict(db.execute("SELECT tenant, count(*) FROM audit GROUP BY tenant").fetchall())
                most = min(self._per_tenant, _most_each(held.values(), self._total))
                for tenant in held:
                    _keep_newest(db, most, "tenant = ?", tenant)
                self._unswept = 0

    def sent(self, tenant: str, messages: Iterable[str]) -> dict[str, AuditRecord]:
        """The tenant's records of these messages; one that is forgotten, unknown or damaged is not among them."""
        statement = f"SELECT {_COLUMNS} FROM audit WHERE tenant = ? AND message = ?"
        with self._database.transaction() as db:
            found = [row for message in messages for row in db.execute(statement, (tenant, message))]
        return {record.message: record for record in _records(found)}

    def newest(self, tenant: str, *, sender: str | None = None, limit: int = 1_000) -> list[AuditRecord]:
        """The tenant's records, newest first; where given, of this sender."""
        where, values = ("tenant = ?", (tenant,)) if sender is None else ("tenant = ? AND sender = ?", (tenant, sender))
        statement = f"SELECT {_COLUMNS} FROM audit WHERE {where} ORDER BY n DESC LIMIT ?"
        with self._database.transaction() as db:
            found = db.execute(statement, (*values, limit)).fetchall()
        return _records(found)


def _most_each(held: Iterable[int], total: int) -> int:
    """The most that each may keep of what it holds, at least 1, so that all together keep ``total`` at most."""
    ascending = sorted(held)
    left = total
    for number, count in enumerate(ascending):
        fair = max(1, left // (len(ascending) - number))
        if count > fair:
            return fair
        left -= count
    return total


def _keep_newest(db: sqlite3.Connection, most: int, where: str, *values: str) -> None:
    (there,) = db.execute(f"SELECT count(*) FROM audit WHERE {where}", values).fetchone()
    if there > most:
        oldest = f"SELECT n FROM audit WHERE {where} ORDER BY n LIMIT ?"
        db.execute(f"DELETE FROM audit WHERE n IN ({oldest})", (*values, there - most))


def _row(record: AuditRecord) -> tuple[Any, ...]:
    told = (record.message, record.tenant, record.sender, record.receiver, float(record.sent), record.encoding)
    return with_digest((*told, _packed(record.spans), _packed(record.excluded)))


def _records(rows: Iterable[tuple[Any, ...]]) -> list[AuditRecord]:
    records = []
    for row in rows:
        try:
            records.append(_record(row))
        except InvalidRequestError as damage:
            logger.error("the record of message %r in the store is damaged and left out: %s", row[0], damage)
    return records


def _record(row: tuple[Any, ...]) -> AuditRecord:
    """Raises InvalidRequestError for a row that is not as it was written."""
    message, tenant, sender, receiver, sent, encoding, spans, excluded = checked(row)
    return AuditRecord(
        message=message,
        tenant=tenant,
        sender=sender,
        receiver=receiver,
        sent=sent,
        encoding=encoding,
        spans=_unpacked(spans),
        excluded=_unpacked(excluded),
    )


def _packed(ranges: Runs) -> bytes:
    return pack_int32([edge for one in ranges for edge in one])


def _unpacked(data: bytes) -> Runs:
    edges = unpack_int32(data)
    return tuple(zip(edges[::2], edges[1::2], strict=True))
