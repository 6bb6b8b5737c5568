"""Chat completions answered from messages, by plain HTTP and by the openai package."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from served_api import ServedApi, excerpt

from cb_sglang.client import CacheBack, Sender

QUESTION = "What was gained?"
NAMES = ("polk_1848", "moby_dick", "darwin_origin")


def body(**fields: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": QUESTION}]
    return {"model": "gemma-3-270m", "messages": turns, "temperature": 0, "max_tokens": 8, **fields}


@pytest.fixture
def senders(client: CacheBack) -> list[Sender]:
    text = excerpt("polk_1848")
    return [client.create_sender(prompt=text[n * 900 : (n + 1) * 900]) for n in range(3)]


def test_without_the_object_the_route_is_sglangs_own(http: httpx.Client) -> None:
    plain = http.post("/v1/chat/completions", json=body(seed=1))
    null = http.post("/v1/chat/completions", json=body(seed=1, cacheback=None))
    mention = body(seed=1) | {"messages": [{"role": "user", "content": 'the word "cacheback"'}]}
    assert plain.status_code == null.status_code == http.post("/v1/chat/completions", json=mention).status_code == 200
    assert plain.json()["choices"] == null.json()["choices"]
    json_header = {"Content-Type": "application/json"}
    broken = [http.post("/v1/chat/completions", content=c, headers=json_header) for c in (b'{"cacheback": ', b"{")]
    assert broken[0].status_code == broken[1].status_code >= 400


def test_fan_in_reads_every_message_in_order(http: httpx.Client, senders: list[Sender]) -> None:
    names = [sender.id for sender in senders]
    plain = http.post("/v1/chat/completions", json=body()).json()
    answer = http.post("/v1/chat/completions", json=body(cacheback={"senders": names, "budget": 32}))
    assert answer.status_code == 200, answer.text
    ids = answer.headers["X-CacheBack-Messages"].split(",")
    assert len(ids) == 3
    # Three messages of 32 positions, and their labels.
    assert answer.json()["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 96
    again = http.post("/v1/chat/completions", json=body(cacheback={"messages": ids}))
    assert again.json()["choices"] == answer.json()["choices"], "the same messages, by their ids"
    turned = http.post("/v1/chat/completions", json=body(cacheback={"messages": ids[::-1]}))
    assert turned.json()["usage"]["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]


def test_streaming_is_sglangs_own(http: httpx.Client, senders: list[Sender]) -> None:
    wanted = {"senders": [senders[0].id], "encoding": "text"}
    whole = http.post("/v1/chat/completions", json=body(cacheback=wanted)).json()["choices"][0]["message"]["content"]
    text, lines = "", []
    with http.stream("POST", "/v1/chat/completions", json=body(cacheback=wanted, stream=True)) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        text += json.loads(line)["choices"][0]["delta"].get("content") or ""
    assert text == whole


def test_the_openai_package(server: ServedApi, senders: list[Sender]) -> None:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", http_client=httpx.Client(trust_env=False)
    ) as client:
        answer = client.chat.completions.create(
            model="gemma-3-270m",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=8,
            extra_body={"cacheback": {"senders": [sender.id for sender in senders], "ratio": 8}},
        )
        assert answer.choices[0].message.content is not None
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "Hi"}],
                extra_body={"cacheback": {"senders": ["snd_none"]}},
            )
        assert caught.value.code == "sender_not_found"


@pytest.mark.parametrize(
    ("changed", "param", "words"),
    [
        ({"cacheback": {}}, "cacheback", "senders"),
        ({"cacheback": {"senders": ["a"], "messages": ["msg_" + "0" * 32]}}, "cacheback", "one of the two"),
        ({"cacheback": {"senders": [], "ratio": 8}}, "cacheback.senders", "at least 1"),
        ({"cacheback": {"senders": ["a"], "ratio": 0.5}}, "cacheback.ratio", "greater than or equal"),
        ({"cacheback": {"senders": ["a"], "nonsense": 1}}, "cacheback.nonsense", "no such field"),
        ({"cacheback": {"messages": ["msg_" + "0" * 32]}}, "cacheback.messages[0]", "not on record"),
        ({"cacheback": {"messages": [{"encoding": "text"}]}}, "cacheback.messages[0]", "needs its text"),
        (
            {"cacheback": {"senders": ["a"]}, "messages": [{"role": "user", "content": " "}]},
            "cacheback.query",
            "no text",
        ),
        ({"cacheback": {"senders": ["a"]}, "messages": "hello"}, "messages", "list of chat turns"),
        ({"cacheback": {"senders": ["a"]}, "input_ids": [1]}, "input_ids", "not input_ids"),
    ],
)
def test_what_is_wrong_is_said(http: httpx.Client, changed: dict[str, Any], param: str, words: str) -> None:
    answer = http.post("/v1/chat/completions", json=body() | changed)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]
