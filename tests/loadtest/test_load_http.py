"""Whole runs over HTTP against a stub with known delays, in virtual time: what is reported must be what was so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from load_run import Run, capacity, workload
from stub_server import Settings, Stub

from cb_loadtest.load.bench import Bench
from cb_loadtest.load.view import capacity_table, summary_table
from cb_sglang.errors import InvalidRequestError


@pytest.mark.parametrize(("mode", "level"), [("open", 60.0), ("closed", 8.0)])
def test_percentiles_are_those_of_the_server(mode: str, level: float) -> None:
    run = Run(Settings(delay=(0.2, 0.4)), workload(requests=120), level, mode)
    truth = np.array([entry["seconds"] for entry in run.stub.log if entry["kind"] == "message"]) * 1_000
    assert run.step["completed"] == len(truth) == 120
    for percent in (50, 90, 95, 99):
        found = run.step["time_to_message_ms"][f"p{percent}"]
        assert found == pytest.approx(np.percentile(truth, percent), rel=0.02)
    assert run.step["mean_e2e_latency_ms"] == pytest.approx(truth.mean(), rel=0.02)
    if mode == "closed":
        assert run.step["concurrency"] == pytest.approx(8.0, rel=0.1)
        assert run.step["messages_per_s"] == pytest.approx(8 / 0.3, rel=0.1)


def test_a_stall_shows_in_every_request_that_was_due_meanwhile() -> None:
    run = Run(Settings(delay=(0.01, 0.01), stall_after=30, stall=2.0), workload(requests=160), 40.0, "open")
    assert run.step["completed"] == 160
    assert run.step["sent_late_ms"]["max"] < 1.0  # every request was sent when it was due
    requests = sorted(run.requests, key=lambda line: line["due_s"])
    until = requests[29]["due_s"] + requests[29]["e2e_latency_ms"] / 1_000
    during = [line for line in requests[30:] if line["due_s"] < until - 0.02]
    assert len(during) == pytest.approx(80, rel=0.3)
    for line in during:
        assert line["due_s"] + line["e2e_latency_ms"] / 1_000 == pytest.approx(until, abs=0.02)
    # Half of the requests were due in the stall, so the percentiles know of it.
    assert run.step["p90_e2e_latency_ms"] > 1_000


def test_the_three_ways_in_one_run() -> None:
    run = Run(
        Settings(delay=(0.01, 0.01), token=0.002, prefill=0.0001),
        workload(receivers={"answers": "both"}, baseline_share=0.5, senders={"count": 1}),
        2.0,
        ways=("message", "text_report", "full_context"),
    )
    found = run.found
    steps = {(step["way"], step["answering"]): step for step in found["steps"]}
    ways = ("message", "text_report", "full_context")
    assert [steps[way, False]["completed"] for way in ways] == [8, 4, 4]
    assert found["messages_per_s"] == {way: {"2": steps[way, False]["messages_per_s"]} for way in ways}
    message, report, context = (steps[way, True] for way in ways)
    sender, kept = message["mean_sender_positions"], message["mean_kept_positions"]
    assert kept == report["mean_kept_positions"] == -(-sender // 8)
    # Two round trips of sockets are a jump or two of the clock late at most.
    assert message["time_to_message_ms"]["p50"] == pytest.approx(10.0, abs=0.5)
    assert report["time_to_message_ms"]["p50"] == pytest.approx(2 * kept + 0.1 * report_words(run), abs=2.0)
    assert message["mean_itl_ms"] == pytest.approx(2.0, abs=0.1)
    assert (message["total_output_tokens"], report["total_output_tokens"]) == (8 * 4, 4 * (4 + kept))
    assert context["mean_kept_positions"] == sender
    assert (message["cached_share"], report["cached_share"], context["cached_share"]) == (1.0, 1.0, 0.0)
    assert message["mean_payload_bytes"] == 4 * kept
    assert message["grants"] == {"asked": 8}
    assert message["server"]["cacheback_message_seconds"]["stage=total"]["count"] == 8
    assert message["server"]["cacheback_message_seconds"]["stage=total"]["mean"] == pytest.approx(0.01, abs=0.001)
    assert (found["cache"]["verified"], found["cache"]["misses"]) == (True, 0)
    assert [line for line in run.lines if line["kind"] == "step"] == found["steps"]
    assert found["generator"]["requests"] == len(run.requests) == 32
    assert found["generator"]["cpu_ms_per_request"] > 0
    assert "secret" not in json.dumps(found)
    table = summary_table(found)
    assert table.row_count == 6
    assert next(iter(table.columns[5].cells)) == "10 / max 10"  # 8 requests have no p99


def report_words(run: Run) -> float:
    """Mean tokens of what asks for a report."""
    step = next(step for step in run.found["steps"] if (step["way"], step["answering"]) == ("text_report", False))
    return float(step["total_input_tokens"] / step["completed"] - step["mean_sender_positions"])


@pytest.mark.parametrize("encoding", ["token_ids", "text"])
def test_receivers_of_all_ways_read_prompts_that_are_not_in_the_cache(encoding: str) -> None:
    one = {"senders": {"count": 1}, "queries": {"count": 1}, "baseline_share": 1.0}
    chosen = workload(receivers={"answers": "on", "encoding": encoding}, **one)
    run = Run(Settings(radix=True), chosen, 2.0, ways=("message", "text_report", "full_context"))
    for step in run.found["steps"]:
        assert (step["completed"], step["receiver_cached_tokens"] < 4) == (8, True)
    assert all(line["receiver_cached_tokens"] < 6 for line in run.requests)
    assert run.found["cache"]["warm_full_contexts"] == 0


def test_a_second_run_finds_no_full_context_in_the_cache() -> None:
    stub = Stub(Settings(radix=True))
    runs = [Run(stub, workload(baseline_share=1.0), 2.0, ways=("message", "full_context")) for _ in range(2)]
    assert runs[0].found["workload_digest"] == runs[1].found["workload_digest"]
    for run in runs:
        cache = run.found["cache"]
        assert (cache["verified"], cache["warm_full_contexts"]) == (True, 0)


def test_full_contexts_in_the_cache_are_no_verified_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cb_loadtest.load.bench.secrets.token_hex", lambda _: "the same")
    stub = Stub(Settings(radix=True))
    chosen = workload(senders={"count": 1}, baseline_share=1.0)
    cache = [Run(stub, chosen, 2.0, ways=("message", "full_context")).found["cache"] for _ in range(2)][1]
    assert (cache["verified"], cache["misses"], cache["warm_full_contexts"]) == (False, 0, 8)


def test_the_servers_own_times_are_not_the_generators_lateness() -> None:
    run = Run(Settings(delay=(0.1, 0.1), concurrency=1), workload(requests=8), 2.0)
    assert run.step["server_engine_ms"]["p50"] == pytest.approx(100.0, abs=1.0)
    assert run.step["server_queue_ms"]["p50"] == pytest.approx(100.0, abs=2.0)
    assert run.step["sent_late_ms"]["max"] < 1.0
    assert {round(line["server_engine_ms"]) for line in run.requests} == {100}


@pytest.mark.parametrize(("policy", "problems"), [(None, 1), ("fixed", 0)])
def test_messages_that_were_granted_less_than_reports_have_are_a_problem(policy: str | None, problems: int) -> None:
    chosen = workload(senders={"positions": {"low": 64, "high": 64}}, receivers={"policy": policy})
    found = Run(Settings(room=6), chosen, 2.0, ways=("message", "text_report")).found
    assert len(found["problems"]) == problems
    assert all("6 positions and text reports 8" in line for line in found["problems"])


def test_a_server_that_does_not_tell_an_operators_secrets_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CB_SGLANG_API_KEYS", "key-a")
    found = Run(Settings(admin="key-admin"), workload(), 2.0).found
    assert [line.partition(" ")[0] for line in found["problems"]] == ["/server_info", "/metrics"]
    assert (found["cache"]["verified"], found["cache"]["misses"]) == (None, None)
    assert found["steps"][0]["verified_hits"] is None
    assert summary_table(found).caption is not None
    assert all(line.endswith("give the admin's key in CB_SGLANG_ADMIN_KEY") for line in found["problems"])
    monkeypatch.delenv("CB_SGLANG_API_KEYS")
    server, metrics = Run(Settings(admin="key-admin"), workload(), 2.0).found["problems"]
    assert server.endswith("not open to tenants")
    assert metrics.endswith("start the server with --enable-metrics")
    monkeypatch.setenv("CB_SGLANG_API_KEYS", "key-a")

    monkeypatch.setenv("CB_SGLANG_ADMIN_KEY", "key-admin")
    run = Run(Settings(admin="key-admin"), workload(), 2.0)
    assert (run.found["problems"], run.found["cache"]["verified"]) == ([], True)
    assert run.step["server"] is not None
    assert {entry["key"] for entry in run.stub.log} == {"key-a"}
    assert "key-admin" not in json.dumps([run.found, run.lines])


def test_text_messages_reach_receivers_as_text() -> None:
    step = Run(Settings(), workload(receivers={"answers": "on", "encoding": "text"}), 2.0).step
    assert (step["completed"], step["total_output_tokens"]) == (8, 32)
    assert step["mean_payload_bytes"] == pytest.approx(5 * step["mean_kept_positions"])


def test_equal_seeds_give_the_same_load_and_the_same_verified_hits() -> None:
    runs = [Run(Settings(), workload(), 3.0, seed=seed) for seed in (5, 5, 6)]
    asked = [sorted((line["index"], line["sender"], line["query"]) for line in run.requests) for run in runs]
    assert asked[0] == asked[1] != asked[2]
    digests = [run.found["workload_digest"] for run in runs]
    assert digests[0] == digests[1] != digests[2]
    assert [run.found["cache"]["verified_hits"] for run in runs] == [8, 8, 8]


def test_a_cold_cache_is_no_verified_run() -> None:
    cache = Run(Settings(forgetful=True), workload(), 2.0).found["cache"]
    assert (cache["verified"], cache["verified_hits"], cache["misses"]) == (False, 0, 8)
    assert cache["cold_positions_at_first"] > 0


def test_refused_requests_are_counted_by_code_and_are_no_goodput() -> None:
    run = Run(Settings(fail_every=4), workload(requests=20), 2.0)
    assert run.found["errors"] == {"503 server_overloaded": 5}
    assert (run.step["completed"], run.step["failed"], run.step["slo_attainment"]) == (15, 5, 0.75)
    assert sum(not line["success"] for line in run.requests) == 5


def test_a_request_that_takes_too_long_is_a_timeout_and_not_a_lost_server() -> None:
    run = Run(Settings(delay=(0.1, 0.1), stall_after=3, stall=60.0), workload(requests=80), 2.0, timeout=2.0)
    assert run.found["stopped"] is None
    assert run.step["errors"]["504 timeout"] == run.step["failed"] > 32
    assert run.step["completed"] + run.step["failed"] == 80


def test_seconds_bound_a_round() -> None:
    step = Run(Settings(delay=(1.0, 1.0)), workload(rounds=2), 3.0, seconds=9.5).step
    assert step["completed"] == 2 * 3 * 10
    assert step["duration"] == pytest.approx(20.0, rel=0.02)


def test_tenants_send_their_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CB_SGLANG_API_KEYS", "key-a, key-b")
    run = Run(Settings(), workload(tenants=2, requests=30), 2.0)
    assert {entry["key"] for entry in run.stub.log} == {"key-a", "key-b"}
    assert {tenant: figures["n"] > 0 for tenant, figures in run.step["tenants"].items()} == {"0": True, "1": True}
    assert "key-a" not in json.dumps([run.found, run.lines])
    monkeypatch.setenv("CB_SGLANG_API_KEYS", "key-a")
    with pytest.raises(InvalidRequestError, match="2 tenants"):
        Run(Settings(), workload(tenants=2), 2.0)


def test_chats_are_measured_beside_the_load_and_alone() -> None:
    chats = {"concurrency": 2, "max_new_tokens": 8}
    run = Run(Settings(token=0.005, delay=(0.05, 0.05)), workload(chats=chats, requests=12), 2.0)
    alone = run.found["chats"]["alone_itl_ms"]
    assert alone["n"] == 2 * 7
    assert alone["p50"] == pytest.approx(5.0, abs=0.2)
    # 12 requests of 50 ms, two at a time: 0.3 s, in which two chats get a token every 5 ms.
    assert run.step["chat_itl_ms"]["n"] == pytest.approx(120, abs=40)
    assert run.step["chat_itl_ms"]["p50"] == pytest.approx(5.0, abs=0.2)


def test_a_gap_of_a_chat_counts_whole_in_the_step_in_which_it_began() -> None:
    chosen = workload(chats={"concurrency": 1, "max_new_tokens": 8}, requests=4, baseline_share=0.5)
    run = Run(Settings(token=3.0, delay=(1.0, 1.0)), chosen, 1.0, ways=("message", "full_context"))
    # Messages from 0 to 4 s, contexts to 10 s; the tokens come at 3, 6 and 9 s, and the last gap is cut off.
    for step in run.found["steps"]:
        assert step["chat_itl_ms"]["n"] == 1
        assert step["chat_itl_ms"]["max"] == pytest.approx(3_000.0, abs=50.0)


def test_capacity_finds_the_knee_of_a_server_with_four_places() -> None:
    found = capacity(Settings(delay=(0.05, 0.05), concurrency=4))
    # Eight receivers take two turns of 50 ms; a ninth takes three.
    assert (found["knee"]["level"], found["knee"]["ended"]) == (8.0, "found")
    assert found["knee"]["p99_ms"] == pytest.approx(100.0, abs=2.0)
    model = found["service_model"]
    # The stub takes 50 ms a call, whatever is in it.
    assert model["fixed"] == pytest.approx(0.05, rel=0.02)
    assert model["batch_effect"]["16"] == pytest.approx(1 / 16, rel=0.02)
    assert model["max_relative_error"] < 0.05
    assert {point["ratio"] for point in found["curve"]} == {2.0, 4.0, 8.0, 16.0, 32.0}
    assert capacity_table(found).row_count == len(found["curve"]) > 0
    json.dumps(found, allow_nan=False)


def test_capacity_of_an_open_loop_is_the_rate_that_the_server_keeps_up_with() -> None:
    # One place that takes 200 ms serves 5 a second. In 80 s the backlog of a tenth more misses no objective of 8 s.
    settings = Settings(delay=(0.2, 0.2), concurrency=1)
    found = capacity(settings, mode="open", slo_ms=8_000.0, requests=1, seconds=20.0, max_seconds=6_000.0)
    assert 4.2 < found["knee"]["level"] < 5.4
    assert found["knee"]["ended"] == "found"
    for probe in found["probes"]:
        assert probe["requests"] == pytest.approx(80 * probe["level"], abs=16 + 0.3 * 80 * probe["level"])
        assert probe["pace"] < 0.95 or probe["level"] < 5.7


def test_a_probe_at_a_low_rate_waits_for_requests() -> None:
    found = capacity(Settings(delay=(0.05, 0.05)), mode="open", highest=0.1, seconds=1.0)
    assert (found["knee"]["level"], found["knee"]["ended"]) == (0.1, "the largest load allowed still holds")
    assert found["probes"][0]["requests"] > 3


def test_a_probe_of_an_open_loop_lasts_for_its_requests_within_a_tenth_of_the_search() -> None:
    found = [
        capacity(Settings(delay=(0.01, 0.01)), mode="open", highest=4.0, requests=n, seconds=1.0) for n in (40, 100_000)
    ]
    for probe in found[0]["probes"]:
        assert probe["requests"] == pytest.approx(min(40, 60 * probe["level"]), abs=20)
    assert found[1]["probes"][-1]["requests"] == pytest.approx(240, abs=50)


def test_senders_that_probes_did_not_find_are_a_problem() -> None:
    found = capacity(Settings(delay=(0.05, 0.05), forgetful=True), highest=1.0)
    assert [line.partition(" ")[0] for line in found["problems"]] == [str(found["probes"][0]["requests"])]
    assert capacity(Settings(delay=(0.05, 0.05)), highest=1.0)["problems"] == []


def test_receivers_of_every_probe_read_prompts_that_are_not_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []
    fresh = Bench.fresh
    monkeypatch.setattr(Bench, "fresh", lambda self, label: labels.append(label) or fresh(self, label))
    found = capacity(Settings(delay=(0.13, 0.13)), highest=1.0)
    assert len(found["probes"]) > 1  # a close thing, so the same load again
    assert len(set(labels)) == len(labels)


def test_capacity_runs_the_chats_of_its_workload() -> None:
    stub = Stub(Settings(delay=(0.05, 0.05), token=0.005))
    found = capacity(stub, workload={"chats": {"concurrency": 2, "max_new_tokens": 8}}, highest=2.0)
    assert found["chats"]["alone_itl_ms"]["n"] == 2 * 7
    for probe in found["probes"]:
        assert probe["chat_itl_ms"]["n"] > 10
        assert probe["chat_itl_ms"]["p99"] == pytest.approx(5.0, abs=0.5)
    assert sum(entry["kind"] == "stream" for entry in stub.log) > 2


def test_the_fit_reads_prompts_that_no_run_before_has_left_in_the_cache() -> None:
    stub = Stub(Settings(delay=(0.05, 0.05), radix=True))
    first, second = (capacity(stub, highest=1.0)["service_model"]["reader_per_position"] for _ in range(2))
    assert first == pytest.approx(1e-4, rel=0.3)
    assert second == pytest.approx(first, rel=0.3)


def test_capacity_that_is_out_of_time_keeps_what_it_found() -> None:
    found = capacity(Settings(delay=(0.05, 0.05)), max_seconds=2.0)
    assert found["knee"]["ended"] == "the 2 seconds are used up"
    assert found["knee"]["level"] is not None


def test_an_endless_p99_is_null(tmp_path: Path) -> None:
    found = capacity(Settings(fail_every=2))
    assert found["knee"]["level"] is None
    assert found["probes"][0]["p99_ms"] is None
    assert found["probes"][0]["failed"] == 12
