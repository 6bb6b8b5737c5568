"""Records of sent messages, written before the message leaves: what waits meanwhile goes into one commit."""

from __future__ import annotations

import asyncio

from cb_sglang.audit import AuditLog, AuditRecord
from cb_sglang.database import Database


class AuditWriter:
    """For one event loop. A commit waits for the disk, so that many messages share one."""

    def __init__(self, database: Database, log: AuditLog) -> None:
        self._database = database
        self._log = log
        self._waiting: list[tuple[AuditRecord, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def record(self, record: AuditRecord) -> None:
        """Returns once the record is on the disk. Raises StoreError when that fails."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((record, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await written

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            failure: Exception | None = None
            try:
                await self._database.run(self._log.record, [record for record, _ in batch])
            except Exception as error:
                failure = error
            for _, written in batch:
                if written.done():  # its caller has left
                    continue
                if failure is None:
                    written.set_result(None)
                else:
                    written.set_exception(failure)
