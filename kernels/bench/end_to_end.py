"""M queries over one sender through the real engine, in one run.

    python kernels/bench/end_to_end.py [--json FILE] [--rounds 5] [--quick]

A float32 Qwen3 of 93M parameters with random weights (hidden 512, intermediate 4,096, 12 layers, 8/4 heads, D 64,
vocabulary 8,192); T = 4,096, 32 rows a query, M = 1, 4, 16. Per M: the batch against M single calls
(batch_gain) and against prefill-only requests of the same rows (overhead_vs_prefill_only). At M = 16 also, left out
with --quick: against engines that score in torch (gain_of_compiled_kernel) and that run SGLang's stock torch_native
backend with our scoring on top (gain_vs_torch_native). Kinds alternate round by round, so that a noisy machine hits
them all; medians are compared. cpu_overhead_vs_prefill_only compares CPU seconds of the engine's processes instead, for
machines that run other work as well. In the JSON, plain names are for M = 16 and ``..._by_queries`` for each M.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from cb_kernels.cpu_native_build import SWITCH
from cb_sglang.templates import WrappedQuery

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from workload import ask, batch_of, timed

SENDER, ROWS, VOCABULARY = 4_096, 32, 8_192
BUDGET = SENDER // 16
SIZES = (1, 4, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the ratios here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="leave out the stock torch_native engine")
    arguments = parser.parse_args()

    draw = random.Random(0)
    sender = [draw.randrange(8_000) for _ in range(SENDER)]
    queries = [WrappedQuery([draw.randrange(8_000) for _ in range(ROWS - 1)], 0, ROWS - 1) for _ in range(64)]
    with tempfile.TemporaryDirectory() as model:
        write_model(model)
        with serving(model, "cacheback_cpu", sender) as engine:
            ours = {m: measure(engine, sender, queries, arguments.rounds, m) for m in SIZES}
        largest = max(SIZES)
        others: dict[str, float] = {}
        if not arguments.quick:
            with switched_off(SWITCH), serving(model, "cacheback_cpu", sender) as engine:
                in_torch = measure(engine, sender, queries, arguments.rounds, largest)
            with serving(model, "torch_native", sender) as engine:
                # Once, since it takes a minute or more.
                stock = timed(lambda: ask(engine, sender, batch_of(queries, largest, 1), budget=BUDGET))
            others = {
                "gain_of_compiled_kernel": in_torch["batch"] / ours[largest]["batch"],
                "gain_vs_torch_native": stock / ours[largest]["batch"],
            }
    by_queries = {
        "milliseconds_per_message": {m: 1e3 * times["batch"] / m for m, times in ours.items()},
        "batch_gain": {m: times["single"] / times["batch"] for m, times in ours.items()},
        "overhead_vs_prefill_only": {m: times["batch"] / times["plain"] for m, times in ours.items()},
        "cpu_overhead_vs_prefill_only": {m: times["batch cpu"] / times["plain cpu"] for m, times in ours.items()},
    }
    found: dict[str, Any] = {name: table[largest] for name, table in by_queries.items()}
    found |= others
    for name, table in by_queries.items():
        found[f"{name}_by_queries"] = {str(m): value for m, value in table.items()}
    print(json.dumps(found, indent=2))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def measure(engine: Any, sender: list[int], queries: list[WrappedQuery], rounds: int, m: int) -> dict[str, float]:
    """Median seconds for M queries as one batch, one after another, and as prefill-only requests.

    Under the kind's name wall seconds, under "<name> cpu" CPU seconds.
    """
    kinds: dict[str, Callable[[list[WrappedQuery]], object]] = {
        "batch": lambda b: ask(engine, sender, b, budget=BUDGET),
        "single": lambda b: [ask(engine, sender, [q], budget=BUDGET) for q in b],
        "plain": lambda b: ask(engine, sender, b, budget=BUDGET, scored=False),
    }
    seconds: dict[str, list[float]] = {key: [] for name in kinds for key in (name, f"{name} cpu")}
    for number in range(rounds + 1):
        for name, run in kinds.items():
            used = cpu_seconds()
            elapsed = timed(lambda r=run, n=number: r(batch_of(queries, m, n)))
            used = cpu_seconds() - used
            if number:  # the first round warms up
                seconds[name].append(elapsed)
                seconds[f"{name} cpu"].append(used)
    return {name: statistics.median(found) for name, found in seconds.items()}


def cpu_seconds() -> float:
    """CPU time of the engine's processes so far."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return float(sum(t.user + t.system for t in times))


@contextmanager
def switched_off(variable: str) -> Iterator[None]:
    """``variable`` is 0 in the environment of engines that start in here."""
    before = os.environ.get(variable)
    os.environ[variable] = "0"
    try:
        yield
    finally:
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


@contextmanager
def serving(model: str, backend: str, sender: list[int]) -> Iterator[Any]:
    """An engine with the sender in its cache."""
    import sglang

    engine = sglang.Engine(
        model_path=model, device="cpu", attention_backend=backend, skip_tokenizer_init=True, max_total_tokens=16_384
    )
    try:
        engine.generate(input_ids=sender, sampling_params={"max_new_tokens": 0})
        yield engine
    finally:
        engine.shutdown()


def write_model(path: str) -> None:
    """The random model, as a directory that SGLang loads."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=4_096,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8_192,
        eos_token_id=VOCABULARY - 1,
        bos_token_id=VOCABULARY - 2,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)


if __name__ == "__main__":
    main()
