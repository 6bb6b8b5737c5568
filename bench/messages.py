"""What a message costs, on the embedded model, in one run.

    python bench/messages.py [--json FILE] [--rounds 7]

For M = 1, 4, 16 queries of about 24 rows over one sender of 4,096 positions: the time per message, against
(a) the same rows as prefill-only requests without scoring (overhead_vs_prefill_only), and
(b) a text report of 4,096 / 16 tokens decoded from the same sender by the same engine (speedup_vs_text_report).
Rounds alternate between the two kinds, so that a noisy machine hits both; medians are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from workload import ask, batch_of, timed

from cb_loadtest.cases import default_cases_path, load_cases
from cb_sglang.embedded_model import ensure_embedded_model
from cb_sglang.templates import WrappedQuery, wrap_query

SENDER = 4_096
RATIO = 16
SIZES = (1, 4, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the two ratios here")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()

    import sglang
    from rich.console import Console
    from rich.table import Table
    from transformers import AutoTokenizer

    model = str(ensure_embedded_model())
    tokenizer = AutoTokenizer.from_pretrained(model)
    sender, queries = workload(tokenizer)
    engine = sglang.Engine(model_path=model, device="cpu", max_total_tokens=32_768)
    try:
        engine.generate(input_ids=sender, sampling_params={"max_new_tokens": 0})
        results = {m: compare(engine, sender, queries, m, arguments.rounds) for m in SIZES}
        report = timed(lambda: decode_report(engine, tokenizer, sender))
    finally:
        engine.shutdown()

    table = Table(title=f"Per message over a sender of {SENDER} positions (medians of {arguments.rounds} rounds)")
    for column in ("queries", "message s", "prefill only s", "overhead", f"text report of {SENDER // RATIO} tokens s"):
        table.add_column(column, justify="right")
    for m, (scored, plain) in results.items():
        table.add_row(str(m), f"{scored:.4f}", f"{plain:.4f}", f"{scored / plain:.2f}", f"{report:.1f}")
    Console(width=110).print(table)
    found = {
        "overhead_vs_prefill_only": {str(m): scored / plain for m, (scored, plain) in results.items()},
        "speedup_vs_text_report": {str(m): report / scored for m, (scored, _) in results.items()},
    }
    print(json.dumps(found, indent=2))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def workload(tokenizer: Any) -> tuple[list[int], list[WrappedQuery]]:
    """A sender of SENDER token ids of real prose, and the shipped cases' questions, wrapped."""
    cases = load_cases(default_cases_path())
    texts = dict.fromkeys(context.text for case in cases for context in case.contexts)
    ids = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)]
    return [tokenizer.bos_token_id, *ids][:SENDER], [wrap_query(tokenizer, case.question) for case in cases]


def compare(engine: Any, sender: list[int], queries: list[WrappedQuery], m: int, rounds: int) -> tuple[float, float]:
    """Median seconds per message with scoring, and per request of the same rows without it."""
    budget, seconds = SENDER // RATIO, {True: [], False: []}
    for number in range(rounds + 1):
        for scored, found in seconds.items():
            batch = batch_of(queries, m, number)
            elapsed = timed(lambda b=batch, s=scored: ask(engine, sender, b, budget=budget, scored=s))
            if number:  # the first round warms up
                found.append(elapsed / m)
    return statistics.median(seconds[True]), statistics.median(seconds[False])


def decode_report(engine: Any, tokenizer: Any, sender: list[int]) -> None:
    prompt = [*sender, *tokenizer.encode("\n\nSummary of the text above:", add_special_tokens=False)]
    engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": SENDER // RATIO, "ignore_eos": True})


if __name__ == "__main__":
    main()
