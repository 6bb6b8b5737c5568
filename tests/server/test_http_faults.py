"""Clients that leave at every stage that test_http_disconnect.py leaves out; everything they held is given back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from leaving import check_baseline, counters, left, wait_until
from served_api import ServedApi, random_ids

from cb_sglang.client import CacheBack, Sender

ROWS = 400
QUERIES = 16
LONG = 5_000


@pytest.fixture
def cold(server: ServedApi, client: CacheBack) -> Iterator[Sender]:
    """A sender whose cache is gone, with nothing else in it."""
    sender = client.create_sender(input_ids=random_ids(600, seed=50))
    server.flush()
    yield sender
    check_baseline(server)
    client.delete_sender(sender)


def queries(count: int = QUERIES) -> list[list[int]]:
    return [random_ids(ROWS, seed=seed) for seed in range(count)]


def begun(server: ServedApi) -> Any:
    """Whether the engine has computed anything since now."""
    before = server.prefilled()
    return lambda: server.prefilled() > before


def check_less_done(server: ServedApi, before: int, work: int) -> None:
    """The engine has computed less than half of ``work`` positions since ``before``."""
    assert server.prefilled() - before < work / 2


def check_stopped(server: ServedApi, before: int, work: int) -> None:
    """The same once it is idle: the rest was not computed for nobody."""
    server.flush()
    check_less_done(server, before, work)


def decode_steps(server: ServedApi) -> float:
    """Steps of the engine that have made tokens, so far."""
    moments = server.load()["decode_moments"]
    return float(moments[0]) if moments else 0.0


def test_leaving_the_queue(server: ServedApi, cold: Sender) -> None:
    path, body = f"/v1/senders/{cold.id}/messages", {"queries": queries(40)}
    with left(server, path, body):
        wait_until(lambda: counters(server)["queued"] > 0, "more work than may run at once")
        of_the_first = counters(server)["queued"]
        with left(server, path, body):
            wait_until(lambda: counters(server)["queued"] > of_the_first, "both callers in the queue")
            before = server.prefilled()
        wait_until(lambda: counters(server)["queued"] <= of_the_first, "the second one out of it")
        check_less_done(server, before, 40 * ROWS)
        assert counters(server)["running"] > 0, "the first one goes on"


@pytest.mark.parametrize("stream", [False, True], ids=["list", "stream"])
def test_leaving_a_transfer(server: ServedApi, client: CacheBack, cold: Sender, stream: bool) -> None:
    other = client.create_sender(input_ids=random_ids(300, seed=51))
    before, started = server.prefilled(), begun(server)
    body = {"senders": [cold.id, other.id], "queries": queries(), "stream": stream}
    with left(server, "/v1/transfers", body) as connection:
        if stream:
            response = connection.getresponse()
            assert response.readline() == b"event: transfer\n"
        else:
            wait_until(started, "begun")
    check_stopped(server, before, 2 * QUERIES * ROWS)
    client.delete_sender(other)


def test_leaving_a_chat_whose_message_is_being_made(server: ServedApi, client: CacheBack, cold: Sender) -> None:
    question = " ".join(f"word{n}" for n in range(1_000))
    work = cold.positions + len(client.tokenize(question))
    before, started = server.prefilled(), begun(server)
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 8,
        "cacheback": {"senders": [cold.id]},
    }
    with left(server, "/v1/chat/completions", body):
        wait_until(started, "begun")
    check_stopped(server, before, work)


def test_leaving_a_chat_in_its_answer(server: ServedApi, cold: Sender) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "What is it about?"}],
        "max_tokens": LONG,
        "ignore_eos": True,
        "stream": True,
        "cacheback": {"senders": [cold.id]},
    }
    before = decode_steps(server)
    with left(server, "/v1/chat/completions", body) as connection:
        assert connection.getresponse().readline().startswith(b"data: ")
        assert counters(server)["num_running_reqs"] == 1
    wait_until(lambda: counters(server)["num_running_reqs"] == 0, "aborted")
    assert decode_steps(server) - before < LONG / 2


def test_leaving_an_extension(server: ServedApi, client: CacheBack, cold: Sender) -> None:
    listed, before, started = client.list_senders(), server.prefilled(), begun(server)
    with left(server, f"/v1/senders/{cold.id}/extend", {"input_ids": random_ids(LONG, seed=52)}):
        wait_until(started, "begun")
    check_stopped(server, before, LONG)
    assert client.list_senders() == listed, "nobody was told its id"


def test_leaving_the_roll_of_latent_rows(server: ServedApi, client: CacheBack, cold: Sender) -> None:
    listed, started = client.list_senders(), begun(server)
    body = {"input_ids": random_ids(200, seed=53), "latent_steps": 1_000}
    with left(server, "/v1/senders", body):
        wait_until(started, "begun")
    check_baseline(server)
    assert client.list_senders() == listed


def test_leaving_a_pin_holds_nothing(server: ServedApi, client: CacheBack, cold: Sender) -> None:
    long = client.create_sender(input_ids=random_ids(3_000, seed=54))
    server.flush()
    started = begun(server)
    with left(server, f"/v1/senders/{long.id}/pin", {}, method="PUT"):
        wait_until(started, "begun")
    wait_until(lambda: client.sender(long).pinned_positions == 0, "unpinned")
    assert client.capacity().pinned_positions == 0
    check_baseline(server)
    client.delete_sender(long)
    server.flush()
