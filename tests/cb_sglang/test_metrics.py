"""Metrics: what is counted for a message, a registration, an error and the load; and how SGLang comes to read it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cb_sglang import wire
from cb_sglang.admission import AdmissionState, Load, TenantLoad
from cb_sglang.metrics import MAX_LABEL_VALUES, OTHER, REGISTRATION, BoundedLabel, Metrics
from cb_sglang.registry import Amounts


def message(*, selector: str = "cacheback", cached: int = 900, limit: wire.Limit = "share") -> wire.Message:
    return wire.Message(
        id="msg_1",
        sender="snd_1",
        index=0,
        encoding="token_ids",
        selector=selector,
        sender_positions=1_000,
        query_positions=12,
        voting_positions=8,
        cached_positions=cached,
        cache_miss="evicted" if cached < 1_000 else None,
        budget=wire.BudgetReport(ratio=8.0, positions=3),
        positions=[0, 4, 5],
        spans=[(0, 1), (4, 6)],
        token_ids=[1, 2, 3],
        payload_bytes=12,
        grant=wire.GrantReport(asked=125, granted=3, limit=limit, reason="share: one of many"),
        timings=wire.Timings(queue_seconds=0.25, engine_seconds=0.5, total_seconds=1.0),
    )


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"cacheback_{name}", labels)


def test_message_is_counted_by_what_it_is(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.message(message(), "team-a")
    metrics.message(message(selector="h2o", cached=1_000, limit="window"), "team-b")

    assert value(registry, "messages_total", selector="cacheback", encoding="token_ids") == 1
    assert value(registry, "messages_total", selector="h2o", encoding="token_ids") == 1
    assert value(registry, "tenant_messages_total", tenant="team-a") == 1
    assert value(registry, "tenant_messages_total", tenant="team-b") == 1
    assert value(registry, "grants_total", limit="share") == 1
    assert value(registry, "grants_total", limit="window") == 1
    assert value(registry, "grants_total", limit="pool") is None


def test_message_seconds_by_stage_and_sizes(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.message(message(), "team-a")

    for stage, seconds in (("queue", 0.25), ("engine", 0.5), ("total", 1.0)):
        assert value(registry, "message_seconds_sum", stage=stage) == seconds
        assert value(registry, "message_seconds_count", stage=stage) == 1
    assert value(registry, "message_seconds_bucket", stage="queue", le="0.1") == 0
    assert value(registry, "message_seconds_bucket", stage="queue", le="0.25") == 1
    assert value(registry, "message_kept_positions_sum") == 3
    assert value(registry, "message_sender_positions_sum") == 1_000
    assert value(registry, "message_payload_bytes_sum") == 12


def test_cache_hits_and_misses_are_positions_and_misses_have_a_reason(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    sender = wire.Sender(id="snd_1", positions=100, cached_positions=40, fingerprint="f", created=0.0)
    metrics.registered(sender, missed=True)
    metrics.registered(sender.model_copy(update={"cached_positions": 100}), missed=False)
    metrics.message(message(cached=900), "team-a")

    assert value(registry, "registrations_total") == 2
    assert value(registry, "cache_positions_total", result="hit") == 40 + 100 + 900
    assert value(registry, "cache_positions_total", result="miss") == 60 + 0 + 100
    assert value(registry, "cache_misses_total", reason=REGISTRATION) == 1
    assert value(registry, "cache_misses_total", reason="evicted") == 1


def test_load_is_what_it_was_told_last(metrics: Metrics, registry: CollectorRegistry) -> None:
    busy = AdmissionState(
        running=Load(requests=2, work=640, rows=16),
        queued=Load(requests=1, work=80, rows=4),
        tenants={"team-a": TenantLoad()},
    )
    idle = AdmissionState(running=Load(), queued=Load(), tenants={})
    metrics.load(busy, Amounts(senders=3, positions=900, row_bytes=64, pinned_positions=50), tenants=2)

    assert value(registry, "requests", state="running") == 2
    assert value(registry, "requests", state="queued") == 1
    assert value(registry, "work", state="running") == 640
    assert value(registry, "query_rows", state="queued") == 4
    assert value(registry, "senders") == 3
    assert value(registry, "positions") == 900
    assert value(registry, "row_bytes") == 64
    assert value(registry, "pinned_positions") == 50
    assert value(registry, "tenants") == 2

    metrics.load(idle, Amounts(), tenants=0)
    assert value(registry, "requests", state="running") == 0
    assert value(registry, "senders") == 0


def test_labels_that_callers_choose_are_bounded(metrics: Metrics, registry: CollectorRegistry) -> None:
    for n in range(3 * MAX_LABEL_VALUES):
        metrics.message(message(selector=f"selector-{n}"), f"tenant-{n}")
        metrics.error(f"code_{n}")

    for name in ("messages_total", "tenant_messages_total", "errors_total"):
        series = [
            sample for family in registry.collect() for sample in family.samples if sample.name == f"cacheback_{name}"
        ]
        assert len(series) == MAX_LABEL_VALUES + 1
        assert sum(sample.value for sample in series) == 3 * MAX_LABEL_VALUES
    assert value(registry, "errors_total", code=OTHER) == 2 * MAX_LABEL_VALUES


def test_a_label_keeps_the_values_it_has() -> None:
    label = BoundedLabel(2)
    assert [label(value) for value in ("a", "b", "c", "a", "b")] == ["a", "b", OTHER, "a", "b"]


def test_names_and_units_are_prometheus_ones(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.message(message(), "team-a")
    text = generate_latest(registry).decode()

    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name.startswith("cacheback_")
            assert name.endswith("_total") == (kind == "counter")
            assert not name.endswith(("_ms", "_milliseconds", "_kb"))


def test_two_in_one_process_do_not_collide() -> None:
    Metrics()
    Metrics()


_MULTIPROCESS = """
import sys

import cb_sglang.metrics
assert "prometheus_client" not in sys.modules  # else SGLang's folder, named later, would not be used

import os
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
sys.path.insert(0, sys.argv[2])
from test_metrics import AdmissionState, Amounts, Load, Metrics, message

metrics = Metrics()
metrics.message(message(), "team-a")
metrics.load(AdmissionState(Load(3, 30, 9), Load(), {}), Amounts(senders=7), tenants=1)

from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_multiprocess_mode_shows_them_to_sglangs_collector(tmp_path: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    run = subprocess.run(
        [sys.executable, "-c", _MULTIPROCESS, str(tmp_path), str(Path(__file__).parent)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert 'cacheback_messages_total{encoding="token_ids",selector="cacheback"} 1.0' in lines
    assert 'cacheback_message_seconds_sum{stage="engine"} 0.5' in lines
    assert 'cacheback_requests{state="running"} 3.0' in lines  # no pid: one number for the server
    assert "cacheback_senders 7.0" in lines
    assert list(tmp_path.glob("*.db"))
