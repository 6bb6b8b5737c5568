"""Clients that leave in the middle: their work stops, and the engine is as free as before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from leaving import left, wait_until
from served_api import ServedApi, random_ids

from cb_sglang.client import CacheBack, Sender

QUERIES, ROWS = 48, 400
WORK = QUERIES * ROWS


@pytest.fixture
def cold(server: ServedApi, client: CacheBack) -> Iterator[Sender]:
    """A sender whose cache is gone."""
    sender = client.create_sender(input_ids=random_ids(1_000, seed=40))
    server.flush()
    yield sender
    client.delete_sender(sender)


def check_idle_again(server: ServedApi, done_before: int, work: int) -> None:
    """The engine stopped long before it had done ``work``, and everything it has can be had."""
    server.flush()
    done = server.prefilled() - done_before
    assert 0 < done < work / 2, f"{done} of {work} positions were computed for nobody"
    load = server.load()
    assert load["num_running_reqs"] == load["num_waiting_reqs"] == load["num_used_tokens"] == 0


@contextmanager
def asked(server: ServedApi, path: str, body: object) -> Iterator[None]:
    """A request whose answer nobody reads; entered when the engine works on it, and left by hanging up."""
    before = server.prefilled()
    with left(server, path, body):
        wait_until(lambda: server.prefilled() > before, "begun")
        yield


@pytest.mark.parametrize("stream", [False, True], ids=["list", "stream"])
def test_leaving_before_the_first_message(server: ServedApi, cold: Sender, stream: bool) -> None:
    before = server.prefilled()
    body = {"queries": [random_ids(ROWS, seed=seed) for seed in range(QUERIES)], "stream": stream}
    with asked(server, f"/v1/senders/{cold.id}/messages", body):
        pass
    check_idle_again(server, before, WORK + cold.positions)


def test_leaving_a_stream_in_its_middle(server: ServedApi, client: CacheBack, cold: Sender) -> None:
    before = server.prefilled()
    messages = client.stream_messages(cold, [random_ids(ROWS, seed=seed) for seed in range(QUERIES)])
    next(messages)
    messages.close()
    check_idle_again(server, before, WORK + cold.positions)


def test_leaving_a_registration(server: ServedApi, client: CacheBack) -> None:
    ids = random_ids(6_000, seed=41)
    server.flush()
    before = server.prefilled()
    listed = client.list_senders()
    with asked(server, "/v1/senders", {"input_ids": ids}):
        pass
    check_idle_again(server, before, len(ids))
    assert client.list_senders() == listed, "nobody was told its id, so it is not registered"


def test_one_of_two_leaving_a_registration_leaves_the_other_alone(server: ServedApi, client: CacheBack) -> None:
    ids = random_ids(1_500, seed=42)
    server.flush()
    with ThreadPoolExecutor(1) as pool:
        with asked(server, "/v1/senders", {"input_ids": ids}):
            staying = pool.submit(lambda: client.create_sender(input_ids=ids))
            time.sleep(0.2)
        assert staying.result().positions == len(ids)
    client.delete_sender(staying.result())
