"""Compile ``cpu_native.cpp`` once per machine and user, and load it.

The library lies in the user's cache folder, named after all that went into it. It is loaded only from a folder that
nobody else can write to. Whatever is missing (compiler, AVX2, a private folder) is logged once, and scoring runs in
torch instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SWITCH = "CB_KERNELS_NATIVE"

_SOURCE = Path(__file__).with_name("cpu_native.cpp")
# Without contraction, so that equal sums of products come out equal: with one voting row the two energies are one
# number, and a bit between them would decide ties.
_COMPILE = ("-std=c++17", "-O3", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=off", "-fopenmp", "-fPIC", "-c")
# No -fopenmp here: the OpenMP calls must resolve to the runtime that torch has loaded. A second one would start
# threads of its own that compete with torch's.
_LINK = ("-shared",)
_COMPILE_SECONDS = 60.0
_KEPT_LIBRARIES = 4


def native_library() -> ctypes.CDLL | None:
    """The compiled kernel; None where it cannot be had, or with ``CB_KERNELS_NATIVE=0`` in the environment.

    The first call in a process may compile, which takes about two seconds; it never raises.
    """
    return None if os.environ.get(SWITCH) == "0" else _load()


@functools.cache
def _load() -> ctypes.CDLL | None:
    try:
        path = build(cache_directory())
        library = ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        reason = f"{error}: {error.stderr[-1000:]}"
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home directory
        reason = str(error)
    else:
        logger.info("CPU scoring runs in the compiled kernel %s", path)
        return library
    logger.warning("CPU scoring runs in torch, which is slower than the compiled kernel (%s)", reason)
    return None


def cache_directory() -> Path:
    """``kernels`` in ``$CB_SGLANG_CACHE``, or in ``$XDG_CACHE_HOME/cb-sglang``, or in ``~/.cache/cb-sglang``."""
    if own := os.environ.get("CB_SGLANG_CACHE"):
        base = Path(own).expanduser()
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        base = Path(xdg).expanduser() / "cb-sglang"
    else:
        base = Path("~/.cache/cb-sglang").expanduser()
    return base.absolute() / "kernels"


def build(directory: Path) -> Path:
    """The library in ``directory``, compiled first if it is not there. Safe to call from several processes at once.

    Raises OSError (no AVX2, no g++, a folder that is not private) or subprocess.SubprocessError (the compiler).
    """
    # With the flags above any CPU of this level runs the library, so that a home shared by machines is no trap.
    if (level := torch.backends.cpu.get_cpu_capability()) not in ("AVX2", "AVX512"):
        raise OSError(f"it needs a CPU with AVX2; torch found {level}")
    compiler = shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("it needs g++, which is not on PATH")
    target = directory / f"cpu_native-{_fingerprint(compiler)}.so"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(directory)
    if not target.exists():
        _sweep(directory)
        _compile(compiler, target)
    _require_private(target)
    return target


def _fingerprint(compiler: str) -> str:
    parts = (_SOURCE.read_bytes(), " ".join((*_COMPILE, *_LINK)).encode(), _run(compiler, "--version").encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        compiled, library = f"{work}/kernel.o", f"{work}/kernel.so"
        _run(compiler, *_COMPILE, str(_SOURCE), "-o", compiled)
        _run(compiler, *_LINK, compiled, "-o", library)
        os.chmod(library, 0o700)
        os.replace(library, target)


def _run(*command: str) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_COMPILE_SECONDS,
        check=True,
    )
    return done.stdout


def _sweep(directory: Path) -> None:
    """Leave the newest few libraries; a process that has an older one loaded keeps it."""
    found = sorted(directory.glob("cpu_native-*.so"), key=lambda path: path.lstat().st_mtime, reverse=True)
    for path in found[_KEPT_LIBRARIES - 1 :]:
        with contextlib.suppress(OSError):
            path.unlink()


def _require_private(path: Path) -> None:
    """Raise PermissionError if anyone but us and root could put something else at ``path``."""
    resolved = path.resolve(strict=True)
    mine = resolved.stat()
    if mine.st_uid != os.geteuid() or mine.st_mode & 0o022:
        raise PermissionError(
            f"{resolved} is not ours alone to write; make it so (chown, chmod go-w) or set CB_SGLANG_CACHE to a "
            "private folder"
        )
    for parent in resolved.parents:
        status = parent.stat()
        open_to_others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in (os.geteuid(), 0) or open_to_others:
            raise PermissionError(f"others can replace what is in {parent}; set CB_SGLANG_CACHE to a private folder")
