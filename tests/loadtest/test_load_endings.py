"""How runs end: Ctrl-C while the server hangs, senders left behind, connections that this process cannot open."""

from __future__ import annotations

import asyncio
import errno
import resource
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey
from load_run import Run, against, capacity, workload
from stub_server import Settings, Stub
from virtual_time import run_virtually

from cb_loadtest.load import transport
from cb_loadtest.load.bench import Bench, open_bench
from cb_loadtest.load.content import Content, sender_text
from cb_loadtest.load.generator import Stop
from cb_loadtest.load.transport import Link
from cb_loadtest.load.workload import MAX_CONCURRENCY
from cb_sglang.client.errors import APICapacityError

TIMEOUT = 600.0


@pytest.mark.parametrize(
    "hang",
    [
        {"/v1/tokenize": 0},
        {"/server_info": 0},
        {"/v1/senders": 0},
        {"/v1/senders": 1},
        {"/v1/senders": 2},
        {"/metrics": 0},
        {"/metrics": 1},
        {"/generate": 0},
    ],
    ids=str,
)
def test_ctrl_c_ends_a_run_at_once_wherever_the_server_hangs(hang: dict[str, int]) -> None:
    chosen = workload(senders={"count": 1}, chats={"concurrency": 1}, rounds=2)
    run = Run(Settings(hang=hang, interrupt=True, delay=(0.1, 0.1), token=0.01), chosen, 1.0, timeout=TIMEOUT)
    assert run.found["stopped"] == "interrupted"
    assert run.stub.hung_at is not None
    assert run.ended_at - run.stub.hung_at == pytest.approx(1.0, abs=0.1)


def test_metrics_that_do_not_come_hold_a_run_up_for_seconds_only() -> None:
    run = Run(Settings(hang={"/metrics": 0}), workload(), 1.0, timeout=TIMEOUT)
    assert run.found["stopped"] is None
    assert run.step["completed"] == 8
    assert run.ended_at < 11.0
    assert [line.partition(" ")[0] for line in run.found["problems"]] == ["/metrics"]


def test_ctrl_c_ends_the_fit() -> None:
    stub = Stub(Settings(delay=(0.05, 0.05), hang={"/generate": 0}, interrupt=True))
    found = capacity(stub, highest=1.0, timeout=TIMEOUT)
    assert (found["stopped"], found["knee"]["level"], found["service_model"]) == ("interrupted", 1.0, None)


def test_senders_are_leased_and_deleted() -> None:
    run = Run(Settings(), workload(), 2.0)
    assert (run.stub.senders, set(run.stub.leases)) == ({}, {3_600.0})
    stub = Stub(Settings(delay=(0.05, 0.05)))
    capacity(stub, highest=1.0)
    assert stub.senders == {}


def test_senders_that_were_there_before_are_kept() -> None:
    stub = Stub()
    chosen = workload(senders={"count": 2})

    async def left(url: str) -> dict[str, list[int]]:
        async with open_bench(url, chosen, seed=0, timeout=TIMEOUT, stop=Stop(), say=print) as bench:
            await bench.register(bench.links[0], bench.content.senders[0].ids)
            before = dict(stub.senders)
            async with open_bench(url, chosen, seed=0, timeout=TIMEOUT, stop=Stop(), say=print) as other:
                await other.prime("message")
                assert len(stub.senders) == 2
            assert stub.senders == before
        return stub.senders

    assert against(stub, left) == {}


def test_a_server_that_deletes_nothing_holds_a_run_up_for_seconds_only() -> None:
    run = Run(Settings(hang={"DELETE": 1}), workload(), 2.0, timeout=TIMEOUT)
    assert "1 senders could not be deleted" in run.console
    assert run.stub.hung_at is not None
    assert run.ended_at - run.stub.hung_at == pytest.approx(5.0, abs=0.1)


def test_priming_that_fails_leaves_nothing_running() -> None:
    ended: list[str] = []

    class Refusing:
        async def run(self, call: Any) -> Any:
            if b"[1]" in call.body:
                raise APICapacityError("full")
            await asyncio.sleep(1.0)
            ended.append("registered")

    link = cast(Link, Refusing())
    content = Content((sender_text([1]), sender_text([2])), (), (), (), ())

    async def main() -> None:
        bench = Bench([link], link, workload(), content, seed=0, stop=Stop())
        with pytest.raises(APICapacityError, match="full"):
            await bench.prime("message")
        await asyncio.sleep(2.0)

    run_virtually(main)
    assert ended == []


def test_a_process_without_files_is_no_lost_server(monkeypatch: pytest.MonkeyPatch) -> None:
    create, made = aiohttp.TCPConnector._create_connection, 0

    async def few(self: aiohttp.TCPConnector, *arguments: Any) -> Any:
        nonlocal made
        made += 1
        if made > 8:
            key = ConnectionKey("127.0.0.1", 1, False, True, None, None, None)
            raise aiohttp.ClientConnectorError(key, OSError(errno.EMFILE, "Too many open files"))
        return await create(self, *arguments)

    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", few)
    run = Run(Settings(delay=(0.2, 0.2)), workload(requests=400), 64.0)
    assert run.found["stopped"] is None
    assert run.found["errors"] == {"500 too_many_open_files": run.step["failed"]}
    assert run.step["failed"] > 64
    assert run.step["completed"] > 0


def test_the_limit_of_open_files_is_raised_and_bounds_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, 1_024)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert 256 < transport.most_connections() < 1_024
    assert limits[-1] == (1_024, 1_024)
    limits.append((1 << 20, 1 << 20))
    assert transport.most_connections() == MAX_CONCURRENCY
