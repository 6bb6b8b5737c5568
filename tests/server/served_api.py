"""What the tests here share: the running server, and real prose to register at it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from cb_loadtest.cases import Case, default_cases_path, load_cases
from cb_loadtest.served import ServerProcess
from cb_sglang.client import CacheBack

EXCERPT_CHARS = 3_000
CASES = {case.id: case for case in load_cases(default_cases_path())}


@dataclass(frozen=True)
class ServedApi:
    """A ready server, our client of it, and plain HTTP to it."""

    url: str
    process: ServerProcess
    client: CacheBack
    http: httpx.Client

    @property
    def pool_positions(self) -> int:
        return int(self.load()["max_total_num_tokens"])

    def prefilled(self) -> int:
        """Positions computed by the engine so far, not counting those that came from the cache."""
        return int(self.load()["total_prefill_uncached_tokens"])

    def load(self) -> dict[str, Any]:
        return self.http.get("/v1/loads").raise_for_status().json()["loads"][0]  # type: ignore[no-any-return]

    def flush(self) -> None:
        """Wait until nothing runs or waits in the engine, then empty its cache."""
        answer = self.http.post("/flush_cache", params={"timeout": 120})
        assert answer.status_code == 200, f"the engine did not become idle: {answer.text}"


def document(case: Case) -> str:
    return case.contexts[0].text


def excerpt(name: str) -> str:
    """The beginning of a document that ships with the project."""
    text = next(document(case) for case in CASES.values() if case.contexts[0].id == name)
    return text[:EXCERPT_CHARS]


def random_ids(count: int, seed: int) -> list[int]:
    """Ordinary tokens of the embedded model's vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(1_000, 200_000) for _ in range(count)]


def sse_events(body: str) -> list[tuple[str, Any]]:
    """Name and JSON of every event of a whole stream, read as the standard has it."""
    assert body.endswith("\n\n")
    events = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        fields = [line.partition(": ") for line in block.split("\n")]
        names = [value for field, _, value in fields if field == "event"]
        data = [value for field, _, value in fields if field == "data"]
        assert len(names) == 1 and len(data) == 1 and len(fields) == 2
        events.append((names[0], json.loads(data[0])))
    return events


def runs_of(positions: Sequence[int]) -> list[tuple[int, int]]:
    """The maximal runs of neighbours, found the slow way."""
    kept = set(positions)
    starts = [p for p in sorted(kept) if p - 1 not in kept]
    stops = [p + 1 for p in sorted(kept) if p + 1 not in kept]
    return list(zip(starts, stops, strict=True))
