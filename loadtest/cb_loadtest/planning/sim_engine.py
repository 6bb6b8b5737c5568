"""A simulated engine: it takes steps, and each step holds whatever work is there, as with continuous batching."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from itertools import count
from typing import Any

import simpy

from cb_loadtest.planning.engine import Engine

Steps = Generator[simpy.Event, Any, None]
# Rows of prefill in one step, as in SGLang's --chunked-prefill-size.
CHUNK_ROWS = 8_192


@dataclass(slots=True)
class _Query:
    sender: int
    rows: int
    positions: int
    done: simpy.Event


@dataclass(slots=True)
class _Prefill:
    rows: int
    past: int
    done: simpy.Event


class SimulatedEngine:
    """``score``, ``prefill`` and ``decode`` return an event that happens when the work is done.

    A step scores everything that waits (queries of one sender in one batch), prefills up to CHUNK_ROWS rows and gives
    every running answer one token. While nothing waits, many decoding steps are taken as one, up to the step in which
    new work arrives.
    """

    def __init__(self, env: simpy.Environment, engine: Engine) -> None:
        self._env = env
        self._engine = engine
        self._queries: list[_Query] = []
        self._prefills: deque[_Prefill] = deque()
        self._joining: list[tuple[int, int, simpy.Event]] = []  # tokens, positions, done; not before the next step
        self._answers: list[tuple[int, int, int, simpy.Event]] = []  # last token, order, positions there, done
        self._order = count()
        self._tokens = 0  # that every running answer would have had, since the start
        self._positions_at_zero = 0  # sum over answers of their positions, minus self._tokens each
        self._wake = env.event()
        env.process(self._run())

    def score(self, sender: int, *, rows: int, positions: int) -> simpy.Event:
        query = _Query(sender, rows, positions, self._env.event())
        self._queries.append(query)
        self._notify()
        return query.done

    def prefill(self, *, rows: int, past: int = 0) -> simpy.Event:
        prefill = _Prefill(rows, past, self._env.event())
        self._prefills.append(prefill)
        self._notify()
        return prefill.done

    def decode(self, *, tokens: int, positions: int) -> simpy.Event:
        """An answer of ``tokens`` tokens that begins at ``positions``."""
        done = self._env.event()
        self._joining.append((tokens, positions, done))
        self._notify()
        return done

    def _notify(self) -> None:
        if not self._wake.triggered:
            self._wake.succeed()

    def _run(self) -> Steps:
        while True:
            self._wake = self._env.event()
            self._join()
            if self._queries or self._prefills:
                yield from self._mixed_step()
            elif self._answers:
                yield from self._decode_run()
            else:
                yield self._wake

    def _join(self) -> None:
        for tokens, positions, done in self._joining:
            heapq.heappush(self._answers, (self._tokens + tokens, next(self._order), positions + tokens, done))
            self._positions_at_zero += positions - self._tokens
        self._joining.clear()

    def _mixed_step(self) -> Steps:
        queries, self._queries = self._queries, []
        seconds = self._scoring_seconds(queries)
        finished: list[simpy.Event] = []
        room = CHUNK_ROWS
        while self._prefills and room:
            first = self._prefills[0]
            rows = min(first.rows, room)
            seconds += self._engine.prefill_seconds(rows=rows, past=first.past)
            first.rows, first.past, room = first.rows - rows, first.past + rows, room - rows
            if not first.rows:
                finished.append(self._prefills.popleft().done)
        decoding = bool(self._answers)
        if decoding:
            seconds += self._decode_seconds(1)
        yield self._env.timeout(seconds)
        for done in [*(query.done for query in queries), *finished]:
            done.succeed()
        if decoding:
            self._advance(1)

    def _scoring_seconds(self, queries: list[_Query]) -> float:
        batches: dict[int, list[_Query]] = {}
        for query in queries:
            batches.setdefault(query.sender, []).append(query)
        return sum(
            self._engine.scoring_seconds(
                queries=len(batch),
                rows=math.ceil(sum(query.rows for query in batch) / len(batch)),
                positions=batch[0].positions,
            )
            for batch in batches.values()
        )

    def _decode_run(self) -> Steps:
        """Until the first answer ends, or the step in which something else arrives."""
        tokens = self._answers[0][0] - self._tokens
        step = self._decode_seconds(tokens) / tokens
        started = self._env.now
        end = self._env.timeout(tokens * step)
        yield end | self._wake
        if not end.processed:
            taken = min(tokens, max(1, math.ceil((self._env.now - started) / step)))
            yield self._env.timeout(max(0.0, started + taken * step - self._env.now))
            tokens = taken
        self._advance(tokens)

    def _decode_seconds(self, tokens: int) -> float:
        sequences = len(self._answers)
        positions = self._positions_at_zero // sequences + self._tokens
        return self._engine.decode_seconds(sequences=sequences, positions=positions, tokens=tokens)

    def _advance(self, tokens: int) -> None:
        self._tokens += tokens
        while self._answers and self._answers[0][0] <= self._tokens:
            last, _, positions, done = heapq.heappop(self._answers)
            self._positions_at_zero -= positions - last
            done.succeed()
