"""Two tenants and an admin on a server of their own: what they cannot see of each other, and what a restart keeps.

The tests run in this order on one server; the last two end it, once with SIGKILL and once with SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served_api import excerpt

from cb_loadtest.served import ServerProcess, free_port, serve_command
from cb_sglang.tenants import new_key

START_SECONDS = 600.0
TEXT = excerpt("polk_1848")[:800]


class TenantsServer:
    """A server with keys and a data folder that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        made = {name: new_key(name) for name in ("admin", "a", "b")}
        self.keys = {name: key for name, (key, _) in made.items()}
        (folder / "keys.txt").write_text("# a comment\n" + "\n".join(line for _, line in made.values()) + "\n")
        self._port = free_port()
        self._process: ServerProcess | None = None

    def start(self) -> None:
        leash = [sys.executable, str(Path(__file__).with_name("leash.py"))]
        options = ["--tenant-keys", str(self._folder / "keys.txt"), "--data-dir", str(self._folder / "data")]
        options += ["--max-total-tokens", "4096"]
        self._process = ServerProcess([*leash, *serve_command(self._port, options)], self._folder / "server.log")
        self._process.__enter__()
        end = time.monotonic() + START_SECONDS
        with self.client(None) as http:
            while time.monotonic() < end:
                self._process.check()
                try:
                    if http.get("/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.5)
        raise AssertionError("the server was not ready in time")

    def kill(self) -> None:
        """SIGKILL to every process of the server's group, the leash included."""
        os.killpg(self._pid, signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM to the server's main process, as a service manager does; the leash passes it on."""
        os.kill(self._pid, signal.SIGTERM)

    @property
    def _pid(self) -> int:
        assert self._process is not None and self._process._process is not None
        return self._process._process.pid

    def stop(self) -> None:
        if self._process is not None:
            self._process.__exit__(None, None, None)
            self._process = None

    def client(self, tenant: str | None) -> httpx.Client:
        headers = {} if tenant is None else {"Authorization": f"Bearer {self.keys[tenant]}"}
        base = f"http://127.0.0.1:{self._port}"
        return httpx.Client(base_url=base, headers=headers, timeout=120.0, trust_env=False)


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantsServer]:
    server = TenantsServer(tmp_path_factory.mktemp("tenants"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def a(tenants: TenantsServer) -> Iterator[httpx.Client]:
    with tenants.client("a") as http:
        yield http


@pytest.fixture
def b(tenants: TenantsServer) -> Iterator[httpx.Client]:
    with tenants.client("b") as http:
        yield http


def create(http: httpx.Client, **content: Any) -> dict[str, Any]:
    answer = http.post("/v1/senders", json=content)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_without_a_key_everything_is_closed(tenants: TenantsServer) -> None:
    paths = ("/v1/senders", "/v1/capacity", "/v1/models", "/metrics", "/get_server_info", "/docs", "/nothing")
    with tenants.client(None) as http:
        answers = [http.get(path) for path in paths]
        answers += [http.post(p, json={}) for p in ("/v1/senders", "/generate", "/v1/chat/completions", "/flush_cache")]
        answers.append(http.get("/v1/senders", headers={"Authorization": "Bearer cb_wrong"}))
        answers.append(http.get("/v1/senders", headers={"Authorization": "Basic " + tenants.keys["a"]}))
        for answer in answers:
            assert answer.status_code == 401, answer.request.url
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert http.get("/health").status_code == 200


def test_management_is_for_the_admin(tenants: TenantsServer, a: httpx.Client) -> None:
    for path in ("/metrics", "/get_server_info", "/v1/loads"):
        assert a.get(path).status_code == 404
    for path in ("/flush_cache", "/abort_request", "/update_weights_from_disk", "/v1/score", "/encode"):
        assert a.post(path, json={}).status_code == 404
    assert a.get("/v1/models").status_code == 200
    with tenants.client("admin") as admin:
        assert admin.get("/v1/loads").status_code == 200


def test_a_foreign_sender_is_like_none(a: httpx.Client, b: httpx.Client) -> None:
    own = create(a, prompt=TEXT)
    same = create(b, prompt=TEXT)
    assert same["id"] != own["id"] and same["fingerprint"] == own["fingerprint"]
    absent = "snd_" + "0" * 32
    (message,) = a.post(f"/v1/senders/{own['id']}/messages", json={"queries": ["What?"]}).json()["data"]
    tried = {
        "get": lambda name: b.get(f"/v1/senders/{name}"),
        "delete": lambda name: b.delete(f"/v1/senders/{name}"),
        "pin": lambda name: b.put(f"/v1/senders/{name}/pin"),
        "audit": lambda name: b.get(f"/v1/senders/{name}/audit"),
        "extend": lambda name: b.post(f"/v1/senders/{name}/extend", json={"prompt": "x"}),
        "ask": lambda name: b.post(f"/v1/senders/{name}/messages", json={"queries": ["What?"]}),
        "transfer": lambda name: b.post("/v1/transfers", json={"senders": [name], "queries": ["What?"]}),
    }
    for name, call in tried.items():
        foreign, none = call(own["id"]), call(absent)
        assert foreign.status_code == none.status_code, name
        assert foreign.text.replace(own["id"], absent) == none.text, name
    assert [sender["id"] for sender in b.get("/v1/senders").json()["data"]] == [same["id"]]
    # Nor is a message of another tenant's.
    for name in (message["id"], "msg_" + "0" * 32):
        answer = b.post("/v1/senders", json={"prompt": "x", "inherits": [name]})
        assert answer.status_code == 400 and "is not on record" in answer.json()["error"]["message"]
    assert a.get(f"/v1/senders/{own['id']}").status_code == 200


def test_nobody_hits_another_tenants_cache(a: httpx.Client, b: httpx.Client) -> None:
    text = excerpt("polk_1848")[800:2_000]
    assert create(a, prompt=text)["cached_positions"] <= 1
    assert create(b, prompt=text)["cached_positions"] <= 1, "registered by a, and yet new to b"
    ids = b.post("/v1/tokenize", json={"prompt": text}).json()["tokens"]
    mine = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    assert a.post("/generate", json=mine).json()["meta_info"]["cached_tokens"] > len(ids) // 2
    fresh = {**mine, "input_ids": [*ids[:1], *ids[2:]]}
    assert a.post("/generate", json=fresh).status_code == 200
    assert b.post("/generate", json=fresh).json()["meta_info"]["cached_tokens"] <= 1, "only a has this in the cache"
    for spoof in ({"extra_key": "guess"}, {"cache_salt": "guess"}, {"extra_key": None}):
        cached = b.post("/generate", json={**fresh, **spoof}).json()["meta_info"]["cached_tokens"]
        assert cached > len(ids) // 2, "whatever is asked for, b is in b's own namespace"
    refused = b.post("/generate", json={**mine, "rid": "chosen"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "rid"


def test_nobody_scores_or_pins_past_our_endpoints(tenants: TenantsServer, a: httpx.Client) -> None:
    pin = {"cacheback_pin": {"pin_id": "x", "hold": True, "token": ""}}
    sampling = {"max_new_tokens": 1, "custom_params": pin}
    for params in (sampling, [sampling]):
        answer = a.post("/generate", json={"input_ids": [5, 6, 7], "sampling_params": params})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "custom_params"
    with tenants.client("admin") as admin:
        answer = admin.post("/generate", json={"input_ids": [5, 6, 7], "sampling_params": sampling})
        assert "pins are made with" in answer.json()["meta_info"]["cacheback"][0]["error"]


def test_no_body_of_a_tenant_ends_the_server(a: httpx.Client, b: httpx.Client) -> None:
    """Each of these ended the scheduler, or kept all others waiting."""
    one: dict[str, Any] = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}
    sampling = [
        {"n": 100_000_000},
        {"stop_token_ids": [1 << 40], "min_new_tokens": 1},
        {"top_k": 1 << 40},
        {"logit_bias": {"5": 1e300}},
        {"stop_regex": "(a+)+$"},
    ]
    refused: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {**one, "token_indices_to_pool": [1 << 40]}),
        ("/generate", {**one, "positional_embed_overrides": {"embeds": []}}),
        ("/generate", {**one, "input_ids": [1 << 40]}),
        ("/generate", {**one, "return_logprob": True, "top_logprobs_num": 1 << 40}),
        *(("/generate", {**one, "sampling_params": {"max_new_tokens": 1, **params}}) for params in sampling),
        ("/v1/completions", {"prompt": "a", "n": 100_000_000}),
        ("/v1/completions", {"prompt": [1 << 40]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "input_ids": [1 << 40]}),
        ("/v1/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": 1}}),
    ]
    for path, body in refused:
        answer = a.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"], (path, body)
    for path, name in (("/v1/tokenize", "prompt"), ("/detokenize", "model")):
        assert a.post(path, json={name: "a" * (1 << 20)}).status_code == 413
    assert b.post("/generate", json=one).status_code == 200


def test_ordinary_requests_of_tenants(a: httpx.Client) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "n": 2, "logprobs": True}
    sampled = {"temperature": 0.5, "top_p": 0.9, "stop": ["b"], "stop_token_ids": [1], "seed": 1}
    batch = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 1, "min_new_tokens": 1}, "return_logprob": True}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {**chat, **sampled, "top_logprobs": 2, "user": "me"}),
        ("/v1/completions", {"model": "m", "prompt": ["a", "b"], "max_tokens": 1, **sampled, "logit_bias": {"5": 1}}),
        ("/generate", {**batch, "top_logprobs_num": [1, 2]}),
        ("/v1/tokenize", {"prompt": ["a", "b"], "add_special_tokens": False}),
        ("/v1/detokenize", {"tokens": [5, 6]}),
    ]
    for path, body in asked:
        answer = a.post(path, json=body)
        assert answer.status_code == 200, answer.text


def test_killed_in_the_middle_of_registrations(tenants: TenantsServer) -> None:
    acknowledged: list[tuple[str, str]] = []

    def register(tenant: str) -> None:
        with tenants.client(tenant) as http:
            for number in range(200):
                try:
                    made = http.post("/v1/senders", json={"prompt": f"{tenant} {number}: a ship at sea.", "ttl": 600})
                    acknowledged.append((tenant, made.json()["id"]))
                except (httpx.TransportError, ValueError):
                    return

    callers = [threading.Thread(target=register, args=(tenant,)) for tenant in ("a", "b")]
    for caller in callers:
        caller.start()
    while len(acknowledged) < 12:
        time.sleep(0.01)
    tenants.kill()
    for caller in callers:
        caller.join()
    tenants.stop()
    tenants.start()
    with tenants.client("a") as a, tenants.client("b") as b:
        by_name = {"a": a, "b": b}
        for tenant, sender in acknowledged:
            assert by_name[tenant].get(f"/v1/senders/{sender}").status_code == 200
        for tenant, sender in (acknowledged[0], acknowledged[-1]):
            answer = by_name[tenant].post(f"/v1/senders/{sender}/messages", json={"queries": ["Where?"]})
            (message,) = answer.json()["data"]
            assert message["cache_miss"] == "restarted"
            assert len(by_name[tenant].get(f"/v1/senders/{sender}/audit").json()["data"]) == 1


def test_sigterm_finishes_what_runs_and_takes_nothing_new(tenants: TenantsServer, a: httpx.Client) -> None:
    body = {"text": "Once", "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}, "stream": True}
    sender = create(a, prompt=TEXT)["id"]
    with tenants.client("b") as b, b.stream("POST", "/generate", json=body) as running:
        lines = running.iter_lines()
        assert next(lines).startswith("data:")
        tenants.terminate()
        time.sleep(0.3)
        try:
            refused = a.post(f"/v1/senders/{sender}/messages", json={"queries": ["Who?"]})
            assert refused.status_code == 503 and refused.headers["Retry-After"]
        except httpx.TransportError:
            pass  # the listening socket may be closed already
        assert [line for line in lines if line][-1] == "data: [DONE]"
