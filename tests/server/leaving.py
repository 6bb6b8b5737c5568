"""Clients that hang up, and what must be true of the server afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection

from served_api import ServedApi

PATIENCE_SECONDS = 60.0


@contextmanager
def left(server: ServedApi, path: str, body: object, *, method: str = "POST") -> Iterator[HTTPConnection]:
    """A request that is sent on entering and hung up on when the context is left, whatever of the answer was read."""
    connection = HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        yield connection
    finally:
        connection.close()


def wait_until(reached: Callable[[], bool], what: str) -> None:
    """Poll a state that must come; how soon is not judged."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < end, f"never {what}"
        time.sleep(0.02)


def counters(server: ServedApi) -> dict[str, int]:
    """Our queue, and SGLang's own counts of requests and of positions in use; all zero when nothing goes on."""
    ours, engine = server.http.get("/v1/capacity").raise_for_status().json(), server.load()
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    return {name: ours[name] for name in ("running", "queued", "receivers")} | {name: engine[name] for name in names}


def check_baseline(server: ServedApi) -> None:
    """Everything was given back, and the server works."""
    wait_until(lambda: not any(counters(server).values()), f"idle again: {counters(server)}")
    sender = server.client.create_sender(prompt="The ship sails at noon from Boston with forty men.")
    (message,) = server.client.messages(sender, ["When does it sail?"], budget=4)
    assert len(message.positions) == 4
    server.client.delete_sender(sender)
