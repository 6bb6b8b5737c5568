"""The report of a load test: what is read, what is drawn, and a page that holds everything and loads nothing."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import load_results
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from cb_loadtest.cli import app
from cb_loadtest.figure_style import COLOURS, levels_axis, values_axis
from cb_loadtest.load import capacity as load_capacity
from cb_loadtest.load import run as load_run
from cb_loadtest.reporting.figures import capacity_figure, latency_figure, throughput_figure
from cb_loadtest.reporting.inputs import (
    CapacitySummary,
    ReportInputError,
    RunSummary,
    read_capacity,
    read_run,
)
from cb_loadtest.reporting.page import page, paragraph, table
from cb_loadtest.reporting.report import draw_report

PNG = b"\x89PNG\r\n\x1a\n"


def run_of(**changes: Any) -> RunSummary:
    return RunSummary.model_validate(load_results.run_summary(**changes))


def capacity_of(**changes: Any) -> CapacitySummary:
    return CapacitySummary.model_validate(load_results.capacity_summary(**changes))


def recall_report() -> dict[str, Any]:
    rows = [
        {"source": source, "selector": selector, "size": size, "strict": strict, "seconds": seconds}
        | {"strict_low": strict - 0.1, "strict_high": strict + 0.1}
        for source, selector, size, strict, seconds in [
            ("message", "cacheback", "8", 0.7, 1.6),
            ("report", None, "8", 0.45, 24.0),
            ("full", None, None, 0.85, 6.0),
        ]
    ]
    meta = {"answers": rows, "cases": 32, "documents": 9, "differences": {}, "command": "cb-loadtest recall --answer"}
    return {"_meta": meta}


class Page(HTMLParser):
    """Collects what a browser would fetch or run, the text, and the tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_formats_are_those_that_the_commands_write() -> None:
    assert load_results.run_summary()["format"] == load_run.FORMAT
    assert load_results.capacity_summary()["format"] == load_capacity.FORMAT


def test_latency_lines_are_the_measured_percentiles() -> None:
    run = run_of()
    figure = latency_figure(run)
    assert figure is not None
    message, answer = figure.axes
    assert message.get_ylabel() == "time to message (ms)" and answer.get_ylabel() == "time to end of answer (ms)"
    solid, dotted, *_ = message.lines
    assert solid.get_color() == COLOURS[0] and (solid.get_linestyle(), dotted.get_linestyle()) == ("-", ":")
    steps = [step for step in run.steps if step.way == "message" and not step.answering]
    assert list(solid.get_xdata()) == [1.0, 4.0, 16.0]
    assert list(solid.get_ydata()) == [step.time_to_message_ms.p50 for step in steps]
    assert list(dotted.get_ydata()) == [step.time_to_message_ms.max for step in steps]  # of 40 requests
    assert len(message.lines) == len(answer.lines) == 9  # three ways, two percentiles and the maxima each
    assert message.get_yscale() == "log"


def test_a_p99_is_drawn_from_a_hundred_requests_on() -> None:
    for requests, shown, labels in ((99, "max", 4), (100, "p99", 3)):
        run = run_of(steps=[load_results.step("message", 1.0, requests=requests)])
        figure = latency_figure(run)
        assert figure is not None
        _, dotted, *hollow = figure.axes[0].lines
        assert list(dotted.get_ydata()) == [getattr(run.steps[0].time_to_message_ms, shown)]
        assert len(hollow) == (shown == "max") and len(figure.legends[0].get_texts()) == labels


def test_throughput_shows_every_way_in_its_colour() -> None:
    figure = throughput_figure(run_of())
    assert figure is not None and len(figure.axes) == 2
    assert [line.get_color() for line in figure.axes[0].lines] == list(COLOURS[:3])
    only_reports = run_of(steps=[load_results.step("text_report", 1.0), load_results.step("text_report", 2.0)])
    alone = throughput_figure(only_reports)
    assert alone is not None and [line.get_color() for line in alone.axes[0].lines] == [COLOURS[1]]


def test_capacity_shows_search_and_curve() -> None:
    found = capacity_of()
    figure = capacity_figure(found)
    assert figure is not None
    search, curve = figure.axes
    labels = [text.get_text() for text in search.get_legend().get_texts()]
    assert "knee: 12" in labels and "probe, over 1 % failed" in labels
    eight = next(line for line in curve.lines if line.get_label() == "read here, 8x")
    expected = [point.receivers_on_this_server for point in found.curve if point.ratio == 8]
    assert list(eight.get_ydata()) == expected and len(set(expected)) > 2
    searched_only = capacity_figure(capacity_of(curve=[], service_model=None))
    assert searched_only is not None and len(searched_only.axes) == 1
    assert capacity_figure(capacity_of(curve=[], probes=[])) is None


def test_a_load_that_fell_behind_was_not_held() -> None:
    probes = [{"level": 2.0, "p99_ms": 30.0, "requests": 100, "failed": 0, "pace": pace} for pace in (0.99, 0.5)]
    figure = capacity_figure(capacity_of(probes=probes))
    assert figure is not None
    counts = {str(line.get_label()): len(line.get_xdata()) for line in figure.axes[0].lines}
    assert counts["probe, objective held"] == counts["probe, fell behind"] == 1


def test_figures_without_data_are_left_out() -> None:
    run = run_of(steps=[])
    assert latency_figure(run) is None and throughput_figure(run) is None
    drawn = draw_report(run)
    assert drawn.pictures == {} and "Commands" in Page(drawn.html).text


def tick_boxes(figure: Figure) -> list[list[Any]]:
    """Boxes of the tick labels of every axis, as drawn."""
    figure.draw_without_rendering()
    boxes = []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            labels = [
                label
                for place, label in zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
                if low <= place <= high and label.get_text()
            ]
            boxes.append([label.get_window_extent() for label in labels])
    return boxes


@pytest.mark.parametrize("levels", [list(range(1, 65, 3)), [0.25, 16, 17, 18, 24]])
def test_tick_labels_never_overlap(levels: list[float]) -> None:
    probes = [{"level": level, "p99_ms": 30.0 * level, "requests": 9, "failed": 0} for level in levels]
    figures = [
        capacity_figure(capacity_of(probes=probes, slo_p99_ms=300.0)),
        latency_figure(run_of(steps=[load_results.step("message", level) for level in levels])),
    ]
    for figure in figures:
        assert figure is not None
        for boxes in tick_boxes(figure):
            assert len(boxes) >= 2
            assert not any(a.overlaps(b) for a, b in pairwise(boxes))


def test_axes_are_logarithmic_where_the_range_asks_for_it() -> None:
    axes = Figure().subplots()
    values_axis(axes, [1.0, 7.0])
    assert axes.get_yscale() == "linear" and axes.get_ylim()[0] == 0
    values_axis(axes, [1.0, 8.0])
    assert axes.get_yscale() == "log"
    other = Figure().subplots()
    values_axis(other, [0.0, 1_000.0])  # a logarithm has no 0
    levels_axis(other, [3.0])
    assert other.get_yscale() == other.get_xscale() == "linear"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the command made of all three inputs."""
    folder = tmp_path_factory.mktemp("report")
    inputs = {"run": load_results.run_summary(), "capacity": load_results.capacity_summary(), "recall": recall_report()}
    arguments = ["report", "--out", str(folder / "out")]
    for name, content in inputs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
        arguments += [f"--{name}", str(folder / f"{name}.json")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return folder / "out"


def test_page_holds_everything_and_loads_nothing(written: Path) -> None:
    names = ["latency.png", "throughput.png", "capacity.png", "accuracy.png"]
    assert {path.name for path in written.iterdir()} == {"report.html", *names}
    html, pictures = (written / "report.html").read_text(), [(written / name).read_bytes() for name in names]
    assert all(png.startswith(PNG) for png in pictures)
    found = Page(html)
    assert found.sources and all(source.startswith("data:image/png;base64,") for source in found.sources)
    inside = [base64.b64decode(source.partition(",")[2]) for source in found.sources]
    assert inside == pictures
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    assert not re.search(r"url\(|@import|https?:", re.sub(r"base64,[^\"]*", "", html))
    for said in (
        "cb-loadtest run --concurrency 1,4,16",
        "cb-loadtest capacity --slo-p99 2000",
        "cb-loadtest recall --answer",
        "a processor",
        "0.1.0",
        "cacheback_message_seconds stage=score",
        "12 receivers",
        "share 40",
    ):
        assert said in found.text


def test_what_went_wrong_is_said_first() -> None:
    run = run_of(
        steps=[load_results.step("message", 2.0, failed=7)],
        stopped="the server is gone",
        problems=["priming failed"],
        cache={"verified": False, "misses": 3},
    )
    text = Page(draw_report(run).html).text
    search = capacity_of(stopped="interrupted", problems=["the fit failed"])
    whole = Page(draw_report(run_of(), search).html).text
    assert "capacity ended early: interrupted" in whole and "the fit failed" in whole
    before = text[: text.index("Latency against load")]
    for said in ("the server is gone", "3 misses", "7 requests failed", "priming failed"):
        assert said in before
    assert "503 server_overloaded 7" in text


def rows_of(html: str, title: str) -> list[dict[str, str]]:
    """The rows of the table under ``title``, by their headings."""
    part = html[html.index(f"<h2>{title}</h2>") :].partition("</section>")[0]
    headings = re.findall("<th scope[^>]*>(.*?)</th>", part)
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", part)]
    return [dict(zip(headings, row, strict=True)) for row in rows if row]


TIMES = {"mean": 5.0, "max": 9.9, "p50": 5.0, "p90": 9.0, "p95": 9.5, "p99": 9.8}


def test_percentiles_of_too_few_samples_are_shown_as_their_maximum() -> None:
    for n, shown in ((9, 1), (10, 2), (20, 3), (100, 4)):
        step = load_results.step("message", 1.0) | {"time_to_message_ms": TIMES | {"n": n}}
        row = rows_of(draw_report(run_of(steps=[step])).html, "Times of the steps")[0]
        found = [row[name] for name in ("p50", "p90", "p95", "p99")]
        assert found == ["5", "9", "9.5", "9.8"][:shown] + ["max 9.9"] * (4 - shown)
        assert (row["time in ms"], row["n"]) == ("to the message", str(n))


def test_the_servers_queue_and_the_generators_lateness_have_their_own_names() -> None:
    step = load_results.step("message", 1.0)
    for late in ("queue_ms", "sent_late_ms"):
        step.pop(late, None)
    nothing = dict.fromkeys(TIMES) | {"n": 0}
    for late in ("queue_ms", "sent_late_ms"):
        given = step | {late: TIMES | {"n": 40, "p50": 1.25}, "server_queue_ms": TIMES | {"n": 40, "p50": 2.5}}
        rows = rows_of(draw_report(run_of(steps=[given | {"server_engine_ms": nothing}])).html, "Times of the steps")
        p50 = {row["time in ms"]: row["p50"] for row in rows}
        assert p50["sent late by the generator"] == "1.25" and p50["in the server&#x27;s queue"] == "2.5"
        assert not any("engine" in what for what in p50)


def test_an_interrupted_step_is_seen() -> None:
    cut = load_results.step("message", 16.0) | {"cut_off": 12, "receiver_cached_tokens": 33.0}
    html = draw_report(run_of(steps=[load_results.step("message", 1.0), cut])).html
    assert [row["cut off"] for row in rows_of(html, "Steps")] == ["0", "12"]
    assert [row["cached at the receiver"] for row in rows_of(html, "Steps")] == ["-", "33"]
    assert "12 requests were cut off" in html


@pytest.mark.parametrize(
    ("ways", "cache", "said"),
    [
        (["full_context"], {"verified": False, "misses": 0}, None),
        (["message"], {"verified": True, "misses": 0}, None),
        (["message"], {"verified": False, "misses": 2}, "(2 misses)"),
        (["message"], {"verified": None, "misses": None}, "page size"),
        (["message"], {"verified": True, "misses": 0, "warm_full_contexts": 3}, "3 full contexts were found"),
    ],
)
def test_the_cache_is_complained_of_only_with_a_reason(
    ways: list[str], cache: dict[str, Any], said: str | None
) -> None:
    html = draw_report(run_of(steps=[load_results.step(way, 1.0) for way in ways], cache=cache)).html
    complaints = re.findall('<p class="bad">(.*?)</p>', html)
    assert [said in complaint for complaint in complaints if said] == [True] * (said is not None)
    assert bool(complaints) == (said is not None)


def test_a_way_that_completed_nothing_is_named() -> None:
    steps = [load_results.step("message", 1.0), load_results.step("text_report", 1.0, requests=0)]
    assert "No text report was completed." in Page(draw_report(run_of(steps=steps)).html).text


@pytest.mark.parametrize(
    ("reports", "said"),
    [(129.0, "text reports of as many tokens"), (140.0, "text reports (up to 9% longer or shorter than messages)")],
)
def test_reports_are_as_long_as_messages_only_where_they_are(reports: float, said: str) -> None:
    steps = [load_results.step(way, level) for level in (1.0, 4.0) for way in ("message", "text_report")]
    steps[-1]["mean_kept_positions"] = reports
    steps.append(load_results.step("text_report", 16.0, requests=0))  # cut off: it kept nothing
    assert said in Page(draw_report(run_of(steps=steps)).html).text
    assert "text reports;" in Page(draw_report(run_of(steps=[steps[0], steps[3]])).html).text  # at different loads


def test_chats_are_shown_alone_and_under_load() -> None:
    loaded = load_results.step("message", 4.0) | {"chat_itl_ms": TIMES | {"n": 200, "p99": 80.0}}
    chats = {"alone_itl_ms": TIMES | {"n": 100}, "errors": {"503 server_overloaded": 2}}
    html = draw_report(run_of(steps=[loaded], chats=chats)).html
    rows = rows_of(html, "Chats beside the load")
    assert [(row["beside"], row["p99"]) for row in rows] == [("no load", "9.8"), ("message, 4 receivers", "80")]
    assert "503 server_overloaded 2" in html
    assert "Chats beside" not in draw_report(run_of()).html


def test_a_capacity_shows_its_chats_alone_and_at_the_knee() -> None:
    assert "inter-token" not in Page(draw_report(run_of(), capacity_of()).html).text
    chats = {"alone_itl_ms": TIMES | {"n": 100}, "errors": {}}
    found = load_results.capacity_summary(chats=chats)
    for probe in found["probes"]:
        probe["chat_itl_ms"] = TIMES | {"n": 200, "p99": 10.0 * probe["level"]}
    said = "(p99, ms): 9.8 without load, 120 beside the largest that held."
    assert said in Page(draw_report(run_of(), CapacitySummary.model_validate(found)).html).text


@pytest.mark.parametrize(
    ("mode", "said"), [("closed", "2000 ms: 12"), ("open", "2000 ms and that is kept up with: 12")]
)
def test_an_open_loop_is_also_kept_up_with(mode: str, said: str) -> None:
    assert said in Page(draw_report(run_of(), capacity_of(mode=mode)).html).text


def test_the_fitted_costs_are_shown_with_units() -> None:
    cost = {"fixed": 0.02, "per_row": 1e-4, "per_row_position": 3e-8, "reader_fixed": 0.01, "reader_per_position": 2e-4}
    fit = {"median_relative_error": 0.021, "max_relative_error": 0.5, "batch_effect": {"1": 1.0, "16": 0.25}}
    why = {"calibration": 1.0, "uncalibrated": "receivers answer"}
    found = capacity_of(service_model=cost | fit, curve_setting=why)
    text = Page(draw_report(run_of(), found).html).text
    for said in (
        "20 ms",
        "100 µs",
        "30 ns",
        "10 ms, and 200 µs a position",
        "2.1% in the median, 50.0% at most",
        "a message among 16 in one call25% of the time of one alone",
        "1 (receivers answer)",
    ):
        assert said in text
    assert "What a message costs" not in draw_report(run_of(), capacity_of(service_model=None)).html


def test_names_from_files_are_text_only() -> None:
    evil = "<script>alert('x')</script> $\\frac{$ & \"quoted\""
    run = run_of(workload={"name": evil, evil: evil}, server_info={"served_model_name": evil}, problems=[evil])
    run.steps = run.steps[:1]
    run.steps[0].way = evil
    found = Page(draw_report(run).html)
    assert "script" not in found.tags and evil in found.text
    assert "<" not in table(["<a>"], [["<b>"]]).markup.replace("<div", "").replace("<t", "").replace("</", "")
    assert "<i>" not in page("<i>", [paragraph("<i>")])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "format"),
        ({"slo_ms": -1}, "slo_ms"),
        ({"mode": "ajar"}, "mode"),
        ({"steps": [{}]}, r"steps\.0"),
        ({"steps": [load_results.step("message", 1.0) | {"messages_per_s": float("nan")}]}, "messages_per_s"),
        ({"steps": [load_results.step("message", 1.0) | {"level": 0}]}, "level"),
    ],
)
def test_files_that_are_no_run(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(load_results.run_summary(**change)))
    with pytest.raises(ReportInputError, match=said):
        read_run(path)


def test_files_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(ReportInputError, match="cannot be read"):
        read_run(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ReportInputError, match="cb-loadtest capacity"):
        read_capacity(tmp_path / "broken.json")


def test_command_says_which_file_it_wants(tmp_path: Path) -> None:
    path = tmp_path / "capacity.json"
    path.write_text(json.dumps(load_results.capacity_summary()))
    done = CliRunner().invoke(app, ["report", "--run", str(path), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1 and "cb-loadtest run" in done.output
    assert not (tmp_path / "out").exists()
