"""The examples, run as a reader would, against the real server."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from served_api import ServedApi

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(server: ServedApi, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(path))["main"](["--url", server.url]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 3, "it says what it does"
