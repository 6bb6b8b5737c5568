"""SGLang's engine as the HTTP process sees it: the TokenizerManager, behind three calls.

``prefill`` puts a sender into the radix cache; ``score`` runs queries over senders in one batch; ``encode`` and
``decode`` use SGLang's tokenizer on a thread of their own, off the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from cb_sglang.errors import ContextLengthError, EngineError, InvalidRequestError
from cb_sglang.spec import WIRE_KEY, ScoringSpec, StatisticSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scored:
    """The outcome of one query: kept sender positions, ascending, and what SGLang says about the request."""

    index: int
    positions: list[int]
    span_scores: list[float] | None
    cached_positions: int
    seconds: float


class Engine:
    """One running SGLang engine. Make it with ``Engine.of_this_process`` after SGLang's HTTP server has started."""

    def __init__(self, tokenizer_manager: Any, *, max_input: int, pool_positions: int) -> None:
        self._manager = tokenizer_manager
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cacheback-tokenizer")
        config = tokenizer_manager.model_config
        self.max_input = min(max_input, pool_positions - 1)
        """Longest request in positions, sender and query together."""
        self.vocab_size: int = config.vocab_size

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
        """Hash of what the KV of a token depends on: the model's path, config and present weight version."""
        manager = self._manager
        config = manager.model_config.hf_config.to_json_string()
        facts = [manager.model_path, manager.config_value("weight_version"), config]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def tokenizer(self) -> Any:
        """SGLang's tokenizer. Raises InvalidRequestError when the server runs with --skip-tokenizer-init."""
        if self._manager.tokenizer is None:
            raise InvalidRequestError("this server runs without a tokenizer; send token ids")
        return self._manager.tokenizer

    async def tokenizing(self, function: Callable[..., T], *args: Any) -> T:
        """Run a tokenizer call off the event loop. One thread, since fast tokenizers are not re-entrant."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function, *args)

    async def prefill(self, input_ids: list[int]) -> int:
        """Compute the KV of these tokens and leave it in the radix cache. How many positions were there already."""
        async for out in self._generate([input_ids], [{"max_new_tokens": 0}]):
            return int(out["meta_info"]["cached_tokens"])
        raise EngineError("SGLang ended a prefill without an answer")

    async def score(self, requests: Sequence[tuple[list[int], ScoringSpec]]) -> AsyncGenerator[Scored, None]:
        """Run scoring passes, ``(sender + query ids, spec)`` each, as one batch; yields as they finish.

        Leaving the iterator early aborts what is still running. Raises EngineError.
        """
        params = [_params(spec) for _, spec in requests]
        async for out in self._generate([ids for ids, _ in requests], params):
            meta, index, result = out["meta_info"], out["index"], _result(out)
            yield Scored(
                index=index,
                positions=result["positions"],
                span_scores=result.get("span_scores"),
                cached_positions=min(int(meta["cached_tokens"]), requests[index][1].sender_len),
                seconds=float(meta["e2e_latency"]),
            )

    async def measure(self, requests: Sequence[tuple[list[int], StatisticSpec]]) -> AsyncGenerator[list[float], None]:
        """Run measurements of senders, ``(ids, spec)`` each: one float a sender position, in no set order.

        Raises EngineError.
        """
        params = [_params(spec) for _, spec in requests]
        async for out in self._generate([ids for ids, _ in requests], params):
            yield _result(out)["scores"]

    async def _generate(
        self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]
    ) -> AsyncGenerator[dict[str, Any], None]:
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        longest = max(map(len, input_ids))
        if longest > self.max_input:
            raise ContextLengthError(f"{longest} positions exceed this server's limit of {self.max_input}")
        # Token-id lists travel to the scheduler as one message, so that they meet in one batch.
        request = GenerateReqInput(
            input_ids=input_ids,
            sampling_params=sampling_params,
            rid=[f"cacheback-{uuid.uuid4().hex}" for _ in input_ids],
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


def _params(spec: ScoringSpec | StatisticSpec) -> dict[str, Any]:
    # One new token: with none, SGLang cuts the result to the output's length.
    return {"max_new_tokens": 1, "temperature": 0.0, "custom_params": spec.to_wire()}


def _result(out: dict[str, Any]) -> dict[str, Any]:
    result = (out["meta_info"].get(WIRE_KEY) or [None])[0]
    if not isinstance(result, dict):
        raise EngineError(
            "the scheduler returned no scores; is the cacheback plugin active in it? See the server's log"
        )
    if "error" in result:
        raise EngineError(f"scoring failed: {result['error']}")
    return result
