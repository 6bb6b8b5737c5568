"""Registering, listing and deleting senders on the real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from served_api import ServedApi, excerpt, random_ids

from cb_sglang.client import CacheBack, Sender
from cb_sglang.errors import SenderNotFoundError


def test_same_content_is_the_same_sender(server: ServedApi, client: CacheBack) -> None:
    text = excerpt("clinton_1999")
    server.flush()
    first = client.create_sender(prompt=text)
    assert first.cached_positions == 0
    assert first.id.startswith("snd_") and len(first.fingerprint) == 64

    again = client.create_sender(prompt=text)
    by_ids = client.create_sender(input_ids=client.tokenize(text))
    # SGLang always computes a request's last position, so this is all a registration can find cached.
    assert again.cached_positions == by_ids.cached_positions == first.positions - 1
    for other in (again, by_ids):
        assert (other.id, other.fingerprint, other.positions) == (first.id, first.fingerprint, first.positions)
        assert other.created == first.created


def test_other_content_is_another_sender_and_shares_the_cached_prefix(server: ServedApi, client: CacheBack) -> None:
    server.flush()
    shared = random_ids(200, seed=1)
    first = client.create_sender(input_ids=[*shared, *random_ids(30, seed=2)])
    second = client.create_sender(input_ids=[*shared, *random_ids(30, seed=3)])
    assert first.id != second.id and first.fingerprint != second.fingerprint
    assert second.cached_positions == 200
    client.delete_sender(first)
    client.delete_sender(second)


def test_one_token_is_a_sender(client: CacheBack) -> None:
    sender = client.create_sender(input_ids=[1234])
    assert sender.positions == 1
    (message,) = client.messages(sender, ["What is this?"], ratio=1)
    assert message.positions == [0] and message.token_ids == [1234]
    client.delete_sender(sender)


def test_list_get_delete(client: CacheBack, http: httpx.Client) -> None:
    for left in client.list_senders():
        client.delete_sender(left)
    made = [client.create_sender(input_ids=random_ids(20, seed=seed)) for seed in (10, 11, 12)]

    listed = http.get("/v1/senders").json()
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == [sender.id for sender in made], "oldest first"
    # Only a registration knows what was cached then.
    assert [Sender(**entry) for entry in listed["data"]] == [
        s.model_copy(update={"cached_positions": None}) for s in made
    ]
    assert client.sender(made[1]) == Sender(**listed["data"][1])

    assert http.delete(f"/v1/senders/{made[1].id}").json() == {
        "object": "sender.deleted",
        "id": made[1].id,
        "deleted": True,
    }
    assert [sender.id for sender in client.list_senders()] == [made[0].id, made[2].id]
    for call in (client.sender, client.delete_sender, lambda s: client.messages(s, ["Who?"])):
        with pytest.raises(SenderNotFoundError):
            call(made[1])

    back = client.create_sender(input_ids=random_ids(20, seed=11))
    assert back.id == made[1].id and [s.id for s in client.list_senders()][-1] == back.id
    for sender in (made[0], made[2], back):
        client.delete_sender(sender)
    assert client.list_senders() == []


def test_registered_at_once_is_prefilled_once(server: ServedApi, client: CacheBack) -> None:
    ids = random_ids(900, seed=20)
    server.flush()
    before = server.prefilled()
    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(lambda _: client.create_sender(input_ids=ids), range(6)))
    server.flush()  # which also brings the engine's counters up to date
    assert len({sender.id for sender in made}) == 1
    # Callers that came late were told of a full cache; nobody paid for a second prefill.
    assert {sender.cached_positions for sender in made} <= {0, len(ids) - 1}
    assert server.prefilled() - before < 2 * len(ids)
    client.delete_sender(made[0])


def test_deleting_a_sender_leaves_messages_under_way_alone(client: CacheBack) -> None:
    sender = client.create_sender(input_ids=random_ids(300, seed=30))
    messages = client.stream_messages(sender, [random_ids(200, seed=seed) for seed in range(8)])
    indexes = {next(messages).index}
    client.delete_sender(sender)
    indexes |= {message.index for message in messages}
    assert indexes == set(range(8))
    with pytest.raises(SenderNotFoundError):
        client.messages(sender, ["Who?"])
