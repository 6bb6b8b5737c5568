"""The demo: real documents as senders, questions as receivers, messages instead of reports.

    python -m cb_loadtest.demo                      # starts a server with the embedded model, and stops it
    python -m cb_loadtest.demo --base-url http://127.0.0.1:30000

For every question: what the message keeps, how much of the evidence that is, an answer from it and an answer
from nothing, and its time beside that of a text report of as many tokens, decoded in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from cb_loadtest.cases import Case, CaseError, default_cases_path, load_cases
from cb_loadtest.demo_view import Entry, Shown, query_view, summary_view
from cb_loadtest.documents import register_text
from cb_loadtest.evidence import AlignmentError, Chars, TokenText, answers, evidence_recall
from cb_loadtest.local_server import exit_on_terminate, ready_client
from cb_loadtest.receiver import reply
from cb_loadtest.served import ServerDiedError
from cb_sglang.budget import MAX_RATIO
from cb_sglang.client import CacheBack, Message, Sender
from cb_sglang.errors import CacheBackError

RATIO = 8.0
REPORT_PROMPT = "\n\nReport of the most important facts above, for a colleague:"


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A document as a sender: its tokens, where they stand in its text, and the cases that ask about it."""

    name: str
    sender: Sender
    ids: list[int]
    tokens: TokenText
    cases: list[Case]


def demo_cases(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """The demo's cases by the document they ask about. Raises DemoError when there are none to show."""
    grouped: dict[str, list[Case]] = {}
    for case in cases:
        if case.demo and len(case.contexts) == 1 and case.gold:
            grouped.setdefault(case.contexts[0].id, []).append(case)
    if not grouped:
        raise DemoError('no case with "demo": true, one context and gold spans')
    return grouped


def register(client: CacheBack, name: str, cases: Sequence[Case]) -> Registered:
    """Make the document of ``cases`` a sender, by token ids, so that every position's text is known."""
    document = register_text(client, cases[0].contexts[0].text)
    return Registered(name, document.sender, document.ids, document.tokens, list(cases))


def ask(client: CacheBack, document: Registered, query: str, ratio: float) -> tuple[Message, float]:
    """One message for one query, and the seconds it took over HTTP."""
    started = time.perf_counter()
    (message,) = client.messages(document.sender, [query], ratio=ratio, encoding="token_ids")
    return message, time.perf_counter() - started


def time_report(client: CacheBack, document: Registered, tokens: int) -> float:
    """Seconds to decode a text report of ``tokens`` tokens from the sender, whose prefix is in the cache."""
    prompt = document.ids + client.tokenize(REPORT_PROMPT, add_special_tokens=False)
    report = client.generate(input_ids=prompt, max_new_tokens=tokens, ignore_eos=True)
    if len(report.output_ids) != tokens:
        raise DemoError(f"the report has {len(report.output_ids)} tokens, not {tokens}; its time says nothing")
    return report.seconds


def gold_chars(case: Case) -> list[Chars]:
    return [(span.start, span.end) for span in case.gold]


def make_entry(
    document: Registered,
    case: Case,
    message: Message,
    *,
    ratio: float,
    seconds_message: float,
    seconds_text_report: float,
    text_report_tokens: int,
    replies: tuple[str, str],
) -> Entry:
    """What was measured for one query; ``replies`` are from the message and with nothing."""
    from_message, from_nothing = replies
    return Entry(
        query=case.question,
        kept=len(message.positions),
        total=message.sender_positions,
        evidence_recall=evidence_recall(message.positions, document.tokens.tokens_over(gold_chars(case))),
        seconds_message=seconds_message,
        seconds_text_report=seconds_text_report,
        text_report_tokens=text_report_tokens,
        case=case.id,
        document=document.name,
        sender=message.sender,
        ratio=ratio,
        spans=message.spans,
        cached_positions=message.cached_positions,
        answer=from_message,
        answer_has_reference=answers(from_message, case.answer),
        answer_with_nothing=from_nothing,
        answer_with_nothing_has_reference=answers(from_nothing, case.answer),
        reference="; ".join(group[0] for group in case.answer),
    )


def make_shown(document: Registered, case: Case, message: Message) -> Shown:
    """The readable side of one message."""
    gold = gold_chars(case)
    tokens = document.tokens
    return Shown(
        spans=[(span, tokens.span_segments(span, gold)) for span in message.spans],
        evidence=[tokens.evidence_segments(one, message.positions) for one in gold],
    )


def run_document(
    client: CacheBack, document: Registered, ratio: float, progress: Callable[[str], None]
) -> Iterator[tuple[Entry, Shown]]:
    """Ask a sender all its questions; the text report is timed once, after the messages."""
    progress(f"{document.name}: {len(document.cases)} messages")
    made = [ask(client, document, case.question, ratio) for case in document.cases]
    length = max(len(message.positions) for message, _ in made)
    progress(f"{document.name}: a text report of {length} tokens, token by token, to compare")
    report = time_report(client, document, length)
    for case, (message, seconds) in zip(document.cases, made, strict=True):
        progress(f"{document.name}: answers")
        if message.token_ids is None:
            raise DemoError("the server sent a message without token ids, although they were asked for")
        given: tuple[list[int], list[int]] = (message.token_ids, [])
        from_message, from_nothing = (reply(client, ids, case.question).text.strip() for ids in given)
        entry = make_entry(
            document,
            case,
            message,
            ratio=ratio,
            seconds_message=seconds,
            seconds_text_report=report,
            text_report_tokens=length,
            replies=(from_message, from_nothing),
        )
        yield entry, make_shown(document, case, message)


def run(client: CacheBack, cases: Sequence[Case], ratio: float, console: Console) -> list[Entry]:
    """The whole demo against a server that is ready; prints as it goes."""
    grouped = demo_cases(cases)
    count = sum(len(group) for group in grouped.values())
    entries: list[Entry] = []
    with console.status("") as status:
        documents = []
        for name, group in grouped.items():
            status.update(f"registering {name}")
            started = time.perf_counter()
            documents.append(register(client, name, group))
            sender, seconds = documents[-1].sender, time.perf_counter() - started
            console.print(
                f"sender {sender.id}: {name}, {sender.positions} positions, registered in {seconds:.1f} s",
                highlight=False,
                soft_wrap=True,
            )
        for document in documents:
            for entry, shown in run_document(client, document, ratio, status.update):
                entries.append(entry)
                console.print(query_view(entry, shown, len(entries), count))
    console.print(summary_view(entries))
    return entries


def write_json(path: Path, entries: Sequence[Entry]) -> None:
    """One object a query, in a list; written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(entry) for entry in entries], indent=2, ensure_ascii=False) + "\n"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def demo(arguments: argparse.Namespace, console: Console) -> None:
    """Runs the demo and writes the JSON file."""
    cases = load_cases(arguments.cases)
    demo_cases(cases)  # a case file of no use is found before a server is started
    log = arguments.json.parent / "demo-server.log"
    with ready_client(arguments.base_url, log, console) as client:
        entries = run(client, cases, arguments.ratio, console)
    write_json(arguments.json, entries)
    console.print(f"written to {arguments.json}", highlight=False, soft_wrap=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m cb_loadtest.demo",
        description="Messages from real documents, beside text reports. With CB_SGLANG_API_KEY set, it is sent.",
    )
    parser.add_argument("--base-url", help="use this server instead of starting one")
    parser.add_argument("--json", type=Path, default=Path("build/demo.json"), help="results (%(default)s)")
    parser.add_argument("--ratio", type=float, default=RATIO, help="positions a kept position (%(default)s)")
    parser.add_argument("--cases", type=Path, default=default_cases_path(), help="case file (the shipped one)")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.ratio <= MAX_RATIO:
        parser.error(f"--ratio must be between 1 and {MAX_RATIO:g}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when the demo failed, 130 after Ctrl-C."""
    arguments = parse_arguments(argv)
    console = Console()
    try:
        with exit_on_terminate():
            demo(arguments, console)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except (CacheBackError, CaseError, DemoError, AlignmentError, ServerDiedError, OSError) as error:
        console.print(Text.assemble(("the demo failed: ", "bold red"), str(error)), soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
