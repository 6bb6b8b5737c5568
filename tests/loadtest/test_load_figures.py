"""What is said of the measurements: samples, a step's summary, the server's own metrics."""

from __future__ import annotations

import io
import json
import random
import re
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cb_loadtest.load.calls import Outcome
from cb_loadtest.load.live import Live
from cb_loadtest.load.samples import Samples
from cb_loadtest.load.schedule import Planned
from cb_loadtest.load.server_metrics import changes, parse_metrics
from cb_loadtest.load.summary import messages_per_s
from cb_loadtest.load.tally import MAX_ERROR_KINDS, Record, Step, Tally


def test_percentiles_are_numpys() -> None:
    draw = random.Random(5)
    values = [draw.expovariate(3.0) for _ in range(1_237)]
    samples = Samples()
    samples.extend(values)
    found = samples.milliseconds()
    for percent in (50, 90, 95, 99):
        assert found[f"p{percent}"] == pytest.approx(1_000 * np.percentile(values, percent), abs=1e-3)
    assert found["n"] == 1_237
    assert found["max"] == pytest.approx(1_000 * max(values), abs=1e-3)


def test_beyond_the_bound_samples_stay_a_fair_sample() -> None:
    samples = Samples(limit=2_000)
    samples.extend(float(i) for i in range(100_000))
    assert samples.count == 100_000
    assert samples.percentile(50) == pytest.approx(50_000, rel=0.05)
    assert samples.percentile(99) == pytest.approx(99_000, rel=0.02)


def test_nothing_measured_is_null_and_never_nan() -> None:
    tally = Tally(Step("message", True, "closed", 4.0), 100.0)
    summary = json.loads(json.dumps(tally.summary(), allow_nan=False))
    assert summary["p99_e2e_latency_ms"] is None
    assert summary["tteoa_ms"]["p99"] is None
    assert (summary["request_throughput"], summary["slo_attainment"], summary["cached_share"]) == (0.0, 0.0, None)


def record(index: int, seconds: float, *, cached: int = 100, error: str | None = None, tenant: int = 0) -> Record:
    due = 10.0 + index
    outcome = Outcome(
        message_at=due + seconds / 2,
        ended_at=due + seconds,
        sender_positions=100,
        cached_positions=cached,
        kept=25,
        payload_bytes=100,
        input_tokens=140,
        output_tokens=3,
        first_token_at=due + seconds * 0.7,
        answer_gaps=[0.01, 0.03],
        asked=50,
        grant_limit="share",
    )
    return Record(Planned(index, 0, 0), 0, tenant, due, due + 0.02, due + seconds, None if error else outcome, error)


def test_a_step_adds_up() -> None:
    tally = Tally(Step("message", True, "open", 2.0), slo_ms=250.0)
    tally.started, tally.seconds = 6, 4.0
    for found in (
        record(0, 0.1),
        record(1, 0.2, cached=99),
        record(2, 0.3, cached=50, tenant=1),
        record(3, 0.05, error="503 server_overloaded"),
        record(4, 0.05, error="503 server_overloaded"),
    ):
        tally.add(found)
    summary = tally.summary()
    assert (summary["completed"], summary["failed"], summary["cut_off"]) == (3, 2, 1)
    assert summary["errors"] == {"503 server_overloaded": 2}
    assert summary["messages_per_s"] == summary["request_throughput"] == pytest.approx(0.75)
    assert summary["mean_e2e_latency_ms"] == pytest.approx(200.0)
    assert summary["concurrency"] == pytest.approx(0.6 / 4.0)
    assert summary["time_to_message_ms"]["p50"] == pytest.approx(100.0)
    assert summary["mean_ttft_ms"] == pytest.approx(140.0)
    assert summary["mean_itl_ms"] == pytest.approx(20.0)
    assert summary["sent_late_ms"]["p50"] == pytest.approx(20.0)
    # Two of five met the objective: a refused request is not a fast one.
    assert summary["request_goodput"] == pytest.approx(0.5)
    assert summary["slo_attainment"] == pytest.approx(0.4)
    assert summary["cached_share"] == pytest.approx(249 / 300)
    assert (summary["verified_hits"], summary["misses"]) == (1, 2)
    assert (summary["mean_kept_positions"], summary["mean_payload_bytes"]) == (25, 100)
    assert summary["grants"] == {"share": 3}
    assert summary["tenants"]["1"]["p50"] == pytest.approx(300.0)
    assert (summary["request_rate"], summary["max_concurrency"]) == (2.0, None)


def test_a_step_in_which_nothing_ended_has_no_rate() -> None:
    tally = Tally(Step("message", False, "closed", 4.0), 100.0)
    assert messages_per_s([tally.summary()]) == {}
    tally.add(record(0, 0.1))
    tally.seconds = 0.5
    assert messages_per_s([tally.summary()]) == {"message": {"4": 2.0}}


def test_a_hit_may_miss_less_than_a_page() -> None:
    tally = Tally(Step("message", False, "closed", 1.0), 100.0, page_size=16)
    for cached in (100, 96, 85, 84):
        tally.add(record(0, 0.1, cached=cached))
    assert tally.hits == 3


def test_kinds_of_errors_are_bounded() -> None:
    tally = Tally(Step("message", False, "closed", 1.0), 100.0)
    for i in range(1_000):
        tally.add(record(i, 0.1, error=f"500 e{i}"))
    assert len(tally.errors) <= MAX_ERROR_KINDS + 1
    assert sum(tally.errors.values()) == tally.failed == 1_000


def test_keys_that_mean_the_same_are_named_as_in_sglangs_benchmark() -> None:
    source = Path(str(distribution("sglang").locate_file("sglang/benchmark/serving.py"))).read_text(encoding="utf-8")
    result = source[source.index("        result = {\n") : source.index("        if goodput:")]
    theirs = set(re.findall(r'"(\w+)":', result))
    ours = set(Tally(Step("message", True, "closed", 1.0), 100.0).summary())
    named_alike = {key for key in ours if key.endswith(("latency_ms", "ttft_ms", "tpot_ms", "itl_ms"))} - {
        "chat_itl_ms"
    }
    assert len(named_alike) == 24
    throughputs = {"request_throughput", "input_throughput", "output_throughput", "total_throughput"}
    counts = {"completed", "duration", "total_input_tokens", "total_output_tokens", "concurrency"}
    assert named_alike | throughputs | counts | {"backend", "request_rate", "max_concurrency"} <= ours & theirs


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_says_what_is_measured_and_how_it_went(terminal: bool) -> None:
    shown = io.StringIO()
    tally = Tally(Step("message", True, "closed", 4.0), 250.0)
    tally.seconds = 2.0
    with Live(Console(file=shown, force_terminal=terminal, width=120)) as live:
        live.begin(tally, 2)
        for number in (0, 1):
            tally.add(record(number, 0.2, error="503 x" if number else None))
            live.show(tally, number + 1)
        live.end(tally)
    assert "message + answer, 4 receivers: 1 done, 1 failed, p50 200 ms, p99 200 ms, 0.50/s" in shown.getvalue()


PAGE = """# HELP sglang:cache_hit_rate The rate.
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{{model_name="x"}} 0.5
# HELP cacheback_message_seconds Time by stage.
# TYPE cacheback_message_seconds histogram
cacheback_message_seconds_bucket{{le="1.0",stage="score"}} {count}
cacheback_message_seconds_bucket{{le="+Inf",stage="score"}} {count}
cacheback_message_seconds_count{{stage="score"}} {count}
cacheback_message_seconds_sum{{stage="score"}} {total}
# TYPE cacheback_grants_total counter
cacheback_grants_total{{limit="share"}} {grants}
cacheback_grants_total{{limit="asked"}} 7
# TYPE cacheback_queue gauge
cacheback_queue{{tenant="a,b"}} {queue}
"""


def test_server_metrics_are_what_happened_in_between() -> None:
    before = parse_metrics(PAGE.format(count=10, total=2.0, grants=3, queue=4))
    after = parse_metrics(PAGE.format(count=30, total=7.0, grants=8, queue=1))
    assert changes(before, after) == {
        "cacheback_message_seconds": {"stage=score": {"count": 20, "mean": 0.25}},
        "cacheback_grants_total": {"limit=share": 5.0},
        "cacheback_queue": {"tenant=a,b": 1.0},
    }


def test_metrics_that_appear_meanwhile_count_from_nothing() -> None:
    after = parse_metrics(PAGE.format(count=2, total=1.0, grants=8, queue=1))
    assert changes({}, after)["cacheback_message_seconds"] == {"stage=score": {"count": 2, "mean": 0.5}}


def test_a_page_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError):
        parse_metrics("cacheback_x{ 1\n")
