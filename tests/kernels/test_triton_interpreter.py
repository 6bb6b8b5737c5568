"""Runs interpreted_triton.py with Triton's interpreter switched on, in one process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


def test_kernels_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    path = [str(HERE.parents[1] / "kernels"), str(HERE), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
    result = subprocess.run(
        [*command, str(HERE / "interpreted_triton.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert result.returncode == 0, f"{result.stdout[-20000:]}\n{result.stderr[-2000:]}"
    assert " passed" in result.stdout and " skipped" not in result.stdout
