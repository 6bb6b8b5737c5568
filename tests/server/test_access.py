"""With tenants' keys: closed by default, prompts in the tenant's own radix namespace, the rest for the admin."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from mounted_app import SECRET, call, http_scope, mounted_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from cb_server import access, bodies, fields
from cb_server.access import TenantAccess
from cb_sglang.tenants import Tenants, namespace, new_key

NAMES = ("alice", "bob", "admin")
KEYS, LINES = zip(*(new_key(name) for name in NAMES), strict=True)
TENANTS = Tenants.parse("\n".join(LINES), "test")
HEADERS = {name: {"Authorization": f"Bearer {key}"} for name, key in zip(NAMES, KEYS, strict=True)}
MANAGEMENT = ["/flush_cache", "/update_weights_from_disk", "/start_profile", "/metrics", "/abort_request", "/v1/loads"]
OURS = ["/v1/senders", "/v1/senders/snd_1/messages", "/v1/transfers", "/v1/capacity"]
PROMPTED = ["/generate", "/v1/completions", "/v1/chat/completions"]
TOKENIZED = ["/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"]
VOCABULARY = 1_000


def app() -> Starlette:
    """An app that shows what reached it, behind the middleware."""

    async def show(request: Request) -> JSONResponse:
        body = await request.body()
        shown = {"method": request.method, "path": request.url.path, "body": body.decode()}
        shown["headers"] = [name for name in request.headers if name.startswith("x-")]
        return JSONResponse(shown | {"length": request.headers.get("content-length")})

    async def accept(socket: WebSocket) -> None:
        await socket.accept()

    methods = ["GET", "POST", "PUT", "DELETE", "HEAD"]
    shown = Starlette(routes=[WebSocketRoute("/{path:path}", accept), Route("/{path:path}", show, methods=methods)])
    shown.add_middleware(TenantAccess, tenants=TENANTS, namespace_of=lambda name: namespace(SECRET, name))
    metrics, engine = SimpleNamespace(error=lambda code: None), SimpleNamespace(vocab_size=VOCABULARY)
    shown.state.cacheback_service = SimpleNamespace(metrics=metrics, engine=engine, stopping=False)
    return shown


def post(path: str, body: Any, who: str | None = "alice", method: str = "POST") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return call(app(), method, path, content=content, headers=None if who is None else HEADERS[who])


@pytest.mark.parametrize("path", [*MANAGEMENT, *OURS, *PROMPTED, *TOKENIZED, "/", "/v1/models", "/docs"])
@pytest.mark.parametrize(
    "key", [None, "", "Bearer", "Bearer wrong", "Basic " + KEYS[0], KEYS[0], "Bearer " + "x" * 600]
)
def test_without_a_key_every_route_is_closed(path: str, key: str | None) -> None:
    answer = call(app(), "POST", path, json={}, headers=None if key is None else {"Authorization": key})
    assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_only_health_is_open_and_only_to_look_at() -> None:
    assert call(app(), "GET", "/health").status_code == 200
    assert call(app(), "HEAD", "/health").status_code == 200
    assert call(app(), "POST", "/health").status_code == 401


@pytest.mark.parametrize(
    "path", [*MANAGEMENT, "/", "/health_generate", "/v1/senders_of_all", "/generate/", "//generate"]
)
def test_what_is_not_for_tenants_does_not_exist_for_them(path: str) -> None:
    for method in ("GET", "POST"):
        answer = post(path, {}, method=method)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "endpoint_not_found"
        assert post(path, {}, who="admin", method=method).status_code == 200


@pytest.mark.parametrize("path", OURS)
def test_our_routes_get_what_tenants_sent(path: str) -> None:
    body = b'{"extra_key" : "mine"} '
    shown = post(path, body).json()
    assert (shown["method"], shown["path"], shown["body"]) == ("POST", path, body.decode())


@pytest.mark.parametrize("path", ["/v1/models", "/model_info", "/get_model_info"])
def test_what_tenants_may_read_they_may_only_read(path: str) -> None:
    assert post(path, {}, method="GET").status_code == 200
    for method in ("POST", "PUT", "DELETE"):
        assert post(path, {}, method=method).status_code == 404


@pytest.mark.parametrize("path", [*PROMPTED, *TOKENIZED])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_what_takes_a_body_takes_it_by_post(path: str, method: str) -> None:
    assert post(path, {}, method=method).status_code == 404
    assert post(path, {}, method=method, who="admin").status_code == 200


@pytest.mark.parametrize("path", PROMPTED)
@pytest.mark.parametrize(
    "body",
    [
        {"lora_path": "a"},
        {"lora_path": "a", "extra_key": "theirs", "cache_salt": "theirs"},
        {"lora_path": "é", "extra_key": None, "cache_salt": ["x"], "rid": None},
    ],
    ids=["plain", "forged", "odd"],
)
def test_prompts_are_in_the_tenant_s_own_namespace(path: str, body: dict[str, Any]) -> None:
    seen = {}
    for who in ("alice", "bob"):
        reached = post(path, body, who).json()
        parsed = json.loads(reached["body"])
        seen[who] = parsed.pop("extra_key")
        assert parsed == {name: value for name, value in body.items() if name not in ("extra_key", "cache_salt")}
        assert int(reached["length"]) == len(reached["body"].encode())
    assert seen == {who: namespace(SECRET, who) for who in seen} and len(set(seen.values())) == 2


# fmt: off
REFUSED = [
    "session_params", "session_id", "custom_logit_processor", "rid", "bootstrap_host", "bootstrap_port",
    "bootstrap_room", "bootstrap_pair_key", "decode_tp_size", "routed_dp_rank", "data_parallel_rank",
    "disagg_prefill_dp_rank", "chat_template", "chat_template_kwargs", "token_indices_to_pool",
    "multi_item_delimiter_indices", "positional_embed_overrides", "input_embeds", "mm_hashes", "mm_content_hashes",
    "priority", "kv_hints", "encoder_urls", "num_items_assigned", "need_wait_for_mm_inputs", "http_worker_ipc",
    "lora_id", "routing_key", "conversation_id", "custom_labels", "no_logs", "log_metrics", "background",
    "received_time", "external_trace_header", "return_hidden_states", "return_routed_experts", "custom_params",
    "stop_regex", "beam_width", "images_config", "video_config", "mm_processor_kwargs", "max_dynamic_patch",
    "watermark", "unknown",
]
# fmt: on


@pytest.mark.parametrize("path", [*PROMPTED, *TOKENIZED])
@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_named_is_refused(path: str, field: str) -> None:
    answer = post(path, {field: 1})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert error["message"] == f"{field} is not open to tenants of this server; leave it out"
    assert post(path, {field: None}).status_code == 200
    assert post(path, {field: 1}, who="admin").status_code == 200


@pytest.mark.parametrize(
    "field", ["custom_params", "stop_regex", "beam_width", "stream_interval", "watermark", "choice"]
)
def test_what_is_not_named_is_refused_in_sampling_params(field: str) -> None:
    for sampling in ({field: 1}, [{field: 1}], [{}, {field: 1}]):
        answer = post("/generate", {"text": "a", "sampling_params": sampling})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_a_long_name_is_cut() -> None:
    assert len(post("/generate", {"x" * 5_000: 1}).json()["error"]["param"]) == 256


TURNS = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
IMAGE = {"type": "image_url", "image_url": {"url": "https://host/a.png", "detail": None}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
SAMPLING = {
    "temperature": 0,
    "top_p": 0.9,
    "top_k": -1,
    "min_p": 0.1,
    "stop": ["\n", "END"],
    "stop_token_ids": [0, 999],
    "logit_bias": {"5": -100, "6": 0.5},
    "repetition_penalty": 1.1,
    "ignore_eos": True,
    "n": 2,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"url": {"type": "string"}}}}}
ORDINARY: list[tuple[str, dict[str, Any]]] = [
    (
        "/generate",
        {"text": "a", "sampling_params": {**SAMPLING, "max_new_tokens": 5, "json_schema": "{}"}, "stream": True},
    ),
    ("/generate", {"input_ids": list(range(1_000)) * 3, "return_logprob": True, "logprob_start_len": 0}),
    ("/generate", {"text": ["a", "b"], "sampling_params": [{}, {"min_new_tokens": 1}], "top_logprobs_num": [1, 2]}),
    ("/generate", {"input_ids": [[1, 2], [3]], "return_logprob": [True, False], "token_ids_logprob": [[5], [6]]}),
    ("/generate", {"text": "a", "token_ids_logprob": [1, 2], "image_data": "data:image/png;base64,AA"}),
    ("/generate", {"text": ["a", "b"], "image_data": [["http://host/a"], None], "lora_path": ["x", "y"]}),
    # As SGLang's own clients send them.
    ("/generate", {"text": "a", "sampling_params": {"stop_regex": []}, "return_routed_experts": False}),
    (
        "/v1/completions",
        {"model": "m", "prompt": "a", "max_tokens": 5, **SAMPLING, "best_of": 2, "logprobs": 5, "seed": 1},
    ),
    ("/v1/completions", {"prompt": ["a"] * 1_024, "echo": True, "suffix": "b", "user": "me", "stream_options": {}}),
    ("/v1/completions", {"prompt": [1, 2, 3], "response_format": {"type": "json_object"}, "lora_path": "x"}),
    ("/v1/completions", {"prompt": [[1], [2, 3]]}),
    ("/v1/chat/completions", {"model": "m", "messages": TURNS, **SAMPLING, "logprobs": True, "top_logprobs": 20}),
    ("/v1/chat/completions", {"messages": TURNS, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False}),
    (
        "/v1/chat/completions",
        {"messages": TURNS, "max_completion_tokens": 9, "reasoning_effort": "low", "store": False},
    ),
    (
        "/v1/chat/completions",
        {"messages": [*TURNS, {"role": "user", "content": [IMAGE, AUDIO]}], "metadata": {"a": "b"}},
    ),
    ("/v1/chat/completions", {"messages": TURNS, "cacheback": {"senders": ["snd_1"]}}),
    ("/v1/chat/completions", {"messages": [], "input_ids": [1, 2]}),
    ("/tokenize", {"model": "m", "prompt": "a", "add_special_tokens": False}),
    ("/v1/tokenize", {"messages": TURNS, "tools": [TOOL], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [1, 2], "skip_special_tokens": False}),
    ("/v1/detokenize", {"tokens": [[1], [5_000]]}),
]


@pytest.mark.parametrize(("path", "body"), ORDINARY, ids=range(len(ORDINARY)))
def test_ordinary_requests_pass(path: str, body: dict[str, Any]) -> None:
    answer = post(path, body)
    assert answer.status_code == 200, answer.text
    reached = json.loads(answer.json()["body"])
    assert reached.pop("extra_key", None) == (namespace(SECRET, "alice") if path in PROMPTED else None)
    assert reached == body


def media(url: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}


def sampled(**params: Any) -> dict[str, Any]:
    return {"text": "a", "sampling_params": params}


HUGE = 100_000_000
BEYOND: list[tuple[str, str, Any]] = [
    ("/generate", "n", sampled(n=HUGE)),
    ("/generate", "n", sampled(n=float(2))),
    ("/generate", "n", sampled(n=True)),
    ("/generate", "n", {"text": ["a"] * 100, "sampling_params": {"n": 11}}),
    ("/generate", "n", {"text": ["a"] * 2, "sampling_params": [{"n": 1}, {"n": 129}]}),
    ("/generate", "temperature", sampled(temperature=1e300)),
    ("/generate", "temperature", sampled(temperature=float("nan"))),
    ("/generate", "repetition_penalty", sampled(repetition_penalty=1e-300)),
    ("/generate", "top_k", sampled(top_k=1 << 40)),
    ("/generate", "min_new_tokens", sampled(min_new_tokens=1 << 40)),
    ("/generate", "max_new_tokens", sampled(max_new_tokens=1.5)),
    ("/generate", "logit_bias", sampled(logit_bias={"5": float("inf")})),
    ("/generate", "logit_bias", sampled(logit_bias={"5": "1"})),
    ("/generate", "logit_bias", sampled(logit_bias={str(n): 1 for n in range(1_025)})),
    ("/generate", "stop", sampled(stop="a" * 1_025)),
    ("/generate", "stop_token_ids", sampled(stop_token_ids=[-1])),
    ("/generate", "stop_token_ids", sampled(stop_token_ids=[1_000])),
    ("/generate", "stop_token_ids", {"text": ["a", "b"], "sampling_params": [{}, {"stop_token_ids": [1_000]}]}),
    ("/generate", "text", {"text": ["a"] * 1_025}),
    ("/generate", "text", {"text": []}),
    ("/generate", "input_ids", {"input_ids": [[1]] * 1_025}),
    ("/generate", "input_ids", {"input_ids": [5, 1_000]}),
    ("/generate", "input_ids", {"input_ids": [[5], [6, 1_000]]}),
    ("/generate", "input_ids", {"input_ids": [-1]}),
    ("/generate", "input_ids", {"input_ids": [1 << 64]}),
    ("/generate", "top_logprobs_num", {"text": "a", "top_logprobs_num": HUGE}),
    ("/generate", "top_logprobs_num", {"text": "a", "top_logprobs_num": [5]}),
    ("/generate", "top_logprobs_num", {"text": ["a", "b"], "top_logprobs_num": [5, None]}),
    ("/generate", "top_logprobs_num", {"text": ["a", "b"], "top_logprobs_num": [5]}),
    ("/generate", "lora_path", {"text": "a", "lora_path": ["x"]}),
    ("/generate", "sampling_params", {"text": "a", "sampling_params": [{}]}),
    ("/generate", "image_data", {"text": "a", "image_data": "/srv/secret.png"}),
    ("/generate", "image_data", {"text": "a", "image_data": [["file:///srv/secret.png"]]}),
    ("/generate", "image_data", {"text": "a", "image_data": {"format": "processor_output", "hash": 5}}),
    ("/generate", "audio_data", {"text": "a", "audio_data": ["secret.wav"]}),
    ("/v1/completions", "n", {"prompt": "a", "n": HUGE}),
    ("/v1/completions", "n", {"prompt": "a", "n": str(HUGE)}),
    ("/v1/completions", "n", {"prompt": ["a"] * 9, "n": 128}),
    ("/v1/completions", "best_of", {"prompt": "a", "best_of": HUGE}),
    ("/v1/completions", "logprobs", {"prompt": "a", "logprobs": HUGE}),
    ("/v1/completions", "prompt", {"prompt": ["a"] * 1_025}),
    ("/v1/completions", "prompt", {"prompt": [[1]] * 1_025}),
    ("/v1/completions", "prompt", {"prompt": [1_000]}),
    ("/v1/completions", "lora_path", {"prompt": ["a", "b"], "lora_path": ["x", "y"]}),
    ("/v1/chat/completions", "n", {"messages": [], "n": HUGE}),
    ("/v1/chat/completions", "top_logprobs", {"messages": [], "top_logprobs": str(HUGE)}),
    ("/v1/chat/completions", "input_ids", {"messages": [], "input_ids": [1_000]}),
    ("/v1/chat/completions", "input_ids", {"messages": [], "input_ids": ["5"]}),
    ("/v1/chat/completions", "messages", {"messages": {}}),
    ("/v1/chat/completions", "messages", media("/srv/secret.png")),
    ("/v1/chat/completions", "messages", media({"url": "file:///srv/secret.png"})),
    ("/v1/chat/completions", "messages", media({"url": "data:,", "content_hash": "sha256:" + "0" * 64})),
    ("/v1/chat/completions", "messages", media({"url": "data:,", "max_dynamic_patch": HUGE})),
    ("/tokenize", "messages", media({"url": "file:///srv/secret.png"})),
    ("/tokenize", "extra_key", {"prompt": "a", "extra_key": "mine"}),
    ("/tokenize", "prompt", {"prompt": ["a"] * 1_025}),
    ("/detokenize", "tokens", {"tokens": [[1]] * 1_025}),
    ("/detokenize", "tokens", {"tokens": [-1]}),
]


@pytest.mark.parametrize(("path", "field", "body"), BEYOND, ids=range(len(BEYOND)))
def test_what_would_end_the_server_or_fill_it_is_refused(path: str, field: str, body: dict[str, Any]) -> None:
    answer = post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text
    assert post(path, body, who="admin").status_code == 200


def test_text_that_is_tokenized_where_all_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "MAX_TEXT_CHARS", 100)
    for path, name in (("/generate", "text"), ("/v1/completions", "prompt")):
        assert post(path, {name: ["a" * 50, "b" * 50]}).status_code == 200
        assert post(path, {name: ["a" * 50, "b" * 51]}).json()["error"]["param"] == name


@pytest.mark.parametrize("path", TOKENIZED)
def test_bodies_to_tokenize_are_bounded_more_tightly(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(access, "MAX_TOKENIZED_BYTES", 100)
    assert post(path, {"model": "a" * 50}).status_code == 200
    answer = post(path, {"model": "a" * 100})
    assert answer.status_code == 413 and answer.json()["error"]["message"] == "the body exceeds 100 bytes; send less"
    assert post(path, {"model": "a" * 100}, who="admin").status_code == 200
    assert post("/generate", {"text": "a" * 100}).status_code == 200


def test_headers_that_do_what_no_field_may_are_taken_away() -> None:
    sent = ["X-Override-Rid", "x-override-priority", "X-Data-Parallel-Rank", "x-smg-routing-key", "x-request-id"]
    for who, reach in (("alice", ["x-request-id"]), ("admin", [name.lower() for name in sent])):
        headers = {**HEADERS[who], **dict.fromkeys(sent, "1")}
        for path in ("/generate", "/v1/chat/completions", "/v1/senders"):
            assert call(app(), "POST", path, json={}, headers=headers).json()["headers"] == reach


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff", b"[" * 100_000, b"1" * 5_000], ids=range(7))
def test_what_is_no_object_is_refused(body: bytes) -> None:
    answer = post("/generate", body)
    assert answer.status_code == 400 and "error" in answer.json()


def test_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 100)
    assert post("/generate", {"text": "a" * 50}).status_code == 200
    answer = post("/generate", {"text": "a" * 100})
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer " + KEYS[2].encode())]], ids=["no key", "admin"])
def test_websockets_are_closed(headers: list[tuple[bytes, bytes]]) -> None:
    sent: list[Any] = []

    async def send(event: Any) -> None:
        sent.append(event)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = http_scope("GET", "/generate", *headers) | {"type": "websocket", "subprotocols": []}
    asyncio.run(app()(scope, receive, send))
    assert [event["type"] for event in sent] == ["websocket.close"]


def test_lifespan_needs_no_key() -> None:
    seen: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    middleware = TenantAccess(inner, tenants=TENANTS, namespace_of=lambda name: None)
    asyncio.run(middleware({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]


def test_a_mounted_app_with_keys_is_closed_and_one_without_is_open() -> None:
    body = {"messages": []}
    assert call(mounted_app(None), "POST", "/v1/chat/completions", json=body).status_code == 200
    assert call(mounted_app(None), "POST", "/flush_cache").status_code == 200
    closed = mounted_app(None, TENANTS)
    assert call(closed, "POST", "/v1/chat/completions", json=body).status_code == 401
    assert call(closed, "POST", "/flush_cache", headers=HEADERS["alice"]).status_code == 404
    reached = call(closed, "POST", "/v1/chat/completions", json=body, headers=HEADERS["alice"])
    assert reached.json() == body | {"extra_key": namespace(SECRET, "alice")}
