"""The chat route: without a ``cacheback`` object SGLang's own, byte for byte; with one, answered from messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from mounted_app import SGLANG_HEADER, call, http_scope, mounted_app

from cb_server import bodies, chat_route
from cb_server.chat_route import MESSAGES_HEADER, PATH, ChatWithMessages
from cb_sglang import wire
from cb_sglang.chat import Block, Insert
from cb_sglang.content import Part
from cb_sglang.errors import CapacityError, SenderNotFoundError
from cb_sglang.tenants import Tenant

ID = "msg_" + "0" * 32
TURNS = [{"role": "user", "content": "who?"}]


# --- without our object


class Original:
    """Stands for SGLang's route: keeps what reaches it, answers with chunks."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        while True:
            self.received.append(await receive())
            if not self.received[-1].get("more_body"):
                break
        await send({"type": "http.response.start", "status": 207, "headers": [(b"x-theirs", b"\xe9")]})
        for chunk in (b"data: 1\n\n", b"", b"data: [DONE]\n\n"):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def chunks(*parts: bytes) -> list[Any]:
    last = len(parts) - 1
    return [{"type": "http.request", "body": part, "more_body": n < last} for n, part in enumerate(parts)]


def through(incoming: Sequence[Any]) -> tuple[Original, list[Any]]:
    """What reaches SGLang's route of these ASGI messages, and what is sent in answer."""
    original, sent, pending = Original(), [], list(incoming)

    async def receive() -> Any:
        return pending.pop(0) if pending else {"type": "http.disconnect"}

    async def send(event: Any) -> None:
        sent.append(event)

    route = ChatWithMessages(original)  # type: ignore[arg-type]
    scope = http_scope("POST", PATH, (b"x-mine", b"\xe9"), (b"content-type", b"text/odd"))
    asyncio.run(asyncio.wait_for(route(scope, receive, send), 20))
    return original, sent


def meaning(messages: list[Any]) -> bytes | None:
    """The body that ASGI messages bring, however it is cut; None when the client has left."""
    if any(message["type"] == "http.disconnect" for message in messages):
        return None
    assert [message.get("more_body", False) for message in messages] == [True] * (len(messages) - 1) + [False]
    return b"".join(message.get("body", b"") for message in messages)


@pytest.mark.parametrize(
    "incoming",
    [
        chunks(json.dumps({"messages": TURNS, "stream": True}).encode()),
        chunks(b'{"messages"', b"", b": [ ] ,", b'"messages":[]}'),
        chunks(b'{"cacheback": null, "messages": []}'),
        chunks(b'{"messages": [{"role": "user", "content": "say \\"cacheback\\": {}"}]}'),
        chunks(b'{"metadata": {"cacheback": {"senders": []}}}'),
        chunks(b'["cacheback"]'),
        chunks(b'{"cacheback": '),
        chunks(b'{"cacheback": {"senders": ["a"]}} trailing'),
        chunks(b'\xff\xfe"cacheback"'),
        chunks(b'"cacheback"' + b"[" * 100_000),
        chunks(b'"cacheback"' + b"1" * 5_000),
        chunks(b""),
        [{"type": "http.disconnect"}],
        [*chunks(b'{"mess', b"")[:1], {"type": "http.disconnect"}],
        [{"type": "http.request"}],
    ],
    ids=range(15),
)
def test_every_other_request_reaches_sglang_as_it_came(incoming: list[Any]) -> None:
    """Byte for byte, and its answer comes back ASGI message by ASGI message."""
    original, sent = through(incoming)
    assert meaning(original.received) == meaning(incoming)
    assert [event.get("body") for event in sent] == [None, b"data: 1\n\n", b"", b"data: [DONE]\n\n", b""]
    assert (sent[0]["status"], sent[0]["headers"]) == (207, [(b"x-theirs", b"\xe9")])


def test_a_body_beyond_our_bound_is_sglang_s_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """We read no further than the bound, and hand on what we read and what we did not."""
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 30)
    body = json.dumps({"cacheback": {"senders": ["a"]}, "messages": TURNS}).encode()
    incoming = chunks(*(body[n : n + 10] for n in range(0, len(body), 10)))
    original, _ = through(incoming)
    assert meaning(original.received) == meaning(incoming) == body
    assert len(original.received) > 1, "read on from where we stopped"


def test_the_mounted_route_is_sglang_s() -> None:
    content = b'{"messages" :  []}'
    answer = call(mounted_app(None), "POST", PATH, content=content, headers={"content-type": "text/odd"})
    assert (answer.content, answer.headers[SGLANG_HEADER]) == (content, str(len(content)))
    assert answer.headers["content-type"].startswith("text/odd") and MESSAGES_HEADER not in answer.headers


def test_other_methods_are_refused_as_before() -> None:
    """SGLang's own app refuses them; ours must not answer in its place."""
    app = FastAPI()

    @app.post(PATH)
    async def chat() -> None: ...

    before = call(app, "GET", PATH)
    app.state.cacheback_service = None
    chat_route.mount(app)
    after = call(app, "GET", PATH)
    assert (after.status_code, after.content) == (before.status_code, before.content)


def test_an_sglang_without_the_route_is_an_error_at_start() -> None:
    with pytest.raises(LookupError):
        chat_route.mount(FastAPI())


# --- with it


class Senders:
    def namespace(self, tenant: str) -> str | None:
        return f"namespace of {tenant}"


class Service:
    """Has two messages for every chat, one of them text; keeps what it was asked."""

    def __init__(self, error: Exception | None = None, ids: Sequence[str] = (ID, ID)) -> None:
        self.senders = Senders()
        self.error = error
        self.ids = list(ids)
        self.asked: list[tuple[Tenant, wire.ChatExtension, str]] = []

    async def blocks(self, tenant: Tenant, wanted: wire.ChatExtension, query: str) -> tuple[list[Block], list[str]]:
        self.asked.append((tenant, wanted, query))
        if self.error is not None:
            raise self.error
        return [Block("snd_a", None, Part([5, 6])), Block("snd_b", "found", None)], self.ids


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Sequence[Insert], str | None]]:
    """What SGLang's chat was asked to complete; it streams where that is asked."""
    calls: list[tuple[dict[str, Any], Sequence[Insert], str | None]] = []

    async def complete(
        body: dict[str, Any], request: Request, *, inserts: Sequence[Insert], namespace: str | None
    ) -> Response:
        calls.append((body, inserts, namespace))
        if body.get("temperature") == "hot":
            raise RequestValidationError([{"loc": ("temperature",), "msg": "no number", "type": "float"}])
        if not body.get("stream"):
            return Response(b'{"choices": []}', media_type="application/json")

        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    monkeypatch.setattr(chat_route, "complete_chat", complete)
    return calls


def chat(service: Service, wanted: Any, **body: Any) -> httpx.Response:
    return call(mounted_app(service), "POST", PATH, json={"messages": TURNS, "cacheback": wanted, **body})


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_completed_from_its_messages(completed: list[Any], stream: bool) -> None:
    service = Service()
    answer = chat(service, {"senders": ["snd_a", "snd_b"], "budget": 5}, stream=stream, temperature=0.5)
    assert answer.content == (b"data: 1\n\ndata: [DONE]\n\n" if stream else b'{"choices": []}')
    assert answer.headers[MESSAGES_HEADER] == f"{ID},{ID}"
    ((tenant, wanted, query),) = service.asked
    assert (tenant.name, wanted.senders, wanted.budget, query) == ("default", ["snd_a", "snd_b"], 5, "who?")
    ((body, inserts, namespace),) = completed
    (insert,) = inserts
    assert {name: value for name, value in body.items() if name != "messages"} == {"stream": stream, "temperature": 0.5}
    assert body["messages"][0]["content"].endswith("\n\nwho?") and insert.marker in body["messages"][0]["content"]
    assert (insert.part, namespace) == (Part([5, 6]), "namespace of default")


def test_a_query_of_its_own_and_given_messages(completed: list[Any]) -> None:
    service = Service()
    chat(service, {"senders": ["snd_a"], "query": "where?"})
    # Messages that are there need no query, and a chat that asks nothing can still be completed.
    chat(service, {"messages": [ID]}, messages=[])
    assert [query for _, _, query in service.asked] == ["where?", ""]
    assert len(completed) == 2


@pytest.mark.parametrize(
    ("wanted", "body", "param"),
    [
        ({}, {}, "cacheback"),
        ("yes", {}, "cacheback"),
        ({"senders": ["a"], "messages": [ID]}, {}, "cacheback"),
        ({"senders": []}, {}, "cacheback.senders"),
        ({"senders": ["a"], "ratio": 0.5}, {}, "cacheback.ratio"),
        ({"senders": ["a"], "surprise": 1}, {}, "cacheback.surprise"),
        ({"messages": ["x"]}, {}, "cacheback.messages[0]"),
        ({"messages": [{"encoding": "text"}]}, {}, "cacheback.messages[0]"),
        ({"senders": ["a"]}, {"messages": "who?"}, "messages"),
        ({"senders": ["a"]}, {"messages": ["who?"]}, "messages"),
        ({"senders": ["a"]}, {"messages": []}, "cacheback.query"),
        ({"senders": ["a"]}, {"input_ids": [5]}, "input_ids"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(completed: list[Any], wanted: Any, body: dict[str, Any], param: str) -> None:
    service = Service()
    answer = chat(service, wanted, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert completed == [] and service.asked == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(SenderNotFoundError("no such sender"), 404), (CapacityError("full"), 503), (RuntimeError("/secret/path"), 500)],
)
def test_failures_have_our_shape_and_complete_nothing(completed: list[Any], error: Exception, status: int) -> None:
    answer = chat(Service(error), {"senders": ["a"]})
    assert answer.status_code == status and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert completed == [] and "/secret/path" not in answer.text
    assert answer.headers.get("Retry-After") == ("1" if status == 503 else None)


def test_sglang_s_part_of_the_body_is_refused_by_sglang(completed: list[Any]) -> None:
    answer = chat(Service(), {"senders": ["a"]}, temperature="hot")
    assert answer.status_code == 422 and "detail" in answer.json(), "FastAPI's answer; SGLang has its own handler"


@pytest.mark.parametrize("name", ["é", "☃", "a\r\nX-Forged: 1", "a,b", " "])
def test_what_a_client_calls_a_message_is_not_put_into_headers(completed: list[Any], name: str) -> None:
    """A message object is the client's to write: its id may be anything."""
    answer = chat(Service(ids=[name, ID]), {"messages": [{"encoding": "text", "text": "a", "id": name}, ID]})
    assert answer.status_code == 200
    assert answer.headers[MESSAGES_HEADER] == ID and "X-Forged" not in answer.headers


def test_a_client_that_leaves_ends_the_work() -> None:
    async def test() -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        class Hanging(Service):
            async def blocks(self, *args: Any) -> Any:
                started.set()
                try:
                    await asyncio.sleep(60)
                finally:
                    cancelled.set()

        body = json.dumps({"messages": TURNS, "cacheback": {"senders": ["a"]}}).encode()
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        incoming.put_nowait(chunks(body)[0])
        sent: list[Any] = []

        async def send(event: Any) -> None:
            sent.append(event)

        running = asyncio.create_task(mounted_app(Hanging())(http_scope("POST", PATH), incoming.get, send))
        await started.wait()
        incoming.put_nowait({"type": "http.disconnect"})
        await running
        assert cancelled.is_set() and sent[0]["status"] == 499

    asyncio.run(asyncio.wait_for(test(), 20))
