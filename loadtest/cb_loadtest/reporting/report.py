"""A load test as one page and its pictures: what was measured, where, with which commands."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from cb_loadtest.figure_style import DPI
from cb_loadtest.plots import answer_figure
from cb_loadtest.recall_report import Report, write_text
from cb_loadtest.reporting.figures import WAY_NAMES, capacity_figure, latency_figure, throughput_figure
from cb_loadtest.reporting.inputs import CapacitySummary, Provenance, RunSummary, Step
from cb_loadtest.reporting.page import Html, code, facts, page, paragraph, picture, section, table

PAGE = "report.html"
_MAX_ROWS = 500
_LOAD_UNITS = {"closed": "receivers", "open": "requests/s"}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A page and its pictures by file name."""

    html: str
    pictures: dict[str, bytes]


def draw_report(run: RunSummary, capacity: CapacitySummary | None = None, recall: Report | None = None) -> Drawn:
    """Everything that the inputs have something for; a figure without data is left out."""
    return _Builder(run, capacity, recall).build()


def write_report(drawn: Drawn, folder: Path) -> list[Path]:
    """``report.html`` and the pictures next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, png in drawn.pictures.items():
        path = folder / name
        path.write_bytes(png)
        written.append(path)
    write_text(folder / PAGE, drawn.html)
    return [folder / PAGE, *written]


@dataclass
class _Builder:
    run: RunSummary
    capacity: CapacitySummary | None
    recall: Report | None
    pictures: dict[str, bytes] = field(default_factory=dict)

    def build(self) -> Drawn:
        model = self.run.server_info.get("served_model_name", "unknown model")
        parts = [
            *self._warnings(),
            *self._figure(
                "Latency against load",
                "latency.png",
                latency_figure(self.run),
                "Time from the moment a request was due, for messages, text reports of as many tokens, and the full "
                f"context; {_samples(self.run)}. Solid: median; dotted: 99th percentile.",
            ),
            *self._figure(
                "Throughput against load",
                "throughput.png",
                throughput_figure(self.run),
                "Messages, reports or read contexts a second, on the same server in the same run.",
            ),
            *self._capacity(),
            *self._accuracy(),
            section("Steps", _steps_table(self.run.steps)),
            *self._server_times(),
            *self._origins(),
        ]
        return Drawn(page(f"Load test: {model}, workload {self.run.workload.get('name', '')}", parts), self.pictures)

    def _figure(self, title: str, name: str, figure: Figure | None, caption: str) -> list[Html]:
        if figure is None:
            return []
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=DPI)
        self.pictures[name] = stream.getvalue()
        return [section(title, picture(self.pictures[name], alt=title, caption=caption))]

    def _warnings(self) -> list[Html]:
        cache = self.run.cache
        lines = [f"The run ended early: {self.run.stopped}."] if self.run.stopped else []
        if not cache.get("verified"):
            lines.append(f"Not every sender was found in the cache ({cache.get('misses', '?')} misses).")
        failed = sum(step.failed for step in self.run.steps)
        if failed:
            lines.append(f"{failed} requests failed; see the steps.")
        return [paragraph(line, kind="bad") for line in [*lines, *self.run.problems]]

    def _capacity(self) -> list[Html]:
        found = self.capacity
        if found is None:
            return []
        unit = _LOAD_UNITS[found.mode]
        knee = "not even the smallest load" if found.knee.level is None else f"{found.knee.level:.4g} {unit}"
        caption = f"The search for the largest load whose p99 holds {found.slo_p99_ms:g} ms: {knee}."
        if found.curve:
            caption += (
                " Right: what the fitted costs give for other senders: receivers whose messages are made in time, and "
                "those whose messages are also read by the same engine, by ratio. Hollow: beyond the measured lengths."
            )
        return self._figure("Capacity", "capacity.png", capacity_figure(found), caption)

    def _accuracy(self) -> list[Html]:
        if self.recall is None:
            return []
        caption = "Recall harness: strict accuracy of a receiver's answers against the time to the end of the answer."
        return self._figure("Accuracy against time", "accuracy.png", answer_figure(self.recall), caption)

    def _server_times(self) -> list[Html]:
        rows = []
        for step in self.run.steps:
            for metric, by_labels in (step.server or {}).items():
                if isinstance(by_labels, Mapping):
                    load = f"{step.level:g}{' + answer' if step.answering else ''}"
                    rows += [(f"{metric} {labels}", load, _moved(value)) for labels, value in by_labels.items()]
        if not rows:
            return []
        note = [paragraph(f"{len(rows) - _MAX_ROWS} more are left out.")] if len(rows) > _MAX_ROWS else []
        return [
            section("The server's own figures", table(("metric", "load", "value"), sorted(rows)[:_MAX_ROWS]), *note)
        ]

    def _origins(self) -> list[Html]:
        sources: list[Provenance] = [self.run]
        if self.capacity is not None:
            sources.append(self.capacity)
        commands = [source.command for source in sources if source.command]
        if self.recall is not None:
            commands.append(str(self.recall["_meta"].get("command", "cb-loadtest recall")))
        return [
            section("Commands", code("\n".join(commands))),
            section("Where it was measured", facts(_origin(self.run))),
            section("Workload", facts({**_flat(self.run.workload), "seed": self.run.seed})),
        ]


def _samples(run: RunSummary) -> str:
    """How many requests stand behind the points, since a p99 of few is their maximum."""
    fewest: dict[str, int] = {}
    for step in run.steps:
        fewest[step.way] = min(step.completed, fewest.get(step.way, step.completed))
    return "requests behind a point: " + ", ".join(
        f"{WAY_NAMES.get(way, way)} at least {count}" for way, count in fewest.items()
    )


def _steps_table(steps: list[Step]) -> Html:
    headings = (
        "way",
        "load",
        "done",
        "failed",
        "made/s",
        "goodput/s",
        "message p50 ms",
        "p99",
        "TTEOA p50 ms",
        "p99",
        "queue p99",
        "cached",
        "kept",
        "payload B",
        "chat ITL p50 ms",
        "p99",
        "grants",
        "errors",
    )
    rows = []
    for step in steps[:_MAX_ROWS]:
        message, answer, chat = step.time_to_message_ms, step.tteoa_ms, step.chat_itl_ms
        rows.append(
            (
                WAY_NAMES.get(step.way, step.way) + (" + answer" if step.answering else ""),
                f"{step.level:g} {_LOAD_UNITS[step.mode]}",
                step.completed,
                step.failed,
                f"{step.messages_per_s:.3g}",
                f"{step.request_goodput:.3g}",
                _number(message.p50),
                _number(message.p99),
                _number(answer.p50 if answer else None),
                _number(answer.p99 if answer else None),
                _number(step.queue_ms.p99),
                "-" if step.cached_share is None else f"{step.cached_share:.1%}",
                _number(step.mean_kept_positions),
                _number(step.mean_payload_bytes),
                _number(chat.p50),
                _number(chat.p99),
                _counts(step.grants),
                _counts(step.errors),
            )
        )
    return table(headings, rows)


def _origin(run: RunSummary) -> dict[str, object]:
    return {
        "finished": run.finished,
        "server": run.server,
        **_flat(run.server_info, "server "),
        **_flat(run.machine, "machine "),
        **{f"version of {name}": found for name, found in run.versions.items()},
        "cache": ", ".join(f"{name} {value}" for name, value in run.cache.items()),
        "load generator": ", ".join(f"{name} {value}" for name, value in run.generator.items()),
        "objective of a request": f"{run.slo_ms:g} ms",
    }


def _flat(found: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    made: dict[str, object] = {}
    for name, value in found.items():
        if isinstance(value, Mapping):
            made.update(_flat(value, f"{prefix}{name}."))
        else:
            made[f"{prefix}{name}"] = value
    return made


def _moved(value: object) -> str:
    """A counter's growth, or a histogram's mean and count."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_moved(number)}" for name, number in value.items())
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items())) or "-"
