"""Closed and open loop in virtual time: schedules and latencies to the microsecond, without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from virtual_time import run_virtually

from cb_loadtest.load.generator import Stop, closed_loop, open_loop
from cb_loadtest.load.schedule import Planned


class Server:
    """Serves a request in ``seconds``, all at once; between ``stall`` and ``until`` nothing ends."""

    def __init__(self, seconds: float, stall: float = 0.0, until: float = 0.0) -> None:
        self.seconds, self.stall, self.until = seconds, stall, until
        self.due: dict[int, float] = {}
        self.sent: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.most = 0

    async def perform(self, request: Planned, due: float) -> None:
        loop = asyncio.get_running_loop()
        self.due[request.index], self.sent[request.index] = due, loop.time()
        self.most = max(self.most, len(self.sent) - len(self.ended))
        await asyncio.sleep(self.seconds)
        if self.stall <= loop.time() < self.until:
            await asyncio.sleep(self.until - loop.time())
        self.ended[request.index] = loop.time()


def every(gap: float, count: int) -> Iterator[Planned]:
    return (Planned(i, 0, 0, offset=i * gap) for i in range(count))


def test_closed_loop_keeps_exactly_its_receivers_busy() -> None:
    server = Server(seconds=2.0)

    async def main() -> float:
        await closed_loop(every(0, 12), server.perform, concurrency=3, stop=Stop())
        return asyncio.get_running_loop().time()

    assert run_virtually(main) == pytest.approx(8.0)
    assert server.most == 3
    assert [server.sent[i] for i in range(12)] == pytest.approx([2.0 * (i // 3) for i in range(12)])


def test_closed_loop_begins_nothing_after_its_time_but_ends_what_it_began() -> None:
    server = Server(seconds=2.0)

    async def main() -> None:
        await closed_loop(every(0, 1_000), server.perform, concurrency=2, stop=Stop(), seconds=5.0)

    run_virtually(main)
    assert sorted(server.ended.values()) == pytest.approx([2.0, 2.0, 4.0, 4.0, 6.0, 6.0])


def test_open_loop_keeps_its_schedule_while_the_server_stalls() -> None:
    server = Server(seconds=0.1, stall=2.0, until=7.0)

    async def main() -> None:
        await open_loop(every(0.25, 40), server.perform, stop=Stop())

    run_virtually(main)
    for i in range(40):
        assert server.sent[i] == pytest.approx(i * 0.25)
        assert server.due[i] == server.sent[i]
        done = i * 0.25 + 0.1
        assert server.ended[i] == pytest.approx(7.0 if 2.0 <= done < 7.0 else done)
    # A generator that waits for answers would have met the stall once, with one request.
    slow = [i for i in range(40) if server.ended[i] - server.due[i] > 0.2]
    assert len(slow) == 20


def test_requests_that_find_no_room_wait_at_the_generator_from_when_they_were_due() -> None:
    server = Server(seconds=1.0)

    async def main() -> None:
        await open_loop(every(0.1, 4), server.perform, stop=Stop(), max_in_flight=1)

    run_virtually(main)
    assert server.most == 1
    assert [server.due[i] for i in range(4)] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert [server.ended[i] for i in range(4)] == pytest.approx([1.0, 2.0, 3.0, 4.0], abs=0.05)


def test_open_loop_leaves_out_what_is_due_after_its_time() -> None:
    server = Server(seconds=10.0)

    async def main() -> None:
        await open_loop(every(1.0, 100), server.perform, stop=Stop(), seconds=3.0)

    run_virtually(main)
    assert sorted(server.ended) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["closed", "open", "open, full"])
def test_a_stop_ends_the_loop_at_once_and_cancels_what_is_on_its_way(kind: str) -> None:
    server = Server(seconds=3.0)

    async def main() -> float:
        stop = Stop()
        loop = asyncio.get_running_loop()
        loop.call_later(4.0, stop.ask, "enough")
        loop.call_later(4.5, stop.ask, "again")
        if kind == "closed":
            await closed_loop(every(0, 100), server.perform, concurrency=2, stop=stop)
        else:
            room = 1 if kind == "open, full" else 100
            await open_loop(every(1.0, 100), server.perform, stop=stop, max_in_flight=room)
        assert stop.reason == "enough"
        return loop.time()

    assert run_virtually(main) == pytest.approx(4.0, abs=0.01)
    assert len(server.ended) < len(server.sent)


def test_a_stop_cuts_off_what_it_is_raced_with() -> None:
    begun: list[str] = []

    async def work(name: str, seconds: float) -> str:
        begun.append(name)
        await asyncio.sleep(seconds)
        if name == "fails":
            raise ZeroDivisionError
        return name

    async def main() -> float:
        stop, loop = Stop(), asyncio.get_running_loop()
        loop.call_later(3.0, stop.ask, "enough")
        assert await stop.unless_asked(work("short", 1.0)) == "short"
        with pytest.raises(ZeroDivisionError):
            await stop.unless_asked(work("fails", 1.0))
        assert await stop.unless_asked(work("long", 100.0)) is None
        assert await stop.unless_asked(work("late", 0.0)) is None
        return loop.time()

    assert run_virtually(main) == pytest.approx(3.0)
    assert begun == ["short", "fails", "long"]


def test_an_error_of_the_generator_itself_is_raised_and_nothing_goes_on() -> None:
    ended: list[int] = []

    async def perform(request: Planned, due: float) -> None:
        await asyncio.sleep(1.0 + request.index)
        if request.index == 1:
            raise ZeroDivisionError
        ended.append(request.index)

    async def main() -> None:
        await closed_loop(every(0, 9), perform, concurrency=3, stop=Stop())

    with pytest.raises(ZeroDivisionError):
        run_virtually(main)
    assert ended == [0]
