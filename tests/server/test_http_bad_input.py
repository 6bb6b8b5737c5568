"""Bad input on the real server: each gets a status, the nested shape, the field at fault, and what to change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from served_api import ServedApi

from cb_sglang.client import CacheBack, Sender

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module", autouse=True)
def as_good_as_before(server: ServedApi) -> Iterator[None]:
    """After all of it the server answers as it did before, and nothing was registered or kept busy."""
    client = server.client
    for left in client.list_senders():
        client.delete_sender(left)
    ids = [2, *range(1_000, 1_200)]

    def ask() -> list[int]:
        sender = client.create_sender(input_ids=ids)
        (message,) = client.messages(sender, ["Who?"])
        client.delete_sender(sender)
        return message.positions

    before = ask()
    yield
    assert client.health()
    assert [s.positions for s in client.list_senders()] == []
    server.flush()
    assert server.load()["num_used_tokens"] == 0
    assert ask() == before


@pytest.fixture(scope="module")
def held(as_good_as_before: None, server: ServedApi) -> Iterator[Sender]:
    sender = server.client.create_sender(input_ids=[2, *range(2_000, 2_300)])
    yield sender
    server.client.delete_sender(sender)


def refused(
    answer: httpx.Response, param: str | None, *words: str, status: int = 400, code: str = "invalid_value"
) -> None:
    """The answer is an error of ours about ``param`` whose message has all of ``words``."""
    assert answer.status_code == status, answer.text[:500]
    assert len(answer.content) < 2_000, "errors do not echo what was sent"
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code), error
    for word in words:
        assert word in error["message"], error["message"]


@dataclass(frozen=True)
class Bad:
    """A body and what is wrong with it. ``raw`` bytes are sent as they are, everything else as JSON."""

    name: str
    body: Any
    param: str | None
    words: tuple[str, ...]
    code: str = "invalid_value"

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def bad(name: str, body: Any, param: str | None, *words: str, code: str = "invalid_value") -> Any:
    return pytest.param(Bad(name, body, param, words, code), id=name)


def options(name: str, value: Any, *words: str) -> list[Any]:
    """The same wrong option on the call and on its second query."""
    return [
        bad(f"{name}-{value!r}"[:40], {"queries": ["a"], name: value}, name, *words),
        bad(
            f"query-{name}-{value!r}"[:40],
            {"queries": ["a", {"query": "b", name: value}]},
            f"queries[1].{name}",
            *words,
        ),
    ]


NOT_JSON = [
    bad("no-json", b"who?", None, "not JSON"),
    bad("empty-body", b"", None, "the body", "required"),
    bad("half-a-body", b'{"queries": ["a"', None, "not JSON"),
    bad("array", [1], None, "the body", "object"),
    bad("string", "x", None, "the body", "object"),
    bad("null", b"null", None, "the body"),
    bad("not-utf-8", b'{"queries": ["\xff\xfe"], "prompt": "\xff"}', None, "utf-8", "byte 14"),
    bad("10000-brackets", b"[" * 10_000 + b"]" * 10_000, None, "nested too deeply"),
    bad("10000-objects", b'{"queries":' * 10_000 + b"1" + b"}" * 10_000, None, "nested too deeply"),
    bad("5000-digits", b'{"queries": ["a"], "budget": ' + b"9" * 5_000 + b"}", None, "too many digits"),
]

QUERIES = [
    bad("no-queries", {}, "queries", "required"),
    bad("queries-string", {"queries": "Who?"}, "queries", "list"),
    bad("queries-empty", {"queries": []}, "queries", "at least 1"),
    bad("queries-257", {"queries": ["a"] * 257}, "queries", "at most 256"),
    bad("query-empty", {"queries": ["a", ""]}, "queries[1]", "at least 1"),
    bad("query-blank", {"queries": ["a", " \n\t "]}, "queries[1]", "empty", "ask a question"),
    bad("query-object-blank", {"queries": [{"query": "  "}]}, "queries[0]", "ask a question"),
    bad("query-object-empty", {"queries": [{}]}, "queries[0].query", "required"),
    bad("query-number", {"queries": [5]}, "queries[0]", "a string, a list of token ids, or an object"),
    bad("query-null", {"queries": ["a", None]}, "queries[1]", "a string, a list of token ids, or an object"),
    bad("query-bool", {"queries": [True]}, "queries[0]", "a string, a list of token ids, or an object"),
    bad("query-1-MB", {"queries": ["x" * 1_000_000]}, "queries[0]", "at most 32768 characters"),
    bad("query-40000-ids", {"queries": [[5] * 40_000]}, "queries[0]", "at most 32768"),
    bad("query-no-ids", {"queries": [[]]}, "queries[0]", "at least 1"),
    bad("query-negative-id", {"queries": [[5, -1]]}, "queries[0][1]", "greater than or equal to 0"),
    bad("query-id-float", {"queries": [[1.5]]}, "queries[0][0]", "integer"),
    bad("query-id-string", {"queries": [["5"]]}, "queries[0][0]", "integer"),
    bad("query-id-bool", {"queries": [[True]]}, "queries[0][0]", "integer"),
    bad("query-id-beyond", {"queries": ["a", [5, 262_144]]}, "queries[1]", "262144", "vocabulary"),
    bad("query-surrogate", b'{"queries": ["\\ud800"]}', "queries[0]", "valid string"),
    bad("query-surrogate-inside", b'{"queries": ["who \\udc00 is"]}', "queries[0]", "valid string"),
]

OPTIONS = [
    bad("both", {"queries": ["a"], "ratio": 8, "budget": 10}, "budget", "ratio or budget, not both"),
    bad("query-both", {"queries": [{"query": "a", "ratio": 8, "budget": 10}]}, "queries[0].budget", "not both"),
    *options("ratio", 0, "greater than or equal to 1"),
    *options("ratio", 0.99, "greater than or equal to 1"),
    *options("ratio", -8, "greater than or equal to 1"),
    *options("ratio", 1e7, "less than or equal to 1000000"),
    *options("ratio", float("nan"), "finite"),
    *options("ratio", float("inf"), "finite"),
    *options("ratio", float("-inf"), "finite"),
    *options("ratio", "8", "number"),
    *options("ratio", True, "number"),
    bad("ratio-1e999", b'{"queries": ["a"], "ratio": 1e999}', "ratio", "finite"),
    *options("budget", 0, "greater than or equal to 1"),
    *options("budget", -5, "greater than or equal to 1"),
    *options("budget", "5", "integer"),
    *options("budget", 2.5, "integer"),
    *options("budget", 2.0, "integer"),
    *options("budget", True, "integer"),
    *options("budget", 2**40, "less than 2147483648"),
    *options("budget", [], "integer"),
    *options("encoding", "morse", "'mixed' or 'text'"),
    *options("encoding", 1, "'mixed' or 'text'"),
    *options("selector", "oracle", "'oracle'", "choose one of", "cacheback", "mean_query"),
    *options("selector", "", "at least 1"),
    *options("selector", "s" * 10_000, "at most"),
    *options("selector_options", 5, "dictionary"),
    bad("order", {"queries": ["a"], "selector_options": {"order": 1}}, "selector_options.order", "greater than 1"),
    bad("alpha", {"queries": ["a"], "selector_options": {"alpha": "2"}}, "selector_options.alpha", "number"),
    bad(
        "query-option",
        {"queries": [{"query": "a", "selector_options": {"text": 1}}]},
        "queries[0].selector_options.text",
        "no such field",
    ),
    *options("query_template", "no place", "{query} exactly once"),
    *options("query_template", "{query}{query}", "{query} exactly once"),
    *options("query_template", "x" * 9_000, "at most 8192"),
    *options("query_template", "\ud800{query}", "valid string"),
    *options("span_scores", "yes", "boolean"),
    bad("stream-string", {"queries": ["a"], "stream": "yes"}, "stream", "boolean"),
    *options("surprise", 1, "no such field"),
    # Names that pydantic also uses for the forms of a query must not get lost.
    *options("text", 1, "no such field"),
    bad("long-field", {"queries": ["a"], "x" * 1_000_000: 1}, "x" * 256, "no such field"),
    bad("many-fields", {str(n): n for n in range(100_000)}, None, "100000 fields"),
]

SENDERS = [
    bad("nothing", {}, None, "exactly one of input_ids, prompt and messages"),
    bad("two", {"prompt": "a", "input_ids": [5]}, None, "exactly one", "not input_ids and prompt"),
    bad("prompt-empty", {"prompt": ""}, "prompt", "at least 1"),
    bad("prompt-number", {"prompt": 5}, "prompt", "string"),
    bad("prompt-list", {"prompt": ["a"]}, "prompt", "string"),
    bad("prompt-surrogate", b'{"prompt": "\\ud800"}', "prompt", "valid string"),
    bad("prompt-too-long", {"prompt": "x" * 16_777_217}, "prompt", "at most 16777216"),
    bad("ids-empty", {"input_ids": []}, "input_ids", "at least 1"),
    bad("ids-string", {"input_ids": "5"}, "input_ids", "list"),
    bad("ids-negative", {"input_ids": [5, -1]}, "input_ids[1]", "greater than or equal to 0"),
    bad("ids-beyond", {"input_ids": [5, 262_144]}, "input_ids", "262144", "vocabulary"),
    bad("ids-2^31", {"input_ids": [2**31]}, "input_ids[0]", "less than 2147483648"),
    bad("ids-float", {"input_ids": [1.0]}, "input_ids[0]", "integer"),
    bad("ids-bool", {"input_ids": [True]}, "input_ids[0]", "integer"),
    bad("ids-million-wrong", {"input_ids": [""] * 1_000_000}, "input_ids[0]", "integer"),
    bad("messages-empty", {"messages": []}, "messages", "at least 1"),
    bad("messages-part", {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    bad("messages-extra", {"messages": [{"role": "u", "content": "", "text": 1}]}, "messages[0].text", "no such field"),
    bad("surprise", {"prompt": "a", "text": "b"}, "text", "no such field"),
]


@pytest.mark.parametrize("case", [*NOT_JSON, *QUERIES, *OPTIONS])
def test_messages(http: httpx.Client, held: Sender, case: Bad) -> None:
    answer = http.post(f"/v1/senders/{held.id}/messages", content=case.content, headers=JSON)
    refused(answer, case.param, *case.words, code=case.code)


@pytest.mark.parametrize("case", [*NOT_JSON, *SENDERS])
def test_senders(http: httpx.Client, case: Bad) -> None:
    refused(http.post("/v1/senders", content=case.content, headers=JSON), case.param, *case.words, code=case.code)


def test_streaming_refuses_with_a_status(http: httpx.Client, held: Sender) -> None:
    """What is wrong shows before the first event, as a plain answer."""
    for query, param in ((" ", "queries[0]"), ([300_000], "queries[0]")):
        answer = http.post(f"/v1/senders/{held.id}/messages", json={"queries": [query], "stream": True})
        refused(answer, param)


def test_one_bad_query_refuses_the_call(server: ServedApi, http: httpx.Client, held: Sender) -> None:
    server.flush()
    before = server.prefilled()
    refused(http.post(f"/v1/senders/{held.id}/messages", json={"queries": ["What?"] * 8 + [[300_000]]}), "queries[8]")
    server.flush()
    assert server.prefilled() == before, "nothing was computed for it"


def test_too_long_for_this_server(server: ServedApi, client: CacheBack, http: httpx.Client, held: Sender) -> None:
    limit = server.pool_positions
    long = {"code": "context_length_exceeded"}
    path = f"/v1/senders/{held.id}/messages"
    refused(http.post(path, json={"queries": ["a", [5] * limit]}), "queries[1]", "shorten the query", **long)
    words = "word " * 6_400  # within the bound on characters, beyond the pool together with a sender of 2,000
    longer = client.create_sender(input_ids=[2, *range(3_000, 5_000)])
    answer = http.post(f"/v1/senders/{longer.id}/messages", json={"queries": [words]})
    refused(answer, "queries[0]", f"sender ({longer.positions})", "shorten the query", **long)
    client.delete_sender(longer)
    for content, param in (({"input_ids": [5] * limit}, "input_ids"), ({"prompt": "word " * 2 * limit}, "prompt")):
        refused(http.post("/v1/senders", json=content), param, "this server takes at most", **long)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
@pytest.mark.parametrize("path", ["/v1/senders", "/v1/senders/snd_x/messages"])
def test_wrong_content_type(http: httpx.Client, path: str, kind: str) -> None:
    headers = {"Content-Type": kind} if kind else {}
    refused(http.post(path, content=b'{"prompt": "a"}', headers=headers), None, "Content-Type: application/json")


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_body_over_64_MiB(server: ServedApi, chunked: bool) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(66):
            yield b" " * (1 << 20)

    # Its own connection: the server may close it while the rest of the body is still on the way.
    with httpx.Client(base_url=server.url, timeout=60.0, trust_env=False) as http:
        answer = http.post("/v1/senders", content=pieces() if chunked else b" " * ((64 << 20) + 1), headers=JSON)
    refused(answer, None, "67108864 bytes", status=413, code="body_too_large")


UNKNOWN_IDS = {
    "never-made": "snd_00000000000000000000000000000000",
    "dots": "...",
    "space": "%20",
    "nul": "%00",
    "not-utf-8": "%ff%fe",
    "emoji": "%F0%9F%90%8B",
    "quote": "'%22;--",
    "10-kB": "a" * 10_240,
}


@pytest.mark.parametrize("sender_id", [pytest.param(value, id=name) for name, value in UNKNOWN_IDS.items()])
def test_unknown_sender(http: httpx.Client, sender_id: str) -> None:
    for answer in (
        http.get(f"/v1/senders/{sender_id}"),
        http.delete(f"/v1/senders/{sender_id}"),
        http.post(f"/v1/senders/{sender_id}/messages", json={"queries": ["Who?"]}),
    ):
        refused(answer, "sender_id", "no such sender", "POST /v1/senders", status=404, code="sender_not_found")


def test_deleted_sender_is_unknown(client: CacheBack, http: httpx.Client) -> None:
    sender = client.create_sender(input_ids=[2, 3_000, 3_001])
    client.delete_sender(sender)
    for answer in (
        http.get(f"/v1/senders/{sender.id}"),
        http.delete(f"/v1/senders/{sender.id}"),
        http.post(f"/v1/senders/{sender.id}/messages", json={"queries": ["Who?"], "stream": True}),
    ):
        refused(answer, "sender_id", "no such sender", status=404, code="sender_not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/v1/senders"),
        ("DELETE", "/v1/senders"),
        ("PATCH", "/v1/senders/snd_x"),
        ("GET", "/v1/senders/snd_x/messages"),
        ("GET", "/v1/senders/a%2Fb"),
        ("GET", "/v1/senders/..%2F..%2Fetc%2Fpasswd"),
        ("GET", "/v1/senders/"),
    ],
)
def test_no_such_endpoint(http: httpx.Client, method: str, path: str) -> None:
    answer = http.request(method, path)
    refused(answer, None, method, "POST and GET /v1/senders", status=404, code="endpoint_not_found")
