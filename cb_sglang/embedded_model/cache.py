"""The cache folder: one finished directory a model, written once, atomically, by one process at a time.

A build happens in a hidden directory beside the target, under a file lock, and is renamed into place when all
is flushed to disk. So a directory with the target's name was whole once; ``complete.json`` holds the size of
every file, which is compared on each use to notice later damage.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cb_sglang.embedded_model.errors import EmbeddedModelError
from cb_sglang.embedded_model.progress import WAIT, ProgressFn

MANIFEST = "complete.json"
LOCK_TIMEOUT = 900.0  # seconds; a build takes well under a minute on an idle machine

_MANIFEST_BYTES = 1 << 16
_POLL = 0.2  # seconds between two looks at the lock


def default_cache_dir() -> Path:
    """``$CB_SGLANG_CACHE``, or ``$XDG_CACHE_HOME/cb-sglang``, or ``~/.cache/cb-sglang``."""
    if own := os.environ.get("CB_SGLANG_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "cb-sglang"
    return Path.home() / ".cache" / "cb-sglang"


def is_complete(directory: Path) -> bool:
    """True if every file in the directory's manifest has the size it was written with. Reads no weights."""
    try:
        with (directory / MANIFEST).open("rb") as file:
            manifest = json.loads(file.read(_MANIFEST_BYTES))
        sizes = manifest["files"]
        return bool(sizes) and all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def build_once(
    target: Path,
    build: Callable[[Path], dict[str, Any]],
    *,
    progress: ProgressFn,
    lock_timeout: float = LOCK_TIMEOUT,
) -> Path:
    """Return ``target``, whole: as it stands, or after ``build(directory)`` filled one that took its place.

    ``build`` returns facts to note in the manifest. Another process that is building is waited for, at most
    ``lock_timeout`` seconds. Leftovers of killed builds are removed. Raises EmbeddedModelError when the
    folder cannot be written, the disk is full, or the wait is over; other errors of ``build`` go through.
    """
    if is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _Lock(target, progress, lock_timeout):
            if not is_complete(target):
                _replace(target, build)
    except OSError as error:
        raise _explain(error, target.parent) from error
    return target


def require_space(folder: Path, needed: int) -> None:
    """Raise EmbeddedModelError unless ``folder``'s disk has ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EmbeddedModelError(
            f"the embedded model needs {_megabytes(needed)} of free disk space in {folder}, which has "
            f"{_megabytes(free)}; free some space, or set CB_SGLANG_CACHE to a folder on another disk"
        )


class _Lock:
    """An exclusive file lock beside ``target`` that reports while it waits."""

    def __init__(self, target: Path, progress: ProgressFn, timeout: float) -> None:
        from filelock import FileLock

        self.path = target.parent / f".{target.name}.lock"
        self.progress = progress
        self.timeout = timeout
        self.lock = FileLock(self.path)

    def __enter__(self) -> None:
        from filelock import Timeout

        start = time.monotonic()
        while True:
            try:
                self.lock.acquire(timeout=_POLL)
                return
            except Timeout:
                waited = time.monotonic() - start
                if waited >= self.timeout:
                    raise EmbeddedModelError(
                        f"another process has been building the embedded model for over {self.timeout:g} s "
                        f"(it holds {self.path}); wait for it or stop it, then try again"
                    ) from None
                self.progress(WAIT, int(waited), int(self.timeout))

    def __exit__(self, *exc: object) -> None:
        self.lock.release()


def _replace(target: Path, build: Callable[[Path], dict[str, Any]]) -> None:
    """Build beside ``target`` and rename; call it with the lock held."""
    prefix = f".{target.name}.building-"
    _sweep(target.parent, prefix)
    work = target.parent / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}"
    work.mkdir()
    try:
        facts = build(work)
        sizes = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
        (work / MANIFEST).write_text(json.dumps({**facts, "files": sizes}, indent=2) + "\n")
        for path in work.iterdir():
            _flush(path)
        _flush(work)
        if target.exists() or target.is_symlink():  # damaged: a rename cannot replace a filled directory
            target.rename(target.parent / f"{prefix}damaged-{secrets.token_hex(4)}")
        work.rename(target)
        _flush(target.parent)
    finally:
        _sweep(target.parent, prefix)


def _sweep(folder: Path, prefix: str) -> None:
    """Remove what this or a killed build left over. Failing to is no reason to fail."""
    for leftover in folder.glob(f"{prefix}*"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                leftover.unlink()


def _flush(path: Path) -> None:
    """fsync, so that a power cut after the rename cannot leave files of right size and wrong content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _explain(error: OSError, folder: Path) -> EmbeddedModelError:
    hint = "set CB_SGLANG_CACHE to a folder that can be written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, or set CB_SGLANG_CACHE to a folder on another disk"
    return EmbeddedModelError(f"the embedded model cannot be written to {folder} ({error}); {hint}")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
