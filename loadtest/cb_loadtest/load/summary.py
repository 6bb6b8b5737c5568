"""What a whole run comes to, out of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cb_loadtest.load.bench import Bench


def figures(steps: Sequence[dict[str, Any]], bench: Bench) -> dict[str, Any]:
    """Throughput, cache hits and errors of all steps, and what the load cost the generator (chats included)."""
    errors: Counter[str] = Counter()
    for step in steps:
        errors.update(step["errors"])
    return {
        "messages_per_s": messages_per_s(steps),
        "cache": cache_report(steps, bench),
        "errors": dict(errors),
        "generator": {
            "cpu_seconds": round(bench.cpu_seconds, 3),
            "requests": bench.requests,
            "cpu_ms_per_request": round(1_000 * bench.cpu_seconds / max(bench.requests, 1), 3),
        },
    }


def messages_per_s(steps: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Way -> level -> messages (or reports, or prefilled contexts) made a second.

    Of the steps without answers where there are such: an answering receiver keeps the server busy with more.
    """
    found: dict[str, dict[str, float]] = {}
    for step in sorted(steps, key=lambda step: not step["answering"]):
        found.setdefault(step["way"], {})[f"{step['level']:g}"] = step["messages_per_s"]
    return found


def cache_report(steps: Sequence[dict[str, Any]], bench: Bench) -> dict[str, Any]:
    """Whether the primed senders were found in the cache when it was measured. Full contexts must not be."""
    primed = [step for step in steps if step["way"] != "full_context"]
    hits, misses = sum(step["verified_hits"] for step in primed), sum(step["misses"] for step in primed)
    return {
        "verified": misses == 0 and hits > 0,
        "verified_hits": hits,
        "misses": misses,
        "primed_positions": bench.primed.positions,
        "cold_positions_at_first": bench.primed.cold_first,
        "cold_positions_later": bench.primed.cold_later,
    }
