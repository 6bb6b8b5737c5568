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
    """Way -> level -> messages (or reports, or prefilled contexts) made a second; of steps that made any.

    Of the steps without answers where there are such: an answering receiver keeps the server busy with more.
    """
    found: dict[str, dict[str, float]] = {}
    for step in sorted(steps, key=lambda step: not step["answering"]):
        if step["completed"]:
            found.setdefault(step["way"], {})[f"{step['level']:g}"] = step["messages_per_s"]
    return found


def cache_report(steps: Sequence[dict[str, Any]], bench: Bench) -> dict[str, Any]:
    """Whether the primed senders were found in the cache when it was measured, and full contexts were not.

    ``verified``, hits and misses are None where the page size, by which a hit is told, is not known.
    """
    primed = [step for step in steps if step["way"] != "full_context"]
    warm = sum(step["warm_full_contexts"] for step in steps)
    hits, misses, verified = None, None, False if warm else None
    if all(step["verified_hits"] is not None for step in primed):
        hits, misses = (sum(step[key] for step in primed) for key in ("verified_hits", "misses"))
        verified = warm == 0 and misses == 0 and hits > 0
    return {
        "verified": verified,
        "verified_hits": hits,
        "misses": misses,
        "warm_full_contexts": warm,
        "primed_positions": bench.primed.positions,
        "cold_positions_at_first": bench.primed.cold_first,
        "cold_positions_later": bench.primed.cold_later,
    }
