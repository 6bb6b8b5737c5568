"""What queries do to a chat that runs meanwhile: its inter-token latency alone, and beside them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from api import Api, open_api
from serving import served

from cb_loadtest.load.calls import generate_stream_body
from cb_loadtest.load.samples import Samples
from cb_loadtest.load.transport import Link, open_session

CHAT_PROMPT, CHAT_TOKENS = 64, 256
POSITIONS, BUDGET = 2_048, 128
CALLERS, QUERIES, QUERY_TOKENS = 8, 4, 32
TIMEOUT_SECONDS = 300.0


def run(seconds: float, max_running_rows: Sequence[int], seed: int) -> dict[str, Any]:
    """Figures for every bound on query rows, each on a server of its own."""
    found = {}
    for rows in max_running_rows:
        with served("--max-running-rows", str(rows), "--deadline", "300") as url:
            found[str(rows)] = asyncio.run(measured(url, seconds, random.Random(seed)))
    return {"by_max_running_rows": found}


async def measured(url: str, seconds: float, draw: random.Random) -> dict[str, Any]:
    """Gaps between a chat's tokens, in milliseconds, in both conditions, and the messages made beside it."""
    tokens = range(1_000, 200_000)
    async with open_api(url) as api, open_session() as session:
        link = Link(session, url, None, TIMEOUT_SECONDS)
        sender = await api.register(draw.choices(tokens, k=POSITIONS))
        queries = [draw.choices(tokens, k=QUERY_TOKENS) for _ in range(CALLERS * QUERIES)]
        prompt = ",".join(map(str, draw.choices(tokens, k=CHAT_PROMPT)))
        await link.stream(generate_stream_body(prompt, 16))  # warms up
        alone = await chatted(link, prompt, seconds)
        made: Counter[str] = Counter()
        callers = [
            asyncio.create_task(ask_forever(api, sender, queries[n * QUERIES : (n + 1) * QUERIES], made))
            for n in range(CALLERS)
        ]
        await asyncio.sleep(2.0)
        before = made["ok"]
        beside = await chatted(link, prompt, seconds)
        messages = made["ok"] - before
        for caller in callers:
            caller.cancel()
        ended = await asyncio.gather(*callers, return_exceptions=True)
    failed = [repr(each) for each in ended if not isinstance(each, asyncio.CancelledError)]
    if failed:
        raise RuntimeError(f"callers failed: {failed}")
    return {
        "alone_ms": alone.milliseconds(),
        "beside_queries_ms": beside.milliseconds(),
        "messages_per_s": round(messages / seconds, 2),
        "codes": dict(made),
    }


async def chatted(link: Link, prompt: str, seconds: float) -> Samples:
    """Gaps of one chat after the other, for ``seconds``."""
    gaps = Samples()
    try:
        async with asyncio.timeout(seconds):
            while True:
                await link.stream(generate_stream_body(prompt, CHAT_TOKENS), gaps.extend)
    except TimeoutError:
        return gaps


async def ask_forever(api: Api, sender: str, queries: list[list[int]], made: Counter[str]) -> None:
    while True:
        body = {"queries": queries, "budget": BUDGET}
        reply = await api.call("POST", f"/v1/senders/{sender}/messages", body)
        made[reply.code] += len(queries) if reply.status == 200 else 1
