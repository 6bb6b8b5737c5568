"""Records are on the disk when ``record`` returns, and many that wait share one commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from cb_sglang.audit import AuditLog, AuditRecord
from cb_sglang.audit_writer import AuditWriter
from cb_sglang.database import Database
from cb_sglang.errors import StoreError


class SlowLog(AuditLog):
    """Writes only when it is let; ``batches`` says what each commit held. ``fail`` is raised in place of the next."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.let = threading.Event()
        self.let.set()
        self.batches: list[list[str]] = []
        self.fail: Exception | None = None

    def record(self, records: Sequence[AuditRecord]) -> None:
        assert self.let.wait(20)
        self.batches.append([record.message for record in records])
        failure, self.fail = self.fail, None
        if failure is not None:
            raise failure
        super().record(records)


def record(message: str) -> AuditRecord:
    return AuditRecord(
        message=message, tenant="alice", sender="snd_1", receiver=None, sent=1.0, encoding="text", spans=((0, 3),)
    )


def run(test: Callable[[AuditWriter, SlowLog], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        database = Database(None)
        log = SlowLog(database)
        try:
            async with asyncio.timeout(20):
                await test(AuditWriter(database, log), log)
        finally:
            log.let.set()
            database.close()

    asyncio.run(main())


def written(log: SlowLog) -> list[str]:
    return sorted(each.message for each in log.newest("alice"))


def test_what_waits_while_one_is_written_shares_the_next_commit() -> None:
    async def test(writer: AuditWriter, log: SlowLog) -> None:
        log.let.clear()
        first = asyncio.create_task(writer.record(record("m0")))
        await asyncio.sleep(0.01)
        others = [asyncio.create_task(writer.record(record(f"m{n}"))) for n in range(1, 5)]
        await asyncio.sleep(0.01)
        assert not any(each.done() for each in (first, *others)), "nothing is on the disk yet"
        log.let.set()
        await asyncio.gather(first, *others)
        assert log.batches == [["m0"], ["m1", "m2", "m3", "m4"]]
        assert written(log) == ["m0", "m1", "m2", "m3", "m4"]
        await writer.record(record("m5"))
        assert written(log)[-1] == "m5"

    run(test)


@pytest.mark.parametrize("error", [StoreError("disk full"), RuntimeError("a bug")])
def test_a_failure_reaches_all_that_shared_it_and_nobody_else(error: Exception) -> None:
    async def test(writer: AuditWriter, log: SlowLog) -> None:
        log.let.clear()
        first = asyncio.create_task(writer.record(record("m0")))
        await asyncio.sleep(0.01)
        others = [asyncio.create_task(writer.record(record(f"m{n}"))) for n in range(1, 3)]
        await asyncio.sleep(0.01)
        log.fail = error
        log.let.set()
        outcomes = await asyncio.gather(first, *others, return_exceptions=True)
        assert outcomes == [error, None, None]
        assert written(log) == ["m1", "m2"]

    run(test)


def test_who_leaves_takes_nothing_from_the_others() -> None:
    async def test(writer: AuditWriter, log: SlowLog) -> None:
        log.let.clear()
        leaving, staying = (asyncio.create_task(writer.record(record(name))) for name in ("m0", "m1"))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        log.let.set()
        await staying
        await writer.record(record("m2"))
        # Whether the message of who left was sent is not known: it stays on record.
        assert written(log) == ["m0", "m1", "m2"]

    run(test)
