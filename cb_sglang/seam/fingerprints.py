"""Which model and which tokenizer a server runs, as hashes that two servers can compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

_SAMPLE_BYTES = 64 << 10
_MAX_FILES = 4_096


def model_fingerprint(manager: Any) -> str:
    """SHA-256 (hex) of what the KV of a token depends on: config, weight files and present weight version.

    manager: SGLang's TokenizerManager. Of every weight file its size and samples from start, middle and end, so that
    a copy elsewhere has the same fingerprint and a fine-tune another; the version counts in-place updates.
    """
    config = manager.model_config.hf_config.to_dict()
    config.pop("_name_or_path", None)
    facts = [json.dumps(config, sort_keys=True, default=str), str(manager.config_value("weight_version"))]
    return hashlib.sha256("\0".join([*facts, _weights(manager.model_path)]).encode()).hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 (hex) of the vocabulary: equal where the same ids stand for the same tokens."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    digest = hashlib.sha256()
    for token, number in vocabulary:
        digest.update(f"{number}\0{token}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


@lru_cache(maxsize=16)
def _weights(model_path: str) -> str:
    folder = Path(model_path)
    if not folder.is_dir():
        return model_path  # a name that SGLang resolved by itself
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.gguf")])[:_MAX_FILES]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        for sample in _samples(file):
            digest.update(sample)
    return digest.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        for start in (0, max(0, size // 2), max(0, size - _SAMPLE_BYTES)):
            opened.seek(start)
            yield opened.read(_SAMPLE_BYTES)
