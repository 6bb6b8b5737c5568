"""Predictions and simulations as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cb_loadtest.planning.predict import Prediction
from cb_loadtest.planning.scenario import Outcome, Scenario


def prediction_view(found: Prediction, model: str, engine: str) -> RenderableType:
    """The ways side by side, then what fits and where another way is better."""
    setting = found.setting
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title=f"{model} on {engine}: {setting.receivers} receivers, {setting.senders} sender(s) of "
        f"{setting.sender_length:,} positions, ratio {setting.ratio:g} ({setting.kept:,} kept)",
        title_justify="left",
    )
    table.add_column("way", no_wrap=True)
    for heading in ("delivered", "TTEOA", "made/s", "answers/s", "positions", "fit"):
        table.add_column(heading, justify="right", no_wrap=True)
    for way in found.ways:
        table.add_row(
            way.name + (" *" if way.window_overshoot else ""),
            duration(way.delivery),
            duration(way.answer),
            "-" if way.messages_per_s is None else f"{way.messages_per_s:,.3g}",
            f"{way.answers_per_s:,.3g}",
            f"{way.positions:,}",
            f"{way.receivers_that_fit:,}",
            style="bold" if way.name == found.best else None,
        )
    lines = [f"* {way.name}: {way.window_overshoot}" for way in found.ways if way.window_overshoot]
    return Group(table, Text("\n".join([*lines, *_facts(found)])))


def _facts(found: Prediction) -> list[str]:
    setting = found.setting
    return [
        f"KV pool: {found.pool_positions:,} positions; {found.senders_that_fit} whole senders, "
        f"{found.senders_beside_receivers} beside these receivers' messages. (fit: receivers in a pool of their own.)",
        _better(
            "Reading the full context",
            found.full_below_length,
            lambda length: f"for senders of up to {length:,.0f} positions",
        ),
        _better("Shipping the full KV", found.kv_above_link, lambda link: f"over links from {link / 1e9:,.3g} GB/s")
        + f" This link has {setting.link / 1e9:g} GB/s.",
        _better("A text report", found.text_below_tokens, lambda tokens: f"up to {tokens:,.0f} tokens"),
        "The sender's own prefill is not counted: it has read its context. Nothing overlaps; times are of the last "
        "receiver.",
    ]


def _better(what: str, bound: float | None, where: Callable[[float], str]) -> str:
    return f"{what} ends sooner {where(bound)}." if bound is not None else f"{what} never ends sooner here."


def duration(seconds: float) -> str:
    """Three digits with a unit, whatever the size."""
    if seconds >= 1_000:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1_000 * seconds:.3g} ms"


def simulation_view(found: Sequence[tuple[Scenario, Outcome]], model: str, engine: str) -> RenderableType:
    """One row a run: how fast, how much was kept, what was refused and what had to be read again."""
    first = found[0][0]
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title=f"{model} on {first.servers} servers of {engine}: {first.senders} senders of about "
        f"{first.sender_length:,} positions, ratio {first.ratio:g}, {first.seconds:g} s simulated, seed {first.seed}",
        title_justify="left",
    )
    for heading in ("agents", "policy", "msg/s", "msg p50", "p99", "TTEOA p99", "kept", "refused", "rebuilt"):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    lines = []
    for scenario, outcome in found:
        refused = sum(outcome.refused.values())
        median = outcome.kept.percentile(50)
        table.add_row(
            f"{scenario.agents:,}",
            outcome.policy,
            f"{outcome.messages_per_s:,.3g}",
            *map(_time, (outcome.message.percentile(50), outcome.message.percentile(99))),
            _time(outcome.answer.percentile(99)),
            "-" if median is None else f"{100 * median:.0f} %",
            f"{100 * refused / max(1, outcome.requests):.2g} %",
            f"{outcome.rebuilds:,}",
        )
        lines.append(
            f"{scenario.agents:,} {outcome.policy}: granted by {_counts(outcome.grants)}; refused by "
            f"{_counts(outcome.refused)}; {outcome.evictions:,} evictions"
            + ("" if outcome.complete else "; ended early by --max-requests")
        )
    return Group(table, Text("\n".join([*lines, "kept: median of granted / asked positions."])))


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(found.items())) or "nothing"
