"""A server under load: its senders registered, requests made the three ways and recorded."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from cb_loadtest.load.calls import WAYS, Ask, prefill
from cb_loadtest.load.content import NOTHING, Content, SenderText, prepare
from cb_loadtest.load.environment import admin_key, api_keys
from cb_loadtest.load.generator import Stop, closed_loop, open_loop
from cb_loadtest.load.schedule import Planned
from cb_loadtest.load.tally import Record, Step, Tally
from cb_loadtest.load.transport import Link, OpenFilesError, most_connections, open_session
from cb_loadtest.load.workload import Workload, WorkloadError
from cb_sglang.client import APIConnectionError, APITimeoutError, Sender, calls
from cb_sglang.errors import CacheBackError

UNREACHABLE_AFTER = 32
"""So many requests in a row without a connection, and the server is taken for gone."""

_PAUSE_UNREACHABLE = 0.1
_AT_ONCE = 8  # senders that are registered or deleted
_SENDER_TTL = 3_600.0  # renewed by every query; senders of a run that was killed end by it
_FORGET_SECONDS = 5.0


@dataclass(slots=True)
class Primed:
    """What priming found: the senders' positions, and how many of them were not in the cache, first and later."""

    positions: int = 0
    cold_first: int = 0
    cold_later: int = 0


class Bench:
    """Makes requests and counts what they cost the generator.

    ``links`` holds one for each tenant; ``admin`` reads what is the operator's; senders in ``foreign`` are kept.
    """

    def __init__(
        self,
        links: Sequence[Link],
        admin: Link,
        workload: Workload,
        content: Content,
        *,
        seed: int,
        stop: Stop,
        foreign: Collection[str] = (),
    ) -> None:
        self.links = links
        self.admin = admin
        self.workload = workload
        self.content = content
        self.primed = Primed()
        self.cpu_seconds = 0.0
        self.requests = 0
        self._seed = seed
        self._stop = stop
        self._nonce = secrets.token_hex(8)
        self._ids: dict[int, str] = {}
        self._foreign = foreign
        self._registered: dict[str, Link] = {}
        self._lost = 0

    def fresh(self, label: str) -> random.Random:
        """Draws for what no run before may have put into the cache; nothing of the plan or its digest."""
        return random.Random(f"{label}/{self._seed}/{self._nonce}")

    async def register(self, link: Link, ids: Sequence[int]) -> Sender:
        """A sender that is deleted when the bench is left, unless it is a foreign one. Raises the client's errors."""
        registered = await link.run(calls.create_sender(input_ids=ids, ttl=_SENDER_TTL))
        if registered.id not in self._foreign:
            self._registered[registered.id] = link
        return registered

    async def forget(self) -> int:
        """Delete the registered senders as far as the server does it in time; how many are left."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(name: str, link: Link) -> None:
            async with room:
                try:
                    await link.run(calls.delete_sender(name))
                except CacheBackError as error:
                    if error.status != 404:
                        return
                del self._registered[name]

        with suppress(TimeoutError):
            async with asyncio.timeout(_FORGET_SECONDS):
                await asyncio.gather(*(one(*entry) for entry in self._registered.items()))
        return len(self._registered)

    async def prime(self, way: str) -> None:
        """Put the senders into the cache where ``way`` reads them from. Raises the client's errors."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(number: int, sender: SenderText) -> None:
            async with room:
                await self._prime_sender(way, number, sender)

        if way == "full_context":
            return
        try:
            async with asyncio.TaskGroup() as group:
                for number, sender in enumerate(self.content.senders):
                    group.create_task(one(number, sender))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _prime_sender(self, way: str, number: int, sender: SenderText) -> None:
        link = self.links[sender.tenant]
        if way == "text_report":
            # A server may keep registered senders under a salt of their tenant; reports read the plain prefix.
            await prefill(link, sender.json_ids)
            return
        registered = await self.register(link, sender.ids)
        # SGLang always computes a prompt's last position anew.
        cold = max(0, registered.positions - 1 - (registered.cached_positions or 0))
        if number in self._ids:
            self.primed.cold_later += cold
        else:
            self.primed.positions += registered.positions
            self.primed.cold_first += cold
        self._ids[number] = registered.id

    async def warm_up(self, ways: Iterable[str], answering: bool) -> None:
        """The workload's uncounted requests. Raises the client's errors, so that a hopeless run ends here."""
        for way in ways:
            await self.prime(way)
            for index in range(self.workload.warmup):
                if self._stop:
                    return
                step = Step(way, answering, "warm-up", 0)
                await WAYS[way](self._ask(step, Planned(index, index % len(self.content.senders), 0), 0))

    async def measure(
        self,
        tally: Tally,
        planned: Iterable[Planned],
        *,
        turn: int,
        seconds: float | None,
        sink: Callable[[Record], None],
    ) -> None:
        """One round of a step, the ``turn``-th. Its time ends with the last request, or with the stop."""
        loop = asyncio.get_running_loop()
        start, end = loop.time(), loop.time()
        cpu = time.process_time()

        async def perform(request: Planned, due: float) -> None:
            nonlocal end
            tally.started += 1
            record = await self._request(tally.step, request, due, turn)
            end = max(end, record.ended_at)
            tally.add(record)
            sink(record)

        try:
            if tally.step.mode == "closed":
                await closed_loop(planned, perform, concurrency=int(tally.step.level), stop=self._stop, seconds=seconds)
            else:
                await open_loop(planned, perform, stop=self._stop, seconds=seconds, max_in_flight=most_connections())
        finally:
            self.cpu_seconds += time.process_time() - cpu
            tally.seconds += (loop.time() if self._stop else end) - start

    async def _request(self, step: Step, request: Planned, due: float, turn: int) -> Record:
        loop = asyncio.get_running_loop()
        tenant = self.content.senders[request.sender].tenant
        self.requests += 1
        sent = loop.time()
        outcome, error = None, None
        try:
            outcome = await WAYS[step.way](self._ask(step, request, turn))
            self._lost = 0
        except CacheBackError as failure:
            error = f"{failure.status} {failure.code}"
            await self._after(failure)
        ended = loop.time() if outcome is None else outcome.ended_at
        return Record(request, turn, tenant, due, sent, ended, outcome, error)

    async def _after(self, failure: CacheBackError) -> None:
        """A server that is gone must not be asked as fast as connections are refused, nor for ever."""
        gone = isinstance(failure, APIConnectionError) and not isinstance(failure, APITimeoutError)
        self._lost = self._lost + 1 if gone else 0
        if self._lost >= UNREACHABLE_AFTER:
            self._stop.ask(f"the server is gone: {failure.message}")
        if gone or isinstance(failure, OpenFilesError):
            await self._stop.within(_PAUSE_UNREACHABLE)

    def _ask(self, step: Step, request: Planned, turn: int) -> Ask:
        sender = self.content.senders[request.sender]
        draw = self.fresh(f"{step.way}/{step.label}/{step.answering}/{turn}/{request.index}")
        return Ask(
            link=self.links[sender.tenant],
            sender_id=self._ids.get(request.sender, ""),
            sender=sender,
            question=self.content.questions[request.question],
            receivers=self.workload.receivers,
            answering=step.answering,
            preamble=self.content.preamble(draw),
            preamble_text=self.content.preamble_text(draw),
        )


@asynccontextmanager
async def open_bench(
    url: str,
    workload: Workload,
    *,
    seed: int,
    timeout: float,
    stop: Stop,
    say: Callable[[str], None],
) -> AsyncIterator[Bench]:
    """A bench on the server at ``url``, with the keys of the environment; senders are not registered yet.

    After a stop it has no content. Leaving it deletes the senders that it registered, but none that was there before;
    ``say`` is told of those left.
    Raises WorkloadError when there are keys, but fewer than tenants, and the client's errors.
    """
    keys = api_keys()
    if keys and len(keys) < workload.tenants:
        raise WorkloadError(f"{workload.tenants} tenants need as many API keys, not {len(keys)}")
    async with open_session() as session:
        tenants: Sequence[str | None] = keys[: workload.tenants] or [None] * workload.tenants
        links = [Link(session, url, tenant, timeout) for tenant in tenants]
        admin = Link(session, url, key, timeout) if (key := admin_key()) else links[0]
        content = await stop.unless_asked(prepare(links[0], workload, seed)) or NOTHING
        # Without keys all links are of one tenant.
        listed = (link.run(calls.list_senders()) for link in (links if keys else links[:1]))
        known = await stop.unless_asked(asyncio.gather(*listed)) or []
        foreign = {sender.id for senders in known for sender in senders}
        bench = Bench(links, admin, workload, content, seed=seed, stop=stop, foreign=foreign)
        try:
            yield bench
        finally:
            if left := await bench.forget():
                say(f"{left} senders could not be deleted; they end when nobody has asked them for an hour")
