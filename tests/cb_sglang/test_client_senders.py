"""The client's calls for senders of every kind: received, extended, private, latent, in a chain."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from client_answers import KINDS, MESSAGE_IDS, SENDER, Handler, answering, message, refuse, use

from cb_sglang.client import Audit, Capacity, Hop, Message, PrivateSpan, ReceivedMessage, Sender
from cb_sglang.errors import InvalidRequestError, SenderNotFoundError
from cb_sglang.wire import ExtendRequest, SenderRequest

HANDED_ON = {
    "id": MESSAGE_IDS[0],
    "sender": "snd_1",
    "encoding": "token_ids",
    "token_ids": list(range(100, 108)),
    "model_fingerprint": "m0",
    "tokenizer_fingerprint": "t0",
}
RECEIVED = message(0, id=MESSAGE_IDS[0], model_fingerprint="m0", tokenizer_fingerprint="t0")


def recording(sent: list[tuple[str, str, Any]], answer: Any = SENDER) -> Handler:
    def handler(request: httpx.Request) -> httpx.Response:
        sent.append((request.method, request.url.path, json.loads(request.content or b"null")))
        return httpx.Response(200, json=answer)

    return handler


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_of_a_sender_is_sent(kind: str) -> None:
    sent: list[tuple[str, str, Any]] = []
    handler = recording(sent)
    use(
        kind,
        handler,
        "create_sender",
        prompt="Text.",
        inherits=[
            MESSAGE_IDS[1],
            Message(**RECEIVED),
            ReceivedMessage(encoding="text", text="so"),
            {"encoding": "text", "text": "it"},
        ],
        latent_steps=8,
        private=[PrivateSpan(chars=(0, 2)), {"chars": [3, 4]}],
        ttl=60,
        pin=True,
    )
    use(kind, handler, "extend_sender", Sender(**SENDER), prompt="More.", latent_steps=2, private=[{"tokens": [0, 1]}])
    use(kind, handler, "extend_sender", "a/b", messages=[{"role": "user", "content": "Hi"}], ttl=1.5)
    use(kind, handler, "create_sender", input_ids=[1], inherits=None, private=None, ttl=None)
    lead = [MESSAGE_IDS[1], HANDED_ON, {"encoding": "text", "text": "so"}, {"encoding": "text", "text": "it"}]
    first = {"prompt": "Text.", "latent_steps": 8, "private": [{"chars": [0, 2]}, {"chars": [3, 4]}]}
    assert sent == [
        ("POST", "/v1/senders", {**first, "ttl": 60.0, "inherits": lead, "pin": True}),
        (
            "POST",
            "/v1/senders/snd_1/extend",
            {"prompt": "More.", "latent_steps": 2, "private": [{"tokens": [0, 1]}]},
        ),
        ("POST", "/v1/senders/a/b/extend", {"messages": [{"role": "user", "content": "Hi"}], "ttl": 1.5}),
        ("POST", "/v1/senders", {"input_ids": [1]}),
    ]
    for _, path, body in sent:
        (ExtendRequest if path.endswith("extend") else SenderRequest).model_validate(body)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name, args, kwargs, param, said",
    [
        ("create_sender", (), {"prompt": "a", "latent_steps": -1}, "latent_steps", "greater than or equal to 0"),
        ("create_sender", (), {"prompt": "a", "latent_steps": 10_000}, "latent_steps", "less than or equal to 1024"),
        ("create_sender", (), {"prompt": "a", "ttl": 0}, "ttl", "greater than 0"),
        ("create_sender", (), {"prompt": "a", "private": [{"chars": [4, 4]}]}, "private", "start before stop"),
        ("create_sender", (), {"prompt": "a", "private": [{"role": "user"}]}, None, "roles are those of messages"),
        ("create_sender", (), {"prompt": "a", "inherits": []}, "inherits", "at least 1"),
        ("create_sender", (), {"prompt": "a", "inherits": MESSAGE_IDS[0]}, "inherits", "put the message into one"),
        ("create_sender", (), {"prompt": "a", "inherits": ["msg_1"]}, "inherits", "match pattern"),
        ("create_sender", (), {"prompt": "a", "inherits": [{"encoding": "mixed"}]}, "inherits", "needs its payload"),
        ("create_sender", (), {"prompt": "a", "pinned": True}, None, "unknown options: pinned; there are inherits"),
        ("extend_sender", ("s",), {}, None, "exactly one"),
        ("extend_sender", ("s",), {"prompt": "a", "inherits": MESSAGE_IDS}, None, "unknown options: inherits"),
        ("extend_sender", ("..",), {"prompt": "a"}, "sender", "id"),
        ("audit", ("",), {}, "sender", "id"),
    ],
)
def test_bad_senders_are_not_sent(
    kind: str, name: str, args: Any, kwargs: dict[str, Any], param: str | None, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        use(kind, refuse, name, *args, **kwargs)
    assert caught.value.param == param


@pytest.mark.parametrize("kind", KINDS)
def test_audit_and_capacity(kind: str) -> None:
    entry = {"message": MESSAGE_IDS[0], "receiver": "planner", "created": 2.5, "encoding": "text", "spans": [[0, 3]]}
    sent: list[tuple[str, str, Any]] = []
    audit = use(kind, recording(sent, {"object": "audit", "sender": "snd_1", "data": [entry]}), "audit", "snd_1")
    assert isinstance(audit, Audit)
    assert (audit.data[0].receiver, audit.data[0].spans) == ("planner", [(0, 3)])
    counts = {"pool_positions": 900, "used_positions": 30, "pinned_positions": 8, "context_length": 512}
    load = {"receivers": 3, "running": 2, "queued": 1}
    grant = {"asked": 512, "granted": 300, "limit": "share", "reason": "900 / 3"}
    got = use(kind, recording(sent, {"object": "capacity", **counts, **load, "grant": grant}), "capacity")
    assert isinstance(got, Capacity)
    assert (got.pool_positions, got.queued, got.grant.granted, got.grant.limit) == (900, 1, 300, "share")
    assert sent == [("GET", "/v1/senders/snd_1/audit", None), ("GET", "/v1/capacity", None)]


# --- chains


@pytest.mark.parametrize("kind", KINDS)
def test_each_hop_inherits_the_message_of_the_one_before(kind: str) -> None:
    sent: list[tuple[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        body, hop = json.loads(request.content), len(sent) // 2
        sent.append((request.url.path, body))
        if request.url.path == "/v1/senders":
            return httpx.Response(200, json=SENDER | {"id": f"snd_{hop}", "inherited": 8 * bool(hop)})
        made = message(0, id=MESSAGE_IDS[hop], sender=f"snd_{hop}", encoding="text", token_ids=None, text=f"from {hop}")
        return httpx.Response(200, json={"object": "list", "data": [made]})

    hops = ["One.", {"prompt": "Two.", "latent_steps": 4}, {"input_ids": [7, 8]}, "Four."]
    got = use(kind, handler, "chain", hops, "Why?", ratio=2, encoding="text")
    assert [(type(hop), hop.sender.id, hop.message.id) for hop in got] == [
        (Hop, f"snd_{n}", MESSAGE_IDS[n]) for n in range(4)
    ]
    assert [hop.sender.inherited for hop in got] == [0, 8, 8, 8]
    registered = [body for path, body in sent if path == "/v1/senders"]
    assert [body.get("inherits", [{}])[0].get("text") for body in registered] == [None, "from 0", "from 1", "from 2"]
    assert "inherits" not in registered[0]
    assert registered[1]["latent_steps"] == 4 and registered[2]["input_ids"] == [7, 8]
    asked = [(path, body) for path, body in sent if path != "/v1/senders"]
    options = {"queries": ["Why?"], "stream": False, "ratio": 2.0, "encoding": "text"}
    assert asked == [(f"/v1/senders/snd_{n}/messages", options) for n in range(4)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "hops, query, options, param",
    [
        ([], "q", {}, "hops"),
        ("text", "q", {}, "hops"),
        (["a"] * 65, "q", {}, "hops"),
        (["a", ""], "q", {}, "hops"),
        (["a", {"prompt": "b", "input_ids": [1]}], "q", {}, "hops"),
        (["a", {"prompt": "b", "inherits": [MESSAGE_IDS[0]]}], "q", {}, "hops"),
        (["a", {}], "q", {}, "hops"),
        (["a"], "", {}, "queries"),
        (["a"], "q", {"ratio": 0.5}, "ratio"),
        (["a"], "q", {"rato": 2}, None),
    ],
)
def test_a_bad_chain_sends_nothing(kind: str, hops: Any, query: str, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        use(kind, refuse, "chain", hops, query, **options)
    assert caught.value.param == param


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_stops_at_the_hop_that_fails(kind: str) -> None:
    gone = {"error": {"message": "Gone.", "type": "not_found_error", "code": "sender_not_found"}}
    calls: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.path)
        return answering(404, gone)(request) if len(calls) > 1 else httpx.Response(200, json=SENDER)

    with pytest.raises(SenderNotFoundError):
        use(kind, handler, "chain", ["a", "b"], "q")
    assert calls == ["/v1/senders", "/v1/senders/snd_1/messages"]
