"""The examples without a server: one clear line, and a status that says so. With one they run in tests/server."""

from __future__ import annotations

import runpy
import socket
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def test_the_examples_are_there() -> None:
    assert [path.stem for path in EXAMPLES] == ["chain", "fan_in", "follow_up", "openai_client"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_no_server(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(path))["main"]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, and nobody listens
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert main(["--url", url]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"{path.stem}: {url}: ") and output.err.count("\n") == 1
