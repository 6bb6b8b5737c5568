"""The recall harness against a server in this process: what is asked, paired, resumed, and survives failures."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from rich.console import Console

from cb_loadtest import recall as recall_module
from cb_loadtest import recall_run
from cb_loadtest.cases import Case, Context, GoldSpan
from cb_loadtest.evidence import answers, reference_share
from cb_loadtest.recall import RecallError, RecallOptions, command_line, measure, without_credentials
from cb_loadtest.recall_journal import Journal, JournalError
from cb_loadtest.recall_plan import AnswerPlan, Plan, PlanError, Selector, Size, units
from cb_loadtest.recall_report import Report
from cb_loadtest.receiver import RECEIVER_PROMPT
from cb_sglang.client import APIConnectionError, CacheBack


def case(name: str, document: str, question: str, gold: str, answer: str | None = None) -> Case:
    """A case over ``document``, a prefix that makes the text, with the words ``gold`` in the middle of it."""
    words = [f"{document}{n}" for n in range(40)]
    text = " ".join([*words[:20], gold, *words[20:]])
    start = text.index(gold)
    return Case(
        id=name,
        contexts=(Context(id=document, text=text),),
        question=question,
        gold=(GoldSpan(start=start, end=start + len(gold)),),
        answer=((answer,),) if answer else (),
    )


ONE = case("one", "a", "Where did Ana climb ?", "Ana climb Everest", "Everest")
TWO = case("two", "b", "Who swam ?", "Ben swam", "Ben")
THREE = Case(**{**ONE.model_dump(), "id": "three", "question": "Anything else ?"})
CASES = [ONE, TWO, THREE]
CACHEBACK, RECENT, RANDOM = Selector("cacheback"), Selector("streaming_llm"), Selector("random")
EIGHT, FOUR = Size(ratio=8.0), Size(ratio=4.0)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[CacheBack]:
    with CacheBack("http://fake", transport=engine.transport) as client:
        yield client


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(recall_run.time, "sleep", slept.append)
    return slept


def options(tmp_path: Path, plan: Plan, **changes: Any) -> RecallOptions:
    return RecallOptions(plan=plan, cases=tmp_path / "cases.jsonl", out=tmp_path / "out" / "recall.json", **changes)


def run(client: CacheBack, tmp_path: Path, plan: Plan, cases: list[Case] | None = None, **changes: Any) -> Report:
    return measure(client, cases or CASES, options(tmp_path, plan, **changes), Console(quiet=True))


# --- what is measured


def test_recall_of_a_run(client: CacheBack, engine: FakeEngine, tmp_path: Path) -> None:
    report = run(client, tmp_path, Plan((CACHEBACK, RECENT), (EIGHT, Size(budget=30))))
    assert list(report) == ["cacheback", "streaming_llm", "_meta"]
    # 44, 43 and 44 positions: ratio 8 keeps 6 of them. "one": Ana and climb are in its query, Everest is not.
    cell = report["cacheback"]["8"]
    assert cell["gold_recall"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3) and cell["all_gold"] == 0.0
    assert (cell["n"], cell["documents"], cell["kept"]) == (3, 2, 6.0)
    assert cell["low"] <= cell["gold_recall"] <= cell["high"] and cell["low_by_case"] <= cell["gold_recall"]
    assert report["streaming_llm"]["8"]["gold_recall"] == 0.0
    # The last 29 positions begin in front of the gold words.
    assert (
        report["streaming_llm"]["budget:30"] | {"kept": 30.0, "all_gold": 1.0, "gold_recall": 1.0}
        == (report["streaming_llm"]["budget:30"])
    )
    meta = report["_meta"]
    assert meta["default_selector"] == "cacheback" and meta["query_free"] == ["streaming_llm"]
    assert (meta["model"], meta["cases"], meta["documents"], meta["positions"]) == ("fake", 3, 2, [43, 44])
    difference = meta["differences"]["streaming_llm"]["8"]["gold_recall"]
    assert difference["difference"] == pytest.approx(-cell["gold_recall"]) and difference["n"] == 3
    assert meta["failed"] == [] and meta["units"] == meta["units_measured_in_this_run"] == 12
    json.dumps(report, allow_nan=False)


def test_each_document_is_registered_once_and_each_case_asked_in_one_call(
    client: CacheBack, engine: FakeEngine, tmp_path: Path
) -> None:
    run(client, tmp_path, Plan((CACHEBACK, RECENT), (EIGHT, FOUR)))
    registered = [body for method, path, body in engine.requests if (method, path) == ("POST", "/v1/senders")]
    assert len([body for body in registered if "input_ids" in body]) == 2  # three cases over two documents
    asked = engine.calls("/messages")
    assert len(asked) == 3 and all(len(body["queries"]) == 4 for body in asked)
    assert asked[0]["queries"][0] == {"ratio": 8.0, "selector": "cacheback", "query": ONE.question}
    # "three" asks about the first document again, so it comes before "two".
    assert [body["queries"][0]["query"] for body in asked] == [ONE.question, THREE.question, TWO.question]
    assert engine.senders == {}  # nothing is left at the server


def test_senders_of_others_stay(client: CacheBack, engine: FakeEngine, tmp_path: Path) -> None:
    ids = client.tokenize(ONE.contexts[0].text)
    sender = client.create_sender(input_ids=ids)
    run(client, tmp_path, Plan((CACHEBACK,), (EIGHT,)))
    assert list(engine.senders) == [sender.id]


def test_random_draws_anew_for_every_case(client: CacheBack, engine: FakeEngine, tmp_path: Path) -> None:
    plan = Plan((RANDOM,), (EIGHT, FOUR), seed=5)
    first = run(client, tmp_path, plan)
    seeds = {
        query["query"]: query["selector_options"]["seed"] for b in engine.calls("/messages") for query in b["queries"]
    }
    assert len(set(seeds.values())) == 3
    assert run(client, tmp_path, plan)["random"] == first["random"]
    seen = {unit.query for unit in units(Plan((RANDOM,), (EIGHT,), seed=6), ONE)}
    assert seen.isdisjoint(unit.query for unit in units(plan, ONE))


def test_fan_in_pools_the_gold_of_all_contexts(client: CacheBack, tmp_path: Path) -> None:
    gold = (*ONE.gold, GoldSpan(context=1, start=TWO.gold[0].start, end=TWO.gold[0].end))
    both = Case(id="both", contexts=(ONE.contexts[0], TWO.contexts[0]), question="Ana swam ?", gold=gold)
    report = run(client, tmp_path, Plan((CACHEBACK, RECENT), (EIGHT,)), [both])
    assert report["cacheback"]["8"]["gold_recall"] == pytest.approx(2 / 5)  # Ana of three, swam of two
    assert report["cacheback"]["8"]["kept"] == 12.0 and report["_meta"]["positions"] == [87, 87]
    assert report["cacheback"]["8"]["low"] is None  # one document cluster: no interval


def test_wordings_and_ablation(client: CacheBack, engine: FakeEngine, tmp_path: Path) -> None:
    plan = Plan((CACHEBACK, RECENT), (EIGHT,), (None, "Q: {query}"), irrelevant="Which metal melts ?")
    report = run(client, tmp_path, plan)
    sent = Counter(
        (q["selector"], q.get("query_template"), q["query"]) for q in engine.calls("/messages")[0]["queries"]
    )
    assert sent == Counter(
        {
            ("cacheback", None, ONE.question): 1,
            ("cacheback", "Q: {query}", ONE.question): 1,
            ("cacheback", None, "Which metal melts ?"): 1,
            ("streaming_llm", None, ONE.question): 1,  # sees neither the query nor the wording
        }
    )
    meta = report["_meta"]
    assert meta["ablation"]["selectors"]["cacheback"]["cells"]["8"]["gold_recall"] == 0.0
    own = report["cacheback"]["8"]["gold_recall"]
    assert meta["ablation"]["selectors"]["cacheback"]["differences"]["8"]["gold_recall"]["difference"] == own
    assert [row["template"] for row in meta["wordings"]] == ["default", "Q: {query}"]
    again = meta["wordings"][1]["selectors"]["cacheback"]
    assert again["cells"]["8"]["gold_recall"] == own and not again["differences"]["8"]["gold_recall"]["clear"]


def test_answers(client: CacheBack, engine: FakeEngine, tmp_path: Path) -> None:
    answer = AnswerPlan((CACHEBACK, RECENT), (EIGHT,), 24, RECEIVER_PROMPT)
    report = run(client, tmp_path, Plan((CACHEBACK,), (EIGHT,), answer=answer), [ONE, TWO])
    rows = {(row["source"], row["selector"], row["size"]): row for row in report["_meta"]["answers"]}
    # "Everest" is not in the message for "one"; "Ben" is not in that for "two", whose query has only "swam".
    assert {key: row["strict"] for key, row in rows.items()} == {
        ("full", None, None): 1.0,
        ("nothing", None, None): 0.0,
        ("message", "cacheback", "8"): 0.0,
        ("message", "streaming_llm", "8"): 0.0,
        ("report", None, "8"): 0.0,
    }
    assert (
        rows["message", "cacheback", "8"]["given_tokens"] == 6.0 and rows["nothing", None, None]["given_tokens"] == 0.0
    )
    assert rows["full", None, None]["given_tokens"] == pytest.approx(43.5)
    assert all(row["n"] == 2 and row["seconds"] > 0 for row in rows.values())
    reports = [b["sampling_params"] for b in engine.calls("/generate") if b["sampling_params"].get("ignore_eos")]
    assert [params["max_new_tokens"] for params in reports] == [6, 6]  # as many tokens as the message keeps


def test_a_case_without_gold_counts_for_answers_only(client: CacheBack, tmp_path: Path) -> None:
    bare = Case(id="bare", contexts=ONE.contexts, question="Where ?", answer=(("Everest",),))
    answer = AnswerPlan((CACHEBACK,), (EIGHT,), 24, RECEIVER_PROMPT)
    report = run(client, tmp_path, Plan((CACHEBACK,), (EIGHT,), answer=answer), [bare, TWO])
    assert report["cacheback"]["8"]["n"] == 1 and report["_meta"]["cases_without_gold"] == 1
    assert all(row["n"] == 2 for row in report["_meta"]["answers"])


# --- failures


def test_an_unknown_selector_costs_only_itself(client: CacheBack, engine: FakeEngine, tmp_path: Path) -> None:
    report = run(client, tmp_path, Plan((CACHEBACK, Selector("h2o"), RECENT), (EIGHT, FOUR)))
    assert report["cacheback"]["8"]["n"] == report["streaming_llm"]["4"]["n"] == 3 and report["h2o"] == {}
    failed = report["_meta"]["failed"]
    assert Counter((f["case"], f["selector"], f["size"]) for f in failed) == Counter(
        (c.id, "h2o", size) for c in CASES for size in ("8", "4")
    )
    assert "unknown selector 'h2o'" in failed[0]["error"] and report["_meta"]["failed_count"] == 6


def test_a_failing_case_is_reported_and_the_rest_paired(client: CacheBack, engine: FakeEngine, tmp_path: Path) -> None:
    engine.broken_text = "b3"
    report = run(client, tmp_path, Plan((CACHEBACK, RECENT), (EIGHT,)))
    assert report["cacheback"]["8"]["n"] == 2
    assert {(f["case"], f["selector"]) for f in report["_meta"]["failed"]} == {
        ("two", "cacheback"),
        ("two", "streaming_llm"),
    }
    assert "boom" in report["_meta"]["failed"][0]["error"]
    assert report["_meta"]["differences"]["streaming_llm"]["8"]["gold_recall"]["n"] == 2


def test_a_message_against_the_budget_law_is_no_measurement(
    client: CacheBack, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.stingy = {"streaming_llm"}
    report = run(client, tmp_path, Plan((CACHEBACK, RECENT), (EIGHT,)))
    assert report["streaming_llm"] == {} and report["cacheback"]["8"]["n"] == 3
    assert "keeps 5 positions; the budget law says 6 of 44" in report["_meta"]["failed"][0]["error"]


def test_options_that_cannot_be_sent(client: CacheBack, tmp_path: Path) -> None:
    report = run(client, tmp_path, Plan((CACHEBACK, Selector.parse("cacheback+alpha=-1")), (EIGHT,)))
    assert report["cacheback"]["8"]["n"] == 3 and report["cacheback+alpha=-1"] == {}
    assert "selector_options.alpha" in report["_meta"]["failed"][0]["error"]


def test_a_busy_server_is_asked_again(
    client: CacheBack, engine: FakeEngine, tmp_path: Path, no_waiting: list[float]
) -> None:
    engine.busy = 3
    report = run(client, tmp_path, Plan((CACHEBACK,), (EIGHT,)))
    assert report["cacheback"]["8"]["n"] == 3 and no_waiting == [1.0] * 3
    engine.busy = 1_000
    with pytest.raises(RecallError, match="full"):
        run(client, tmp_path, Plan((CACHEBACK,), (EIGHT,)))
    assert len(no_waiting) == 3 + 3 * recall_run._BUSY_TRIES


def test_forgotten_senders_are_registered_again(client: CacheBack, engine: FakeEngine, tmp_path: Path) -> None:
    engine.forgetful = True
    report = run(client, tmp_path, Plan((CACHEBACK,), (EIGHT,)))
    assert report["cacheback"]["8"]["n"] == 3 and report["_meta"]["failed"] == []


def test_progress_reaches_its_end_whatever_fails(client: CacheBack, engine: FakeEngine, tmp_path: Path) -> None:
    plan = Plan((CACHEBACK, Selector("h2o"), Selector.parse("cacheback+alpha=99")), (EIGHT, FOUR))
    broken = Case(
        id="lost",
        contexts=(Context(id="x", text="\N{ZERO WIDTH SPACE}"),),
        question="?",
        gold=(GoldSpan(start=0, end=1),),
    )
    engine.broken_text = "b3"
    counted: list[int] = []
    with Journal(tmp_path / "j", "f", resume=False) as journal:
        runner = recall_run.Runner(client, plan, journal, on_unit=counted.append)
        runner.run([*CASES, broken])
    assert sum(counted) == recall_run.unit_count(plan, [*CASES, broken]) == 24


# --- going on


def test_a_killed_run_goes_on(client: CacheBack, engine: FakeEngine, tmp_path: Path) -> None:
    plan = Plan((CACHEBACK, RECENT), (EIGHT, FOUR))
    engine.dead_after = 1
    with pytest.raises(APIConnectionError):
        # With every connection refused the server is gone, which is not the fault of one case.
        run(client, tmp_path, plan)
    journal = tmp_path / "out" / "recall.units.jsonl"
    assert len(journal.read_text().splitlines()) == 1 + 4
    with journal.open("a") as stream:
        stream.write('{"key": "cut o')  # what a kill leaves
    engine.dead_after = None
    before = len(engine.calls("/messages"))
    resumed = run(client, tmp_path, plan, resume=True)
    assert len(engine.calls("/messages")) - before == 2  # the two cases that were missing
    assert (resumed["_meta"]["units"], resumed["_meta"]["units_measured_in_this_run"]) == (12, 8)
    fresh = run(client, tmp_path, plan)
    assert {name: fresh[name] for name in ("cacheback", "streaming_llm")} == {
        name: resumed[name] for name in ("cacheback", "streaming_llm")
    }
    # A finished run asks for nothing, and a larger plan only for what is new.
    before = len(engine.calls("/messages"))
    run(client, tmp_path, plan, resume=True)
    assert len(engine.calls("/messages")) == before
    larger = run(client, tmp_path, Plan((CACHEBACK, RECENT, RANDOM), (EIGHT, FOUR)), resume=True)
    assert [len(body["queries"]) for body in engine.calls("/messages")[before:]] == [2, 2, 2]
    assert larger["cacheback"] == fresh["cacheback"]


def test_failed_units_are_tried_again(client: CacheBack, engine: FakeEngine, tmp_path: Path) -> None:
    engine.broken_text = "b3"
    plan = Plan((CACHEBACK,), (EIGHT,))
    assert run(client, tmp_path, plan)["cacheback"]["8"]["n"] == 2
    engine.broken_text = ""
    assert run(client, tmp_path, plan, resume=True)["cacheback"]["8"]["n"] == 3


def test_a_journal_of_another_model_is_refused(client: CacheBack, engine: FakeEngine, tmp_path: Path) -> None:
    plan = Plan((CACHEBACK,), (EIGHT,))
    run(client, tmp_path, plan)
    engine.weights = "v2"
    with pytest.raises(JournalError, match="another model"):
        run(client, tmp_path, plan, resume=True)
    run(client, tmp_path, plan)  # without --resume it starts again
    run(client, tmp_path, plan, resume=True)


def test_a_changed_case_is_measured_again(client: CacheBack, engine: FakeEngine, tmp_path: Path) -> None:
    plan = Plan((CACHEBACK,), (EIGHT,))
    run(client, tmp_path, plan, [ONE])
    changed = case("one", "a", ONE.question, "Ana climb Lhotse")
    report = run(client, tmp_path, plan, [changed], resume=True)
    assert report["_meta"]["units_measured_in_this_run"] == 1
    run(client, tmp_path, plan, [Case(**ONE.model_dump() | {"demo": True})], resume=True)
    assert len(engine.calls("/messages")) == 2  # "demo" changes nothing


def test_journal(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "units.jsonl"
    with Journal(path, "f", resume=True) as journal:  # nothing there yet
        journal.add("k", {"n": 1})
        with pytest.raises(JournalError, match="another run writes"):
            Journal(path, "f", resume=True)
    with Journal(path, "f", resume=True) as journal:
        assert journal.records == {"k": {"n": 1}}
        journal.add("l", {"n": 2})
    good = path.read_bytes()
    assert len(good.splitlines()) == 3
    for broken, said in [
        (good + b"{}\n", "line 4 is broken"),
        (good + b"no json\n", "line 4 is broken"),
        (b"text\n", "no journal"),
        (b'{"format": "other"}\n', "no journal"),
        (good + b"x" * (1 << 20), "line 4 is too long"),
    ]:
        path.write_bytes(broken)
        with pytest.raises(JournalError, match=said):
            Journal(path, "f", resume=True)
        assert path.read_bytes() == broken  # a file that is refused is left as it was
    path.write_bytes(good[:-3])
    with Journal(path, "f", resume=True) as journal:
        assert list(journal.records) == ["k"]
    with Journal(path, "f", resume=False) as journal:
        assert journal.records == {}
    assert len(path.read_bytes().splitlines()) == 1


# --- the plan


@pytest.mark.parametrize(
    "text, name, fields",
    [
        ("cacheback", "cacheback", {}),
        (" cacheback+sink_free ", "cacheback", {"sink_free": True}),
        (
            "cacheback+sink_free=false+alpha=1e+1+order=3",
            "cacheback",
            {"alpha": 10.0, "order": 3.0, "sink_free": False},
        ),
        ("random+seed=7", "random", {"seed": 7}),
        ("my.module:rule", "my.module:rule", {}),
    ],
)
def test_selector_with_options(text: str, name: str, fields: dict[str, Any]) -> None:
    selector = Selector.parse(text)
    assert (selector.name, dict(selector.options)) == (name, fields)
    assert Selector.parse(selector.label) == selector


@pytest.mark.parametrize(
    "text",
    ["", "_meta", "a b", "cacheback+dose=2", "cacheback+alpha=x", "cacheback+alpha=nan", "cacheback+seed=1.5",
     "cacheback+sink_free=1", "cacheback+alpha=1+alpha=2"],
)  # fmt: skip
def test_unusable_selectors(text: str) -> None:
    with pytest.raises(PlanError):
        Selector.parse(text)


@pytest.mark.parametrize(
    "ratio, budget", [(0.5, None), (math.nan, None), (math.inf, None), (None, 0), (None, None), (2, 2)]
)
def test_unusable_sizes(ratio: float | None, budget: int | None) -> None:
    with pytest.raises(PlanError):
        Size(ratio=ratio, budget=budget)


def test_sizes() -> None:
    assert (Size(ratio=8.0).label, Size(ratio=2.5).label, Size(budget=64).label) == ("8", "2.5", "budget:64")
    assert (Size(ratio=8.0).positions(2001), Size(budget=64).positions(2001), Size(budget=64).positions(9)) == (
        251,
        64,
        9,
    )


def test_unusable_plans() -> None:
    for wrong in (
        lambda: Plan((), (EIGHT,)),
        lambda: Plan((CACHEBACK,), ()),
        lambda: Plan((CACHEBACK, CACHEBACK), (EIGHT,)),
        lambda: Plan((CACHEBACK,), (EIGHT, Size(ratio=8))),
        lambda: Plan((CACHEBACK,), (EIGHT,), (None, None)),
        lambda: Plan((CACHEBACK,), tuple(Size(budget=n + 1) for n in range(60_000))),
    ):
        with pytest.raises(PlanError):
            wrong()


def test_the_default_selector_is_compared_with_wherever_it_stands() -> None:
    assert Plan((RECENT, CACHEBACK), (EIGHT,)).default == CACHEBACK
    assert Plan((RECENT, Selector.parse("cacheback+sink_free")), (EIGHT,)).default == RECENT


def test_units_are_distinct() -> None:
    plan = Plan(
        (CACHEBACK, Selector.parse("cacheback+sink_free"), RANDOM),
        (EIGHT, FOUR),
        (None, "Q: {query}"),
        irrelevant="Hm ?",
    )
    made = [unit for one in CASES for unit in units(plan, one)]
    assert len({unit.key for unit in made}) == len(made) == 3 * (2 * 3 * 2 + 2)


# --- reading answers


@pytest.mark.parametrize(
    "reply, groups, share",
    [
        ("It was THE Merrimac.", [["merrimac"]], 1.0),
        ("about 4000 persons", [["4,000"]], 1.0),
        ("about 4,000 persons", [["4000"]], 1.0),
        ("in 1943", [["4"]], 0.0),
        ("14,000 of them", [["4,000"]], 0.0),
        ("3.75 metres", [["75"]], 0.0),
        ("they deserted", [["desert"]], 1.0),
        ("an important man", [["ant"]], 0.0),
        ("nothing", [["no"]], 0.0),
        ("No.", [["no"]], 1.0),
        ("Charli D’Amelio", [["charli d'amelio"]], 1.0),
        ("Montréal, in Québec", [["Montreal"], ["quebec"], ["Ottawa"]], 2 / 3),
        ("a $ sign", [["$"]], 1.0),
        ("", [["x"]], 0.0),
        ("Mercury", [["quicksilver", "mercury"], ["iron"]], 0.5),
        ("B", [["(B)"]], 1.0),
        (" (B) because (A) is wrong", [["(B)"]], 1.0),
        ("(A), not (B)", [["(B)"]], 0.0),
        ("The correct answer is B", [["(B)"]], 1.0),
        ("A man said so", [["(A)"]], 0.0),
        ("B. Ben", [["(B)"]], 1.0),
    ],
)
def test_reference_share(reply: str, groups: list[list[str]], share: float) -> None:
    assert reference_share(reply, groups) == pytest.approx(share)
    assert answers(reply, groups) == (share == 1.0)


def test_reference_share_without_groups() -> None:
    with pytest.raises(ValueError, match="no reference"):
        reference_share("x", [])


# --- odds and ends


def test_no_password_in_the_report(tmp_path: Path) -> None:
    url = "http://ada:secret@host:30000"
    assert without_credentials(url) == "http://host:30000"
    for argv in (["recall", "--base-url", url], ["recall", f"--base-url={url}"]):
        shown = command_line(options(tmp_path, Plan((CACHEBACK,), (EIGHT,)), base_url=url, argv=argv))
        assert "secret" not in shown and "host:30000" in shown
    assert recall_module.OWN_SERVER not in shown
