"""Results of load tests for report tests, put together by the load generator's own code from known latencies."""

from __future__ import annotations

import random
from typing import Any

from cb_loadtest.load.calls import Outcome
from cb_loadtest.load.curve import CurveSetting, ReceiverCost, capacity_curve
from cb_loadtest.load.schedule import Planned
from cb_loadtest.load.tally import Record, Step, Tally
from cb_loadtest.planning.fit import ServiceModel

SECONDS = {"message": 0.2, "text_report": 6.0, "full_context": 2.0}
COST = ServiceModel(fixed=0.02, per_row=1e-3, per_row_position=1e-6)
READER = ReceiverCost(fixed=0.02, per_position=2e-3)


def step(
    way: str, level: float, *, answering: bool = False, mode: str = "closed", failed: int = 0, requests: int = 40
) -> dict[str, Any]:
    """One step's summary: requests whose latencies grow with the load."""
    draw = random.Random(f"{way}/{level}/{answering}")
    tally = Tally(Step(way, answering, mode, level), slo_ms=2_000)
    for number in range(requests):
        seconds = SECONDS[way] * level**0.7 * draw.uniform(0.9, 1.4)
        end = seconds + (1.5 * level**0.5 if answering else 0.0)
        outcome = Outcome(
            message_at=seconds,
            ended_at=end,
            sender_positions=1_024,
            cached_positions=1_024,
            kept=128,
            payload_bytes=512,
            input_tokens=1_040,
            first_token_at=end,
            grant_limit="share" if way == "message" else None,
        )
        tally.started += 1
        tally.add(Record(Planned(number, 0, number), 0, 0, 0.0, 0.001, end, outcome))
    for number in range(failed):
        tally.started += 1
        tally.add(Record(Planned(number, 0, number), 0, 0, 0.0, 0.001, 1.0, None, "503 server_overloaded"))
    tally.seconds = requests * SECONDS[way] / level**0.3
    stages = {"cacheback_message_seconds": {"stage=score": {"count": 40, "mean": 0.15}}}
    return tally.summary() | {"server": stages if way == "message" else None}


def run_summary(**changes: Any) -> dict[str, Any]:
    """A run over all ways at 1, 4 and 16 receivers, without and with answers."""
    return {
        "format": "cb-loadtest run 1",
        "steps": [
            step(way, level, answering=answering)
            for answering in (False, True)
            for level in (1.0, 4.0, 16.0)
            for way in SECONDS
        ],
        "cache": {"verified": True, "verified_hits": 480, "misses": 0},
        "generator": {"cpu_ms_per_request": 0.9},
        "problems": [],
        "stopped": None,
        "workload": {"name": "one_sender", "senders": {"count": 1}},
        "seed": 7,
        "slo_ms": 2_000.0,
        "mode": "closed",
        "levels": [1.0, 4.0, 16.0],
        "server": "its own",
        "server_info": {"served_model_name": "gemma-3-270m", "version": "0.5.23"},
        "machine": {"cpu": "a processor", "cores": 2},
        "versions": {"cb-sglang": "0.1.0"},
        "command": "cb-loadtest run --concurrency 1,4,16",
        "finished": "2026-11-30 02:00 UTC",
        **changes,
    }


def capacity_summary(**changes: Any) -> dict[str, Any]:
    """A finished search with its curve."""
    setting = CurveSetting(slo_s=2.0, rows=24, prompt=32, calibration=1.1, pool=60_000, measured=(256, 1_024))
    lengths = [256, 512, 1_024, 2_048, 4_096, 8_192]
    levels = [(1.0, 300.0), (2.0, 420.0), (4.0, 700.0), (8.0, 1_150.0), (16.0, 2_300.0), (12.0, 1_850.0)]
    return {
        "format": "cb-loadtest capacity 1",
        "mode": "closed",
        "slo_p99_ms": 2_000.0,
        "knee": {"level": 12.0, "p99_ms": 1_850.0, "ended": "found"},
        "probes": [
            *({"level": level, "p99_ms": p99, "requests": 200, "failed": 0, "per_s": 9.0} for level, p99 in levels),
            {"level": 32.0, "p99_ms": None, "requests": 200, "failed": 30, "per_s": 9.0},
        ],
        "stopped": None,
        "service_model": {"fixed": COST.fixed, "per_row": COST.per_row, "per_row_position": COST.per_row_position},
        "curve": capacity_curve(COST, READER, setting, lengths, (2.0, 4.0, 8.0, 16.0, 32.0)),
        "command": "cb-loadtest capacity --slo-p99 2000",
        **changes,
    }
