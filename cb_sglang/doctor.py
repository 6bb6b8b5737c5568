"""``cb-sglang doctor``: would ``cb-sglang serve`` with these arguments start, and if not, what has to change?

Starts no server, loads no weights and fetches nothing.
"""

from __future__ import annotations

import contextlib
import platform
import sqlite3
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cb_sglang.budget import positions_for_ratio
from cb_sglang.errors import CacheBackError
from cb_sglang.model_fitness import (
    ModelFacts,
    Serving,
    dtype_bytes,
    model_facts,
    plain_dtype,
    read_config,
    refusals,
)
from cb_sglang.tenants import SECRET_BYTES, Tenants
from cb_sglang.wire import DEFAULT_RATIO

Status: TypeAlias = Literal["ok", "note", "fail"]

SAMPLE_POSITIONS = 8_192
RESERVED_OUTPUT = 1_024
_STYLES = {"ok": "green", "note": "yellow", "fail": "bold red"}
_MAX_MODELS = 16


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``fail``: the server would refuse to start; ``remedy`` says what to change."""

    area: str
    name: str
    status: Status
    text: str
    remedy: str = ""


def examine(arguments: Sequence[str], *, data_dir: Path | None, tenant_keys: Path | None) -> list[Finding]:
    """Everything, in the order of a start. ``arguments`` are SGLang's, as ``serve`` takes them."""
    model_path, remarks = find_model(arguments)
    return [
        *versions(),
        *seams(),
        *device(),
        *flags(arguments, tenant_keys),
        *remarks,
        *([] if model_path is None else model(model_path, arguments)),
        *([] if data_dir is None else store(data_dir)),
    ]


def versions() -> list[Finding]:
    """What is installed; of SGLang also what is wanted."""
    from cb_sglang.seam import SGLANG_VERSION

    found = _version("sglang")
    if found is None:
        remedy = f"pip install 'sglang=={SGLANG_VERSION}'"
        sglang = Finding("versions", "sglang", "fail", f"wanted {SGLANG_VERSION}, not installed", remedy)
    elif found != SGLANG_VERSION:
        # Another version is refused only where a seam differs; that is looked at next.
        remedy = f"pip install 'sglang=={SGLANG_VERSION}', the version that cb-sglang is tested with"
        sglang = Finding("versions", "sglang", "note", f"wanted {SGLANG_VERSION}, found {found}", remedy)
    else:
        sglang = Finding("versions", "sglang", "ok", f"{found}, as wanted")
    return [
        Finding("versions", "cb-sglang", "ok", _version("cb-sglang") or "not installed as a package"),
        sglang,
        Finding("versions", "torch", "ok", _version("torch") or "not installed"),
        Finding("versions", "python", "ok", platform.python_version()),
    ]


def seams() -> list[Finding]:
    """Every place of SGLang that we hook or call (seam/check.py), one by one."""
    from cb_sglang.seam import SGLANG_VERSION, check

    with warnings.catch_warnings():
        # What SGLang says of optional parts when it is imported would stand between the findings.
        warnings.simplefilter("ignore")
        problems = {
            **{
                target: check.function_problem(target, wanted)
                for target, wanted in check.functions(server=True).items()
            },
            **{target: check.attribute_problem(target, wanted) for target, wanted in check.ATTRIBUTES.items()},
        }
    remedy = f"install the version wanted: pip install 'sglang=={SGLANG_VERSION}'"
    return [
        Finding("seams", target, "ok", "as expected")
        if problem is None
        else Finding("seams", target, "fail", problem, remedy)
        for target, problem in problems.items()
    ]


def device() -> list[Finding]:
    """Where the engine would run, and with which kernels of ours."""
    import torch

    from cb_sglang.seam.platform import activate

    if activate() is None:
        name = torch.cuda.get_device_name()
        major, minor = torch.cuda.get_device_capability()
        return [Finding("device", "platform", "ok", f"CUDA: {name}, compute capability {major}.{minor}")]
    from cb_kernels.cpu_native_build import SWITCH, native_library

    native = Finding("device", "kernels", "ok", "compiled for this CPU")
    if native_library() is None:
        remedy = f"install g++ on a machine with AVX2, keep the cache folder private, and do not set {SWITCH}=0"
        native = Finding("device", "kernels", "note", "torch, which is slower than the compiled ones", remedy)
    threads = torch.get_num_threads()
    return [Finding("device", "platform", "ok", f"no CUDA: the portable CPU platform, {threads} threads"), native]


def flags(arguments: Sequence[str], tenant_keys: Path | None) -> list[Finding]:
    """The arguments that cannot be served with, and the tenants' keys."""
    from cb_sglang.launch import complete

    try:
        tenants = Tenants.configured(tenant_keys)
        # With a model path, so that nothing is built.
        complete([*arguments, "--model-path", "."], with_tenants=tenants.has_keys)
    except CacheBackError as error:
        return [Finding("arguments", "accepted", "fail", error.message, "correct the arguments")]
    keys = "set: every route asks for one" if tenants.has_keys else "none: whoever reaches the port is one tenant"
    # Names alone: a value may be a key or a password.
    names = [text.partition("=")[0] for text in arguments if text.startswith("--")]
    return [
        Finding("arguments", "accepted", "ok", " ".join(names) or "none"),
        Finding("arguments", "tenants' keys", "ok" if tenants.has_keys else "note", keys),
    ]


def find_model(arguments: Sequence[str]) -> tuple[Path | None, list[Finding]]:
    """The folder of the model that would be served; None, and why, where there is none to look into."""
    given = argument(arguments, "--model-path", "--model")
    if given is not None:
        if Path(given).is_dir():
            return Path(given), []
        text = f"{given} is no folder on this machine; SGLang would look it up, and its config is not known yet"
        return None, [Finding("model", "folder", "note", text, "give the path of a downloaded model")]
    from cb_sglang.embedded_model import MODEL_DIRECTORY, default_cache_dir
    from cb_sglang.embedded_model.cache import is_complete

    folder = default_cache_dir() / MODEL_DIRECTORY
    if is_complete(folder):
        return folder, []
    text = "the embedded model, which the first start builds (under a minute)"
    return None, [Finding("model", "folder", "note", text, "needs the packages of cb-sglang[demo]")]


def model(folder: Path, arguments: Sequence[str]) -> list[Finding]:
    """Whether the model in ``folder`` can be scored as it would be served, and what a message of it comes to."""
    from cb_sglang.seam.platform import activate

    try:
        facts = model_facts(read_config(folder / "config.json"))
        serving = Serving(
            kv_cache_dtype=argument(arguments, "--kv-cache-dtype") or "auto",
            tp_size=_size(arguments, 1, "--tp-size", "--tensor-parallel-size"),
            pp_size=_size(arguments, 1, "--pp-size", "--pipeline-parallel-size"),
        )
        context = _size(arguments, facts.context_length, "--context-length")
        dtype = served_dtype(facts, argument(arguments, "--dtype") or "auto", on_cpu=activate() is not None)
        # The latent cache of MLA has another size, and such models are refused anyway.
        return fitness(facts, serving) + ([] if facts.latent_attention else window(facts, context, dtype))
    except CacheBackError as error:
        return [Finding("model", str(folder), "fail", error.message, "give a model that SGLang can serve")]


def fitness(facts: ModelFacts, serving: Serving) -> list[Finding]:
    """Which layers are scored, with what geometry, and what would be refused."""
    geometry = f"{facts.heads} query heads, {facts.kv_heads} KV heads, {facts.head_dim} numbers a head"
    findings = [
        Finding("model", "architecture", "ok", facts.architecture),
        Finding("model", "scored layers", "ok", f"{facts.scored_layers} of {facts.layers} have full attention"),
        Finding("model", "geometry", "ok", geometry),
    ]
    problems = refusals(facts, serving)
    if not problems:
        return [*findings, Finding("model", "fitness", "ok", "by its config it can be scored")]
    return findings + [Finding("model", "fitness", "fail", reason, remedy) for reason, remedy in problems]


def window(facts: ModelFacts, context_length: int, dtype: str) -> list[Finding]:
    """The budget and window laws for a sample sender of at most ``SAMPLE_POSITIONS``, in positions and bytes."""
    kv = facts.kv_bytes(dtype)
    sender = min(SAMPLE_POSITIONS, context_length)
    kept = positions_for_ratio(sender, 0, DEFAULT_RATIO)
    fit = max(0, context_length - RESERVED_OUTPUT) // kept
    whole = max(0, context_length - RESERVED_OUTPUT) // sender
    rows = kept * facts.hidden * dtype_bytes(dtype)
    return [
        Finding("window", "context limit", "ok", f"{context_length:,} positions"),
        Finding("window", "KV of a position", "ok", f"{_bytes(kv)} in {dtype}"),
        Finding(
            "window",
            "a message",
            "ok",
            f"of {sender:,} positions at ratio {DEFAULT_RATIO:g}: {kept:,} positions; {_bytes(4 * kept)} as token ids, "
            f"{_bytes(rows)} as embeddings; the sender's whole KV is {_bytes(sender * kv)}",
        ),
        Finding(
            "window",
            "receiver",
            "ok" if fit else "note",
            f"{fit} such messages fit beside {RESERVED_OUTPUT:,} positions of output; of whole senders {whole}",
        ),
    ]


def store(data_dir: Path) -> list[Finding]:
    """The state of a data folder: who may read it, its secret, and the senders in it. Changes nothing."""
    if not data_dir.is_dir():
        return [Finding("data", str(data_dir), "ok", "not there yet; the first start makes it")]
    findings = list(_private(data_dir))
    file = data_dir / "senders.sqlite"
    if not file.is_file():
        return [*findings, Finding("data", "senders", "ok", "none yet")]
    try:
        with contextlib.closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True, timeout=0.5)) as db:
            return [*findings, *_senders(db, file)]
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            text, remedy = "a server is using it now", "start another server with a folder of its own"
        else:
            text, remedy = f"{file} cannot be read: {error}", "move it away, or name another --data-dir"
        return [*findings, Finding("data", "senders", "fail", text, remedy)]


def argument(arguments: Sequence[str], *names: str) -> str | None:
    """The last value that SGLang's arguments give to a flag, as ``--flag value`` or ``--flag=value``."""
    found = None
    for index, text in enumerate(arguments):
        name, equals, value = text.partition("=")
        if name in names:
            following = arguments[index + 1] if index + 1 < len(arguments) else None
            found = value if equals else following
    return found


def served_dtype(facts: ModelFacts, asked: str, *, on_cpu: bool) -> str:
    """The dtype of keys and values: what ``--dtype`` says, else the platform's or the model's."""
    if asked != "auto":
        return plain_dtype(asked)
    if on_cpu:
        return "float32"  # seam/cpu_platform.py
    # SGLang serves a float32 checkpoint in half precision (configs/model_config.py).
    return "float16" if facts.dtype == "float32" else facts.dtype


def render(findings: Sequence[Finding], console: Console) -> None:
    """A table on a terminal, else a line for each finding; then one sentence on what would happen."""
    if console.is_terminal:
        table = Table("area", "what", "", "found", "to change")
        for each in findings:
            status = Text(each.status, style=_STYLES[each.status])
            table.add_row(each.area, Text(each.name), status, Text(each.text), Text(each.remedy))
        console.print(table)
    else:
        for each in findings:
            tail = f" -> {each.remedy}" if each.remedy else ""
            console.print(Text(f"{each.status:4} {each.area}: {each.name}: {each.text}{tail}"), soft_wrap=True)
    failures = sum(each.status == "fail" for each in findings)
    console.print(
        f"cb-sglang serve would refuse: {failures} to change" if failures else "nothing here keeps it from serving"
    )


def _private(data_dir: Path) -> Iterator[Finding]:
    if data_dir.stat().st_mode & 0o077:
        yield Finding("data", str(data_dir), "note", "others on this machine can look into it", f"chmod 700 {data_dir}")
    secret = data_dir / "secret"
    if not secret.is_file():
        yield Finding("data", "secret", "ok", "not there yet; the first start makes it")
    elif secret.stat().st_mode & 0o077:
        yield Finding("data", "secret", "fail", "others on this machine can read it", f"chmod 600 {secret}")
    elif secret.stat().st_size != SECRET_BYTES:
        remedy = "move it away; it is made anew, and senders get new ids"
        yield Finding("data", "secret", "fail", f"it does not hold {SECRET_BYTES} bytes", remedy)
    else:
        yield Finding("data", "secret", "ok", "there, and readable by you alone")


def _senders(db: sqlite3.Connection, file: Path) -> Iterator[Finding]:
    from cb_sglang.database import VERSION

    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found > VERSION:
        text = f"{file} has format {found}; this cb-sglang reads {VERSION}"
        yield Finding("data", "senders", "fail", text, "use the cb-sglang that wrote it, or another --data-dir")
        return
    yield Finding("data", "file", "ok", f"{_bytes(file.stat().st_size)} on the disk")
    rows = db.execute(
        "SELECT model, count(*), sum(length(input_ids)) / 4 FROM senders WHERE expires IS NULL OR expires > ? "
        "GROUP BY model ORDER BY 2 DESC LIMIT ?",
        (time.time(), _MAX_MODELS),
    )
    for fingerprint, count, positions in rows.fetchall():
        text = f"{count:,} with {positions:,} positions"
        yield Finding("data", f"senders of model {fingerprint[:12]}", "ok", text)


def _size(arguments: Sequence[str], default: int, *names: str) -> int:
    text = argument(arguments, *names)
    return int(text) if text is not None and text.isdecimal() and int(text) else default


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} GiB"
