"""How the demo looks: results in, rich renderables out. Evidence has colour and brackets, for logs without colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from cb_loadtest.evidence import Chars, Segment

OPEN, CLOSE = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One query of the demo, as it is written to the JSON file. Times are the client's wall clock, in seconds.

    kept, total:         positions in the message, and of the sender.
    evidence_recall:     share of the evidence's tokens that the message keeps.
    seconds_text_report: decoding ``text_report_tokens`` tokens of a report from the same sender, measured once
                         a sender in the same run.
    answer_has_reference, answer_with_nothing_has_reference: whether a reference answer occurs in it.
    """

    query: str
    kept: int
    total: int
    evidence_recall: float
    seconds_message: float
    seconds_text_report: float
    text_report_tokens: int
    case: str
    document: str
    sender: str
    ratio: float
    spans: list[Chars]
    cached_positions: int
    answer: str
    answer_has_reference: bool
    answer_with_nothing: str
    answer_with_nothing_has_reference: bool
    reference: str

    @property
    def speedup(self) -> float:
        return self.seconds_text_report / self.seconds_message


@dataclass(frozen=True, slots=True)
class Shown:
    """What is shown of a query beyond its entry: the kept spans, and the evidence with the kept part marked."""

    spans: list[tuple[Chars, list[Segment]]]
    evidence: list[list[Segment]]


def marked(segments: Sequence[Segment], *, on: str, off: str = "") -> Text:
    """Segments as one line of text, the marked ones bracketed and in style ``on``."""
    line = Text()
    for text, mark in segments:
        plain = " ".join(text.split("\n"))
        if mark:  # a token brings the space before its word along; it reads better outside
            word = plain.lstrip()
            line.append(plain[: len(plain) - len(word)])
            line.append(f"{OPEN}{word}{CLOSE}", style=on)
        else:
            line.append(plain, style=off)
    return line


def query_view(entry: Entry, shown: Shown, number: int, count: int) -> RenderableType:
    """Everything about one query."""
    facts = Text.assemble(
        (f"{entry.kept} of {entry.total} positions", "bold"),
        f" kept in {len(entry.spans)} spans, ",
        (f"{entry.evidence_recall:.0%} of the evidence", "bold green" if entry.evidence_recall >= 0.5 else "bold red"),
        " among them; message in ",
        (f"{entry.seconds_message:.2f} s", "bold"),
        f", a text report of {entry.text_report_tokens} tokens in ",
        (f"{entry.seconds_text_report:.1f} s", "bold"),
        f" ({entry.speedup:.0f} times as long)",
    )
    spans = _grid("dim", justify="right")
    for (start, stop), segments in shown.spans:
        spans.add_row(f"{start}-{stop - 1}", marked(segments, on="bold green"))
    evidence = _grid("bold")
    for segments in shown.evidence:
        evidence.add_row("evidence", marked(segments, on="bold green", off="red"))
    replies = _grid("bold")
    replies.add_row("from the message", answer_view(entry.answer, entry.answer_has_reference))
    replies.add_row("with nothing", answer_view(entry.answer_with_nothing, entry.answer_with_nothing_has_reference))
    replies.add_row("reference answer", Text(entry.reference))
    title = Text(f"{number}/{count}  {entry.query}", style="bold cyan")
    below = (1, 0, 0, 0)
    return Group(
        Rule(style="dim"), title, facts, Padding(evidence, below), Padding(spans, below), Padding(replies, (1, 0))
    )


def _grid(label_style: str, *, justify: Literal["left", "right"] = "left") -> Table:
    """Labels and texts in two columns."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify=justify, style=label_style, no_wrap=True)
    grid.add_column()
    return grid


def answer_view(answer: str, right: bool) -> Text:
    verdict = (" (holds the reference answer)", "green") if right else (" (does not hold it)", "yellow")
    return Text.assemble(answer or "(nothing)", verdict)


def summary_view(entries: Sequence[Entry]) -> RenderableType:
    """The table at the end."""
    table = Table(title="CacheBack messages", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("query", no_wrap=True)
    for name in ("kept", "evidence", "message", "report", "speedup"):
        table.add_column(name, justify="right")
    for entry in entries:
        table.add_row(
            entry.case,
            f"{entry.kept}/{entry.total}",
            f"{entry.evidence_recall:.0%}",
            f"{entry.seconds_message:.2f} s",
            f"{entry.seconds_text_report:.1f} s",
            f"{entry.speedup:.0f}",
        )
    message, report = mean([e.seconds_message for e in entries]), mean([e.seconds_text_report for e in entries])
    recall = mean([e.evidence_recall for e in entries])
    table.add_section()
    table.add_row(
        "mean", "", f"{recall:.0%}", f"{message:.2f} s", f"{report:.1f} s", f"{report / message:.0f}", style="bold"
    )
    right = sum(e.answer_has_reference for e in entries)
    alone = sum(e.answer_with_nothing_has_reference for e in entries)
    note = Text(
        f"Reference answer in the reply: {right} of {len(entries)} from the messages, {alone} with nothing. The "
        "embedded model is a small base model, so look at the evidence kept, not at its answers. The text report "
        "was timed once a sender, in this run, at as many tokens as the message keeps positions.",
        style="dim",
    )
    return Group(table, note)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
