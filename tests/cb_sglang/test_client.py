"""The client against mock transports and a small ASGI server; every behaviour on both the sync and the async one."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from client_answers import KINDS, SENDER, answering, event, message, refuse, streaming, use
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cb_sglang.client import (
    APIConnectionError,
    APIError,
    APIResponseError,
    APITimeoutError,
    AsyncCacheBack,
    CacheBack,
    Completion,
    Message,
    Query,
    Sender,
)
from cb_sglang.client.errors import api_error
from cb_sglang.client.events import Event, EventParser
from cb_sglang.errors import (
    AuthenticationError,
    BudgetError,
    CacheBackError,
    CapacityError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    RateLimitError,
    SenderNotFoundError,
    StoreError,
)
from cb_sglang.wire import ErrorBody, ErrorResponse, MessagesRequest, SenderRequest

# --- requests


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent(kind: str) -> None:
    sent: list[tuple[str, str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append((request.method, request.url.raw_path.decode(), json.loads(request.content or b"null")))
        path = request.url.path
        if path.endswith("/messages"):
            return httpx.Response(200, json={"object": "list", "data": [message(0)]})
        if request.method == "DELETE":
            return httpx.Response(200, json={"object": "sender.deleted", "id": "snd_1", "deleted": True})
        if path == "/v1/senders" and request.method == "GET":
            return httpx.Response(200, json={"object": "list", "data": [SENDER]})
        return httpx.Response(200, json=SENDER)

    assert use(kind, handler, "create_sender", prompt="Text.") == Sender(**SENDER)
    use(kind, handler, "create_sender", input_ids=(1, 2))
    use(kind, handler, "create_sender", messages=[{"role": "user", "content": "Hi"}])
    assert use(kind, handler, "list_senders") == [Sender(**SENDER)]
    assert use(kind, handler, "sender", "a/b c") == Sender(**SENDER)
    assert use(kind, handler, "delete_sender", Sender(**SENDER)).deleted is True
    (got,) = use(kind, handler, "messages", "snd_1", ["Why?"], ratio=4, encoding="text", span_scores=True)
    assert got.spans == [(0, 8)] and got.budget.positions == 8
    use(kind, handler, "messages", "snd_1", [Query(query="Why?", budget=9)])
    use(kind, handler, "messages", "snd_1", [[5, 6]], ratio=None)
    assert sent == [
        ("POST", "/v1/senders", {"prompt": "Text."}),
        ("POST", "/v1/senders", {"input_ids": [1, 2]}),
        ("POST", "/v1/senders", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("GET", "/v1/senders", None),
        ("GET", "/v1/senders/a%2Fb%20c", None),
        ("DELETE", "/v1/senders/snd_1", None),
        (
            "POST",
            "/v1/senders/snd_1/messages",
            {"queries": ["Why?"], "stream": False, "ratio": 4.0, "encoding": "text", "span_scores": True},
        ),
        ("POST", "/v1/senders/snd_1/messages", {"queries": [{"query": "Why?", "budget": 9}], "stream": False}),
        ("POST", "/v1/senders/snd_1/messages", {"queries": [[5, 6]], "stream": False}),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_key_and_base_url(kind: str) -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"object": "list", "data": []})

    use(kind, handler, "list_senders", settings={"api_key": "s3cret"})
    use(kind, handler, "list_senders")
    assert [request.headers.get("Authorization") for request in seen] == ["Bearer s3cret", None]
    with CacheBack("http://host:1/prefix/", transport=httpx.MockTransport(handler)) as client:
        client.list_senders()
    assert str(seen[-1].url) == "http://host:1/prefix/v1/senders"


@pytest.mark.parametrize("client", [CacheBack, AsyncCacheBack])
@pytest.mark.parametrize(
    "base_url, settings, param",
    [
        ("127.0.0.1:30000", {}, "base_url"),
        ("localhost", {}, "base_url"),
        ("ftp://host", {}, "base_url"),
        ("http://", {}, "base_url"),
        ("http://host:port", {}, "base_url"),
        ("http://host", {"api_key": "s3cret\r\nX: 1"}, "api_key"),
        ("http://host", {"api_key": ""}, "api_key"),
        ("http://host", {"api_key": "s3crét"}, "api_key"),
        ("http://host", {"timeout": 0}, "timeout"),
        ("http://host", {"timeout": float("nan")}, "timeout"),
    ],
)
def test_unusable_settings(client: Any, base_url: str, settings: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client(base_url, **settings)
    assert caught.value.param == param
    assert "s3cr" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name, args, kwargs, param",
    [
        ("create_sender", (), {}, None),
        ("create_sender", (), {"prompt": "a", "input_ids": [1]}, None),
        ("create_sender", (), {"prompt": ""}, "prompt"),
        ("create_sender", (), {"input_ids": []}, "input_ids"),
        ("create_sender", (), {"input_ids": [1, -1]}, "input_ids"),
        ("create_sender", (), {"input_ids": [1, 2.5]}, "input_ids"),
        ("create_sender", (), {"messages": [{"role": "user"}]}, "messages"),
        ("sender", ("",), {}, "sender"),
        ("sender", ("..",), {}, "sender"),
        ("sender", ("x" * 257,), {}, "sender"),
        ("messages", ("s", []), {}, "queries"),
        ("messages", ("s", "Why?"), {}, "queries"),
        ("messages", ("s", [""]), {}, "queries"),
        ("messages", ("s", ["q"] * 257), {}, "queries"),
        ("messages", ("s", ["q" * 32_769]), {}, "queries"),
        ("messages", ("s", ["q"]), {"ratio": 8, "budget": 3}, "budget"),
        ("messages", ("s", ["q"]), {"ratio": 0.5}, "ratio"),
        ("messages", ("s", ["q"]), {"ratio": float("nan")}, "ratio"),
        ("messages", ("s", ["q"]), {"budget": 0}, "budget"),
        ("messages", ("s", ["q"]), {"encoding": "pickle"}, "encoding"),
        ("messages", ("s", ["q"]), {"rato": 8}, None),
        ("stream_messages", ("s", ["q"]), {"budget": 0}, "budget"),
        ("generate", (), {}, None),
        ("generate", (), {"text": "a", "input_ids": [1]}, None),
        ("generate", (), {"input_ids": []}, "input_ids"),
        ("generate", (), {"text": "a", "stop": {1, 2}}, None),
        ("generate", (), {"text": "a", "temperature": float("inf")}, None),
        ("detokenize", ([],), {}, "sequences"),
        ("detokenize", ([[1], []],), {}, "input_ids"),
    ],
)
def test_bad_input_is_not_sent(kind: str, name: str, args: Any, kwargs: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        use(kind, refuse, name, *args, **kwargs)
    assert caught.value.param == param
    assert not isinstance(caught.value, APIError)


def test_stream_messages_checks_before_the_first_step() -> None:
    with CacheBack("http://test", transport=httpx.MockTransport(refuse)) as client, pytest.raises(InvalidRequestError):
        client.stream_messages("s", [])


# --- answers


@pytest.mark.parametrize("kind", KINDS)
def test_messages_come_in_the_order_of_the_queries(kind: str) -> None:
    handler = answering(200, {"object": "list", "data": [message(1), message(0)]})
    assert [m.id for m in use(kind, handler, "messages", "s", ["a", "b"])] == ["msg_0", "msg_1"]


@pytest.mark.parametrize("kind", KINDS)
def test_generate(kind: str) -> None:
    sent: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/generate"
        sent.append(json.loads(request.content))
        meta = {"prompt_tokens": 3, "cached_tokens": 2, "finish_reason": {"type": "length", "length": 2}, "id": "x"}
        return httpx.Response(200, json={"text": " so", "output_ids": [7, 8], "meta_info": meta})

    got = use(kind, handler, "generate", input_ids=[1, 2, 3], max_new_tokens=2, ignore_eos=True)
    assert isinstance(got, Completion)
    assert (got.text, got.output_ids, got.prompt_tokens, got.cached_tokens) == (" so", [7, 8], 3, 2)
    assert got.finish_reason == "length" and got.seconds > 0
    use(kind, handler, "generate", text="Why?", stop=["\n"])
    greedy = {"temperature": 0.0}
    assert sent == [
        {"input_ids": [1, 2, 3], "sampling_params": greedy | {"max_new_tokens": 2, "ignore_eos": True}},
        {"text": "Why?", "sampling_params": greedy | {"max_new_tokens": 128, "stop": ["\n"]}},
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_tokenize_and_detokenize(kind: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/v1/tokenize":
            assert body == {"prompt": "ab", "add_special_tokens": False}
            return httpx.Response(200, json={"tokens": [3, 4], "count": 2, "max_model_len": -1})
        assert (request.url.path, body) == ("/v1/detokenize", {"tokens": [[3], [4]]})
        return httpx.Response(200, json={"text": ["a", "b"]})

    assert use(kind, handler, "tokenize", "ab", add_special_tokens=False) == [3, 4]
    assert use(kind, handler, "detokenize", [[3], [4]]) == ["a", "b"]
    with pytest.raises(APIResponseError, match="1 sequences became 2 texts"):
        use(kind, answering(200, {"text": ["a", "b"]}), "detokenize", [[3]])


@pytest.mark.parametrize("kind", KINDS)
def test_models(kind: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("GET", "/v1/models")
        return httpx.Response(200, json={"object": "list", "data": [{"id": "a", "max_model_len": 8}, {"id": "b"}]})

    assert use(kind, handler, "models") == ["a", "b"]


MALFORMED = [
    b"",
    b"<html>",
    b"{",
    b"null",
    b"[]",
    b"{}",
    b'"\xff"',
    b"[" * 100_000,
    json.dumps({"data": [{**SENDER, "positions": "many"}]}).encode(),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name, args", [("list_senders", ()), ("messages", ("s", ["q"])), ("tokenize", ("a",))])
@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_answers(kind: str, name: str, args: Any, body: bytes) -> None:
    with pytest.raises(APIResponseError) as caught:
        use(kind, answering(200, body), name, *args)
    assert caught.value.status == 200 and caught.value.code == "malformed_response"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("indices", [[], [0], [0, 0], [0, 2], [0, 1, 2]])
def test_messages_that_do_not_match_the_queries(kind: str, indices: list[int]) -> None:
    handler = answering(200, {"object": "list", "data": [message(i) for i in indices]})
    with pytest.raises(APIResponseError, match="2 queries were answered by"):
        use(kind, handler, "messages", "s", ["a", "b"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", [200, 500])
def test_answer_larger_than_the_bound(kind: str, status: int) -> None:
    body = json.dumps({"object": "list", "data": [SENDER]}).encode()
    fits = {"max_response_bytes": len(body)}
    assert len(use(kind, answering(200, body), "list_senders", settings=fits)) == 1
    with pytest.raises(APIResponseError, match="max_response_bytes") as caught:
        use(kind, answering(status, body + b" "), "list_senders", settings=fits)
    assert caught.value.code == "response_too_large"


# --- errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "cls",
    [
        InvalidRequestError,
        BudgetError,
        ContextLengthError,
        SenderNotFoundError,
        CapacityError,
        RateLimitError,
        AuthenticationError,
        EngineError,
        StoreError,
    ],
)
def test_server_errors_keep_their_class(kind: str, cls: type[CacheBackError]) -> None:
    body = ErrorResponse(error=ErrorBody(message="Change it.", type=cls.type, param="ratio", code=cls.code))
    handler = answering(cls.status, body.model_dump(), Retry_After="7")
    with pytest.raises(cls) as caught:
        use(kind, handler, "messages", "s", ["q"])
    error = caught.value
    assert isinstance(error, APIError)
    assert (error.status, error.type, error.code) == (cls.status, cls.type, cls.code)
    assert (error.message, error.param, error.retry_after) == ("Change it.", "ratio", 7.0)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and vars(copy) == vars(error)


@pytest.mark.parametrize(
    "status, body, cls, said, code",
    [
        (418, b"<html>", APIError, "the server answered with HTTP status 418", "internal_error"),
        (502, b"", APIError, "the server answered with HTTP status 502", "internal_error"),
        (401, b'{"error": "Unauthorized"}', AuthenticationError, "Unauthorized", "invalid_api_key"),
        (400, b'{"error": {"message": "Too long."}}', InvalidRequestError, "Too long.", "invalid_value"),
        (
            400,
            b'{"object": "error", "message": "No.", "type": "BadRequestError", "code": 400}',
            InvalidRequestError,
            "No.",
            "400",
        ),
        (404, b'{"detail": "Not Found"}', APIError, "the server answered with HTTP status 404", "internal_error"),
        (429, b"{}", RateLimitError, "the server answered with HTTP status 429", "tenant_over_share"),
        (503, b"{}", CapacityError, "the server answered with HTTP status 503", "server_overloaded"),
        (500, b'{"error": {"message": ["x"], "type": 1, "code": true}}', APIError, "HTTP status 500", "internal_error"),
        (500, b"[" * 100_000, APIError, "HTTP status 500", "internal_error"),
        (307, b"", APIError, "HTTP status 307", "internal_error"),
        (204, b"", APIError, "HTTP status 204", "internal_error"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_others(kind: str, status: int, body: bytes, cls: type[CacheBackError], said: str, code: str) -> None:
    with pytest.raises(cls) as caught:
        use(kind, answering(status, body, Location="http://elsewhere/"), "list_senders")
    assert isinstance(caught.value, APIError)
    assert said in caught.value.message
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (status, code, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name, args", [("list_senders", ()), ("stream_messages", ("s", ["q"]))])
@pytest.mark.parametrize(
    "raised, cls",
    [
        (httpx.ConnectError("refused"), APIConnectionError),
        (httpx.ReadError(""), APIConnectionError),
        (httpx.RemoteProtocolError("gone"), APIConnectionError),
        (httpx.ConnectTimeout("slow"), APITimeoutError),
        (httpx.ReadTimeout("slow"), APITimeoutError),
        (httpx.PoolTimeout("slow"), APITimeoutError),
        (httpx.DecodingError("bad"), APIResponseError),
    ],
)
def test_no_answer(kind: str, name: str, args: Any, raised: Exception, cls: type[CacheBackError]) -> None:
    calls = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        raise raised

    with pytest.raises(cls) as caught:
        use(kind, handler, name, *args)
    assert calls == 1  # no retries
    assert caught.value.__cause__ is raised
    assert (cls is APITimeoutError) == isinstance(caught.value, APITimeoutError)


# --- streams


@pytest.mark.parametrize("kind", KINDS)
def test_stream(kind: str) -> None:
    sent: list[Any] = []
    answer = streaming(b": hello\n\n", event("message", message(1)), event("message", message(0)), event("done", {}))

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return answer(request)

    got = use(kind, handler, "stream_messages", "s", ["a", "b"], budget=8)
    assert [m.index for m in got] == [1, 0]
    assert sent == [{"queries": ["a", "b"], "stream": True, "budget": 8}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "events, cls, said",
    [
        ([event("message", message(0))], APIConnectionError, "broke off"),
        ([], APIConnectionError, "broke off"),
        ([event("done", {})], APIResponseError, r"without messages \[0, 1\]"),
        ([event("message", message(0)), event("done", {})], APIResponseError, r"without messages \[1\]"),
        ([event("message", message(0)), event("message", message(0))], APIResponseError, "not awaited"),
        ([event("message", message(2))], APIResponseError, "not awaited"),
        ([event("message", "{")], APIResponseError, "no Message"),
        ([b"event: message\ndata: \xff\n\n"], APIResponseError, "no Message"),
        ([event("error", "{}")], APIResponseError, "no ErrorEvent"),
        ([event("message", {**message(0), "spans": [[1]]})], APIResponseError, r"no Message: spans.0"),
    ],
)
def test_bad_streams(kind: str, events: list[bytes], cls: type[CacheBackError], said: str) -> None:
    with pytest.raises(cls, match=said):
        use(kind, streaming(*events), "stream_messages", "s", ["a", "b"])


@pytest.mark.parametrize("kind", KINDS)
def test_stream_error_events(kind: str) -> None:
    body = {"message": "No.", "type": "invalid_request_error", "param": "budget", "code": "invalid_budget"}
    handler = streaming(event("message", message(1)), event("error", {"error": body, "index": 0}))
    with pytest.raises(BudgetError) as caught:
        use(kind, handler, "stream_messages", "s", ["a", "b"])
    assert isinstance(caught.value, APIError)
    assert (caught.value.index, caught.value.status, caught.value.param) == (0, 400, "budget")


@pytest.mark.parametrize("kind", KINDS)
def test_stream_refused_before_it_starts(kind: str) -> None:
    body = {"error": {"message": "Gone.", "type": "not_found_error", "code": "sender_not_found"}}
    with pytest.raises(SenderNotFoundError, match="Gone"):
        use(kind, answering(404, body), "stream_messages", "s", ["q"])
    with pytest.raises(APIResponseError, match="something else"):
        use(kind, answering(200, {"object": "list", "data": [message(0)]}), "stream_messages", "s", ["q"])


@pytest.mark.parametrize("kind", KINDS)
def test_stream_event_larger_than_the_bound(kind: str) -> None:
    with pytest.raises(APIResponseError) as caught:
        use(
            kind,
            streaming(event("message", message(0))),
            "stream_messages",
            "s",
            ["q"],
            settings={"max_response_bytes": 100},
        )
    assert caught.value.code == "response_too_large"


class Chunks(httpx.SyncByteStream):
    """A body that notes how much of it was asked for, and whether it was closed."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks = chunks
        self.given = 0
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks:
            self.given += 1
            yield chunk

    def close(self) -> None:
        self.closed = True


def test_stream_is_read_as_it_comes_and_closed_when_left() -> None:
    body = Chunks(*(event("message", message(i)) for i in range(3)), event("done", {}))
    headers = {"Content-Type": "text/event-stream"}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, stream=body))
    with CacheBack("http://test", transport=transport) as client:
        stream = client.stream_messages("s", ["a", "b", "c"])
        assert body.given == 0
        assert next(stream).index == 0 and body.given == 1
        assert next(stream).index == 1 and body.given == 2
        assert not body.closed
        stream.close()
        assert body.closed and body.given == 2


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_event_parser_does_not_depend_on_the_chunks(newline: bytes) -> None:
    text = (
        b'event: message\ndata: {"a":\ndata:  "\xc3\xa9"}\n\n: ping\n\nid: 4\ndata\n\nevent: x\n\ndata:y\n\ndata: cut'
    )
    text = text.replace(b"\n", newline)
    expected = [Event("message", b'{"a":\n "\xc3\xa9"}'), Event("message", b""), Event("message", b"y")]
    for size in (1, 2, 3, 7, len(text)):
        parser = EventParser(1000)
        got = [e for at in range(0, len(text), size) for e in parser.feed(text[at : at + size])]
        assert got == expected


@pytest.mark.parametrize("text", [b"x" * 101, b"data: " + b"x" * 101 + b"\n", b"data: 0123456\n" * 20])
def test_event_parser_is_bounded(text: bytes) -> None:
    parser = EventParser(100)
    with pytest.raises(APIResponseError, match="100 bytes"):
        for at in range(0, len(text), 10):
            assert list(parser.feed(text[at : at + 10])) == []


# --- waiting


@pytest.mark.parametrize("kind", KINDS)
def test_health(kind: str) -> None:
    assert use(kind, answering(200, b""), "health") is True
    assert use(kind, answering(503, b""), "health") is False
    with pytest.raises(APIError):
        use(kind, answering(401, b""), "health")


@pytest.mark.parametrize("kind", KINDS)
def test_wait_until_ready(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cb_sglang.client.transport._PROBE_PAUSE", 0.001)
    answers: Iterator[Any] = iter([httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), 503, 200])
    waited: list[float] = []

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/health"
        assert 0 < request.extensions["timeout"]["read"] <= 20
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer)

    assert use(kind, handler, "wait_until_ready", 20, on_wait=waited.append) is None
    assert len(waited) == 4 and waited == sorted(waited)


@pytest.mark.parametrize("kind", KINDS)
def test_wait_until_ready_gives_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cb_sglang.client.transport._PROBE_PAUSE", 0.01)
    with pytest.raises(APITimeoutError, match=r"not ready within 0.05 seconds: it is still starting"):
        use(kind, answering(503, b""), "wait_until_ready", 0.05)
    with pytest.raises(APIError, match="401"):
        use(kind, answering(401, b""), "wait_until_ready", 5)

    def dead(seconds: float) -> None:
        raise ChildProcessError

    with pytest.raises(ChildProcessError):
        use(kind, refuse, "wait_until_ready", 5, on_wait=dead)


# --- a small server


def app() -> Starlette:
    """Senders in a dict, and messages that keep the first positions; bodies are read by the server's models."""
    senders: dict[str, dict[str, Any]] = {}

    def missing() -> JSONResponse:
        error = ErrorBody(message="no such sender", type="not_found_error", code="sender_not_found")
        return JSONResponse(ErrorResponse(error=error).model_dump(), status_code=404)

    async def collection(request: Request) -> Response:
        if request.method == "GET":
            return JSONResponse({"object": "list", "data": list(senders.values())})
        body = SenderRequest.model_validate_json(await request.body())
        ids = body.input_ids or list((body.prompt or "").encode())
        name = f"snd_{len(ids)}"
        senders[name] = SENDER | {"id": name, "positions": len(ids)}
        return JSONResponse(senders[name])

    async def member(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in senders:
            return missing()
        if request.method == "DELETE":
            del senders[name]
            return JSONResponse({"object": "sender.deleted", "id": name, "deleted": True})
        return JSONResponse(senders[name])

    async def messages(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in senders:
            return missing()
        body = MessagesRequest.model_validate_json(await request.body())
        made = [message(i, sender=name, encoding=body.encoding or "token_ids") for i in range(len(body.queries))]
        if not body.stream:
            return JSONResponse({"object": "list", "data": made})

        async def events() -> Any:
            for one in reversed(made):
                await asyncio.sleep(0)
                yield event("message", one)
            yield event("done", {})

        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/v1/senders", collection, methods=["GET", "POST"]),
            Route("/v1/senders/{name}", member, methods=["GET", "DELETE"]),
            Route("/v1/senders/{name}/messages", messages, methods=["POST"]),
        ]
    )


def test_a_sender_from_registration_to_deletion() -> None:
    async def journey() -> None:
        async with AsyncCacheBack("http://test", transport=httpx.ASGITransport(app())) as client:
            sender = await client.create_sender(prompt="Call me Ishmael.")
            assert await client.sender(sender) == sender
            assert await client.list_senders() == [sender]
            listed = await client.messages(sender, ["Who?", [1, 2]], ratio=8, encoding="text")
            assert [m.index for m in listed] == [0, 1]
            assert all(isinstance(m, Message) and m.encoding == "text" for m in listed)
            streamed = [m async for m in client.stream_messages(sender, ["Who?", "Why?"])]
            assert [m.index for m in streamed] == [1, 0]
            assert (await client.delete_sender(sender)).id == sender.id
            assert await client.list_senders() == []
            for ask in (client.sender(sender), client.messages(sender, ["Who?"]), client.delete_sender(sender)):
                with pytest.raises(SenderNotFoundError):
                    await ask
            with pytest.raises(SenderNotFoundError):
                [m async for m in client.stream_messages(sender, ["Who?"])]

    asyncio.run(journey())


# --- the package


def test_both_clients_have_the_same_methods() -> None:
    def public(cls: type) -> set[str]:
        return {name.replace("aclose", "close") for name in vars(cls) if not name.startswith("_")}

    assert public(CacheBack) == public(AsyncCacheBack)


def test_error_without_anything() -> None:
    error = api_error(None)
    assert type(error) is APIError and error.status == 500 and "500" in error.message


def test_import_needs_neither_torch_nor_sglang() -> None:
    code = "import sys, cb_sglang.client; print(sorted({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
