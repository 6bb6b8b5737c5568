"""The command line of the recall harness and what it writes: JSON, tables, Markdown, plots."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from matplotlib.figure import Figure
from rich.console import Console
from test_recall import CASES, ONE, TWO
from typer.testing import CliRunner, Result

from cb_loadtest import recall
from cb_loadtest.cases import Case
from cb_loadtest.cli import app
from cb_loadtest.plots import answer_figure, recall_figure
from cb_loadtest.recall_report import ReportError, read_report
from cb_loadtest.recall_tables import BEGIN, END, MarkerError, terminal_view, write_markdown
from cb_sglang.client import CacheBack

SMALL = ["--selectors", "cacheback,streaming_llm", "--ratios", "4,8"]
PNG = b"\x89PNG\r\n\x1a\n"


def write_cases(path: Path, cases: list[Case]) -> Path:
    rows = []
    for case in cases:
        row = case.model_dump(exclude_none=True)
        row["contexts"] = [{"id": context["id"], "text": context["text"]} for context in row["contexts"]]
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows))
    return path


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()

    @contextmanager
    def ready(base_url: str | None, log: Path, console: Console, **options: Any) -> Iterator[CacheBack]:
        with CacheBack("http://fake", transport=engine.transport) as client:
            yield client

    monkeypatch.setattr(recall, "ready_client", ready)
    return engine


def cli(tmp_path: Path, *arguments: str) -> Result:
    cases = write_cases(tmp_path / "cases.jsonl", CASES)
    out = tmp_path / "build" / "recall.json"
    return CliRunner().invoke(app, ["recall", "--cases", str(cases), "--out", str(out), *arguments])


def test_recall_command(engine: FakeEngine, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "table.md"
    result = cli(tmp_path, *SMALL, "--ablation", "--answer", "--markdown", str(page))
    assert result.exit_code == 0, result.output
    report = read_report(tmp_path / "build" / "recall.json")
    assert list(report) == ["cacheback", "streaming_llm", "_meta"] and list(report["cacheback"]) == ["4", "8"]
    assert {"gold_recall", "all_gold", "n", "low", "high"} <= set(report["cacheback"]["8"])
    assert report["_meta"]["server"] == recall.OWN_SERVER
    for name in ("recall.png", "recall-answers.png"):
        assert (tmp_path / "build" / name).read_bytes().startswith(PNG)
    text = page.read_text()
    for part in (
        "### Gold-token recall, %",
        "| cacheback | yes | 39 [",
        "| streaming_llm | no | 0 [0, 0]",
        "difference to cacheback in points",
        "### Own query minus irrelevant query, points",
        "| text report |  | 8x |",
    ):
        assert part in text, part
    assert re.search(r"\| streaming_llm \| \*\*-39 \[", text)  # an interval that leaves out 0 is bold
    # The same page from the JSON alone.
    again = tmp_path / "again.md"
    shown = CliRunner().invoke(
        app,
        ["table", str(tmp_path / "build" / "recall.json"), "--markdown", str(again), "--plots", str(tmp_path / "p")],
    )
    assert shown.exit_code == 0 and again.read_text() == text and (tmp_path / "p.png").read_bytes().startswith(PNG)
    assert "Gold-token recall" in shown.output


def test_budgets_replace_the_default_ratios(engine: FakeEngine, tmp_path: Path) -> None:
    result = cli(tmp_path, "--selectors", "cacheback", "--budgets", "4,16", "--no-plots")
    assert result.exit_code == 0, result.output
    report = read_report(tmp_path / "build" / "recall.json")
    assert list(report["cacheback"]) == ["budget:4", "budget:16"]
    assert not list((tmp_path / "build").glob("*.png"))
    assert "16 pos." in result.output


def test_failures_are_shown_and_not_fatal(engine: FakeEngine, tmp_path: Path) -> None:
    result = cli(tmp_path, "--selectors", "cacheback,h2o", "--ratios", "8", "--no-plots")
    assert result.exit_code == 0
    assert "3 failures" in result.output and "unknown selector 'h2o'" in result.output.replace("\n", " ")


def test_a_run_that_measures_nothing_fails(engine: FakeEngine, tmp_path: Path) -> None:
    result = cli(tmp_path, "--selectors", "h2o", "--ratios", "8")
    assert result.exit_code == 1 and "nothing could be measured" in result.output
    assert not (tmp_path / "build" / "recall.json").exists()


@pytest.mark.parametrize("raised, code", [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_interrupted_run_can_go_on(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int
) -> None:
    handle, calls = engine.handle, []

    def interrupted(request: Any) -> Any:
        calls.append(request.url.path)
        if calls[-1].endswith("/messages") and sum(path.endswith("/messages") for path in calls) == 2:
            raise raised
        return handle(request)

    monkeypatch.setattr(engine, "handle", interrupted)
    result = cli(tmp_path, *SMALL)
    assert result.exit_code == code, result.output
    if code == 130:
        assert "--resume" in result.output and "Traceback" not in result.output
    assert not (tmp_path / "build" / "recall.json").exists() and engine.senders == {}
    result = cli(tmp_path, *SMALL, "--resume")
    assert result.exit_code == 0, result.output
    meta = read_report(tmp_path / "build" / "recall.json")["_meta"]
    assert (meta["units"], meta["units_measured_in_this_run"]) == (12, 8)


def test_a_server_that_is_gone(engine: FakeEngine, tmp_path: Path) -> None:
    engine.dead_after = 1
    result = cli(tmp_path, *SMALL)
    assert result.exit_code == 1 and "cannot be reached" in result.output and "--resume" in result.output


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--ratios", "0.5"], "between 1 and"),
        (["--ratios", "8,,4"], "empty item"),
        (["--ratios", "x"], "must be numbers"),
        (["--budgets", "1.5"], "whole numbers"),
        (["--selectors", "cacheback+dose=1"], "unknown option"),
        (["--selectors", "cacheback,cacheback"], "given twice"),
        (["--query-template", "no place"], "{query}"),
        (["--answer", "--receiver-prompt", "no place"], "{query}"),
        (["--limit", "0"], "limit"),
        (["--seed", "-1"], "seed"),
    ],
)
def test_unusable_arguments(engine: FakeEngine, tmp_path: Path, arguments: list[str], said: str) -> None:
    result = cli(tmp_path, *arguments)
    assert result.exit_code == 2 and said in re.sub(r"[\s│]+", " ", result.output)
    assert engine.requests == []


def test_missing_cases(engine: FakeEngine, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["recall", "--cases", str(tmp_path / "none"), "--out", str(tmp_path / "o.json")])
    assert result.exit_code == 1 and "is not a file" in result.output
    answers_only = write_cases(tmp_path / "bare.jsonl", [Case(**ONE.model_dump() | {"gold": ()})])
    result = CliRunner().invoke(app, ["recall", "--cases", str(answers_only), "--out", str(tmp_path / "o.json")])
    assert result.exit_code == 2 and "no case has gold spans" in re.sub(r"[\s│]+", " ", result.output)


def test_convert_commands(tmp_path: Path) -> None:
    row = {"_id": "r", "question": "?", "answer": "A", "context": "Text.", **{f"choice_{c}": c for c in "ABCD"}}
    source = tmp_path / "data.json"
    source.write_text(json.dumps([row]))
    result = CliRunner().invoke(app, ["convert", "longbench-v2", str(source), str(tmp_path / "lb.jsonl")])
    assert result.exit_code == 0 and "1 cases, 1 documents, 0 gold spans" in result.output
    arguments = ["convert", "fanoutqa", str(source), str(tmp_path / "f.jsonl"), "--evidence", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and "is not FanOutQA's dev set" in result.output.replace("\n", " ")


# --- Markdown


def report_of(engine: FakeEngine, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    result = cli(tmp_path, "--no-plots", *SMALL, *arguments)
    assert result.exit_code == 0, result.output
    return read_report(tmp_path / "build" / "recall.json")


def test_markdown_between_marks(engine: FakeEngine, tmp_path: Path) -> None:
    report = report_of(engine, tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{BEGIN}\nstale\n{END}\n\nThe end.\n")
    write_markdown(page, report)
    once = page.read_text()
    assert once.startswith(f"# Title\n\n{BEGIN}\n") and once.endswith(f"{END}\n\nThe end.\n") and "stale" not in once
    assert "| cacheback |" in once
    write_markdown(page, report)
    assert page.read_text() == once
    for broken in (BEGIN, f"{END} {BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"):
        page.write_text(broken)
        with pytest.raises(MarkerError):
            write_markdown(page, report)
        assert page.read_text() == broken


def test_markdown_tables_are_well_formed(engine: FakeEngine, tmp_path: Path) -> None:
    report = report_of(engine, tmp_path, "--query-template", "default", "--query-template", "a | b\n{query}")
    page = tmp_path / "page.md"
    write_markdown(page, report)
    blocks = [block for block in page.read_text().split("\n\n") if block.startswith("|")]
    assert len(blocks) == 5
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    assert r"a \| b\n{query}" in page.read_text()


def test_terminal_view_fits_a_narrow_terminal(engine: FakeEngine, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(terminal_view(report_of(engine, tmp_path)))
    text = console.export_text()
    assert "streaming_llm" in text and max(map(len, text.splitlines())) <= 80


def test_other_files_are_no_report(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for content in ("{", "[]", "{}", '{"_meta": null}', '{"_meta": {}}'):
        path.write_text(content)
        with pytest.raises(ReportError):
            read_report(path)
    with pytest.raises(ReportError):
        read_report(tmp_path / "none")


# --- plots


def lines_of(figure: Figure) -> list[list[str]]:
    return [[line.get_label() for line in axes.get_lines()] for axes in figure.axes]  # type: ignore[misc]


def test_recall_figure(engine: FakeEngine, tmp_path: Path) -> None:
    report = report_of(engine, tmp_path)
    figure = recall_figure(report, ["4", "8"], "ratio")
    assert figure is not None and lines_of(figure) == [["cacheback"], ["cacheback", "streaming_llm"]]
    own = figure.axes[0].get_lines()[0]
    assert list(own.get_xdata()) == [4.0, 8.0]
    assert list(own.get_ydata()) == [100 * report["cacheback"][size]["gold_recall"] for size in ("4", "8")]
    assert [len(axes.collections) for axes in figure.axes] == [1, 1]  # a band for each selector of the panel
    assert figure.axes[0].get_xlabel() == "ratio" and figure.axes[0].get_ylabel() == "gold-token recall (%)"
    assert recall_figure(report, [], "ratio") is None and answer_figure(report) is None


def test_answer_figure(engine: FakeEngine, tmp_path: Path) -> None:
    figure = answer_figure(report_of(engine, tmp_path, "--answer", "--answer-ratios", "4,8"))
    assert figure is not None
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "full context (prefix cached)",
        "nothing",
        "message, cacheback",
        "text report",
    ]
    assert [text.get_text() for text in figure.axes[0].texts] == ["4x", "8x", "4x", "8x"]


def test_one_case_has_no_bands(engine: FakeEngine, tmp_path: Path) -> None:
    cases = write_cases(tmp_path / "one.jsonl", [TWO])
    out = tmp_path / "one.json"
    result = CliRunner().invoke(app, ["recall", "--cases", str(cases), "--out", str(out), *SMALL])
    assert result.exit_code == 0, result.output
    figure = recall_figure(read_report(out), ["4", "8"], "ratio")
    assert figure is not None and [len(axes.collections) for axes in figure.axes] == [0, 0]
