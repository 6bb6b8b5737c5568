"""The journal of a recall run: one JSON line for every finished unit, so that a killed run can go on."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FORMAT = "cb-loadtest recall 1"
MAX_UNITS = 5_000_000
MAX_LINE_BYTES = 1 << 20

Record = dict[str, Any]


class JournalError(RuntimeError):
    """The journal cannot be used for this run; the message says what to do."""


class Journal:
    """Finished units by key, in memory and on disk. Use it as a context manager.

    fingerprint: of the model at the server; a journal of another one is refused when resuming.
    resume:      read what the file holds; otherwise it starts empty.

    Raises JournalError when the file is another run's, broken, or being written by another process.
    """

    def __init__(self, path: Path, fingerprint: str, *, resume: bool) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise JournalError(f"another run writes {path}; wait for it, or give another --out") from None
            if resume:
                self._read(fingerprint)
            else:
                self._file.seek(0)
                self._file.truncate()
            if self._file.tell() == 0:
                self._write({"format": FORMAT, "fingerprint": fingerprint})
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, key: str, record: Record) -> None:
        """Keep a finished unit; it is in the file when this returns."""
        if len(self.records) >= MAX_UNITS:
            raise JournalError(f"more than {MAX_UNITS} units; split the cases")
        self.records[key] = record
        self._write({"key": key, **record})

    def _write(self, line: Record) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def _read(self, fingerprint: str) -> None:
        """Load what is there. What a kill left of the last line is cut off; the file ends at a line's end after."""
        self._file.seek(0)
        end, number = 0, 0
        while line := self._file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                break
            number += 1
            self._take(line, number, fingerprint)
            end = self._file.tell()
        if len(line) == MAX_LINE_BYTES:
            raise JournalError(f"{self.path}, line {number + 1} is too long; it is no journal of a recall run")
        self._file.truncate(end)
        self._file.seek(end)

    def _take(self, line: bytes, number: int, fingerprint: str) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if number == 1:
            if not isinstance(record, dict) or record.get("format") != FORMAT:
                raise JournalError(f"{self.path} is no journal of a recall run; remove it, or give another --out")
            if record.get("fingerprint") != fingerprint:
                raise JournalError(
                    f"{self.path} was written with another model at the server; leave out --resume to measure afresh, "
                    "or give another --out"
                )
            return
        key = record.pop("key", None) if isinstance(record, dict) else None
        if not isinstance(record, dict) or not isinstance(key, str):
            raise JournalError(f"{self.path}, line {number} is broken; remove the line")
        if len(self.records) >= MAX_UNITS:
            raise JournalError(f"{self.path} has more than {MAX_UNITS} units; give another --out")
        self.records[key] = record
