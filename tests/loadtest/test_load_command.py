"""The commands themselves: signals, a server that dies, arguments. The stub is a process of its own here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from cb_loadtest.cli import app
from cb_loadtest.served import free_port


@contextmanager
def running_stub(**settings: Any) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Its address and its process."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).parent / "stub_server.py"), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it says where it runs when it does
            url = f"http://127.0.0.1:{port}"
            httpx.post(f"{url}/stub/settings", json=settings).raise_for_status()
            yield url, process
        finally:
            process.kill()


def run(folder: Path, url: str, *arguments: str) -> Result:
    files = ["--out", str(folder / "run.jsonl"), "--json", str(folder / "run.json")]
    return CliRunner().invoke(app, ["run", "--url", url, *files, *arguments])


def when_measuring(folder: Path, act: Callable[[], object]) -> threading.Thread:
    """Does ``act`` once requests are on record; gives up after a minute."""

    def wait() -> None:
        records, end = folder / "run.jsonl", time.monotonic() + 60
        while time.monotonic() < end:
            if records.exists() and records.stat().st_size:
                act()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def report(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary, and the requests of the JSON lines."""
    lines = [json.loads(line) for line in (folder / "run.jsonl").open()]
    return json.loads((folder / "run.json").read_text()), [line for line in lines if line["kind"] == "request"]


def test_a_server_killed_in_the_middle_leaves_a_report_that_counts_the_failures(tmp_path: Path) -> None:
    with running_stub(delay=[0.005, 0.01]) as (url, process):
        killer = when_measuring(tmp_path, process.kill)
        result = run(tmp_path, url, "--concurrency", "8", "--requests", "100000", "--ways", "message,text_report")
        killer.join()
    found, requests = report(tmp_path)
    (step,) = found["steps"]
    assert result.exit_code == 1
    assert found["stopped"].startswith("the server is gone")
    assert "the server is gone" in result.output
    assert step["completed"] == sum(line["success"] for line in requests) > 0
    assert found["errors"] == {"503 connection_failed": step["failed"]}
    assert step["failed"] >= 32


def test_ctrl_c_ends_the_run_with_a_valid_report(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with running_stub(delay=[0.02, 0.05]) as (url, _):
        thread = when_measuring(tmp_path, lambda: os.kill(os.getpid(), signal.SIGINT))
        result = run(tmp_path, url, "--concurrency", "8", "--requests", "100000", "--ways", "message")
        thread.join()
    found, requests = report(tmp_path)
    (step,) = found["steps"]
    assert result.exit_code == 130, result.output
    assert signal.getsignal(signal.SIGINT) is before
    assert found["stopped"] == "interrupted"
    assert step["completed"] == sum(line["success"] for line in requests) > 0
    assert step["failed"] == 0
    assert 0 < step["cut_off"] <= 8


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "1,1"], "different"),
        (["--concurrency", "2.5"], "whole"),
        (["--mode", "open", "--rate", "nan"], "--rate"),
        (["--mode", "open", "--rate", "1e9"], "--rate"),
        (["--ways", "message,telepathy"], "text_report"),
    ],
)
def test_unusable_arguments_say_what_to_give(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    result = run(tmp_path, "http://127.0.0.1:9", *arguments)
    assert result.exit_code == 2
    assert complaint in result.output


def test_more_receivers_than_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cb_loadtest.load.command.most_connections", lambda: 100)
    result = run(tmp_path, "http://127.0.0.1:9", "--concurrency", "101")
    assert result.exit_code == 2
    assert "ulimit -n" in " ".join(result.output.replace("│", " ").split())


def test_a_missing_workload_and_a_missing_server_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cb_loadtest.local_server.READY_SECONDS", 0.1)
    url = f"http://127.0.0.1:{free_port()}"
    for result, complaint in (
        (run(tmp_path, url, "--workload", "nothing"), "no workload 'nothing'"),
        (run(tmp_path, url), "was not ready within"),
    ):
        assert result.exit_code == 1
        assert complaint in " ".join(result.output.split())
    assert not (tmp_path / "run.json").exists()
