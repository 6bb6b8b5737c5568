"""Shapes from configs against published sizes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cb_loadtest.planning.hardware import GPUS, Hardware, HardwareError, parse_gpu
from cb_loadtest.planning.model import ModelShape, built_in_names, load_shape, shape_from_config
from cb_sglang.errors import InvalidRequestError

LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    [
        ("Qwen3-0.6B", 0.6, 0.6),
        ("Qwen3-1.7B", 1.7, 1.7),
        ("Qwen3-4B", 4.0, 4.0),
        ("Qwen3-8B", 8.2, 8.2),
        ("Qwen3-14B", 14.8, 14.8),
        ("Qwen3-32B", 32.8, 32.8),
        ("Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen3-235B-A22B", 235, 22),
        ("gemma-3-270m", 0.27, 0.27),
    ],
)
def test_weights_are_those_of_the_model_cards(name: str, billions: float, active_billions: float) -> None:
    shape = load_shape(name)
    assert shape.weights / 1e9 == pytest.approx(billions, rel=0.02)
    active = shape.active_weights + shape.head_weights + shape.embedding_weights
    assert active / 1e9 == pytest.approx(active_billions, rel=0.02)


def test_every_built_in_shape_is_checked() -> None:
    checked = test_weights_are_those_of_the_model_cards.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert sorted(built_in_names()) == sorted(name for name, *_ in checked)


def test_kv_of_qwen3_8b_is_144_kib_a_position() -> None:
    shape = load_shape("Qwen3-8B")
    assert shape.kv_bytes_per_position == 144 * 1024
    assert 50_000 * shape.kv_bytes_per_position == 7_372_800_000


def test_only_full_attention_layers_are_scored() -> None:
    gemma = load_shape("gemma-3-270m")
    assert (gemma.layers, gemma.full_layers, gemma.window) == (18, 3, 512)
    listed = shape_from_config(
        {**LLAMA, "sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"] * 8}, "listed"
    )
    assert (listed.full_layers, listed.window) == (8, 1024)
    unused = shape_from_config({**LLAMA, "sliding_window": 1024, "use_sliding_window": False}, "unused")
    assert (unused.full_layers, unused.window) == (16, 0)
    # Without kinds of layers SGLang attends to everything, as with Mistral 7B.
    unsaid = shape_from_config({**LLAMA, "sliding_window": 4096}, "unsaid")
    assert (unsaid.full_layers, unsaid.window) == (16, 0)


def test_defaults_and_text_config() -> None:
    plain = shape_from_config(LLAMA, "llama")
    assert plain.head_dim == 64 and plain.weights / 1e9 == pytest.approx(1.236, rel=0.01)
    assert shape_from_config({"text_config": LLAMA, "vision_config": {}}, "llama") == plain
    assert shape_from_config({**LLAMA, "dtype": "float32"}, "llama").kv_bytes_per_position == (
        2 * plain.kv_bytes_per_position
    )


def test_the_context_is_as_long_as_the_server_takes_it() -> None:
    stretched = shape_from_config({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "stretched")
    assert stretched.context_length == 4 * 131072


def test_experts_are_read_when_somebody_chose_them() -> None:
    shape = load_shape("Qwen3-30B-A3B")
    always = shape.dense_weights + shape.head_weights
    assert shape.weights_read(1) == pytest.approx(always + shape.experts_per_token * shape.expert_weights)
    assert shape.weights_read(10_000) == pytest.approx(always + shape.experts * shape.expert_weights)
    assert shape.weights_read(1) < shape.weights_read(2) < 2 * shape.weights_read(1)


def test_config_from_a_file_and_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3.2-1B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_shape(str(folder)) == load_shape(str(folder / "config.json"))
    assert load_shape(str(folder)).name == "Llama-3.2-1B"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "whole number from 1 to 4096"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_key_value_heads": 5}, "do not divide"),
        ({"kv_lora_rank": 512}, "latent"),
        ({"full_attention_interval": 4}, "linear"),
        ({"mamba_d_state": 16}, "linear"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 8}, "sliding_window"),
        ({"dtype": "int8"}, "int8"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}, "dense MLPs"),
        ({"intermediate_size": None}, "no intermediate_size"),
    ],
)
def test_configs_that_cannot_be_planned(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        shape_from_config({**LLAMA, **change}, "broken")


@pytest.mark.parametrize(("content", "said"), [("{", "not JSON"), ("[]", "JSON object")])
def test_files_that_are_no_config(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match=said):
        load_shape(str(path))
    with pytest.raises(InvalidRequestError, match="Qwen3-8B"):
        load_shape(str(tmp_path / "absent.json"))


def test_gpus_by_name_and_by_numbers() -> None:
    assert parse_gpu("h100") is GPUS["H100"]
    assert parse_gpu("1e12, 2e11,16e9") == Hardware("custom", 1e12, 2e11, 16e9)
    assert GPUS["H100"].times(2).bandwidth == 2 * GPUS["H100"].bandwidth


@pytest.mark.parametrize("text", ["H101", "1,2", "1,2,x", "1,2,nan", "0,1,1", "1e12,-1,1e9", "inf,1,1"])
def test_gpus_that_make_no_sense(text: str) -> None:
    with pytest.raises(HardwareError):
        parse_gpu(text)


def test_longer_of_arithmetic_and_traffic() -> None:
    gpu = Hardware("g", 100.0, 10.0, 1.0, compute_efficiency=0.5, bandwidth_efficiency=0.1)
    assert gpu.seconds(100, 1) == 2.0
    assert gpu.seconds(100, 10) == 10.0


def test_shapes_are_values() -> None:
    assert isinstance(load_shape("Qwen3-8B"), ModelShape) and load_shape("Qwen3-8B") == load_shape("Qwen3-8B")
