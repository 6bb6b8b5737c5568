"""SIGKILL in the middle of registrations, again and again on one data folder: what was acknowledged must be there."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from api import Api, open_api
from serving import LOG, kill_server, served

from cb_sglang.tenants import new_key

TENANTS = ("a", "b")
CALLERS = 3  # of each tenant
POSITIONS = 24
CHECKS_AT_ONCE = 8


@dataclass(slots=True)
class Round:
    """What the clients of one life of the server saw: acknowledged (tenant, id), and requests without an answer."""

    acknowledged: list[tuple[str, str]] = field(default_factory=list)
    unanswered: int = 0


def run(times: int, seed: int) -> dict[str, Any]:
    """Figures over ``times`` kills. Raises RuntimeError when the file of senders is damaged."""
    draw = random.Random(seed)
    keys, lines = {}, []
    for tenant in TENANTS:
        keys[tenant], line = new_key(tenant)
        lines.append(line)
    with tempfile.TemporaryDirectory() as folder:
        data, key_file = Path(folder) / "data", Path(folder) / "keys.txt"
        key_file.write_text("\n".join(lines) + "\n")
        options = ("--tenant-keys", str(key_file), "--data-dir", str(data), "--max-total-tokens", "8192")
        before, rounds = Round(), []
        everything: list[tuple[str, str]] = []
        lost: list[tuple[str, str]] = []
        for number in range(times + 1):
            with served(*options) as url:
                lost += asyncio.run(missing(url, keys, before.acknowledged))
                if number == times:
                    lost += asyncio.run(missing(url, keys, everything))
                    break
                before = asyncio.run(registered_until_killed(url, keys, draw))
            check_files(data)
            everything += before.acknowledged
            rounds.append((len(before.acknowledged), before.unanswered))
            print(f"kill {number + 1} of {times}: acknowledged, unanswered = {rounds[-1]}; lost so far {len(lost)}")
    return {
        "kills": times,
        "acknowledged": len(everything),
        "unanswered_when_killed": sum(unanswered for _, unanswered in rounds),
        "acknowledged_and_lost": len(lost),
        "rounds": rounds,
    }


async def registered_until_killed(url: str, keys: dict[str, str], draw: random.Random) -> Round:
    """Register at ``url`` with all callers until the server is killed, a second or two after they have begun."""
    found = Round()

    async def caller(tenant: str, api: Api, seeds: random.Random) -> None:
        try:
            while True:
                ids = [seeds.randrange(1_000, 200_000) for _ in range(POSITIONS)]
                found.acknowledged.append((tenant, await api.register(ids)))
        except (aiohttp.ClientError, TimeoutError):
            found.unanswered += 1

    async def killer() -> None:
        while len(found.acknowledged) < CALLERS:
            await asyncio.sleep(0.001)
        await asyncio.sleep(draw.uniform(0.5, 2.0))
        kill_server()

    async with open_api(url, keys["a"]) as a, open_api(url, keys["b"]) as b, asyncio.TaskGroup() as tasks:
        for tenant, api in (("a", a), ("b", b)):
            for _ in range(CALLERS):
                tasks.create_task(caller(tenant, api, random.Random(draw.random())))
        tasks.create_task(killer())
    return found


async def missing(url: str, keys: dict[str, str], senders: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of the senders that do not answer a query with a message."""
    room = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def answers(api: Api, sender: str) -> bool:
        async with room:
            reply = await api.ask(sender, "Where?", budget=8)
        return reply.status == 200 and len(reply.body["data"][0]["positions"]) == 8

    async with open_api(url, keys["a"]) as a, open_api(url, keys["b"]) as b:
        apis = {"a": a, "b": b}
        found = await asyncio.gather(*(answers(apis[tenant], sender) for tenant, sender in senders))
    return [sender for sender, there in zip(senders, found, strict=True) if not there]


def check_files(data: Path) -> None:
    """Let SQLite check a copy of what the killed server left. The server itself logs rows that are not whole."""
    log = LOG.read_text(errors="replace")
    if "is damaged and left out" in log:
        raise RuntimeError(f"a half sender was loaded; see {LOG}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(data, Path(folder) / "copy")) / "senders.sqlite"
        connection = sqlite3.connect(copy)
        try:
            (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
        finally:
            connection.close()
    if verdict != "ok":
        raise RuntimeError(f"the file of senders is corrupt: {verdict}")
