"""The figures of a load-test report: latency and throughput against load, the knee, the capacity curve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from cb_loadtest.figure_style import COLOURS, GREY, MARKERS, counts_axis, levels_axis, plain, tidy, values_axis
from cb_loadtest.load.search import LEAST_PACE
from cb_loadtest.reporting.inputs import NEEDED, CapacitySummary, CurvePoint, RunSummary, Step, Times

WAY_NAMES = {"message": "message", "text_report": "text report", "full_context": "full context"}
_LOADS = {"closed": "receivers at the same time", "open": "requests a second"}
_PERCENTILES: tuple[tuple[str, Literal["-", ":"]], ...] = (("p50", "-"), ("p99", ":"))
_WIDTH = 4.9  # of a panel, in inches
_INSIDE = "white"  # of hollow markers


def latency_figure(run: RunSummary) -> Figure | None:
    """Median and 99th percentile against the load: time to the message, and to the end of the answer.

    Hollow markers: the maximum, where there are too few requests for the percentile.
    """
    panels: list[tuple[str, Sequence[Step], Callable[[Step], Times | None]]] = [
        ("time to message (ms)", [s for s in run.steps if not s.answering], lambda s: s.time_to_message_ms),
        ("time to end of answer (ms)", [s for s in run.steps if s.answering], lambda s: s.tteoa_ms),
    ]
    panels = [panel for panel in panels if any(step.completed for step in panel[1])]
    if not panels:
        return None
    figure, all_axes = _panels(len(panels))
    for axes, (label, steps, times) in zip(all_axes, panels, strict=True):
        drawn: list[float] = []
        for way, found in _by_way(steps):
            for name, style in _PERCENTILES:
                ends = [(step.level, *t.percentile(name)) for step in found if (t := times(step))]
                points = [(level, value) for level, value, _ in ends if value]
                _line(axes, points, way, style)
                few = [(level, value) for level, value, is_maximum in ends if value and is_maximum]
                if few:
                    _hollow(axes, few, *_look(way))
                drawn += [value for _, value in points]
        _finish(axes, run.mode, steps, label, drawn)
    ways = _legend_of_ways(run.steps)
    styles = [Line2D([], [], color=GREY, linestyle=style, label=name) for name, style in _PERCENTILES]
    if any(line.get_markerfacecolor() == _INSIDE for axes in all_axes for line in axes.lines):
        label = f"maximum of fewer than {NEEDED['p99']}"
        styles.append(Line2D([], [], color=GREY, linestyle="", marker="o", markerfacecolor=_INSIDE, label=label))
    figure.legend(handles=[*ways, *styles], loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def throughput_figure(run: RunSummary) -> Figure | None:
    """Messages, reports or contexts a second against the load; answering receivers in a panel of their own."""
    panels = [
        (title, [step for step in run.steps if step.answering == answering and step.completed])
        for title, answering in (("receivers that do not answer", False), ("receivers that answer", True))
    ]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        return None
    figure, all_axes = _panels(len(panels))
    for axes, (title, steps) in zip(all_axes, panels, strict=True):
        drawn: list[float] = []
        for way, found in _by_way(steps):
            points = [(step.level, step.messages_per_s) for step in found]
            _line(axes, points, way, "-")
            drawn += [value for _, value in points]
        axes.set_title(title, fontsize=10)
        _finish(axes, run.mode, steps, "messages, reports or contexts a second", drawn)
    handles = _legend_of_ways(run.steps)
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def capacity_figure(found: CapacitySummary) -> Figure | None:
    """The search for the knee, and the receivers that one sender serves against its length and the ratio."""
    drawers: list[Callable[[Axes], None]] = []
    if found.probes:
        drawers.append(lambda axes: _draw_probes(axes, found))
    if found.curve:
        drawers.append(lambda axes: _draw_curve(axes, found.curve))
    if not drawers:
        return None
    figure, all_axes = _panels(len(drawers), height=4.9)
    for axes, draw in zip(all_axes, drawers, strict=True):
        draw(axes)
    return figure


def _draw_probes(axes: Axes, found: CapacitySummary) -> None:
    points = [(probe.level, probe.p99_ms, probe.pace) for probe in found.probes if probe.p99_ms is not None]
    failing = [probe.level for probe in found.probes if probe.p99_ms is None]
    top = 1.5 * max([found.slo_p99_ms, *(p99 for _, p99, _ in points)])
    held = [(level, p99) for level, p99, pace in points if p99 <= found.slo_p99_ms and pace >= LEAST_PACE]
    slow = [(level, p99) for level, p99, pace in points if p99 <= found.slo_p99_ms and pace < LEAST_PACE]
    missed = [(level, p99) for level, p99, _ in points if p99 > found.slo_p99_ms]
    axes.plot(*_columns(held), "o", color=COLOURS[0], label="probe, objective held")
    axes.plot(*_columns(missed), "x", color=COLOURS[1], label="probe, objective missed")
    if slow:
        axes.plot(*_columns(slow), "s", color=COLOURS[1], label="probe, fell behind")
    if failing:
        axes.plot(failing, [top] * len(failing), "^", color=COLOURS[1], label="probe, over 1 % failed")
    axes.axhline(found.slo_p99_ms, color=GREY, linestyle="--", linewidth=1, label=f"objective: {found.slo_p99_ms:g} ms")
    if found.knee.level is not None:
        axes.axvline(found.knee.level, color=COLOURS[2], linewidth=1, label=f"knee: {found.knee.level:.4g}")
    values = [found.slo_p99_ms, *(p99 for _, p99, _ in points), *([top] if failing else [])]
    values_axis(axes, values)
    levels_axis(axes, [probe.level for probe in found.probes])
    axes.set_xlabel(_LOADS[found.mode])
    axes.set_ylabel("p99 of a request (ms)")
    tidy(axes)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False, fontsize=9)


def _draw_curve(axes: Axes, curve: Sequence[CurvePoint]) -> None:
    """Hollow markers are beyond the measured lengths. 0 has a place on the axis: nobody is served there."""
    shortest = min(point.ratio for point in curve)
    messages = sorted((point for point in curve if point.ratio == shortest), key=lambda point: point.positions)
    _curve_line(axes, messages, [p.receivers for p in messages], "messages only", "#000000", "*", "--")
    for number, ratio in enumerate(sorted({point.ratio for point in curve})):
        points = sorted((point for point in curve if point.ratio == ratio), key=lambda point: point.positions)
        counts = [point.receivers_on_this_server for point in points]
        colour, marker = COLOURS[number % (len(COLOURS) - 1)], MARKERS[number % len(MARKERS)]
        _curve_line(axes, points, counts, f"read here, {ratio:g}x", colour, marker, "-")
    counts_axis(axes, max(max(point.receivers, point.receivers_on_this_server) for point in curve))
    levels_axis(axes, [point.positions for point in curve])
    axes.set_xlabel("sender length (positions)")
    axes.set_ylabel("receivers of one sender within the objective")
    tidy(axes)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False, fontsize=9)


def _curve_line(
    axes: Axes, points: Sequence[CurvePoint], counts: Sequence[int], label: str, colour: str, marker: str, style: str
) -> None:
    x = [point.positions for point in points]
    axes.plot(x, counts, color=colour, linestyle=style, linewidth=1.4, marker=marker, markersize=5, label=label)
    beyond = [(point.positions, count) for point, count in zip(points, counts, strict=True) if point.extrapolated]
    _hollow(axes, beyond, colour, marker)


def _panels(count: int, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH * max(count, 1.3), height), layout=ConstrainedLayoutEngine(wspace=0.06))
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _by_way(steps: Sequence[Step]) -> Iterable[tuple[str, list[Step]]]:
    for way in _ways(steps):
        yield way, sorted((step for step in steps if step.way == way), key=lambda step: step.level)


def _ways(steps: Sequence[Step]) -> list[str]:
    """The known ways first and always in the same order, so that a way has the same colour in all figures."""
    found = {step.way for step in steps}
    return [*(way for way in WAY_NAMES if way in found), *sorted(found - WAY_NAMES.keys())]


def _look(way: str) -> tuple[str, str]:
    number = list(WAY_NAMES).index(way) if way in WAY_NAMES else len(WAY_NAMES)
    return COLOURS[number], MARKERS[number]


def _line(axes: Axes, points: Sequence[tuple[float, float]], way: str, style: str) -> None:
    colour, marker = _look(way)
    axes.plot(*_columns(points), color=colour, marker=marker, linestyle=style, linewidth=1.5, markersize=5)


def _hollow(axes: Axes, points: Sequence[tuple[float, float]], colour: str, marker: str) -> None:
    axes.plot(*_columns(points), marker, color=colour, markersize=5, markerfacecolor=_INSIDE)


def _legend_of_ways(steps: Sequence[Step]) -> list[Line2D]:
    return [
        Line2D([], [], color=_look(way)[0], marker=_look(way)[1], markersize=5, label=plain(WAY_NAMES.get(way, way)))
        for way in _ways(steps)
    ]


def _finish(axes: Axes, mode: str, steps: Sequence[Step], label: str, values: Sequence[float]) -> None:
    values_axis(axes, values)
    levels_axis(axes, [step.level for step in steps])
    axes.set_xlabel(_LOADS[mode])
    axes.set_ylabel(label)
    tidy(axes)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
