"""What the load generator can do, against a stub server in a process of its own.

How many requests a second it makes when the stub waits for nothing, what each costs in CPU, and how far its
percentiles are from those that the stub noted itself when it waits 0.2 to 0.4 s.

    python loadtest/bench/generator.py [--seconds 5] [--json FILE]

With two cores or more, the generator is pinned to one and the stub to the rest.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from cb_loadtest.load.run import LoadOptions, run_load
from cb_loadtest.load.workload import load_workload
from cb_loadtest.served import free_port
from cb_sglang.client import CacheBack

STUB = Path(__file__).parents[2] / "tests" / "loadtest" / "stub_server.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()

    port = free_port()
    stub = subprocess.Popen([sys.executable, str(STUB), str(port)], stdout=subprocess.DEVNULL)
    pin(stub.pid)
    try:
        url = f"http://127.0.0.1:{port}"
        with CacheBack(url) as client:
            client.wait_until_ready(30)
        figures = {"closed, 16 receivers": rate(url, "closed", 16.0, arguments.seconds)}
        figures["open, 500 a second"] = rate(url, "open", 500.0, arguments.seconds)
        figures["percentiles over the stub's own"] = accuracy(url)
    finally:
        stub.terminate()
        stub.wait()
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def rate(url: str, mode: str, level: float, seconds: float) -> dict[str, float]:
    """Requests per second, CPU per request, and (open loop) how late requests were sent."""
    found = run(url, mode, level, seconds)
    (step,) = found["steps"]
    return {
        "requests_per_s": round(step["request_throughput"], 1),
        "cpu_ms_per_request": found["generator"]["cpu_ms_per_request"],
        "p99_latency_ms": step["p99_e2e_latency_ms"],
        "p99_sent_late_ms": step["sent_late_ms"]["p99"],
        "failed": step["failed"],
    }


def accuracy(url: str) -> dict[str, float]:
    """Each reported percentile as a multiple of the stub's; 1 is exact."""
    httpx.post(f"{url}/stub/settings", json={"delay": [0.2, 0.4]}).raise_for_status()
    (step,) = run(url, "open", 50.0, 8.0)["steps"]
    log = httpx.get(f"{url}/stub/log").raise_for_status().json()["log"]
    truth = np.array([entry["seconds"] for entry in log if entry["kind"] == "message"][-step["completed"] :]) * 1_000
    reported = step["time_to_message_ms"]
    return {f"p{p}": round(reported[f"p{p}"] / float(np.percentile(truth, p)), 4) for p in (50, 90, 95, 99)}


def run(url: str, mode: str, level: float, seconds: float) -> dict[str, Any]:
    """The summary of one run of messages."""
    options = LoadOptions(load_workload("one_sender"), mode, (level,), ("message",), seconds=seconds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return run_load(options, url, Console(file=io.StringIO()), folder / "run.jsonl", folder / "run.json")


def pin(stub: int) -> None:
    """The generator on one core, the stub on the others, where there are others."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(stub, cores[1:])
        os.sched_setaffinity(0, cores[:1])


if __name__ == "__main__":
    main()
