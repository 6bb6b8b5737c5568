"""The embedded default model: Gemma 3 270M (base), from pip packages to a directory that SGLang loads.

    path = ensure_embedded_model()      # first use: about 20 s, 550 MB; later: under a millisecond

The packages of the ``demo`` extra hold a Q4_K_M GGUF file in four parts. On first use they are joined and
checked, dequantised to bfloat16 safetensors with config and tokenizer, and kept in the user's cache folder
with the Gemma terms of use and the notice. The tokenizer adds BOS (id 2) to text by itself: ``tokenizer.py``.
Importing this package imports neither torch nor transformers; neither does building the model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from cb_sglang.embedded_model.cache import build_once, default_cache_dir, is_complete, require_space
from cb_sglang.embedded_model.errors import EmbeddedModelError
from cb_sglang.embedded_model.parts import ModelParts, join_parts, locate_parts, require_gguf
from cb_sglang.embedded_model.progress import TOKENIZER, ProgressFn, progress_bar

__all__ = [
    "MODEL_DIRECTORY",
    "EmbeddedModelError",
    "ProgressFn",
    "default_cache_dir",
    "ensure_embedded_model",
]

# Raise the last number whenever the conversion writes something else, so that old caches are not reused.
MODEL_DIRECTORY = "gemma-3-270m-q4_k_m-bf16-1"

_NOTICE = """\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms
(GEMMA_TERMS.html in this directory is the copy that came with the packages).

These files were modified. cb-sglang made them from {filename}
(SHA-256 {sha256}) as distributed by the packages named in NOTICE.md:
the quantised weights were expanded to bfloat16 and written as safetensors, and the config and
tokenizer files were derived from the metadata of the same file.
"""


def ensure_embedded_model(cache_dir: Path | None = None, progress: ProgressFn | None = None) -> Path:
    """The directory of the embedded model, built on first use; safe to call from several processes at once.

    ``cache_dir`` defaults to ``default_cache_dir()``. ``progress(stage, done, total)`` replaces the bar that
    is otherwise drawn on stderr if that is a terminal. A directory whose files no longer have their sizes is
    rebuilt. Raises EmbeddedModelError: packages missing or damaged, disk full or not writable, another
    process building for too long.
    """
    target = (cache_dir or default_cache_dir()).absolute() / MODEL_DIRECTORY
    if is_complete(target):  # needs neither the packages nor a progress bar
        return target
    require_gguf()
    parts = locate_parts()
    if progress is not None:
        return _ensure(target, parts, progress)
    with progress_bar() as bar:
        return _ensure(target, parts, bar)


def _ensure(target: Path, parts: ModelParts, progress: ProgressFn) -> Path:
    return build_once(target, lambda work: build_model(parts, work, progress), progress=progress)


def build_model(parts: ModelParts, directory: Path, progress: ProgressFn) -> dict[str, Any]:
    """Write the whole model into the empty ``directory`` and return facts for its manifest."""
    from cb_sglang.embedded_model.convert import generation_config, model_config, write_weights
    from cb_sglang.embedded_model.gguf_header import read_header
    from cb_sglang.embedded_model.tokenizer import tokenizer_config, tokenizer_json

    joined = directory / parts.filename
    require_space(directory, parts.size)
    join_parts(parts, joined, progress)
    header = read_header(joined)
    weights = 2 * sum(tensor.size for tensor in header.tensors)
    require_space(directory, weights + 64_000_000)  # tokenizer files and some room
    write_weights(joined, header, directory / "model.safetensors", progress)
    joined.unlink()

    progress(TOKENIZER, 0, 1)
    tokenizer = json.dumps(tokenizer_json(header), ensure_ascii=False, separators=(",", ":"))
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    progress(TOKENIZER, 1, 1)
    _write_json(directory / "tokenizer_config.json", tokenizer_config(header))
    _write_json(directory / "config.json", model_config(header))
    _write_json(directory / "generation_config.json", generation_config(header))
    for path in parts.terms:
        shutil.copyfile(path, directory / path.name)
    notice = _NOTICE.format(filename=parts.filename, sha256=parts.sha256)
    (directory / "NOTICE.cb-sglang.txt").write_text(notice)
    return {"source": parts.filename, "source_sha256": parts.sha256}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
