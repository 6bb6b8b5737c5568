"""``cb-sglang doctor``: what a config says of a model, the sample's arithmetic, a data folder, and the rendering."""

from __future__ import annotations

import io
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cb_sglang import doctor
from cb_sglang.database import VERSION, Database
from cb_sglang.doctor import Finding, argument, find_model, render, served_dtype
from cb_sglang.errors import InvalidRequestError
from cb_sglang.model_fitness import MAX_CONFIG_BYTES, ModelFacts, Serving, model_facts, read_config, refusals
from cb_sglang.registry import Lease
from cb_sglang.seam import SGLANG_VERSION, check
from cb_sglang.senders import SenderContent, new_sender
from cb_sglang.store import SenderStore

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 36,
    "hidden_size": 4_096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "torch_dtype": "bfloat16",
}
GEMMA3 = ["sliding_attention"] * 5 + ["full_attention"]


def facts(**changes: Any) -> ModelFacts:
    return model_facts({**QWEN3_8B, **changes})


def texts(findings: list[Finding]) -> dict[str, str]:
    return {each.name: each.text for each in findings}


def failures(findings: list[Finding]) -> list[str]:
    return [each.text for each in findings if each.status == "fail"]


# --- the config


def test_a_plain_decoder() -> None:
    found = facts()
    assert (found.layers, found.attention_layers, found.scored_layers) == (36, 36, 36)
    assert (found.heads, found.kv_heads, found.head_dim) == (32, 8, 128)
    assert found.context_length == 40_960
    assert found.kv_bytes("bfloat16") == 144 * 1024  # design section 1
    assert found.kv_bytes("float32") == 2 * 144 * 1024
    assert refusals(found, Serving()) == []


@pytest.mark.parametrize(
    ("changes", "attention", "scored"),
    [
        ({"layer_types": GEMMA3 * 6}, 36, 6),
        ({"sliding_window_pattern": 6}, 36, 6),
        ({"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 9}, 9, 9),
        ({"full_attention_interval": 4}, 9, 9),
        ({"layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 9}, 36, 9),
        ({"layers_block_type": ["mamba", "attention"] * 18}, 18, 18),
        ({"layer_types": ["sliding_attention"]}, 36, 36),  # of another model's length: not believed
    ],
)
def test_only_full_attention_is_scored(changes: dict[str, Any], attention: int, scored: int) -> None:
    found = facts(**changes)
    assert (found.attention_layers, found.scored_layers) == (attention, scored)


def test_a_text_config_counts_and_what_it_leaves_out_stands_above_it() -> None:
    found = model_facts({"architectures": ["Outer"], "torch_dtype": "float16", "text_config": QWEN3_8B})
    assert (found.architecture, found.layers, found.dtype) == ("Outer", 36, "bfloat16")


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"factor": 2.0}, 81_920),
        ({"factor": 4.0, "original_max_position_embeddings": 8_192}, 40_960),
        ({"factor": 8.0, "rope_type": "llama3"}, 40_960),
        (None, 40_960),
    ],
)
def test_the_context_limit_is_read_as_sglang_reads_it(scaling: dict[str, Any] | None, context: int) -> None:
    from types import SimpleNamespace

    from sglang.srt.utils.hf_transformers.common import get_context_length

    assert facts(rope_scaling=scaling).context_length == context
    assert get_context_length(SimpleNamespace(**QWEN3_8B, rope_scaling=scaling)) == context


def test_missing_head_numbers_have_the_usual_defaults() -> None:
    config = {name: value for name, value in QWEN3_8B.items() if name not in ("head_dim", "num_key_value_heads")}
    found = model_facts(config)
    assert (found.kv_heads, found.head_dim) == (32, 128)


@pytest.mark.parametrize("value", [None, 0, -1, True, "36", 2.5, 1 << 41])
def test_a_config_without_its_numbers_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="num_hidden_layers"):
        facts(num_hidden_layers=value)


@pytest.mark.parametrize(
    ("changes", "serving", "reason", "remedy"),
    [
        ({"kv_lora_rank": 512}, Serving(), "MLA", "another model"),
        ({"attn_logit_softcapping": 50.0}, Serving(), "soft cap (50)", "another model"),
        ({"layer_types": ["sliding_attention"] * 36}, Serving(), "nothing to score", "another model"),
        ({"quantization_config": {"kv_cache_quant_algo": "fp8"}}, Serving(), "FP8", "--kv-cache-dtype bfloat16"),
        ({}, Serving(kv_cache_dtype="fp8_e5m2"), "fp8_e5m2", "--kv-cache-dtype auto"),
        ({}, Serving(pp_size=2), "pipeline", "--pp-size 1"),
        ({}, Serving(tp_size=16), "8 KV heads", "--tp-size 8"),
    ],
)
def test_what_the_server_would_refuse(changes: dict[str, Any], serving: Serving, reason: str, remedy: str) -> None:
    ((found, change),) = refusals(facts(**changes), serving)
    assert reason in found and remedy in change


@pytest.mark.parametrize(
    ("changes", "serving"),
    [
        ({"attn_logit_softcapping": None}, Serving()),
        ({"quantization_config": {"quant_method": "awq"}}, Serving()),  # quantised weights are no matter
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, Serving(kv_cache_dtype="bf16")),
        ({}, Serving(kv_cache_dtype="bfloat16", tp_size=8)),
    ],
)
def test_what_it_would_not(changes: dict[str, Any], serving: Serving) -> None:
    assert refusals(facts(**changes), serving) == []


@pytest.mark.parametrize("content", ["{", "[]", "x" * (MAX_CONFIG_BYTES + 1), "[" * 100_000], ids=len)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match=r"config\.json"):
        read_config(path)


# --- the arithmetic


def test_the_window_of_a_sample() -> None:
    found = texts(doctor.window(facts(), 40_960, "bfloat16"))
    assert found["context limit"] == "40,960 positions"
    assert found["KV of a position"] == "144 KiB in bfloat16"
    # 8192 / 8 positions; 4 bytes an id; 4096 x 2 bytes a row; (40960 - 1024) // 1024 messages, // 8192 whole senders.
    assert "8,192 positions at ratio 8: 1,024 positions; 4 KiB as token ids, 8 MiB as embeddings" in found["a message"]
    assert found["a message"].endswith("the sender's whole KV is 1.125 GiB")
    assert found["receiver"] == "39 such messages fit beside 1,024 positions of output; of whole senders 4"


def test_a_window_too_small_for_a_message_is_noted() -> None:
    (*_, receiver) = doctor.window(facts(), 1_024, "bfloat16")
    assert (receiver.status, receiver.text.split()[0]) == ("note", "0")


@pytest.mark.parametrize(
    ("of_model", "asked", "on_cpu", "served"),
    [
        ("bfloat16", "auto", False, "bfloat16"),
        ("bfloat16", "auto", True, "float32"),
        ("float32", "auto", False, "float16"),
        ("bfloat16", "half", True, "float16"),
        ("torch.float16", "auto", False, "float16"),
    ],
)
def test_the_dtype_of_the_cache(of_model: str, asked: str, on_cpu: bool, served: str) -> None:
    assert served_dtype(facts(torch_dtype=of_model), asked, on_cpu=on_cpu) == served


# --- arguments and model


def test_arguments_are_found_in_both_spellings_and_the_last_counts() -> None:
    given = ["--tp-size=2", "--model-path", "/models/a", "--tp-size", "4", "--port"]
    assert argument(given, "--tp-size") == "4"
    assert argument(given, "--model", "--model-path") == "/models/a"
    assert argument(given, "--port") is None
    assert argument(given, "--dtype") is None


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return tmp_path


def test_a_models_folder_is_read_with_the_arguments_it_would_be_served_with(model_folder: Path) -> None:
    assert find_model(["--model-path", str(model_folder)]) == (model_folder, [])
    findings = doctor.model(model_folder, ["--tp", "1", "--context-length", "2048", "--dtype", "bfloat16"])
    assert failures(findings) == []
    assert texts(findings)["scored layers"] == "36 of 36 have full attention"
    assert texts(findings)["context limit"] == "2,048 positions"
    for size, flag in ((16, "--tp-size=16"), (16, "--tensor-parallel-size=16")):
        assert f"{size} tensor-parallel ranks" in failures(doctor.model(model_folder, [flag]))[0]


def test_a_folder_without_a_model_fails(tmp_path: Path) -> None:
    (problem,) = failures(doctor.model(tmp_path, []))
    assert "cannot be read" in problem


def test_a_name_is_not_looked_up() -> None:
    folder, (remark,) = find_model(["--model-path", "somebody/some-model"])
    assert folder is None and remark.status == "note"


@pytest.mark.parametrize("flag", ["--disable-radix-cache", "--skip-tokenizer-init"])
def test_arguments_that_cannot_be_served_with_fail(flag: str) -> None:
    (problem,) = failures(doctor.flags([flag], None))
    assert flag in problem


def test_tenants_keys_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CB_SGLANG_TENANT_KEYS", raising=False)
    keys = tmp_path / "keys"
    keys.write_text("not a line of keys")
    (problem,) = failures(doctor.flags([], keys))
    assert "line 1" in problem

    keys.write_text(f"team-a:{'0' * 64}\n")
    assert "asks for one" in texts(doctor.flags([], keys))["tenants' keys"]
    assert failures(doctor.flags(["--api-key", "x"], keys))
    assert "one tenant" in texts(doctor.flags([], None))["tenants' keys"]


def test_values_of_arguments_are_not_shown() -> None:
    shown = texts(doctor.flags(["--api-key", "of-mine", "--ssl-keyfile-password=of-mine"], None))["accepted"]
    assert shown == "--api-key --ssl-keyfile-password"


# --- SGLang


def test_every_seam_is_named_and_fits_the_installed_sglang() -> None:
    findings = doctor.seams()
    assert [each.name for each in findings] == [*check.functions(server=True), *check.ATTRIBUTES]
    assert failures(findings) == []


def test_a_seam_that_differs_fails_with_the_version_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "managers.scheduler.Scheduler.get_init_info"
    monkeypatch.setattr(check, "FUNCTIONS", {target: ("self", "of_another_version"), "nowhere.function": ()})
    monkeypatch.setattr(check, "SERVER_FUNCTIONS", {})
    monkeypatch.setattr(check, "ATTRIBUTES", {"managers.embed_types.PositionalEmbeds": ("gone",)})
    findings = doctor.seams()
    assert [each.status for each in findings] == ["fail"] * 3
    assert all(f"sglang=={SGLANG_VERSION}" in each.remedy for each in findings)


@pytest.mark.parametrize(("installed", "status"), [(SGLANG_VERSION, "ok"), ("0.0.1", "note"), (None, "fail")])
def test_sglangs_version(monkeypatch: pytest.MonkeyPatch, installed: str | None, status: str) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: installed)
    (found,) = (each for each in doctor.versions() if each.name == "sglang")
    assert found.status == status
    assert SGLANG_VERSION in found.text + found.remedy or status == "ok"


# --- the data folder


def save(folder: Path, *, prompts: list[list[int]], expires: float | None = None) -> None:
    database = Database(folder / "senders.sqlite")
    store = SenderStore(database, model_fingerprint="a" * 64)
    for ids in prompts:
        sender = new_sender("team-a", "a" * 64, SenderContent(input_ids=ids), id_key=b"k", created=1.0)
        store.save(sender, Lease(None if expires is None else 60.0, expires))
    database.close()


def test_senders_in_a_data_folder_are_counted(tmp_path: Path) -> None:
    assert "not there yet" in doctor.store(tmp_path / "new")[0].text
    assert "none yet" in texts(doctor.store(tmp_path))["senders"]
    save(tmp_path, prompts=[[1, 2, 3], [4, 5]])
    save(tmp_path, prompts=[[6] * 1_000], expires=time.time() - 1)
    before = (tmp_path / "senders.sqlite").read_bytes()
    findings = doctor.store(tmp_path)
    assert texts(findings)[f"senders of model {'a' * 12}"] == "2 with 5 positions"
    assert failures(findings) == []
    assert (tmp_path / "senders.sqlite").read_bytes() == before


def test_a_data_folder_in_use_fails(tmp_path: Path) -> None:
    server = Database(tmp_path / "senders.sqlite")
    try:
        assert failures(doctor.store(tmp_path)) == ["a server is using it now"]
    finally:
        server.close()


def test_a_file_of_something_else_or_of_a_newer_version_fails(tmp_path: Path) -> None:
    file = tmp_path / "senders.sqlite"
    file.write_bytes(b"not a database, but long enough to be taken for one " * 100)
    assert "cannot be read" in failures(doctor.store(tmp_path))[0]
    file.unlink()
    with sqlite3.connect(file) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()
    assert f"format {VERSION + 1}" in failures(doctor.store(tmp_path))[0]


def test_a_secret_that_others_can_read_fails(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o644)
    (problem,) = (each for each in doctor.store(tmp_path) if each.status == "fail")
    assert problem.remedy == f"chmod 600 {secret}"
    secret.chmod(0o600)
    assert failures(doctor.store(tmp_path)) == []
    secret.write_bytes(b"short")
    assert failures(doctor.store(tmp_path))


# --- the rendering


@pytest.mark.parametrize("terminal", [True, False])
def test_rendering_says_everything_and_reads_no_markup(terminal: bool) -> None:
    findings = [
        Finding("model", "fitness", "fail", "a range [0, 16) and [bold]", "change it"),
        Finding("versions", "python", "ok", "3.11"),
    ]
    out = io.StringIO()
    render(findings, Console(file=out, force_terminal=terminal, width=200, color_system=None))
    for expected in ("a range [0, 16) and [bold]", "change it", "versions", "3.11", "would refuse: 1 to change"):
        assert expected in out.getvalue()


def test_rendering_to_a_file_is_a_line_a_finding() -> None:
    out = io.StringIO()
    findings = [Finding("a", "b", "ok", "c" * 500), Finding("a", "d", "note", "e", "f")]
    render(findings, Console(file=out, width=80))
    assert out.getvalue().splitlines() == [
        f"ok   a: b: {'c' * 500}",
        "note a: d: e -> f",
        "nothing here keeps it from serving",
    ]
