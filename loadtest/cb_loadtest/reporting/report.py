"""A load test as one page and its pictures: what was measured, where, with which commands."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from cb_loadtest.figure_style import DPI
from cb_loadtest.plots import answer_figure
from cb_loadtest.recall_report import Report, write_text
from cb_loadtest.reporting.figures import WAY_NAMES, capacity_figure, latency_figure, throughput_figure
from cb_loadtest.reporting.inputs import NEEDED, CapacitySummary, Chats, Provenance, RunSummary, Step, Times
from cb_loadtest.reporting.page import Html, code, facts, page, paragraph, picture, section, table

PAGE = "report.html"
_MAX_ROWS = 500
_ALIKE = 0.01
_TIMES = ("n", "mean", *NEEDED, "max")
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
                f"Time from the moment a request was due, for {_compared(self.run.steps)}; {_samples(self.run)}. "
                "Solid: median; dotted: 99th percentile; hollow: the maximum, where requests are too few for that.",
            ),
            *self._figure(
                "Throughput against load",
                "throughput.png",
                throughput_figure(self.run),
                "Messages, reports or read contexts a second, on the same server in the same run.",
            ),
            *self._capacity(),
            *self._accuracy(),
            *self._costs(),
            section("Steps", _steps_table(self.run.steps)),
            section("Times of the steps", _times_table(self.run.steps)),
            *self._chats(),
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
        if cache.misses is None:
            lines.append("Whether senders were found in the cache is not known: the server did not say its page size.")
        elif cache.misses:
            lines.append(f"Not every sender was found in the cache ({cache.misses} misses).")
        if cache.warm_full_contexts:
            lines.append(f"{cache.warm_full_contexts} full contexts were found in the cache, which should be cold.")
        done = Counter[str]()
        for step in self.run.steps:
            done[step.way] += step.completed
        lines += [f"No {WAY_NAMES.get(way, way)} was completed." for way, count in done.items() if not count]
        for count, what in (
            (sum(step.failed for step in self.run.steps), "failed"),
            (sum(step.cut_off for step in self.run.steps), "were cut off, and are in no figure"),
        ):
            if count:
                lines.append(f"{count} requests {what}; see the steps.")
        lines += self.run.problems
        if self.capacity is not None:
            if self.capacity.stopped:
                lines.append(f"The search for the capacity ended early: {self.capacity.stopped}.")
            lines += self.capacity.problems
        return [paragraph(line, kind="bad") for line in lines]

    def _capacity(self) -> list[Html]:
        found = self.capacity
        if found is None:
            return []
        unit = _LOAD_UNITS[found.mode]
        knee = "not even the smallest load" if found.knee.level is None else f"{found.knee.level:.4g} {unit}"
        kept_up = " and that is kept up with" if found.mode == "open" else ""
        caption = f"The search for the largest load whose p99 holds {found.slo_p99_ms:g} ms{kept_up}: {knee}."
        fewest = min((probe.requests for probe in found.probes), default=NEEDED["p99"])
        if fewest < NEEDED["p99"]:
            caption += f" Of fewer than {NEEDED['p99']} requests (here at least {fewest}) a p99 is the maximum."
        if found.chats is not None:
            caption += _chats_at_knee(found, found.chats)
        if found.curve:
            caption += (
                " Right: what the fitted costs give for other senders: receivers whose messages are made in time, and "
                "those whose messages are also read by the same engine, by ratio. Hollow: beyond the measured lengths."
            )
        return self._figure("Capacity", "capacity.png", capacity_figure(found), caption)

    def _costs(self) -> list[Html]:
        if self.capacity is None or self.capacity.service_model is None:
            return []
        cost, setting = self.capacity.service_model, self.capacity.curve_setting
        found = {
            "fixed, once a call": f"{_number(1e3 * cost.fixed)} ms",
            "each query row": f"{_number(1e6 * cost.per_row)} µs",
            "each query row and sender position": f"{_number(1e9 * cost.per_row_position)} ns",
        }
        if cost.reader_fixed is not None and cost.reader_per_position is not None:
            found["a receiver's prefill"] = (
                f"{_number(1e3 * cost.reader_fixed)} ms, and {_number(1e6 * cost.reader_per_position)} µs a position"
            )
        if cost.median_relative_error is not None and cost.max_relative_error is not None:
            errors = f"{cost.median_relative_error:.1%} in the median, {cost.max_relative_error:.1%} at most"
            found["the fit misses measured calls by"] = errors
        if setting is not None:
            found["the curve's times are multiplied by"] = f"{setting.calibration:.3g}" + (
                f" ({setting.uncalibrated})" if setting.uncalibrated else ", as measured at the knee"
            )
        for batch, share in cost.batch_effect.items():
            if batch != "1":
                found[f"a message among {batch} in one call"] = f"{share:.0%} of the time of one alone"
        return [section("What a message costs, fitted", facts(found))]

    def _chats(self) -> list[Html]:
        chats, steps = self.run.chats, [step for step in self.run.steps if step.chat_itl_ms.n]
        if chats is None and not steps:
            return []
        rows = [("no load", *_times(chats.alone_itl_ms))] if chats else []
        rows += [(f"{_way(step)}, {_load(step)}", *_times(step.chat_itl_ms)) for step in steps[:_MAX_ROWS]]
        note = paragraph(f"Inter-token latency in ms. Chats that failed: {_counts(chats.errors if chats else {})}")
        return [section("Chats beside the load", note, table(("beside", *_TIMES), rows))]

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


def _chats_at_knee(found: CapacitySummary, chats: Chats) -> str:
    """What became of the chats' latencies: alone, and in the worst probe of the load that held."""
    knee = [probe.chat_itl_ms for probe in found.probes if probe.level == found.knee.level and probe.chat_itl_ms.n]
    worst = max(knee, key=lambda times: times.percentile("p99")[0] or 0.0, default=Times())
    alone, loaded = (_percentile(times, "p99") for times in (chats.alone_itl_ms, worst))
    return f" Chats' inter-token latency (p99, ms): {alone} without load, {loaded} beside the largest that held."


def _samples(run: RunSummary) -> str:
    """How many requests stand behind the points, since a p99 of few is their maximum."""
    fewest: dict[str, int] = {}
    for step in run.steps:
        if step.completed:
            fewest[step.way] = min(step.completed, fewest.get(step.way, step.completed))
    return "requests behind a point: " + ", ".join(
        f"{WAY_NAMES.get(way, way)} at least {count}" for way, count in fewest.items()
    )


def _compared(steps: list[Step]) -> str:
    """The ways that were measured. Reports are as long as messages only where each level's are within 1 %."""
    ways = dict.fromkeys(step.way for step in steps)
    names = {way: f"{WAY_NAMES.get(way, way)}s" for way in ways}
    if {"message", "text_report"} <= ways.keys():
        messages, reports = (
            {(s.answering, s.level): s.mean_kept_positions for s in steps if s.way == way and s.completed}
            for way in ("message", "text_report")
        )
        pairs = [(reports[load], messages[load]) for load in reports.keys() & messages.keys()]
        apart = max((abs(report / message - 1) for report, message in pairs if message), default=None)
        if apart is not None:
            names["text_report"] += (
                " of as many tokens" if apart <= _ALIKE else f" (up to {apart:.0%} longer or shorter than messages)"
            )
    return ", ".join(names.values())


def _steps_table(steps: list[Step]) -> Html:
    headings = (
        "way",
        "load",
        "done",
        "failed",
        "cut off",
        "made/s",
        "goodput/s",
        "cached",
        "kept",
        "payload B",
        "cached at the receiver",
        "grants",
        "errors",
    )
    rows = [
        (
            _way(step),
            _load(step),
            step.completed,
            step.failed,
            step.cut_off,
            f"{step.messages_per_s:.3g}",
            f"{step.request_goodput:.3g}",
            "-" if step.cached_share is None else f"{step.cached_share:.1%}",
            _number(step.mean_kept_positions),
            _number(step.mean_payload_bytes),
            _number(step.receiver_cached_tokens),
            _counts(step.grants),
            _counts(step.errors),
        )
        for step in steps[:_MAX_ROWS]
    ]
    return table(headings, rows)


def _times_table(steps: list[Step]) -> Html:
    rows = [
        (_way(step), _load(step), what, *_times(times))
        for step in steps
        for what, times in (
            ("to the message", step.time_to_message_ms),
            ("to the end of the answer", step.tteoa_ms),
            ("in the server's queue", step.server_queue_ms),
            ("in the server's engine", step.server_engine_ms),
            ("sent late by the generator", step.sent_late_ms),
        )
        if times and times.n
    ]
    return table(("way", "load", "time in ms", *_TIMES), rows[:_MAX_ROWS])


def _times(times: Times) -> tuple[str, ...]:
    """The cells under _TIMES."""
    return (str(times.n), _number(times.mean), *(_percentile(times, name) for name in NEEDED), _number(times.max))


def _percentile(times: Times, name: str) -> str:
    value, is_maximum = times.percentile(name)
    return f"max {_number(value)}" if is_maximum and value is not None else _number(value)


def _way(step: Step) -> str:
    return WAY_NAMES.get(step.way, step.way) + (" + answer" if step.answering else "")


def _load(step: Step) -> str:
    return f"{step.level:g} {_LOAD_UNITS[step.mode]}"


def _origin(run: RunSummary) -> dict[str, object]:
    return {
        "finished": run.finished,
        "server": run.server,
        **_flat(run.server_info, "server "),
        **_flat(run.machine, "machine "),
        **{f"version of {name}": found for name, found in run.versions.items()},
        "cache": ", ".join(f"{name} {value}" for name, value in run.cache.model_dump(exclude_none=True).items()),
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
