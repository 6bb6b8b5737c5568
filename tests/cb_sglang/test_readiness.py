"""Start-up check, both ends of it. That they meet in a real server is for tests/engine/test_engine_refusal.py."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cb_sglang.errors import SeamError
from cb_sglang.seam.readiness import refuse_to_serve, report_refusal

SCHEDULER = SimpleNamespace(tp_worker=SimpleNamespace(model_runner="a runner"))


def report(monkeypatch: pytest.MonkeyPatch, failure: Exception | None) -> dict[str, Any]:
    """What a scheduler reports whose runner is read with this outcome. SGLang itself is not needed for it."""

    def read(runner: object) -> None:
        assert runner == "a runner"
        if failure is not None:
            raise failure

    layers = SimpleNamespace(ScoredLayers=SimpleNamespace(of=read))
    monkeypatch.setitem(sys.modules, "cb_sglang.seam.layers", layers)
    return report_refusal(lambda scheduler: {"status": "ready"}, SCHEDULER)


def serve(*reports: dict[str, Any]) -> None:
    refuse_to_serve("arguments", "manager", "templates", "ports", list(reports), "watchdog", execute_warmup_func=None)


def test_a_model_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = report(monkeypatch, None)
    assert ready == {"status": "ready"}
    serve(ready, ready)


@pytest.mark.parametrize(
    ("failure", "hint"),
    [
        (SeamError("start with --pp-size 1"), "^start with --pp-size 1$"),
        (AttributeError("no such pool"), "cannot be read .AttributeError: no such pool"),
    ],
)
def test_a_model_that_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception, hint: str
) -> None:
    """The scheduler is ready all the same, and says once what is missing; any rank's reason stops our server."""
    refused = report(monkeypatch, failure)
    assert refused["status"] == "ready"
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    with pytest.raises(SeamError, match=hint):
        serve({"status": "ready"}, refused)
