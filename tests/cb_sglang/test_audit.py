"""The audit record: who got what, bounded, per tenant."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cb_sglang.audit import AuditLog, AuditRecord
from cb_sglang.database import Database
from cb_sglang.errors import InvalidRequestError, StoreError


@pytest.fixture
def database() -> Iterator[Database]:
    with closing(Database(None)) as opened:
        yield opened


def record(number: int, **fields: Any) -> AuditRecord:
    told: dict[str, Any] = dict(
        message=f"msg_{number}",
        tenant="a",
        sender="snd_1",
        receiver="planner",
        sent=float(number),
        encoding="token_ids",
        spans=((0, 1), (16, 32)),
    )
    return AuditRecord(**{**told, **fields})


def numbers(records: list[AuditRecord]) -> list[int]:
    return [int(one.message.removeprefix("msg_")) for one in records]


def test_what_was_recorded_comes_back(tmp_path: Path) -> None:
    told = [record(1, excluded=((2, 3),)), record(2, receiver=None, spans=()), record(3, encoding="mixed")]
    with closing(Database(tmp_path / "db")) as database:
        AuditLog(database).record(told)
    with closing(Database(tmp_path / "db")) as database:
        assert AuditLog(database).newest("a") == told[::-1]
        assert AuditLog(database).sent("a", ["msg_3", "msg_none", "msg_1"]) == {"msg_1": told[0], "msg_3": told[2]}


def test_a_tenant_reads_its_own(database: Database) -> None:
    log = AuditLog(database)
    log.record([record(1), record(2, tenant="b")])
    assert log.sent("b", ["msg_1", "msg_2"]).keys() == {"msg_2"}
    assert numbers(log.newest("b", sender="snd_1")) == [2]
    assert log.newest("c") == []


def test_newest_of_all_or_of_a_sender(database: Database) -> None:
    log = AuditLog(database)
    log.record([record(1), record(2, sender="snd_2"), record(3, receiver="coder"), record(4, receiver=None)])
    assert numbers(log.newest("a")) == [4, 3, 2, 1]
    assert numbers(log.newest("a", limit=2)) == [4, 3]
    assert numbers(log.newest("a", sender="snd_1")) == [4, 3, 1]


def test_bounds_keep_the_newest(database: Database) -> None:
    log = AuditLog(database, per_sender=3, total=7, tenant_share=0.75, sweep_every=1)
    for number in range(10):
        log.record([record(number)])
    assert numbers(log.newest("a")) == [9, 8, 7]
    for number in range(10, 16):
        log.record([record(number, sender=f"snd_{number}")])
    assert numbers(log.newest("a")) == [15, 14, 13, 12, 11]
    log.record([record(number, tenant="b", sender=f"snd_{number}") for number in range(16, 20)])
    assert numbers(log.newest("b")) == [19, 18, 17]
    assert numbers(log.newest("a")) == [15, 14, 13]


def test_a_sender_has_no_more_than_its_tenant(database: Database) -> None:
    log = AuditLog(database, total=10, tenant_share=0.5, sweep_every=1_000)
    log.record([record(number) for number in range(20)])
    assert numbers(log.newest("a")) == [19, 18, 17, 16, 15]


def test_without_tenants_the_total_is_all_of_one(database: Database) -> None:
    log = AuditLog(database, per_sender=1_000, total=60, sweep_every=1)
    log.record([record(number, sender=f"snd_{number}") for number in range(80)])
    assert len(log.newest("a")) == 60


def test_bounds_hold_from_time_to_time_and_at_the_start(database: Database) -> None:
    log = AuditLog(database, total=5, sweep_every=4)
    log.record([record(number, sender=f"snd_{number}") for number in range(8)])
    assert len(log.newest("a")) == 5
    for number in range(8, 11):
        log.record([record(number, sender=f"snd_{number}")])
    assert len(log.newest("a")) == 8
    log.record([record(11, sender="snd_11")])
    assert numbers(log.newest("a")) == [11, 10, 9, 8, 7]
    AuditLog(database, total=6, tenant_share=0.5).record([record(12, tenant="b")])
    assert len(log.newest("a")) == 3


def test_one_tenant_cannot_push_out_anothers(database: Database) -> None:
    log = AuditLog(database, total=20, tenant_share=0.5, sweep_every=1)
    log.record([record(number) for number in range(10)])
    log.record([record(number, tenant="b") for number in range(10, 60)])
    assert (len(log.newest("a")), len(log.newest("b"))) == (10, 10)


def test_those_with_the_most_give_way(database: Database) -> None:
    """However many tenants there are, and however large a share each may have."""
    log = AuditLog(database, total=20, tenant_share=0.75, sweep_every=1)
    log.record([record(number, tenant="old") for number in range(3)])
    for turn in range(1, 6):
        for tenant in ("b", "c"):
            first = 100 * turn + (50 if tenant == "c" else 0)
            log.record([record(number, tenant=tenant, sender=tenant) for number in range(first, first + 12)])
    assert numbers(log.newest("old")) == [2, 1, 0]
    assert [len(log.newest(tenant)) for tenant in ("b", "c")] == [8, 8]
    assert numbers(log.newest("c"))[0] == 561


def test_a_tenant_keeps_its_newest_however_many_there_are(database: Database) -> None:
    log = AuditLog(database, total=2, tenant_share=0.1, sweep_every=1)
    for number in range(6):
        log.record([record(number, tenant=f"t{number % 3}")])
    assert [numbers(log.newest(f"t{n}")) for n in range(3)] == [[3], [4], [5]]


def test_recorded_all_or_none(database: Database) -> None:
    log = AuditLog(database)
    log.record([record(1)])
    with pytest.raises(StoreError, match="UNIQUE"):
        log.record([record(2), record(1)])
    assert numbers(log.newest("a")) == [1]


@pytest.mark.parametrize(
    "damage",
    ["sender = 'snd_9'", "receiver = NULL", "sent = 7.0", "spans = x'00'", "excluded = x'0000000001000000'"],
)
def test_a_damaged_record_is_left_out(database: Database, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    log = AuditLog(database)
    log.record([record(1), record(2)])
    with database.transaction() as db:
        db.execute(f"UPDATE audit SET {damage} WHERE message = 'msg_1'")
    with caplog.at_level(logging.ERROR, logger="cb_sglang.audit"):
        assert numbers(log.newest("a")) == [2] and log.sent("a", ["msg_1"]) == {}
    assert "msg_1" in caplog.text


@pytest.mark.parametrize("wrong", [((-1, 2),), ((2, 2),), ((3, 1),), ((0, 2), (2, 3)), ((4, 5), (0, 1))])
def test_spans_lie_apart_and_in_order(wrong: tuple[tuple[int, int], ...]) -> None:
    for field in ("spans", "excluded"):
        with pytest.raises(InvalidRequestError, match="apart and in order"):
            replace(record(1), **{field: wrong})
