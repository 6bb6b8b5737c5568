"""Chat completions answered from messages: what the client sends, and how it reads answers and token streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from client_answers import KINDS, MESSAGE_IDS, SENDER, answering, event, message, refuse, streaming, use

from cb_sglang.client import APIConnectionError, APIError, APIResponseError, ChatMessage, Message, Sender
from cb_sglang.errors import CacheBackError, ContextLengthError, InvalidRequestError, RateLimitError
from cb_sglang.wire import ChatExtension

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
ANSWER: dict[str, Any] = {
    "id": "c1",
    "object": "chat.completion",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "So."}, "finish_reason": "stop"},
        {"index": 1, "message": {"role": "assistant", "content": "Or so."}, "finish_reason": "length"},
    ],
    "usage": {"prompt_tokens": 30, "completion_tokens": 2, "total_tokens": 32, "prompt_tokens_details": None},
}
DONE = b"data: [DONE]\n\n"


def chunk(*texts: str | None, **fields: Any) -> bytes:
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None} for text in texts]
    return f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': choices} | fields)}\n\n".encode()


# --- what is sent


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name, answer", [("chat", answering(200, ANSWER)), ("stream_chat", streaming(DONE))])
def test_what_a_chat_sends(kind: str, name: str, answer: Any) -> None:
    sent: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("POST", "/v1/chat/completions")
        sent.append(json.loads(request.content))
        return answer(request)  # type: ignore[no-any-return]

    senders = [Sender(**SENDER), "snd_2"]
    use(kind, handler, name, TURNS, senders=senders, query="Who?", options={"ratio": 4, "exclude": MESSAGE_IDS[:1]})
    given = Message(**message(0, id=MESSAGE_IDS[0]))
    turns = [ChatMessage(role="user", content="Why?")]
    use(kind, handler, name, turns, received=[MESSAGE_IDS[1], given], model="m", max_tokens=5, stop=["\n"])
    handed_on = {"id": MESSAGE_IDS[0], "sender": "snd_1", "encoding": "token_ids", "token_ids": given.token_ids}
    handed_on |= {"model_fingerprint": "", "tokenizer_fingerprint": ""}
    asked = {"senders": ["snd_1", "snd_2"], "query": "Who?", "ratio": 4.0, "exclude": MESSAGE_IDS[:1]}
    stream = name == "stream_chat"
    assert sent == [
        {"model": "default", "messages": TURNS, "stream": stream, "cacheback": asked},
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Why?"}],
            "stream": stream,
            "max_tokens": 5,
            "stop": ["\n"],
            "cacheback": {"messages": [MESSAGE_IDS[1], handed_on]},
        },
    ]
    for body in sent:
        ChatExtension.model_validate(body["cacheback"])


@pytest.mark.parametrize("kind, name", [("sync", "chat"), ("async", "stream_chat")])
@pytest.mark.parametrize(
    "turns, fields, param",
    [
        (TURNS, {}, None),
        (TURNS, {"senders": ["s"], "received": [MESSAGE_IDS[0]]}, None),
        (TURNS, {"senders": "s"}, "senders"),
        (TURNS, {"senders": []}, "senders"),
        (TURNS, {"received": MESSAGE_IDS[0]}, "received"),
        (TURNS, {"received": ["msg_1"]}, "messages"),
        (TURNS, {"senders": ["s"], "query": ""}, "query"),
        (TURNS, {"senders": ["s"], "options": {"ratio": 0}}, "ratio"),
        (TURNS, {"senders": ["s"], "options": {"rato": 2}}, None),
        (TURNS, {"senders": ["s"], "stream": True}, "stream"),
        (TURNS, {"senders": ["s"], "cacheback": {}}, "cacheback"),
        (TURNS, {"senders": ["s"], "temperature": float("nan")}, None),
        ([], {"senders": ["s"]}, "messages"),
        ("Why?", {"senders": ["s"]}, "messages"),
        (TURNS * 2_049, {"senders": ["s"]}, "messages"),
    ],
)
def test_bad_chats_are_not_sent(kind: str, name: str, turns: Any, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        use(kind, refuse, name, turns, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_has_one_choice(kind: str) -> None:
    for n in (2, [1]):
        with pytest.raises(InvalidRequestError, match="one choice") as caught:
            use(kind, refuse, "stream_chat", TURNS, senders=["s"], n=n)
        assert caught.value.param == "n"
    assert use(kind, answering(200, ANSWER), "chat", TURNS, senders=["s"], n=2).raw == ANSWER


# --- what comes back


@pytest.mark.parametrize("kind", KINDS)
def test_completion(kind: str) -> None:
    ids = ", ".join(MESSAGE_IDS[:2])
    got = use(kind, answering(200, ANSWER, X_CacheBack_Messages=ids), "chat", TURNS, senders=["s"])
    assert (got.text, got.finish_reason, got.prompt_tokens, got.completion_tokens) == ("So.", "stop", 30, 2)
    assert got.message_ids == MESSAGE_IDS[:2] and got.raw == ANSWER
    silent = {**ANSWER, "choices": [{"message": {"content": None, "tool_calls": []}, "finish_reason": "tool_calls"}]}
    got = use(kind, answering(200, silent), "chat", TURNS, senders=["s"])
    assert (got.text, got.finish_reason, got.message_ids) == ("", "tool_calls", [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", [{}, {**ANSWER, "choices": []}, {**ANSWER, "usage": None}, [ANSWER]])
def test_malformed_completions(kind: str, answer: Any) -> None:
    with pytest.raises(APIResponseError, match="no Chat"):
        use(kind, answering(200, answer), "chat", TURNS, senders=["s"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["chat", "stream_chat"])
def test_refused_chats(kind: str, name: str) -> None:
    ours = {"error": {"message": "Too long.", "type": "invalid_request_error", "code": "context_length_exceeded"}}
    with pytest.raises(ContextLengthError, match="Too long"):
        use(kind, answering(400, ours), name, TURNS, senders=["s"])
    theirs = {"object": "error", "message": "No template.", "type": "BadRequestError", "code": 400}
    with pytest.raises(InvalidRequestError, match="No template"):
        use(kind, answering(400, theirs), name, TURNS, senders=["s"])
    with pytest.raises(RateLimitError) as caught:
        use(kind, answering(429, {"error": {"code": "tenant_over_share"}}, Retry_After="2"), name, TURNS, senders=["s"])
    assert caught.value.retry_after == 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_stream(kind: str) -> None:
    usage = chunk(usage={"prompt_tokens": 3})
    extension = b'event: sglext_ids\ndata: {"sglext": 1}\n\n'
    handler = streaming(chunk(""), chunk("So "), b": ping\n\n", chunk(None), chunk("is."), extension, usage, DONE)
    assert use(kind, handler, "stream_chat", TURNS, senders=["s"]) == ["So ", "is."]
    ended = streaming(chunk("a"), DONE, b"data: not json\n\n")
    assert use(kind, ended, "stream_chat", TURNS, senders=["s"]) == ["a"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "events, cls, said",
    [
        ([], APIConnectionError, "broke off"),
        ([chunk("So")], APIConnectionError, "broke off"),
        ([chunk("So"), DONE[:-2]], APIConnectionError, "broke off"),
        ([b"data: {\n\n"], APIResponseError, "no ChatChunk"),
        ([b"data: {}\n\n"], APIResponseError, "needs choices, or an error"),
        ([b'data: {"choices": [{"index": 0}]}\n\n'], APIResponseError, "no ChatChunk: choices.0.delta"),
        ([event("error", {"error": {"message": "No.", "code": "context_length_exceeded"}})], ContextLengthError, "No."),
    ],
)
def test_bad_chat_streams(kind: str, events: list[bytes], cls: type[CacheBackError], said: str) -> None:
    with pytest.raises(cls, match=said):
        use(kind, streaming(*events), "stream_chat", TURNS, senders=["s"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code, status", [(400, 400), (503, 503), (1, 500), ("odd", 500)])
def test_an_error_amid_a_stream(kind: str, code: int | str, status: int) -> None:
    failed = {"error": {"object": "error", "message": "Aborted.", "type": "X", "param": None, "code": code}}
    body = f"data: {json.dumps(failed)}\n\n".encode()
    with pytest.raises(APIError, match="Aborted") as caught:
        use(kind, streaming(chunk("So"), body, DONE), "stream_chat", TURNS, senders=["s"])
    assert (caught.value.status, caught.value.code) == (status, str(code))


@pytest.mark.parametrize("kind", KINDS)
def test_chat_streams_are_bounded(kind: str) -> None:
    pieces = [chunk("a") for _ in range(10)]
    size = sum(map(len, pieces)) + len(DONE)
    enough, short = {"max_response_bytes": size}, {"max_response_bytes": size - 1}
    handler = streaming(*pieces, DONE)
    assert use(kind, handler, "stream_chat", TURNS, senders=["s"], settings=enough) == ["a"] * 10
    with pytest.raises(APIResponseError, match="max_response_bytes") as caught:
        use(kind, handler, "stream_chat", TURNS, senders=["s"], settings=short)
    assert caught.value.code == "response_too_large"
