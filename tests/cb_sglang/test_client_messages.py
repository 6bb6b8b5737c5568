"""The client's calls for messages with every option, in binary form, and of many senders at once."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from client_answers import KINDS, MESSAGE_IDS, SENDER, answering, event, message, refuse, streaming, use
from payload_examples import ENCODINGS, example

from cb_sglang.client import APIConnectionError, APIResponseError, Message, Query, Receiver, SelectorOptions, Sender
from cb_sglang.errors import BudgetError, CacheBackError, InvalidRequestError, RateLimitError
from cb_sglang.payload import encode_batch
from cb_sglang.wire import MessagesRequest, TransfersRequest

OPTIONS: dict[str, Any] = {
    "coverage": 0.9,
    "exclude": [Message(**message(0, id=MESSAGE_IDS[0])), MESSAGE_IDS[1]],
    "since": Message(**message(0, id=MESSAGE_IDS[2])),
    "encoding": "mixed",
    "selector": "cacheback",
    "selector_options": SelectorOptions(alpha=1.5),
    "query_template": "Q: {query}",
    "span_scores": True,
    "receiver": Receiver(label="planner", prompt_positions=40),
    "policy": "fit",
    "min_budget": 16,
    "deadline": 2,
}
WRITTEN = {
    **OPTIONS,
    "exclude": MESSAGE_IDS[:2],
    "since": MESSAGE_IDS[2],
    "selector_options": {"alpha": 1.5},
    "receiver": {"label": "planner", "prompt_positions": 40},
}
NO_SENDER = {"message": "No such sender.", "type": "not_found_error", "param": None, "code": "sender_not_found"}


def transfer(sender: str, query: int, **changes: Any) -> dict[str, Any]:
    made = message(query, sender=sender)
    return {"object": "transfer", "sender": sender, "query": query, "message": made, "error": None} | changes


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_is_sent(kind: str) -> None:
    sent: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, json={"object": "list", "data": [message(0)]})

    use(kind, handler, "messages", "snd_1", ["Why?"], **OPTIONS)
    use(kind, handler, "messages", "snd_1", [Query(query=[1], since=MESSAGE_IDS[0])], receiver={"senders": 3})
    use(kind, handler, "messages", "snd_1", [{"query": "Why?", "coverage": 0.5}], exclude=[], policy=None)
    assert sent == [
        {"queries": ["Why?"], "stream": False, **WRITTEN},
        {"queries": [{"query": [1], "since": MESSAGE_IDS[0]}], "stream": False, "receiver": {"senders": 3}},
        {"queries": [{"query": "Why?", "coverage": 0.5}], "stream": False, "exclude": []},
    ]
    for body in sent:
        MessagesRequest.model_validate(body)


@pytest.mark.parametrize(
    "options, param",
    [
        ({"coverage": 1.5}, "coverage"),
        ({"coverage": 0.5, "ratio": 2}, "coverage"),
        ({"exclude": MESSAGE_IDS[0]}, "exclude"),
        ({"exclude": ["snd_1"]}, "exclude"),
        ({"exclude": MESSAGE_IDS * 300}, "exclude"),
        ({"since": "msg_1"}, "since"),
        ({"selector_options": {"beta": 1}}, "selector_options"),
        ({"receiver": {"senders": 0}}, "receiver"),
        ({"policy": "greedy"}, "policy"),
        ({"min_budget": 0}, "min_budget"),
        ({"deadline": 0}, "deadline"),
        ({"deadlin": 1}, None),
    ],
)
def test_bad_options_are_not_sent(options: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        use("sync", refuse, "messages", "snd_1", ["q"], **options)
    assert caught.value.param == param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["messages", "stream_messages", "message_payloads", "transfers", "stream_transfers"])
def test_every_call_checks_its_options(kind: str, name: str) -> None:
    sender = ["snd_1"] if name.endswith("transfers") else "snd_1"
    for options, param in (({"since": "msg_1"}, "since"), ({"sinse": MESSAGE_IDS[0]}, None)):
        with pytest.raises(InvalidRequestError) as caught:
            use(kind, refuse, name, sender, ["q"], **options)
        assert caught.value.param == param


# --- binary


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_payloads_of_every_encoding(kind: str, encoding: Any) -> None:
    made = [example(encoding, index=n) for n in range(2)]
    sent: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, content=encode_batch(made[::-1]))

    assert use(kind, handler, "message_payloads", Sender(**SENDER), ["a", "b"], encoding=encoding) == made
    (request,) = sent
    assert request.headers["Accept"] == "application/x-safetensors" and request.url.path == "/v1/senders/snd_1/messages"
    assert json.loads(request.content) == {"queries": ["a", "b"], "stream": False, "encoding": encoding}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "body, said",
    [
        (b"", "no batch of messages"),
        (b'{"object": "list", "data": []}', "no batch of messages"),
        (encode_batch([example("mixed", index=0)])[:-1], "no batch of messages"),
        (encode_batch([example("text", index=n) for n in range(2)]), "a batch of 2 messages; at most 1"),
        (encode_batch([]), "1 queries were answered by the messages"),
        (encode_batch([example("text", index=1)]), r"answered by the messages \[1\]"),
    ],
)
def test_bad_payloads(kind: str, body: bytes, said: str) -> None:
    with pytest.raises(APIResponseError, match=said) as caught:
        use(kind, answering(200, body), "message_payloads", "s", ["q"])
    assert caught.value.code == "malformed_response"


@pytest.mark.parametrize("kind", KINDS)
def test_payloads_are_bounded_and_errors_are_json(kind: str) -> None:
    body = encode_batch([example("embeddings", index=0)])
    with pytest.raises(APIResponseError, match="max_response_bytes"):
        use(
            kind,
            answering(200, body),
            "message_payloads",
            "s",
            ["q"],
            settings={"max_response_bytes": len(body) - 1},
        )
    refused = {"error": {"message": "Wait.", "type": "rate_limit_error", "code": "tenant_over_share"}}
    with pytest.raises(RateLimitError, match="Wait") as caught:
        use(kind, answering(429, refused, Retry_After="3"), "message_payloads", "s", ["q"])
    assert caught.value.retry_after == 3.0


# --- transfers


@pytest.mark.parametrize("kind", KINDS)
def test_transfers_come_in_order_with_the_errors_of_their_pairs(kind: str) -> None:
    sent: list[Any] = []
    data = [transfer("b", 0), transfer("a", 1), transfer("b", 1, message=None, error=NO_SENDER), transfer("a", 0)]

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/transfers"
        sent.append(json.loads(request.content))
        return httpx.Response(200, json={"object": "list", "data": data})

    got = use(kind, handler, "transfers", [Sender(**SENDER | {"id": "a"}), "b"], ["q", {"query": "r"}], **OPTIONS)
    assert [(each.sender, each.query) for each in got] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert got[3].message is None and got[3].error.code == "sender_not_found"
    assert all(each.message.index == each.query and each.error is None for each in got[:3])
    assert sent == [{"queries": ["q", {"query": "r"}], "stream": False, **WRITTEN, "senders": ["a", "b"]}]
    TransfersRequest.model_validate(sent[0])


@pytest.mark.parametrize("kind, name", [("sync", "transfers"), ("async", "stream_transfers")])
@pytest.mark.parametrize(
    "senders, queries, param",
    [
        ([], ["q"], "senders"),
        ("snd_1", ["q"], "senders"),
        (["a", "a"], ["q"], None),
        (["a"] * 65, ["q"], "senders"),
        (["a", ""], ["q"], "sender"),
        (["a"], "q", "queries"),
        (["a"], [], "queries"),
        ([f"s{n}" for n in range(64)], ["q"] * 17, None),
    ],
)
def test_bad_transfers_are_not_sent(kind: str, name: str, senders: Any, queries: Any, param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        use(kind, refuse, name, senders, queries)
    assert caught.value.param == param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "data, said",
    [
        ([], "0 transfers are not the 2 pairs"),
        ([transfer("a", 0)], "1 transfers are not"),
        ([transfer("a", 0), transfer("a", 0)], "2 transfers are not"),
        ([transfer("a", 0), transfer("a", 1), transfer("a", 1)], "3 transfers are not"),
        ([transfer("a", 0), transfer("b", 0)], "2 transfers are not"),
        ([transfer("a", 0), transfer("a", 1, message=None)], "transfer 1 of a needs a message, or an error"),
        ([transfer("a", 0), transfer("a", 1, error=NO_SENDER)], "transfer 1 of a needs a message, or an error"),
        ([transfer("a", 0), {"sender": "a"}], "no TransferList: data.1.query"),
    ],
)
def test_transfers_that_do_not_match_the_pairs(kind: str, data: list[Any], said: str) -> None:
    with pytest.raises(APIResponseError, match=said):
        use(kind, answering(200, {"object": "list", "data": data}), "transfers", ["a"], ["q", "r"])


@pytest.mark.parametrize("kind", KINDS)
def test_stream_of_transfers(kind: str) -> None:
    failed = transfer("a", 0, message=None, error=NO_SENDER)
    handler = streaming(event("transfer", transfer("a", 1)), event("transfer", failed), event("done", {}))
    got = use(kind, handler, "stream_transfers", ["a"], ["q", "r"], budget=8)
    assert [(each.query, each.error and each.error.message) for each in got] == [(1, None), (0, "No such sender.")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "events, cls, said",
    [
        ([event("transfer", transfer("a", 0))], APIConnectionError, "broke off"),
        ([event("transfer", transfer("a", 0)), event("done", {})], APIResponseError, r"without transfers \[\('a', 1\)"),
        ([event("transfer", transfer("b", 0))], APIResponseError, r"a transfer \('b', 0\) that was not awaited"),
        ([event("transfer", transfer("a", 0))] * 2, APIResponseError, "not awaited"),
        ([event("transfer", transfer("a", 0, message=None))], APIResponseError, "needs a message, or an error"),
        ([event("message", message(0)), event("done", {})], APIResponseError, "without transfers"),
        ([event("error", {"error": {"message": "No.", "code": "invalid_budget"}})], BudgetError, "No."),
    ],
)
def test_bad_streams_of_transfers(kind: str, events: list[bytes], cls: type[CacheBackError], said: str) -> None:
    with pytest.raises(cls, match=said):
        use(kind, streaming(*events), "stream_transfers", ["a"], ["q", "r"])
