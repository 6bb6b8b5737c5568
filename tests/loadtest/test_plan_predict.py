"""The cost functions against the project's floors and the paper's figures; predictions against themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cb_loadtest.cli import app
from cb_loadtest.planning.engine import Roofline
from cb_loadtest.planning.fit import FitError, FittedEngine, ServiceModel, read_fit
from cb_loadtest.planning.hardware import GPUS, HardwareError
from cb_loadtest.planning.model import load_shape
from cb_loadtest.planning.predict import Prediction, Setting, predict
from cb_sglang.errors import BudgetError, InvalidRequestError

QWEN = load_shape("Qwen3-8B")
# 700 TFLOP/s sustained and all of the bandwidth, nothing around it: what "floor" means in the notes on the kernels.
FLOOR = replace(GPUS["H100"], compute_efficiency=700 / 989, bandwidth_efficiency=1.0)
ENGINE = Roofline(QWEN, GPUS["H100"])


def predicted(setting: Setting) -> Prediction:
    return predict(ENGINE, setting, kv_bytes_per_position=QWEN.kv_bytes_per_position)


def test_floors_of_a_query() -> None:
    """2.8 ms a query at M >= 16 and 8.3 ms at M = 1, for T = 50,000 and R = 32.

    The notes charge every weight for every row, the embedding table too; so does the shape here.
    """
    charged = replace(QWEN, dense_weights=QWEN.weights, head_weights=0, embedding_weights=0)
    engine = Roofline(charged, FLOOR, overhead=0.0)

    def milliseconds(queries: int) -> float:
        return 1_000 * engine.scoring_seconds(queries=queries, rows=32, positions=50_000) / queries

    assert round(milliseconds(1), 1) == 8.3
    assert round(milliseconds(16), 1) == round(milliseconds(64), 1) == 2.8
    assert 1_000 / milliseconds(16) == pytest.approx(361, rel=0.005)
    # What an engine really multiplies is less: the embedding is a lookup, and only one row a query needs logits.
    exact = Roofline(QWEN, FLOOR, overhead=0.0)
    assert 0.9 < exact.scoring_seconds(queries=16, rows=32, positions=50_000) / (16 * milliseconds(16) / 1_000) < 1


def test_default_efficiency_lies_in_the_expected_range() -> None:
    """The notes expect 215 to 275 queries a second of today's kernels on an H100."""
    assert 215 < 16 / ENGINE.scoring_seconds(queries=16, rows=32, positions=50_000) < 275


def test_three_text_messages_of_the_paper() -> None:
    """The paper's 73.2 s for three text messages (Qwen3-8B, H100) lies between the floor and the default.

    How many tokens its messages had is not known here. Assumed: 16x of 50,000 positions, 3,125 tokens each, decoded
    one message after the other.
    """

    def three(engine: Roofline) -> float:
        return 3 * engine.decode_seconds(sequences=1, positions=50_000, tokens=3_125)

    floor = three(Roofline(QWEN, FLOOR, overhead=0.0))
    assert floor < 73.2 < three(ENGINE)
    assert floor == pytest.approx(73.2, rel=0.15) and three(ENGINE) == pytest.approx(73.2, rel=0.2)


def test_a_message_costs_a_fraction_of_a_report_of_the_same_size() -> None:
    found = predicted(Setting(sender_length=50_000, ratio=16, receivers=1, senders=3))
    message, report = found.way("message"), found.way("text_report")
    assert found.best == "message"
    assert report.delivery / message.delivery > 1_000
    assert message.positions == report.positions == 3 * 3_125 + 64 + 128


def test_sliding_layers_cost_their_window_only() -> None:
    hybrid = replace(QWEN, full_layers=6, window=512)
    slow, fast = Roofline(QWEN, FLOOR), Roofline(hybrid, FLOOR)
    assert fast.scoring_seconds(queries=16, rows=32, positions=50_000) < 0.5 * (
        slow.scoring_seconds(queries=16, rows=32, positions=50_000)
    )
    assert fast.pool_positions == slow.pool_positions  # their KV is kept whole


def test_pool_and_senders_that_fit() -> None:
    found = predicted(Setting(sender_length=32_768, receivers=16))
    assert found.pool_positions == int((80e9 * 0.88 - 2 * QWEN.weights) // (144 * 1024))
    assert found.senders_that_fit == found.pool_positions // 32_768
    room = found.pool_positions - 16 * found.way("message").positions
    assert found.senders_beside_receivers == room // 32_768
    with pytest.raises(HardwareError, match="--tp"):
        _ = Roofline(load_shape("Qwen3-235B-A22B"), GPUS["H100"]).pool_positions


def test_window_is_said_and_not_enforced() -> None:
    found = predicted(Setting(sender_length=50_000, receivers=1))
    assert "exceed the context length (40960)" in found.way("full_kv").window_overshoot
    assert found.way("message").window_overshoot == ""


SETTINGS = st.builds(
    Setting,
    sender_length=st.integers(64, 200_000),
    ratio=st.floats(1, 100),
    rows=st.integers(1, 256),
    receivers=st.integers(1, 64),
    senders=st.integers(1, 4),
    answer=st.integers(1, 512),
    link=st.floats(1e8, 1e12),
)


@settings(max_examples=60, deadline=None)
@given(SETTINGS)
def test_crossings_are_where_the_ways_cross(setting: Setting) -> None:
    found = predicted(setting)
    message = found.way("message").answer
    if found.kv_above_link is not None and 1 < found.kv_above_link < 1e14:
        at = predicted(replace(setting, link=found.kv_above_link))
        assert at.way("full_kv").answer == pytest.approx(at.way("message").answer, rel=1e-6)
    else:
        assert predicted(replace(setting, link=1e14)).best != "full_kv" or found.kv_above_link is not None
    tokens = found.text_below_tokens
    if tokens is not None:
        assert predicted(replace(setting, report=tokens)).way("text_report").answer < message
    longer = predicted(replace(setting, report=(tokens or 0) + 1))
    assert longer.way("text_report").answer >= message
    if found.full_below_length is not None:
        shorter = predicted(replace(setting, sender_length=found.full_below_length))
        assert shorter.way("full_context").answer < shorter.way("message").answer


@settings(max_examples=60, deadline=None)
@given(SETTINGS, st.integers(1, 1_000))
def test_more_is_never_faster(setting: Setting, more: int) -> None:
    base = predicted(setting)
    for changed in (
        replace(setting, sender_length=setting.sender_length + more),
        replace(setting, receivers=setting.receivers + more),
        replace(setting, rows=setting.rows + more),
        replace(setting, answer=setting.answer + more),
    ):
        for before, after in zip(base.ways, predicted(changed).ways, strict=True):
            assert after.answer >= before.answer * (1 - 1e-9)


@pytest.mark.parametrize(
    "change", [{"sender_length": 0}, {"receivers": 0}, {"rows": 1 << 40}, {"report": 0}, {"link": 0.0}, {"answer": -1}]
)
def test_settings_out_of_range(change: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(change))):
        replace(Setting(), **change)


def test_ratio_is_the_servers() -> None:
    with pytest.raises(BudgetError):
        Setting(ratio=0.5)


COSTS = {"fixed": 0.5, "per_row": 0.01, "per_row_position": 1e-6}


def test_fit_replaces_scoring_and_prefill(tmp_path: Path) -> None:
    path = tmp_path / "capacity.json"
    path.write_text(json.dumps({"service_model": COSTS}))
    engine = FittedEngine(read_fit(path), ENGINE)
    assert engine.scoring_seconds(queries=4, rows=8, positions=1_000) == pytest.approx(0.5 + 32 * (0.01 + 1e-3))
    assert engine.prefill_seconds(rows=10, past=100) == pytest.approx(0.5 + 10 * (0.01 + 105e-6))
    assert engine.pool_positions == ENGINE.pool_positions
    assert engine.decode_seconds(sequences=2, positions=9, tokens=3) == (
        ENGINE.decode_seconds(sequences=2, positions=9, tokens=3)
    )


def test_fit_with_a_measured_reader_and_pool(tmp_path: Path) -> None:
    path = tmp_path / "capacity.json"
    reader = {"reader_fixed": 0.1, "reader_per_position": 0.002}
    path.write_text(json.dumps({"service_model": COSTS | reader, "curve_setting": {"pool": 5_000}}))
    engine = FittedEngine(read_fit(path), ENGINE)
    assert engine.prefill_seconds(rows=10, past=100) == pytest.approx(0.1 + 10 * (0.002 + 100e-6))
    assert engine.pool_positions == 5_000
    found = predict(engine, Setting(sender_length=1_000, ratio=10), kv_bytes_per_position=1)
    assert found.senders_that_fit == 5 and found.senders_beside_receivers == 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"service_model": {"fixed": 1, "per_row": 1}}',
        '{"service_model": {"fixed": -1, "per_row": 1, "per_row_position": 1}}',
        '{"service_model": {"fixed": NaN, "per_row": 1, "per_row_position": 1}}',
        '{"service_model": {"fixed": 1, "per_row": 0, "per_row_position": 0}}',
    ],
)
def test_files_without_a_service_model(tmp_path: Path, content: str) -> None:
    path = tmp_path / "capacity.json"
    path.write_text(content)
    with pytest.raises(FitError):
        read_fit(path)


def test_service_model_counts_rows_of_the_batch() -> None:
    assert ServiceModel(1.0, 2.0, 3.0).seconds(4, 5) == 1 + 4 * (2 + 15)


def test_command_prints_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = CliRunner().invoke(app, ["plan", "--receivers", "3", "--json", str(path)])
    assert done.exit_code == 0 and "text_report" in done.output
    written = json.loads(path.read_text())
    assert written["model"]["kv_bytes_per_position"] == 147_456
    assert [way["name"] for way in written["ways"]] == ["message", "text_report", "full_context", "full_kv"]
    assert written["setting"]["receivers"] == 3


@pytest.mark.parametrize(
    "arguments", [["--gpu", "Z80"], ["--config", "none"], ["--config", "Qwen3-235B-A22B"], ["--sender-length", "0"]]
)
def test_command_refuses(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["plan", *arguments]).exit_code == 2
