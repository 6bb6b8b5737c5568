"""SGLang's own endpoints in the same process: still there, still of SGLang's shapes, errors included."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from served_api import ServedApi

from cb_sglang.client import CacheBack, Sender

GREEDY = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


def test_generate(http: httpx.Client) -> None:
    answer = http.post("/generate", json={"text": "The capital of France is", "sampling_params": GREEDY}).json()
    assert isinstance(answer["text"], str) and len(answer["output_ids"]) == 4
    assert answer["meta_info"]["completion_tokens"] == 4 and answer["meta_info"]["finish_reason"]["type"] == "length"
    assert "cacheback" not in answer["meta_info"]


def test_generate_is_the_same_while_messages_are_made(client: CacheBack, sender: Sender) -> None:
    alone = client.generate(text="The capital of France is", max_new_tokens=8, ignore_eos=True)
    stream = client.stream_messages(sender, [f"What is fact number {n}?" for n in range(16)])
    next(stream)
    beside = client.generate(text="The capital of France is", max_new_tokens=8, ignore_eos=True)
    assert beside.output_ids == alone.output_ids
    assert sum(1 for _ in stream) == 15


def test_completions(http: httpx.Client) -> None:
    answer = http.post(
        "/v1/completions",
        json={"model": "gemma-3-270m", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0},
    ).json()
    assert answer["object"] == "text_completion" and answer["usage"]["completion_tokens"] == 4
    assert isinstance(answer["choices"][0]["text"], str)


def test_models_and_health(http: httpx.Client) -> None:
    models = http.get("/v1/models").json()
    assert models["object"] == "list" and models["data"][0]["id"] == "gemma-3-270m"
    assert http.get("/health").status_code == 200


def test_errors_stay_sglang_s(http: httpx.Client) -> None:
    flat = http.post("/v1/completions", json={})
    assert flat.status_code == 400
    assert flat.json()["object"] == "error" and isinstance(flat.json()["message"], str)
    native = http.post("/generate", json={})
    assert native.status_code == 400 and set(native.json()["error"]) == {"message"}
    missing = http.get("/no_such_endpoint")
    assert missing.status_code == 404 and missing.json() == {"detail": "Not Found"}


def test_our_endpoints_are_in_the_openapi_document(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert set(paths["/v1/senders"]) == {"post", "get"}
    assert set(paths["/v1/senders/{sender_id}"]) == {"get", "delete"}
    assert set(paths["/v1/senders/{sender_id}/messages"]) == {"post"}
    assert "/generate" in paths


@pytest.mark.parametrize(
    "spec",
    [
        5,
        {},
        {"sender_len": 3},
        {"sender_len": -1, "vote_start": 0, "vote_stop": 1, "budget": 1},
        {"sender_len": 2, "vote_start": 0, "vote_stop": 1 << 40, "budget": 1},
        {"sender_len": 1 << 30, "vote_start": 0, "vote_stop": 1, "budget": 1 << 30},
        {"sender_len": 2, "vote_start": 0, "vote_stop": 1, "budget": 2, "selector": "__import__"},
        {"sender_len": 2, "vote_start": 0, "vote_stop": 1, "budget": 2, "surprise": [[]]},
    ],
    ids=str,
)
def test_forged_scoring_specs_cannot_hurt(server: ServedApi, http: httpx.Client, spec: Any) -> None:
    """Anybody who may call /generate may put this there; the scheduler must refuse it and live."""
    answer = http.post(
        "/generate",
        json={
            "input_ids": [5, 6, 7, 8, 9],
            "sampling_params": {"max_new_tokens": 1, "custom_params": {"cacheback": spec}},
        },
    )
    assert answer.status_code == 200
    (result,) = answer.json()["meta_info"]["cacheback"]
    assert set(result) == {"error"} and isinstance(result["error"], str)
    server.process.check()
