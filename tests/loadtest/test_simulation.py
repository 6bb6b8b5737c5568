"""The simulation against what can be computed by hand, and the policies against each other."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cb_loadtest.cli import app
from cb_loadtest.planning.engine import Roofline
from cb_loadtest.planning.hardware import GPUS
from cb_loadtest.planning.model import load_shape
from cb_loadtest.planning.scenario import Outcome, Scenario
from cb_loadtest.planning.simulation import simulate
from cb_sglang.admission import AdmissionLimits
from cb_sglang.capacity import Policy
from cb_sglang.errors import InvalidRequestError

QWEN = load_shape("Qwen3-8B")
ENGINE = Roofline(QWEN, GPUS["H100"])
# Room for the weights and about 30,000 positions, so that few agents fill it.
SMALL = Roofline(QWEN, replace(GPUS["H100"], memory=(2 * QWEN.weights + 30_000 * QWEN.kv_bytes_per_position) / 0.88))
BUSY = Scenario(agents=60, servers=1, senders=3, sender_length=6_000, ratio=4, think=1.0, seconds=15.0)
POLICIES: tuple[Policy, ...] = ("fixed", "fit", "share")


def refused(outcome: Outcome) -> int:
    return sum(outcome.refused.values())


def test_one_agent_alone_waits_for_nothing() -> None:
    scenario = Scenario(agents=1, servers=1, senders=1, sender_length=8_000, ratio=8, seconds=200.0)
    outcome = simulate(scenario, ENGINE, "share")
    # The only sender's length is drawn; its message keeps a ratio of it, so both follow from the message's time.
    assert outcome.messages > 5 and refused(outcome) == outcome.rebuilds == outcome.evictions == 0
    assert dict(outcome.grants) == {"asked": outcome.messages}
    first, last = outcome.message.percentile(0), outcome.message.percentile(100)
    assert first is not None and last == pytest.approx(first) and outcome.queued.percentile(100) == 0.0
    lengths = range(4_000, 12_001)
    length = min(lengths, key=lambda n: abs(ENGINE.scoring_seconds(queries=1, rows=32, positions=n) - first))
    read = -(-length // 8) + scenario.prompt
    by_hand = (
        ENGINE.scoring_seconds(queries=1, rows=32, positions=length)
        + ENGINE.prefill_seconds(rows=read)
        + ENGINE.decode_seconds(sequences=1, positions=read, tokens=scenario.answer)
    )
    assert outcome.answer.percentile(50) == pytest.approx(by_hand, rel=1e-6)


def test_same_seed_same_numbers_and_another_seed_others() -> None:
    first, second = (simulate(BUSY, SMALL, "share").as_dict() for _ in range(2))
    assert first == second
    assert simulate(replace(BUSY, seed=1), SMALL, "share").as_dict() != first


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_accounted_for(policy: Policy) -> None:
    outcome = simulate(BUSY, SMALL, policy)
    assert outcome.complete and outcome.messages > 50
    # At the edges of the counted time, each agent may have one request that is counted on one side only.
    assert abs(outcome.requests - outcome.messages - refused(outcome)) <= BUSY.agents
    assert sum(outcome.grants.values()) == outcome.messages == outcome.message.count
    assert outcome.answers <= outcome.messages + BUSY.agents


def test_policies_do_what_they_promise_when_the_pool_is_short() -> None:
    found = {policy: simulate(BUSY, SMALL, policy) for policy in POLICIES}
    assert set(found["fixed"].grants) == {"asked"}
    assert "pool" in found["fit"].grants and "share" in found["share"].grants
    # Whoever insists on all of it waits, as on the server, where sharing serves more and sooner.
    assert refused(found["fixed"]) == 0
    assert found["fixed"].messages < found["share"].messages
    least, median = ({p: o.kept.percentile(q) or 0.0 for p, o in found.items()} for q in (0, 50))
    assert least["fixed"] == 1.0 and 0.0 < least["share"] < 1.0
    assert median["share"] < 1.0
    waited = {policy: outcome.message.percentile(50) or 0.0 for policy, outcome in found.items()}
    assert waited["fixed"] > 2 * waited["share"]
    short = replace(BUSY, limits=AdmissionLimits(default_deadline=1.0))
    hurried = {policy: simulate(short, SMALL, policy) for policy in POLICIES}
    assert hurried["fixed"].refused["pool"] > hurried["share"].refused["pool"] > 0


# One place in the engine, one sender that is always there, and receivers that together want more than the pool.
ONE_PLACE = replace(
    BUSY,
    senders=1,
    pinned=1,
    min_budget=1_000,
    limits=AdmissionLimits(max_running_rows=32, default_deadline=1.0, tenant_share=1.0),
)


@pytest.mark.parametrize("policy", ["fixed", "fit"])
def test_who_waits_for_room_in_the_pool_holds_no_place(policy: Policy) -> None:
    outcome = simulate(ONE_PLACE, SMALL, policy)
    assert outcome.messages > 50 and set(outcome.refused) == {"pool"}
    waited = outcome.message.percentile(50)
    assert waited is not None and waited > 0.5 and outcome.queued.percentile(100) == 0.0


@pytest.mark.parametrize(("tenant_share", "reason"), [(1.0, "queue_full"), (0.5, "tenant_share")])
def test_places_to_wait_for_room_in_the_pool_are_bounded(tenant_share: float, reason: str) -> None:
    limits = AdmissionLimits(max_waiting=4, tenant_share=tenant_share)
    outcome = simulate(replace(ONE_PLACE, limits=limits, tenants=1), SMALL, "fixed")
    # The engine has places for all, so that it is the grants that refuse.
    assert outcome.messages > 50 and outcome.queued.percentile(100) == 0.0
    assert outcome.refused[reason] > 0 and set(outcome.refused) == {reason}


def test_one_deadline_covers_the_grant_and_the_turn() -> None:
    outcome = simulate(ONE_PLACE, SMALL, "share")
    assert outcome.refused["pool"] > 0 and outcome.refused["deadline"] > 0
    longest = outcome.message.percentile(100)
    assert longest is not None and longest < 1.1  # the deadline, and one score


def test_what_was_granted_to_a_request_without_a_turn_is_free_again() -> None:
    limits = AdmissionLimits(max_running_rows=32, default_deadline=0.05, tenant_share=1.0)
    outcome = simulate(replace(BUSY, agents=200, think=0.1, seconds=10.0, limits=limits), ENGINE, "fixed")
    granted = outcome.refused["deadline"] * BUSY.sender_length / 2 / BUSY.ratio
    assert granted > ENGINE.pool_positions and set(outcome.refused) == {"deadline"}


def test_with_room_for_all_the_policies_agree() -> None:
    roomy = replace(BUSY, agents=20, sender_length=2_000)
    first, *others = (simulate(roomy, ENGINE, policy).as_dict() for policy in POLICIES)
    assert first["refused"] == {} and first["grants"].keys() == {"asked"}
    for other in others:
        assert other | {"policy": "fixed"} == first


def test_senders_that_do_not_fit_are_read_again_and_pinned_ones_are_not() -> None:
    crowded = Scenario(
        agents=20, servers=1, senders=12, sender_length=6_000, ratio=64, popularity=0, think=1.0, seconds=20.0
    )
    assert simulate(crowded, SMALL, "share").rebuilds > 10
    few = replace(crowded, senders=4, sender_length=3_000)
    assert simulate(few, SMALL, "share").rebuilds == 0
    # Messages as long as their senders push these out, unless they are pinned.
    pushing = replace(crowded, senders=2, sender_length=3_000, ratio=1)
    loose, pinned = (simulate(replace(pushing, pinned=count), SMALL, "fit") for count in (0, 2))
    assert loose.evictions > 0 and loose.rebuilds > 0
    assert pinned.evictions == pinned.rebuilds == 0 and pinned.messages > 50


def test_a_tenant_over_its_share_is_refused_and_a_full_queue_too() -> None:
    limits = AdmissionLimits(max_running_rows=32, max_waiting=8, tenant_share=0.25)
    tenants = replace(BUSY, tenants=2, limits=limits)
    outcome = simulate(tenants, ENGINE, "share")
    assert outcome.refused["tenant_share"] > 0
    many = replace(BUSY, tenants=60, limits=limits)
    assert simulate(many, ENGINE, "share").refused["queue_full"] > 0


def test_deadlines_hold() -> None:
    limits = AdmissionLimits(max_running_rows=32, default_deadline=0.5, tenant_share=1.0)
    outcome = simulate(replace(BUSY, limits=limits, think=0.1), SMALL, "fit")
    waited = outcome.queued.percentile(100)
    assert waited is not None and waited <= 0.5
    assert outcome.refused["deadline"] + outcome.refused["pool"] > 0


def test_a_sender_longer_than_the_pool_is_refused() -> None:
    outcome = simulate(replace(BUSY, senders=1, sender_length=200_000, seconds=5.0), SMALL, "share")
    assert outcome.messages == 0 and set(outcome.refused) == {"context"}


def test_requests_bound_the_run() -> None:
    outcome = simulate(replace(BUSY, max_requests=50), ENGINE, "share")
    assert not outcome.complete and outcome.counted_seconds < 0.9 * BUSY.seconds


@settings(max_examples=15, deadline=None)
@given(
    agents=st.integers(1, 40),
    senders=st.integers(1, 12),
    sender_length=st.integers(2, 20_000),
    ratio=st.floats(1, 50),
    pinned=st.integers(0, 4),
    rows=st.integers(1, 64),
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 100),
)
def test_any_scenario_runs_and_adds_up(
    agents: int, senders: int, sender_length: int, ratio: float, pinned: int, rows: int, policy: Policy, seed: int
) -> None:
    scenario = Scenario(
        agents=agents,
        servers=2,
        senders=senders,
        sender_length=sender_length,
        ratio=ratio,
        pinned=pinned,
        rows=rows,
        think=0.5,
        seconds=5.0,
        min_budget=16,
        seed=seed,
    )
    outcome = simulate(scenario, SMALL, policy)
    assert abs(outcome.requests - outcome.messages - refused(outcome)) <= agents
    assert all(share is None or 0 < share <= 1 for share in (outcome.kept.percentile(0), outcome.kept.percentile(100)))


@pytest.mark.parametrize(
    "change", [{"agents": 0}, {"servers": 1 << 20}, {"think": 0.0}, {"seconds": 1e9}, {"ratio": 0.5}, {"pinned": -1}]
)
def test_scenarios_out_of_range(change: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(change))):
        replace(Scenario(), **change)  # type: ignore[arg-type]


def test_command_compares_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "simulation.json"
    arguments = ["simulate", "--agents", "5,10", "--policies", "fit,share", "--servers", "2", "--seconds", "5"]
    done = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert done.exit_code == 0, done.output
    written = json.loads(path.read_text())
    assert [(run["scenario"]["agents"], run["policy"]) for run in written["runs"]] == [
        (5, "fit"),
        (5, "share"),
        (10, "fit"),
        (10, "share"),
    ]
    assert {"messages_per_s", "message_ms", "tteoa_ms", "refused", "grants"} <= written["runs"][0].keys()


@pytest.mark.parametrize(
    "arguments", [["--agents", "many"], ["--agents", "0"], ["--policies", "greedy"], ["--tenant-share", "2"]]
)
def test_command_refuses(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["simulate", *arguments]).exit_code == 2


def test_planning_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, cb_loadtest.planning.command; "
        "print([name for name in ('torch', 'sglang', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
