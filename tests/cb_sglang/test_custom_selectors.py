"""The operator's allow-list of selectors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cb_kernels import selectors
from cb_kernels.selectors import registry
from cb_sglang import custom_selectors
from cb_sglang.errors import InvalidRequestError


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test allows, no other test sees."""
    monkeypatch.setenv(custom_selectors.VARIABLE, "")
    monkeypatch.setattr(registry, "_SELECTORS", dict(registry._SELECTORS))


def test_allowed_selectors_are_loaded_here_and_named_for_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "house_rule.py").write_text(
        "def votes(context):\n    return context.require_moments().votes\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    custom_selectors.allow(["house_rule:votes"])
    assert os.environ[custom_selectors.VARIABLE] == "house_rule:votes"
    assert selectors.get("house_rule:votes").needs is selectors.Needs.QUERY_ROWS


@pytest.mark.parametrize("spec", ["no_such_module_of_ours:f", "os:no_such_function", "not a spec"])
def test_what_cannot_be_loaded_stops_the_start(spec: str) -> None:
    with pytest.raises(InvalidRequestError, match="--allow-selector"):
        custom_selectors.allow([spec])
