"""A cb-sglang server in this process, behind httpx.MockTransport, for the recall harness.

Words are tokens. ``cacheback`` keeps the words of the query and then the last positions, every other selector the
last positions only (``random``: a seeded draw). What goes wrong is set by the attributes.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import httpx
from fake_server import BOS, Words

from cb_sglang.budget import positions_for_ratio

KNOWN = {"cacheback", "mean_query", "streaming_llm", "random"}


class FakeEngine:
    def __init__(self) -> None:
        self.words = Words()
        self.senders: dict[str, list[int]] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.weights = "v1"
        self.dead_after: int | None = None  # message calls until connections fail
        self.broken_text = ""  # a sender with this word fails in the engine
        self.stingy: set[str] = set()  # selectors that keep one position too few
        self.busy = 0  # message calls that are answered with 503 first
        self.forgetful = False  # drops its senders before the next message call

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.handle)

    def calls(self, path_end: str) -> list[Any]:
        return [body for _, path, body in self.requests if path.endswith(path_end)]

    def handle(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"null")
        self.requests.append((request.method, path, body))
        if self.dead_after is not None and len(self.calls("/messages")) > self.dead_after:
            raise httpx.ConnectError("refused")
        match request.method, path.split("/")[1:]:
            case "GET", ["health"]:
                return httpx.Response(200)
            case "GET", ["v1", "models"]:
                return httpx.Response(200, json={"object": "list", "data": [{"id": "fake"}]})
            case "POST", ["v1", "tokenize"]:
                ids = [BOS] * body["add_special_tokens"] + self.words.encode(body["prompt"])
                return httpx.Response(200, json={"tokens": ids})
            case "POST", ["v1", "detokenize"]:
                return httpx.Response(200, json={"text": [self.words.decode(ids) for ids in body["tokens"]]})
            case "POST", ["generate"]:
                return httpx.Response(200, json=self.generate(body["input_ids"], body["sampling_params"]))
            case "GET", ["v1", "senders"]:
                return httpx.Response(200, json={"data": [self.sender(name) for name in self.senders]})
            case "POST", ["v1", "senders"]:
                ids = body.get("input_ids") or self.words.encode(body["prompt"])
                name = f"snd_{abs(hash(tuple(ids)))}"
                self.senders[name] = ids
                return httpx.Response(200, json=self.sender(name))
            case "DELETE", ["v1", "senders", name]:
                del self.senders[name]
                return httpx.Response(200, json={"id": name, "deleted": True})
            case "POST", ["v1", "senders", name, "messages"]:
                return self.messages(name, body)
        return error(404, f"no route {path}", "not_found")

    def sender(self, name: str) -> Any:
        ids = self.senders[name]
        return {"id": name, "positions": len(ids), "fingerprint": f"{self.weights} {len(ids)}", "created": 0.0}

    def messages(self, name: str, body: Any) -> httpx.Response:
        if self.busy:
            self.busy -= 1
            return error(503, "full", "server_overloaded")
        if self.forgetful:
            self.forgetful = False
            self.senders.clear()
        if name not in self.senders:
            return error(404, "no such sender", "sender_not_found")
        ids = self.senders[name]
        queries = [{**{k: v for k, v in body.items() if k not in ("queries", "stream")}, **q} for q in body["queries"]]
        for query in queries:
            if query["selector"] not in KNOWN:
                return error(400, f"unknown selector {query['selector']!r}", "invalid_value")
        if not body["stream"]:
            return httpx.Response(200, json={"data": [self.message(name, i, q) for i, q in enumerate(queries)]})
        events = b""
        for index, query in enumerate(queries):
            if self.broken_text and self.broken_text in self.words.decode(ids):
                events += event("error", {"error": {"message": "boom", "code": "engine_error"}, "index": index})
                break
            events += event("message", self.message(name, index, query))
        else:
            events += event("done", {})
        return httpx.Response(200, content=events, headers={"Content-Type": "text/event-stream"})

    def message(self, name: str, index: int, query: Any) -> Any:
        ids, selector = self.senders[name], query["selector"]
        total = len(ids)
        size = min(query["budget"], total) if "budget" in query else positions_for_ratio(total, 0, query["ratio"])
        ranked = list(range(total - 1, 0, -1))
        if selector == "random":
            random.Random(query["selector_options"]["seed"]).shuffle(ranked)
        if selector == "cacheback":
            wanted = set(re.findall(r"\w+", query["query"]))
            ranked.sort(key=lambda p: self.words.words[ids[p]].strip(" .") not in wanted)
        kept = sorted([0, *ranked[: size - 1 - (selector in self.stingy)]])
        return {
            "id": "msg",
            "sender": name,
            "index": index,
            "encoding": "token_ids",
            "selector": selector,
            "sender_positions": total,
            "query_positions": 5,
            "voting_positions": 3,
            "cached_positions": total,
            "budget": {"positions": size},
            "positions": kept,
            "spans": [[p, p + 1] for p in kept],
            "token_ids": [ids[p] for p in kept],
            "timings": {"engine_seconds": 0.0, "total_seconds": 0.0},
        }

    def generate(self, ids: list[int], params: Any) -> Any:
        """Answers with the words of the prompt that begin with a capital; a report repeats the prompt's last words."""
        count = params["max_new_tokens"]
        if params.get("ignore_eos"):
            out = ids[-count:]
            return {"text": self.words.decode(out), "output_ids": out, "meta_info": {"prompt_tokens": len(ids)}}
        given = self.words.decode(ids).partition("Question:")[0]
        reply = " ".join(re.findall(r"\b[A-Z]\w+", given)) or "nothing"
        return {"text": f" {reply}", "output_ids": [3], "meta_info": {"prompt_tokens": len(ids), "cached_tokens": 1}}


def event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def error(status: int, message: str, code: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "type": "x", "code": code}})
