"""Engines and references, one of each model at a time.

Tests that take ``engine`` run on every engine, or on those that ``on_engines`` names. pytest groups tests by the
engine they need, so each starts once, and the one before has ended by then: the machine may have two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engine_client import EngineClient
from hf_reference import HfReference

from cb_sglang.embedded_model import ensure_embedded_model


@dataclass(frozen=True)
class Setup:
    """A model and how SGLang serves it."""

    write: Callable[[Path], None] | None
    arguments: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


SETUPS = {
    # One token a page, chunks shorter than most prompts, and a pool small enough to overflow.
    "small": Setup(tiny_models.write_qwen3, {"chunked_prefill_size": 64, "max_total_tokens": 3000}),
    "paged": Setup(
        tiny_models.write_qwen3,
        {
            "chunked_prefill_size": 256,
            "max_total_tokens": 8192,
            "page_size": 16,
            "enable_mixed_chunk": True,
            "radix_eviction_policy": "priority",
        },
    ),
    "hybrid": Setup(tiny_models.write_gemma3, {"chunked_prefill_size": 128, "max_total_tokens": 8192}),
    # SGLang has short convolutions as Triton kernels only, which are slow in the interpreter. Their state is bfloat16
    # unless told otherwise.
    "linear": Setup(
        tiny_models.write_lfm2,
        {"chunked_prefill_size": 128, "max_total_tokens": 8192},
        {"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    ),
    # Two ranks, each with half of the heads: four query heads on two KV heads.
    "parallel": Setup(
        partial(tiny_models.write_qwen3, kv_heads=4),
        {"chunked_prefill_size": 128, "max_total_tokens": 8192, "tp_size": 2},
        {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ),
    "capped": Setup(tiny_models.write_gemma2, {"chunked_prefill_size": 128, "max_total_tokens": 8192}),
    "embedded": Setup(None, {"chunked_prefill_size": 128, "max_total_tokens": 8192}),
}


@pytest.fixture(scope="session")
def model_path(engine_name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model directory of the current engine."""
    write = SETUPS[engine_name].write
    if write is None:
        return ensure_embedded_model()
    path = tmp_path_factory.mktemp(engine_name)
    write(path)
    return path


@pytest.fixture(scope="session", params=list(SETUPS))
def engine_name(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def running_engine(
    engine_name: str, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineClient]:
    log = tmp_path_factory.mktemp("log") / f"{engine_name}.log"
    setup = SETUPS[engine_name]
    client = EngineClient(
        log,
        setup.environment,
        model_path=str(model_path),
        skip_tokenizer_init=True,
        device="cpu",
        log_level="warning",
        sleep_on_idle=True,
        random_seed=0,
        **setup.arguments,
    )
    try:
        yield client
        client.call("count_live_tasks")
        # SGLang keeps its last batch; everything older must be gone.
        assert client.counters()["live_tasks"] <= 8, "scoring tasks outlive their requests"
    finally:
        client.close()


@pytest.fixture
def engine(running_engine: EngineClient) -> Iterator[EngineClient]:
    """The current engine with an empty cache. Afterwards nothing may be left behind in it."""
    running_engine.flush()
    before = running_engine.settled_counters()
    yield running_engine
    after = running_engine.settled_counters()
    assert after["free"] + after["evictable"] == before["free"], "pool slots were lost"
    assert after["free_rows"] == before["free_rows"], "request rows were lost"


@pytest.fixture(scope="session")
def reference(model_path: Path) -> HfReference:
    return HfReference(model_path)
