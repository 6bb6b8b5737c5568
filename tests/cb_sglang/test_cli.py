"""The command line: what is ours is taken, everything else goes to SGLang, and errors are one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cb_sglang import cli, launch
from cb_sglang.errors import InvalidRequestError, SeamError
from cb_sglang.service import Settings
from cb_sglang.templates import DEFAULT_TEMPLATE


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], Settings]]:
    """What ``launch`` was called with."""
    calls: list[tuple[list[str], Settings]] = []

    def record(arguments: Sequence[str], settings: Settings, **options: Any) -> None:
        calls.append((list(arguments), settings))

    monkeypatch.setattr(launch, "launch", record)
    return calls


def serve(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["serve", *arguments])


def test_defaults(launched: list[tuple[list[str], Settings]]) -> None:
    assert serve().exit_code == 0
    assert launched == [([], Settings(query_template=DEFAULT_TEMPLATE, max_senders=4_096))]


def test_sglang_s_arguments_go_through_in_order(launched: list[tuple[list[str], Settings]]) -> None:
    theirs = ["--model-path", "some/model", "--tp", "2", "--port=31000", "--enable-metrics", "--json-args", '{"a": 1}']
    result = serve(*theirs[:3], "--max-senders", "7", *theirs[3:], "--query-template", "Q {query}")
    assert result.exit_code == 0, result.output
    assert launched == [(theirs, Settings(query_template="Q {query}", max_senders=7))]


@pytest.mark.parametrize("value", ["0", "-1", "many", "1000001"])
def test_a_bad_number_is_a_usage_error(launched: list[tuple[list[str], Settings]], value: str) -> None:
    result = serve("--max-senders", value)
    assert result.exit_code == 2 and "--max-senders" in result.output
    assert launched == []


def run_command(code: str) -> tuple[int, str]:
    """Exit status and last line of standard error, in a process of its own: the command leaves by os._exit."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("error", [SeamError("SGLang 0.5.23 is needed, found 0.1"), InvalidRequestError("bad flag")])
def test_what_launch_raises_is_one_line(error: Exception) -> None:
    status, line = run_command(
        "from cb_sglang import cli, launch, errors\n"
        f"def fail(*a, **k): raise errors.{type(error).__name__}({str(error)!r})\n"
        "launch.launch = fail\n"
        "cli.app(['serve'])\n"
    )
    assert (status, line) == (1, f"cb-sglang: {error}")


def test_a_bad_template_stops_the_start() -> None:
    status, line = run_command("from cb_sglang import cli; cli.app(['serve', '--query-template', 'no place'])")
    assert (status, line) == (1, "cb-sglang: query_template must contain {query} exactly once")


def test_help_says_what_it_does() -> None:
    overview = CliRunner().invoke(cli.app, ["--help"])
    assert overview.exit_code == 0 and "serve" in overview.output
    assert "--query-template" in serve("--help").output


# --- completing SGLang's arguments


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An embedded model that is there at once, on a machine where the CPU platform is active."""
    from cb_sglang import embedded_model
    from cb_sglang.seam import platform

    monkeypatch.setattr(embedded_model, "ensure_embedded_model", lambda: tmp_path)
    monkeypatch.setattr(platform, "activate", lambda: "a.platform")
    return tmp_path


def test_without_a_model_the_embedded_one_is_served(embedded: Path) -> None:
    assert launch.complete(["--port", "1"]) == [
        *("--port", "1"),
        *("--model-path", str(embedded), "--served-model-name", "gemma-3-270m"),
        *("--device", "cpu"),
    ]


@pytest.mark.parametrize("given", [["--model-path", "m"], ["--model-path=m"], ["--model", "m"]])
def test_a_given_model_is_served(embedded: Path, given: list[str]) -> None:
    assert launch.complete(given) == [*given, "--device", "cpu"]


def test_a_given_device_stays(embedded: Path) -> None:
    assert launch.complete(["--model", "m", "--device", "cuda"]) == ["--model", "m", "--device", "cuda"]


def test_with_cuda_nothing_forces_the_cpu(embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cb_sglang.seam import platform

    monkeypatch.setattr(platform, "activate", lambda: None)
    assert launch.complete(["--model", "m"]) == ["--model", "m"]


@pytest.mark.parametrize("flag", ["--disable-radix-cache", "--skip-tokenizer-init"])
def test_flags_that_cannot_work_are_refused(embedded: Path, flag: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{flag} cannot be used with cb-sglang: "):
        launch.complete(["--model", "m", flag])
