"""A server as a child process with a log file: started, watched, and gone at the end with all its children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_TAIL_BYTES = 16_384
_PAUSE = 0.05


class ServerDiedError(RuntimeError):
    """The server ended by itself; the message has the end of its log."""


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serve_command(port: int, options: Sequence[str] = ()) -> list[str]:
    """The command that serves the default model on the loopback interface; ``options`` are more of its own.

    The cache is bounded in tokens (1.7 GB) and not by what memory is free: other programs may take some while
    the server starts, which SGLang would count as the weights'.
    """
    address = ["--host", "127.0.0.1", "--port", str(port)]
    memory = ["--mem-fraction-static", "0.5", "--max-total-tokens", "49152"]
    return [sys.executable, "-m", "cb_sglang.cli", "serve", *address, *memory, *options]


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a text file (of its last 16 KiB), without blank ones; none when it cannot be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


class ServerProcess:
    """``command`` in a process group of its own while the context lasts; its output goes to the file ``log``.

    On leaving it gets SIGTERM and ``grace`` seconds; then whatever is left of the group gets SIGKILL. Another
    Ctrl-C cuts the grace short.
    """

    def __init__(self, command: Sequence[str], log: Path, *, grace: float = 15.0) -> None:
        self.log = log
        self._command = list(command)
        self._grace = grace
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        try:
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                if process.poll() is None:
                    process.terminate()
                    process.wait(self._grace)
                _wait_for_group(process.pid, 3.0)
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            _wait_for_group(process.pid, 3.0)

    def check(self, patience: float = 0.0) -> None:
        """Raises ServerDiedError when the server has ended, or ends within ``patience`` seconds."""
        if self._process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(patience)
            last = "\n".join(tail(self.log, 30)) or "(nothing)"
            raise ServerDiedError(f"the server ended with exit code {code}; the end of {self.log}:\n{last}")

    def last_line(self) -> str:
        """What the server logged last."""
        return next(iter(tail(self.log, 1)), "")


def _signal_group(group: int, number: int) -> bool:
    """Whether there was still somebody in the group."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _wait_for_group(group: int, seconds: float) -> None:
    """Wait until the group is empty. Bounded: nobody may reap the grandchildren in a container."""
    end = time.monotonic() + seconds
    while _signal_group(group, 0) and time.monotonic() < end:
        time.sleep(_PAUSE)
