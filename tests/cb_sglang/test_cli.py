"""The command line: what is ours is taken, everything else goes to SGLang, and errors are one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cb_sglang import cli, launch
from cb_sglang.errors import InvalidRequestError, SeamError
from cb_sglang.settings import Settings
from cb_sglang.tenants import VARIABLE, Tenant, Tenants


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], Settings]]:
    """What ``launch`` was called with."""
    calls: list[tuple[list[str], Settings]] = []

    def record(arguments: Sequence[str], settings: Settings, **options: Any) -> None:
        calls.append((list(arguments), settings))

    monkeypatch.setattr(launch, "launch", record)
    monkeypatch.delenv(VARIABLE, raising=False)
    return calls


def serve(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["serve", *arguments])


def test_defaults(launched: list[tuple[list[str], Settings]]) -> None:
    """Those of the settings themselves; who is alone on a server may hold all of it."""
    assert serve().exit_code == 0
    ((arguments, settings),) = launched
    alone = replace(Settings(), admission=replace(Settings().admission, tenant_share=1.0))
    assert (arguments, settings) == ([], alone)


def test_sglang_s_arguments_go_through_in_order(launched: list[tuple[list[str], Settings]]) -> None:
    theirs = ["--model-path", "some/model", "--tp", "2", "--port=31000", "--enable-metrics", "--json-args", '{"a": 1}']
    result = serve(*theirs[:3], "--max-senders", "7", *theirs[3:], "--query-template", "Q {query}")
    assert result.exit_code == 0, result.output
    ((arguments, settings),) = launched
    assert arguments == theirs
    assert (settings.query_template, settings.senders.total.senders) == ("Q {query}", 7)


def test_every_option_reaches_its_setting(launched: list[tuple[list[str], Settings]], tmp_path: Path) -> None:
    folder, keys = str(tmp_path / "data"), str(tmp_path / "keys")
    result = serve(
        *("--data-dir", folder, "--tenant-keys", keys, "--tenant-share", "0.25", "--ttl", "60", "--deadline", "5"),
        *("--max-running-rows", "256", "--max-waiting", "32", "--max-audit", "99"),
    )
    assert result.exit_code == 0, result.output
    ((arguments, settings),) = launched
    assert arguments == [] and (settings.data_dir, settings.tenant_keys) == (Path(folder), Path(keys))
    assert (settings.senders.tenant_share, settings.senders.default_ttl, settings.max_audit) == (0.25, 60.0, 99)
    admission = settings.admission
    assert (admission.tenant_share, admission.default_deadline) == (0.25, 5.0)
    assert (admission.max_running_rows, admission.max_waiting) == (256, 32)


def test_keys_in_the_environment_bound_a_tenant_too(
    launched: list[tuple[list[str], Settings]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "alice:" + "0" * 64)
    assert serve().exit_code == 0
    ((_, settings),) = launched
    assert settings.senders.tenant_share == settings.admission.tenant_share == 0.5


def test_a_key_is_shown_once_and_its_line_opens_the_door() -> None:
    made = CliRunner().invoke(cli.app, ["key", "team-a"])
    assert made.exit_code == 0
    shown = made.stderr.strip().rpartition(" ")[2]
    assert shown not in made.stdout
    assert Tenants.parse(made.stdout, "test").authenticate(f"Bearer {shown}") == Tenant("team-a")
    refused = CliRunner().invoke(cli.app, ["key", "Team A"])
    assert refused.exit_code == 1 and refused.stdout == "" and "a tenant's name is" in refused.stderr


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


def test_without_a_model_the_embedded_one_is_served_with_a_template(embedded: Path) -> None:
    completed = launch.complete(["--port", "1"])
    template = completed[completed.index("--chat-template") + 1]
    assert completed == [
        *("--port", "1", "--enable-metrics"),
        *("--model-path", str(embedded), "--served-model-name", "gemma-3-270m"),
        *("--chat-template", template),
        *("--device", "cpu", "--sleep-on-idle"),
    ]
    assert Path(template).is_file()
    assert launch.complete(["--chat-template", "mine"]).count("--chat-template") == 1


@pytest.mark.parametrize("given", [["--model-path", "m"], ["--model-path=m"], ["--model", "m"]])
def test_a_given_model_is_served(embedded: Path, given: list[str]) -> None:
    assert launch.complete(given) == [*given, "--enable-metrics", "--device", "cpu", "--sleep-on-idle"]


def test_a_given_device_stays(embedded: Path) -> None:
    given = ["--model", "m", "--device", "cuda", "--enable-metrics", "--sleep-on-idle"]
    assert launch.complete(given) == given


def test_with_cuda_nothing_forces_the_cpu(embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cb_sglang.seam import platform

    monkeypatch.setattr(platform, "activate", lambda: None)
    assert launch.complete(["--model", "m"]) == ["--model", "m", "--enable-metrics"]


@pytest.mark.parametrize("flag", ["--disable-radix-cache", "--skip-tokenizer-init"])
def test_flags_that_cannot_work_are_refused(embedded: Path, flag: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{flag} cannot be used with cb-sglang: "):
        launch.complete(["--model", "m", flag])


def test_tenants_keys_take_the_place_of_sglang_s(embedded: Path) -> None:
    assert "--skip-server-warmup" in launch.complete(["--model", "m"], with_tenants=True)
    for flag in ("--api-key", "--admin-api-key=x", "--grpc-mode"):
        with pytest.raises(InvalidRequestError, match=r"give one of them|gRPC knows no tenants"):
            launch.complete(["--model", "m", flag], with_tenants=True)
        assert flag in launch.complete(["--model", "m", flag])
