"""A stand-in for a cb-sglang server, on the standard library alone: ``python fake_server.py PORT [MODE]``.

Words are its tokens, messages keep the first position and the last ones, and it generates the last words of the
prompt. MODE: "ok", "never-ready", "dies" (after the senders are registered), "short-report".
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BOS = 2


class Words:
    """Token ids given to words in the order of their first sight; a word keeps the space before it."""

    def __init__(self) -> None:
        self.words = ["", "", ""]
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        found = []
        for word in re.findall(r"\s?[^\s]+|\s", text):
            if word not in self.ids:
                self.ids[word] = len(self.words)
                self.words.append(word)
            found.append(self.ids[word])
        return found

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[i] for i in ids)


class Fake:
    def __init__(self, mode: str = "ok") -> None:
        self.mode = mode
        self.words = Words()
        self.senders: dict[str, list[int]] = {}
        self.log: list[tuple[str, Any]] = []

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.log.append((path, body))
        if path == "/health":
            return (503 if self.mode == "never-ready" else 200), None
        if path == "/v1/tokenize":
            return 200, {"tokens": [BOS] * body["add_special_tokens"] + self.words.encode(body["prompt"])}
        if path == "/v1/detokenize":
            return 200, {"text": [self.words.decode(ids) for ids in body["tokens"]]}
        if path == "/v1/senders":
            return 200, self.sender(body["input_ids"])
        if path == "/generate":
            return 200, self.generate(body["input_ids"], body["sampling_params"])
        if path.endswith("/messages"):
            if self.mode == "dies":
                print("out of luck", flush=True)
                os._exit(3)
            ids = self.senders[path.split("/")[3]]
            return 200, {"object": "list", "data": [self.message(path.split("/")[3], ids, body)]}
        return 404, {"error": {"message": f"no route {method} {path}", "type": "x"}}

    def sender(self, ids: list[int]) -> Any:
        name = f"snd_{len(self.senders)}"
        self.senders[name] = ids
        return {"id": name, "positions": len(ids), "cached_positions": 0, "fingerprint": "f", "created": 0.0}

    def message(self, name: str, ids: list[int], body: Any) -> Any:
        budget = math.ceil(len(ids) / body["ratio"])
        kept = [0, *range(len(ids) - budget + 1, len(ids))]
        return {
            "id": "msg",
            "sender": name,
            "index": 0,
            "encoding": "token_ids",
            "selector": "cacheback",
            "sender_positions": len(ids),
            "query_positions": 5,
            "voting_positions": 3,
            "cached_positions": len(ids),
            "budget": {"ratio": body["ratio"], "positions": budget},
            "positions": kept,
            "spans": [[0, 1], [len(ids) - budget + 1, len(ids)]],
            "token_ids": [ids[p] for p in kept],
            "timings": {"engine_seconds": 0.0, "total_seconds": 0.0},
        }

    def generate(self, ids: list[int], params: Any) -> Any:
        count = params["max_new_tokens"] - (self.mode == "short-report")
        text = self.words.decode(ids)
        reply = "the Merrimac" if "Merrimac" in text else "a ship"
        return {"text": f" {reply} ", "output_ids": [3] * count, "meta_info": {"prompt_tokens": len(ids)}}


def serve(fake: Fake, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, content = fake.answer(self.command, self.path, body)
            data = b"" if content is None else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _handle

        def log_message(self, format: str, *args: Any) -> None:
            print(self.command, self.path, flush=True)

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    # A child that does not care for SIGTERM, as a stuck worker would not.
    stuck = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('stuck', flush=True); time.sleep(99)"
    )
    child = subprocess.Popen([sys.executable, "-c", stuck], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    print("pids", os.getpid(), child.pid, flush=True)
    serve(Fake(sys.argv[2] if len(sys.argv) > 2 else "ok"), int(sys.argv[1])).serve_forever()
