"""Anybody who reaches SGLang's own endpoints can send a spec. A wrong one gets an error; the engine lives on."""

from __future__ import annotations

from typing import Any

import pytest
from engine_cases import on_engines, random_ask
from engine_client import EngineClient

from cb_sglang.spec import WIRE_KEY

pytestmark = on_engines("small")

GOOD = random_ask(60, 10, seed=1, budget=20)


def send(engine: EngineClient, custom_params: Any, **sampling: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 1, "temperature": 0, "custom_params": custom_params, **sampling}
    return engine.generate(input_ids=GOOD.ids, sampling_params=params)["meta_info"]  # type: ignore[no-any-return]


def assert_alive(engine: EngineClient) -> None:
    ((result, _),) = engine.ask(GOOD)
    assert len(result["positions"]) == GOOD.budget


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"sender_len": 70}, "sender_len"),
        ({"sender_len": 71}, "sender_len"),
        ({"sender_len": 1 << 40}, "sender_len"),
        ({"sender_len": 0}, "sender_len"),
        ({"sender_len": -5}, "sender_len"),
        ({"sender_len": 60.0}, "sender_len"),
        ({"sender_len": "60"}, "sender_len"),
        ({"sender_len": True}, "sender_len"),
        ({"sender_len": None}, "sender_len"),
        ({"sender_len": [60]}, "sender_len"),
        ({"sender_len": {"a": {"b": 60}}}, "sender_len"),
        ({"budget": 1 << 70}, "budget"),
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": 1e9}, "alpha"),
        ({"order": 1.0}, "order"),
        ({"selector": "x" * 100_000}, "selector"),
        ({"vote_start": 10}, "voting rows"),
        ({"vote_start": 5, "vote_stop": 5}, "voting rows"),
        ({"vote_stop": 11}, "voting rows"),
        ({"budget": 0}, "budget"),
        ({"budget": 61}, "budget"),
        ({"latent_len": 20}, "budget"),
        ({"latent_len": 1 << 31}, "latent_len"),
        ({"selector": "magic"}, "choose one of"),
        ({"selector": ""}, "choose one of"),
        ({"selector": 5}, "selector"),
        ({"want_scores": 1}, "want_scores"),
        ({"extra": 1}, "extra"),
        ({"wire_key": "x"}, "wire_key"),
        ({"__class__": "x"}, "__class__"),
    ],
)
def test_wrong_field(engine: EngineClient, change: dict[str, Any], hint: str) -> None:
    wire = {**GOOD.spec.to_wire()[WIRE_KEY], **change}
    (result,) = send(engine, {WIRE_KEY: wire})[WIRE_KEY]
    assert set(result) == {"error"}
    assert hint in result["error"]
    assert_alive(engine)


@pytest.mark.parametrize("wire", [None, 5, "x", [], [1], True, {}, {"budget": 3}])
def test_spec_that_is_no_spec(engine: EngineClient, wire: Any) -> None:
    (result,) = send(engine, {WIRE_KEY: wire})[WIRE_KEY]
    assert WIRE_KEY in result["error"]
    assert_alive(engine)


@pytest.mark.parametrize("custom_params", [None, {}, {"other": 1}, {"Cacheback": {}}, "x", 5, [1], {5: 1}])
def test_no_spec_is_an_ordinary_request(engine: EngineClient, custom_params: Any) -> None:
    assert WIRE_KEY not in send(engine, custom_params)
    assert_alive(engine)


@pytest.mark.parametrize("count", [0, 2, 7])
def test_other_output_lengths(engine: EngineClient, count: int) -> None:
    """Not what our server sends. The result may be cut, but nothing breaks and nothing stays in the tree."""
    meta = send(engine, GOOD.spec.to_wire(), max_new_tokens=count, ignore_eos=True)
    assert meta["completion_tokens"] == count
    if count:
        assert len(meta[WIRE_KEY][0]["positions"]) == GOOD.budget
    assert engine.settled_counters()["tree_tokens"] == len(GOOD.sender)
    assert_alive(engine)


def test_one_bad_query_in_a_batch(engine: EngineClient) -> None:
    """Its neighbours are answered."""
    bad = {**GOOD.sampling, "custom_params": {WIRE_KEY: {"sender_len": 1}}}
    answers = engine.generate(input_ids=[GOOD.ids] * 3, sampling_params=[GOOD.sampling, bad, GOOD.sampling])
    results = [answer["meta_info"][WIRE_KEY][0] for answer in answers]
    assert "error" in results[1]
    assert results[0]["positions"] == results[2]["positions"]
    assert len(results[0]["positions"]) == GOOD.budget


def test_position_zero_alone(engine: EngineClient) -> None:
    """The smallest budget there is."""
    spec = {**GOOD.spec.to_wire()[WIRE_KEY], "budget": 1, "want_scores": False}
    assert send(engine, {WIRE_KEY: spec})[WIRE_KEY] == [{"positions": [0]}]
