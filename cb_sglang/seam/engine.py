"""SGLang's engine as the HTTP process sees it: the TokenizerManager, behind a few calls.

``prefill`` puts a sender into the radix cache; ``score`` runs queries over senders in one batch; ``latent_rows`` rolls
a sender on; ``tokenizing`` uses SGLang's tokenizer on threads of our own, off the event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from cb_sglang.errors import ContextLengthError, EngineError, InvalidRequestError
from cb_sglang.rows import PLACEHOLDER_ID, RowDtype, Rows, joined
from cb_sglang.seam import pins
from cb_sglang.seam.fingerprints import model_fingerprint, tokenizer_fingerprint
from cb_sglang.spec import (
    CACHEABLE_ROWS_KEY,
    WIRE_KEY,
    EmbeddingSpec,
    LatentSpec,
    PinSpec,
    ScoringSpec,
    Spec,
    StatisticSpec,
)

T = TypeVar("T")
_SENDER_PRIORITY = 2


@dataclass(frozen=True, slots=True)
class Context:
    """A sequence as the engine takes it.

    rows:      input embeddings that replace those of some of the tokens.
    namespace: SGLang's ``extra_key``: requests share cached KV only within one. A sequence with rows needs one that
               stands for its rows, because the token ids do not tell them.
    rank:      the data-parallel rank whose cache is to be used, where there are several.
    """

    input_ids: list[int]
    rows: Rows | None = None
    namespace: str | None = None
    rank: int | None = None

    def followed_by(self, input_ids: list[int]) -> Context:
        """This sequence and more tokens."""
        return replace(self, input_ids=[*self.input_ids, *input_ids])


@dataclass(frozen=True, slots=True)
class Scored:
    """The outcome of one query: kept sender positions, ascending, and what SGLang says about the request."""

    index: int
    positions: list[int]
    span_scores: list[float] | None
    cached_positions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """SGLang's own count of its KV pool, in positions, and of its requests."""

    pool_positions: int
    used_positions: int
    running_requests: int
    waiting_requests: int


class Engine:
    """One running SGLang engine. Make it with ``Engine.of_this_process`` after SGLang's HTTP server has started."""

    def __init__(self, tokenizer_manager: Any, *, max_input: int, pool_positions: int) -> None:
        self._manager = tokenizer_manager
        self._tokenizing, self._tokenizing_long = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"cacheback-{name}") for name in ("queries", "senders")
        )
        self._fingerprint = "", ""  # of which weight version
        self._priority = _priority(tokenizer_manager.server_args)
        config = tokenizer_manager.model_config
        self.max_input = min(max_input, pool_positions - 1)
        """Longest request in positions, sender and query together."""
        self.pool_positions = pool_positions
        self.context_length: int = config.context_len
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.row_dtype: RowDtype = str(config.dtype).removeprefix("torch.")  # type: ignore[assignment]
        item = config.dtype.itemsize
        self.embedding_bytes: int = config.hidden_size * item
        """Bytes of one input embedding."""
        self.kv_bytes: int = 2 * config.num_attention_layers * config.get_total_num_kv_heads() * config.head_dim * item
        """Bytes of one position's full KV over all layers, as a cache in the model's dtype holds it."""

    @classmethod
    def of_this_process(cls) -> Engine:
        """The engine behind SGLang's FastAPI app in this process."""
        from sglang.srt.entrypoints.http_server import get_global_state

        state = get_global_state()
        info = state.scheduler_info
        return cls(
            state.tokenizer_manager,
            max_input=info["max_req_input_len"] - 1,
            pool_positions=info["max_total_num_tokens"],
        )

    @property
    def fingerprint(self) -> str:
        """Hash of what the KV of a token depends on (seam/fingerprints.py); another after an update of the weights."""
        version = str(self._manager.config_value("weight_version"))
        if self._fingerprint[0] != version:
            self._fingerprint = version, model_fingerprint(self._manager)
        return self._fingerprint[1]

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """Hash of the tokenizer: equal where the same ids mean the same text."""
        return tokenizer_fingerprint(self.tokenizer)

    @property
    def tokenizer(self) -> Any:
        """SGLang's tokenizer. Raises InvalidRequestError when the server runs with --skip-tokenizer-init."""
        if self._manager.tokenizer is None:
            raise InvalidRequestError("this server runs without a tokenizer; send token ids")
        return self._manager.tokenizer

    @property
    def page_size(self) -> int:
        """Positions a page of the KV pool; the cache holds whole pages."""
        return int(self._manager.server_args.page_size or 1)

    def found_all(self, cached: int, positions: int) -> bool:
        """Whether ``cached`` of a prefill's positions were all: SGLang computes the last one even when it has it."""
        return cached >= positions - self.page_size

    @property
    def stopping(self) -> bool:
        """Whether SGLang is on its way out (SIGTERM): what runs is finished, nothing new is taken."""
        return bool(self._manager.gracefully_exit)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks, each with a cache of its own."""
        return int(self._manager.server_args.dp_size)

    async def tokenizing(self, function: Callable[..., T], *args: Any) -> T:
        """Run what a query needs of the tokenizer off the event loop, one call after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function, *args)

    async def tokenizing_long(self, function: Callable[..., T], *args: Any) -> T:
        """The same for whole senders and texts of their size, on a thread of its own: short queries do not wait."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing_long, function, *args)

    async def load(self) -> EngineLoad:
        """The present load over all data-parallel ranks; SGLang keeps it in shared memory."""
        loads = await self._manager.get_loads()
        return EngineLoad(
            pool_positions=self.pool_positions * max(1, len(loads)),
            used_positions=sum(load.num_used_tokens for load in loads),
            running_requests=sum(load.num_running_reqs for load in loads),
            waiting_requests=sum(load.num_waiting_reqs for load in loads),
        )

    async def prefill(self, context: Context) -> int:
        """Compute the KV of a sequence and leave it in the radix cache. How many positions were there already."""
        async for out in self._generate([context], [{"max_new_tokens": 0}]):
            return int(out["meta_info"]["cached_tokens"])
        raise EngineError("SGLang ended a prefill without an answer")

    async def score(self, requests: Sequence[tuple[Context, ScoringSpec]]) -> AsyncGenerator[Scored, None]:
        """Run scoring passes over sender + query, each with its spec, as one batch; yields as they finish.

        Leaving the iterator early aborts what is still running. Raises EngineError.
        """
        async for out in self._ask(requests):
            meta, index, result = out["meta_info"], out["index"], _result(out)
            yield Scored(
                index=index,
                positions=result["positions"],
                span_scores=result.get("span_scores"),
                cached_positions=min(int(meta["cached_tokens"]), requests[index][1].sender_len),
                seconds=float(meta["e2e_latency"]),
            )

    async def measure(self, requests: Sequence[tuple[Context, StatisticSpec]]) -> AsyncGenerator[list[float], None]:
        """Run measurements of senders: one float a sender position, in no set order. Raises EngineError."""
        async for out in self._ask(requests):
            yield _result(out)["scores"]

    async def pin(self, context: Context, pin_id: str) -> None:
        """Keep a sequence in the radix cache until ``unpin``; computes what is not there. Raises EngineError."""
        await self._send(context, PinSpec(pin_id, hold=True, token=pins.token()))

    async def unpin(self, pin_id: str, rank: int | None = None) -> None:
        """Let SGLang evict it again; nothing happens when it was not pinned. Raises EngineError."""
        await self._send(Context([PLACEHOLDER_ID], rank=rank), PinSpec(pin_id, hold=False, token=pins.token()))

    async def latent_rows(self, context: Context, steps: int) -> Rows:
        """Roll ``steps`` latent rows behind a sequence; returned at positions 0, 1, ... Raises EngineError.

        Every step takes all before it from the cache: it computes one position. The KV of the last row is yet to come.
        """
        rolled = context
        for step in range(steps):
            row = await self._rows(rolled, LatentSpec(step))
            rolled = replace(
                rolled.followed_by([PLACEHOLDER_ID]), rows=joined(rolled.rows, row.shifted(len(rolled.input_ids)))
            )
        assert rolled.rows is not None
        first = len(context.input_ids)
        return rolled.rows.take(range(first, first + steps))

    async def embeddings(self, token_ids: Sequence[int]) -> Rows:
        """The model's input embeddings of these tokens, at positions 0, 1, ... Raises EngineError."""
        return await self._rows(Context([PLACEHOLDER_ID]), EmbeddingSpec(list(token_ids)))

    async def _rows(self, context: Context, spec: LatentSpec | EmbeddingSpec) -> Rows:
        async for out in self._ask([(context, spec)]):
            result, count = _result(out), 1 if isinstance(spec, LatentSpec) else len(spec.token_ids)
            return Rows(tuple(range(count)), result["dtype"], result["hidden"], result["rows"])
        raise EngineError("SGLang ended a request for rows without an answer")

    async def _send(self, context: Context, spec: PinSpec) -> None:
        async for out in self._ask([(context, spec)]):
            _result(out)

    def _ask(self, requests: Sequence[tuple[Context, Spec]]) -> AsyncGenerator[dict[str, Any], None]:
        # One new token: with none, SGLang cuts the result to the output's length.
        params = [{"max_new_tokens": 1, "temperature": 0.0, "custom_params": spec.to_wire()} for _, spec in requests]
        return self._generate([context for context, _ in requests], params)

    async def _generate(
        self, contexts: list[Context], sampling_params: list[dict[str, Any]]
    ) -> AsyncGenerator[dict[str, Any], None]:
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        longest = max(len(context.input_ids) for context in contexts)
        if longest > self.max_input:
            raise ContextLengthError(f"{longest} positions exceed this server's limit of {self.max_input}")
        # Token-id lists travel to the scheduler as one message, so that they meet in one batch.
        request = GenerateReqInput(
            input_ids=[context.input_ids for context in contexts],
            sampling_params=[_marked(c, params) for c, params in zip(contexts, sampling_params, strict=True)],
            rid=[f"cacheback-{uuid.uuid4().hex}" for _ in contexts],
            extra_key=[c.namespace or "" for c in contexts] if any(c.namespace for c in contexts) else None,
            positional_embed_overrides=[overrides(c.rows) for c in contexts] if any(c.rows for c in contexts) else None,
            routed_dp_rank=contexts[0].rank,
            priority=self._priority,
            stream=True,
        )
        outputs = self._manager.generate_request(request)
        try:
            async for out in outputs:
                yield out
        except (ValueError, HTTPException) as error:
            raise EngineError(f"SGLang refused the request: {getattr(error, 'detail', None) or error}") from error
        finally:
            await outputs.aclose()


def _priority(server_args: Any) -> int | None:
    """What keeps senders in the cache longer than requests without a priority, where the operator has chosen so
    (--radix-eviction-policy priority). None where it would also decide who is served first.

    Above 1, which SGLang gives to the prompt of a request without one (mem_cache/unified_radix_cache.py, checkpoint).
    """
    by_priority = server_args.radix_eviction_policy == "priority"
    taken = server_args.enable_priority_scheduling or server_args.abort_on_priority_when_disabled
    return _SENDER_PRIORITY if by_priority and not taken else None


def overrides(rows: Rows | None) -> Any:
    """Rows as SGLang takes them: ``PositionalEmbeds`` (managers/embed_types.py), or None."""
    if rows is None:
        return None
    import torch
    from sglang.srt.managers.embed_types import PositionalEmbeds

    data = torch.frombuffer(bytearray(rows.data), dtype=getattr(torch, rows.dtype))
    return PositionalEmbeds(embeds=data.view(len(rows), rows.hidden), positions=list(rows.positions))


def _marked(context: Context, params: dict[str, Any]) -> dict[str, Any]:
    if context.rows is None or context.namespace is None:
        return params
    return params | {"custom_params": {**params.get("custom_params", {}), CACHEABLE_ROWS_KEY: True}}


def _result(out: dict[str, Any]) -> dict[str, Any]:
    result = (out["meta_info"].get(WIRE_KEY) or [None])[0]
    if not isinstance(result, dict):
        raise EngineError(
            "the scheduler returned no scores; is the cacheback plugin active in it? See the server's log"
        )
    if "error" in result:
        raise EngineError(f"scoring failed: {result['error']}")
    return result
