"""What the engine benchmarks share: a sender, queries over it, and how they are asked and timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from cb_sglang.spec import ScoringSpec
from cb_sglang.templates import WrappedQuery

_fresh_token = itertools.cycle(range(1_000, 8_000))


def ask(
    engine: Any, sender: Sequence[int], queries: Sequence[WrappedQuery], *, budget: int, scored: bool = True
) -> None:
    """Run the queries as one batch, with or without scoring. Raises RuntimeError when an answer is not as asked.

    A leading token of its own keeps each unscored tail from being found in the cache by a later round.
    """
    inputs = [[*sender, next(_fresh_token), *query.input_ids] for query in queries]
    specs = [ScoringSpec(len(sender), 1 + q.vote_start, 1 + q.vote_stop, budget).to_wire() for q in queries]
    params = [{"max_new_tokens": 1, "temperature": 0, "custom_params": spec if scored else None} for spec in specs]
    for output in engine.generate(input_ids=inputs, sampling_params=params):
        meta = output["meta_info"]
        kept = meta.get("cacheback")
        if scored != bool(kept) or (kept and len(kept[0].get("positions", ())) != budget):
            raise RuntimeError(f"unexpected answer: {kept}")
        if meta["cached_tokens"] != len(sender):
            raise RuntimeError(f"{meta['cached_tokens']} positions were cached, not the sender's {len(sender)}")


def timed(work: Callable[[], object]) -> float:
    """Wall seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def batch_of(queries: Sequence[WrappedQuery], size: int, number: int) -> list[WrappedQuery]:
    """The ``number``-th batch, going round through the queries."""
    return [queries[(number * size + i) % len(queries)] for i in range(size)]
