"""An engine without a model for the tests of the service: it selects by the keep law and records what it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cb_kernels.keep import keep_positions_reference
from cb_sglang import wire
from cb_sglang.rows import RowDtype, Rows
from cb_sglang.seam.engine import Context, EngineLoad, Scored
from cb_sglang.service import MessageService
from cb_sglang.settings import Settings
from cb_sglang.spec import SPAN, ScoringSpec, StatisticSpec
from cb_sglang.tenants import Tenant

VOCABULARY = 1_000
HIDDEN = 4
BOS = 2
ALICE, BOB = Tenant("alice"), Tenant("bob")
SECRET = bytes(32)
DOCUMENT = list(range(100, 200))


class Letters:
    """A tokenizer with one token a character, BOS before a text unless told not to."""

    is_fast = True
    chat_template: str | None = None
    bos_token_id = BOS

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + [10 + ord(c) for c in text]

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> dict[str, Any]:
        assert return_offsets_mapping
        leading = [(0, 0)] * add_special_tokens
        return {
            "input_ids": self.encode(text, add_special_tokens),
            "offset_mapping": [*leading, *((n, n + 1) for n in range(len(text)))],
        }

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i - 10) for i in ids if i >= 10)

    def apply_chat_template(self, turns: list[dict[str, str]], *, tokenize: bool, **options: Any) -> Any:
        if turns[0]["role"] == "villain":
            raise RuntimeError("no such role")
        text = "".join(f"{turn['role']}: {turn['content'].strip()};" for turn in turns)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def row(number: float) -> bytes:
    """One row of HIDDEN equal float32 numbers."""
    return np.full(HIDDEN, number, dtype="<f4").tobytes()


def rows(*numbers: float) -> Rows:
    """A row of each number, at positions 0, 1, ..."""
    return Rows(tuple(range(len(numbers))), "float32", HIDDEN, b"".join(map(row, numbers)))


@dataclass
class RecordingEngine:
    """Scores by ``score_of``; the embedding of token n is n in every place, and latent rows are -1, -2, ...

    ``hold`` stops its work until set, ``fail`` makes it fail. ``used`` positions of its pool are taken. Queries find
    ``cached`` positions of their sender, None being all.
    """

    max_input: int = 150
    pool_positions: int = 10_000
    context_length: int = 2_000
    used: int = 0
    cached: int | None = None
    vocab_size: int = VOCABULARY
    hidden_size: int = HIDDEN
    row_dtype: RowDtype = "float32"
    embedding_bytes: int = 4 * HIDDEN
    kv_bytes: int = 1_024
    ranks: int = 1
    page_size: int = 1
    fingerprint: str = "model"
    tokenizer_fingerprint: str = "tokenizer"
    tokenizer: Letters = field(default_factory=Letters)
    score_of: Callable[[int], float] = lambda position: -float(position)
    hold: asyncio.Event | None = None
    fail: Exception | None = None
    prefills: list[Context] = field(default_factory=list)
    rollouts: list[Context] = field(default_factory=list)
    batches: list[list[tuple[Context, ScoringSpec]]] = field(default_factory=list)
    measured: list[StatisticSpec] = field(default_factory=list)
    pinned: dict[str, Context] = field(default_factory=dict)
    cancelled: int = 0
    closed: int = 0

    @property
    def scored(self) -> list[tuple[Context, ScoringSpec]]:
        """All that was to be scored, whatever batch it was in."""
        return [each for batch in self.batches for each in batch]

    async def tokenizing(self, function: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args)

    tokenizing_long = tokenizing

    async def load(self) -> EngineLoad:
        await asyncio.sleep(0)
        return EngineLoad(self.pool_positions, self.used, 0, 0)

    def found_all(self, cached: int, positions: int) -> bool:
        return cached >= positions - self.page_size

    async def prefill(self, context: Context) -> int:
        self.prefills.append(context)
        try:
            await self._work()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return 7

    async def pin(self, context: Context, pin_id: str) -> None:
        await self._work()
        self.pinned[pin_id] = context

    async def unpin(self, pin_id: str, rank: int | None = None) -> None:
        await self._work()
        self.pinned.pop(pin_id, None)

    async def latent_rows(self, context: Context, steps: int) -> Rows:
        self.rollouts.append(context)
        await self._work()
        return rows(*(-1.0 - step for step in range(steps)))

    async def embeddings(self, token_ids: Sequence[int]) -> Rows:
        await self._work()
        return rows(*map(float, token_ids))

    async def score(self, requests: Sequence[tuple[Context, ScoringSpec]]) -> AsyncGenerator[Scored, None]:
        self.batches.append(list(requests))
        try:
            # The last query finishes first.
            for index in reversed(range(len(requests))):
                await self._work()
                spec = requests[index][1]
                scores = [self.score_of(position) for position in range(spec.sender_len)]
                kept = keep_positions_reference(
                    scores, spec.budget, positions_of(spec.protected_runs), positions_of(spec.excluded_runs), SPAN
                )
                cached = spec.sender_len if self.cached is None else self.cached
                yield Scored(index, kept, span_means(scores) if spec.want_scores else None, cached, 0.25)
        finally:
            self.closed += 1

    async def measure(self, requests: Sequence[tuple[Context, StatisticSpec]]) -> AsyncGenerator[list[float], None]:
        for _, spec in requests:
            self.measured.append(spec)
            await self._work()
            yield [self.score_of(position) / len(requests) for position in range(spec.sender_len)]

    async def _work(self) -> None:
        await asyncio.sleep(0)
        if self.hold is not None:
            await self.hold.wait()
        if self.fail is not None:
            raise self.fail


def positions_of(runs: Sequence[tuple[int, int]]) -> list[int]:
    """The positions in half-open runs, each once, ascending."""
    return sorted({position for run in runs for position in range(*run)})


def span_means(scores: Sequence[float]) -> list[float]:
    spans = [scores[start : start + SPAN] for start in range(0, len(scores), SPAN)]
    return [sum(span) / len(span) for span in spans]


def run(
    test: Callable[[RecordingEngine, MessageService], Coroutine[Any, Any, None]],
    *,
    data_dir: Path | None = None,
    engine: RecordingEngine | None = None,
    **settings: Any,
) -> None:
    """A test with an engine and a service on a loop of its own.

    However the test treats the service, nothing of its calls may be left: no task, no admission, no grant.
    """

    async def main(engine: RecordingEngine) -> None:
        async with asyncio.timeout(20):
            service = await MessageService.start(
                engine,  # type: ignore[arg-type]
                Settings(data_dir=data_dir, **settings),
                SECRET,
            )
            try:
                await test(engine, service)
                await settle()
                assert_idle(service)
            finally:
                await service.close()
        await settle()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    asyncio.run(main(engine or RecordingEngine()))


async def settle() -> None:
    """Let everything go on; a thread may have a part in it."""
    for _ in range(10):
        await asyncio.sleep(0.001)


def assert_idle(service: MessageService) -> None:
    """Whatever calls took is given back."""
    load = service.admission.snapshot()
    assert (load.running.requests, load.running.rows, load.queued.requests, load.tenants) == (0, 0, 0, {})
    assert (service.grants.waiting, service.grants.granted_positions) == (0, 0)


async def registered(service: MessageService, ids: list[int] = DOCUMENT, **options: Any) -> str:
    """A sender's id; of Alice's, unless ``tenant`` says otherwise."""
    tenant = options.pop("tenant", ALICE)
    return (await service.senders.register(tenant, wire.SenderRequest(input_ids=ids, **options))).id


async def ask(
    service: MessageService, sender_id: str, *queries: Any, tenant: Tenant = ALICE, **options: Any
) -> list[wire.Message]:
    """The messages of one call, as they came."""
    request = wire.MessagesRequest(queries=list(queries), **options)
    return [each.message async for each in service.messages(tenant, sender_id, request)]
