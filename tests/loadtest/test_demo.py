"""The demo without an engine: pure parts by themselves, the whole against a stand-in server."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_server import Fake, serve
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cb_loadtest import demo
from cb_loadtest.cases import Case, Context, GoldSpan, default_cases_path, load_cases
from cb_loadtest.demo_view import CLOSE, OPEN, Entry, Shown, marked, query_view, summary_view
from cb_loadtest.evidence import AlignmentError, TokenText, align_tokens, answers, cut, evidence_recall
from cb_loadtest.served import ServerDiedError, ServerProcess, free_port, tail

FAKE = Path(__file__).with_name("fake_server.py")
KEYS = {"query", "kept", "total", "evidence_recall", "seconds_message", "seconds_text_report"}


def console() -> Console:
    return Console(file=io.StringIO(), width=120, record=True)


# --- evidence


def decoder(pieces: Sequence[bytes]) -> Callable[[Sequence[Sequence[int]]], list[str]]:
    """Detokenize of a vocabulary of byte strings, as byte-level tokenizers do it."""
    return lambda many: [b"".join(pieces[i] for i in ids).decode("utf-8", "replace") for ids in many]


def test_align_tokens() -> None:
    pieces = [b"", b"Call", b" me", b"\n", b"Ishmael"]
    assert align_tokens("Call me\nIshmael", range(5), decoder(pieces)) == [(0, 0), (0, 4), (4, 7), (7, 8), (8, 15)]
    assert align_tokens("", [], decoder(pieces)) == []
    assert align_tokens("Call ", [1], decoder(pieces)) == [(0, 4)]


def test_align_tokens_that_share_a_character() -> None:
    text = "a\N{WHALE}b"
    whale = "\N{WHALE}".encode()
    split = [b"a", *(whale[i : i + 1] for i in range(4)), b"b"]
    assert align_tokens(text, range(6), decoder(split)) == [(0, 1), *[(1, 2)] * 4, (2, 3)]
    glued = [b"a" + whale[:2], whale[2:] + b"b"]
    assert align_tokens(text, range(2), decoder(glued)) == [(0, 3), (0, 3)]


def test_align_tokens_whose_space_is_lost() -> None:
    pieces = ["Call", "me", "Ishmael"]
    assert align_tokens(
        "Call me  Ishmael", range(3), lambda many: ["".join(pieces[i] for i in ids) for ids in many]
    ) == [
        (0, 4),
        (4, 7),
        (7, 16),
    ]


@pytest.mark.parametrize("text", ["Call him", "call me", "Call me Ishmael"])
def test_align_tokens_of_another_text(text: str) -> None:
    with pytest.raises(AlignmentError):
        align_tokens(text, range(2), decoder([b"Call", b" me"]))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30), st.data())
def test_align_tokens_covers_the_text_in_order(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    ends = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1)))) if len(raw) > 1 else []
    borders = [0, *ends, len(raw)] if raw else []
    pieces = [raw[a:b] for a, b in pairwise(borders)]
    chars = align_tokens(text, range(len(pieces)), decoder(pieces))
    at = 0
    for (start, stop), before in zip(chars, [(0, 0), *chars], strict=False):
        assert (start, stop) == before or start == at
        at = stop
    assert text[at:].strip() == ""
    # A token's characters contain all of its bytes.
    for (start, stop), a, b in zip(chars, borders, borders[1:], strict=False):
        assert len(text[:start].encode()) <= a and b <= len(text[:stop].encode())


def test_tokens_over_gold() -> None:
    tokens = TokenText("Call me now", [(0, 0), (0, 4), (4, 7), (7, 11)])
    assert tokens.tokens_over([(0, 1)]) == {1}
    assert tokens.tokens_over([(4, 7)]) == {2}
    assert tokens.tokens_over([(3, 5)]) == {1, 2}
    assert tokens.tokens_over([(0, 2), (10, 11)]) == {1, 3}
    assert tokens.tokens_over([]) == frozenset()


def test_evidence_recall() -> None:
    assert evidence_recall([0, 2, 3], {2, 3, 4, 5}) == 0.5
    assert evidence_recall([], {1}) == 0.0
    assert evidence_recall([1, 2], [1, 1]) == 1.0
    with pytest.raises(ValueError, match="no gold"):
        evidence_recall([1], [])


def test_cut() -> None:
    text = "0123456789"
    assert cut(text, (2, 8), [(4, 6)]) == [("23", False), ("45", True), ("67", False)]
    assert cut(text, (2, 8), [(0, 3), (3, 4), (7, 10)]) == [("23", True), ("456", False), ("7", True)]
    assert cut(text, (2, 8), [(4, 7), (3, 5)]) == [("2", False), ("3456", True), ("7", False)]
    assert cut(text, (2, 8), [(8, 10), (0, 2)]) == [("234567", False)]
    assert cut(text, (2, 2), [(0, 9)]) == []


def test_segments() -> None:
    tokens = TokenText("Call me now", [(0, 0), (0, 4), (4, 7), (7, 11)])
    assert tokens.span_segments((0, 3), [(5, 9)]) == [("Call ", False), ("me", True)]
    assert tokens.span_segments((0, 1), [(5, 9)]) == []
    assert tokens.evidence_segments((5, 11), {0, 2}) == [("me", True), (" now", False)]


def test_answers() -> None:
    assert answers("It was THE Merrimac.", [["merrimac"]])
    assert not answers("It was 4,000.", [["4,000"], ["Merrimac", "collier"]])
    assert not answers("", [["x"]])


# --- what is shown


def entry(**changes: Any) -> Entry:
    fields: dict[str, Any] = {
        "query": "Which ship [1]?",
        "kept": 4,
        "total": 32,
        "evidence_recall": 0.75,
        "seconds_message": 0.25,
        "seconds_text_report": 5.0,
        "text_report_tokens": 4,
        "case": "c",
        "document": "doc",
        "sender": "snd",
        "ratio": 8.0,
        "spans": [(0, 1), (29, 32)],
        "cached_positions": 32,
        "answer": "[b]Merrimac[/b]",
        "answer_has_reference": True,
        "answer_with_nothing": "",
        "answer_with_nothing_has_reference": False,
        "reference": "Merrimac",
    }
    return Entry(**fields | changes)


def test_marked_can_be_read_without_colour() -> None:
    line = marked([("sunk the", False), ("\nMerrimac", True), (" [bold]", False)], on="green")
    assert line.plain == f"sunk the {OPEN}Merrimac{CLOSE} [bold]"
    assert [span.style for span in line.spans] == ["green"]


def test_query_view() -> None:
    shown = Shown(
        spans=[((0, 1), []), ((29, 32), [("sunk the ", False), ("Merrimac", True)])],
        evidence=[[("collier ", False), ("Merrimac", True)]],
    )
    out = console()
    out.print(query_view(entry(), shown, 2, 8))
    text = out.export_text()
    for part in (
        "2/8  Which ship [1]?",
        "4 of 32 positions kept in 2 spans, 75% of the evidence",
        "message in 0.25 s, a text report of 4 tokens in 5.0 s (20 times as long)",
        f"collier {OPEN}Merrimac{CLOSE}",
        f"29-31  sunk the {OPEN}Merrimac{CLOSE}",
        "[b]Merrimac[/b] (holds the reference answer)",
        "(nothing) (does not hold it)",
    ):
        assert part in text.replace("\n", " "), part


def test_summary_view() -> None:
    out = console()
    out.print(summary_view([entry(), entry(evidence_recall=0.25, seconds_message=0.5, answer_has_reference=False)]))
    text = re.sub(r"\s+", " ", out.export_text())
    assert "4/32" in text and "75%" in text and "25%" in text
    assert re.search(r"mean .*50% .*0\.38 s .*5\.0 s .*13 ", text)
    assert "1 of 2 from the messages, 0 with nothing" in text


def test_write_json(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "demo.json"
    demo.write_json(path, [entry(), entry(query="Où ?")])
    first, second = json.loads(path.read_text(encoding="utf-8"))
    assert set(first) > KEYS and first["spans"] == [[0, 1], [29, 32]] and second["query"] == "Où ?"
    demo.write_json(path, [entry()])
    assert len(json.loads(path.read_text())) == 1
    assert list(path.parent.iterdir()) == [path]


# --- against a stand-in


def shipped() -> list[Case]:
    return load_cases(default_cases_path())


def test_demo_cases_of_the_shipped_file() -> None:
    grouped = demo.demo_cases(shipped())
    assert len(grouped) == 4 and all(len(cases) == 2 for cases in grouped.values())


def test_demo_cases_need_gold_and_one_context() -> None:
    context = Context(id="a", text="The Merrimac.")
    usable = Case(id="1", contexts=(context,), question="?", gold=(GoldSpan(start=4, end=12),), demo=True)
    bare = Case(id="2", contexts=(context,), question="?", answer=(("Merrimac",),), demo=True)
    assert demo.demo_cases([usable, bare]) == {"a": [usable]}
    with pytest.raises(demo.DemoError):
        demo.demo_cases([bare])


@pytest.fixture
def fake() -> Iterator[tuple[Fake, str]]:
    fake = Fake()
    server = serve(fake, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield fake, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def write_cases(path: Path) -> Path:
    text = " ".join(f"word{i}" for i in range(60)) + " by sinking the Merrimac there."
    start = text.index("Merrimac")
    rows = [
        {"question": "Which ship?", "answer": [["Merrimac"]], "gold": [{"start": start, "end": start + 8}]},
        # word0 is not kept; the tokens of "the Merrimac" are: recall 2/3.
        {
            "question": "What?",
            "answer": [["frigate"]],
            "gold": [{"start": 0, "end": 3}, {"start": start - 3, "end": start}],
        },
    ]
    rows = [{"id": f"c{i}", "contexts": [{"id": "doc", "text": text}], "demo": True} | r for i, r in enumerate(rows)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_main_against_a_server(fake: tuple[Fake, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, url = fake
    out = tmp_path / "demo.json"
    cases = write_cases(tmp_path / "cases.jsonl")
    assert demo.main(["--base-url", url, "--json", str(out), "--cases", str(cases)]) == 0
    first, second = json.loads(out.read_text())
    total = 1 + 65  # the beginning-of-text token and the words
    assert (first["kept"], first["total"], first["evidence_recall"]) == (9, total, 1.0)
    assert second["evidence_recall"] == pytest.approx(2 / 3)
    assert first["answer"] == "the Merrimac" and first["answer_has_reference"]
    assert first["answer_with_nothing"] == "a ship" and not first["answer_with_nothing_has_reference"]
    assert not second["answer_has_reference"]
    assert first["text_report_tokens"] == 9 and first["seconds_text_report"] == second["seconds_text_report"] > 0
    reports = [body for path, body in server.log if path == "/generate" and body["sampling_params"].get("ignore_eos")]
    assert [r["sampling_params"]["max_new_tokens"] for r in reports] == [9]  # once a sender
    printed = capsys.readouterr().out
    assert f"{OPEN}Merrimac{CLOSE}" in printed
    assert "9 of 66 positions" in printed and "mean" in printed


def test_a_report_of_the_wrong_length_is_no_comparison(
    fake: tuple[Fake, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, url = fake
    server.mode = "short-report"
    arguments = ["--base-url", url, "--json", str(tmp_path / "o.json"), "--cases", str(write_cases(tmp_path / "c"))]
    assert demo.main(arguments) == 1
    assert "the report has 8 tokens, not 9" in capsys.readouterr().out
    assert not (tmp_path / "o.json").exists()


@pytest.mark.parametrize("ratio", ["0.5", "nan", "x"])
def test_bad_ratio(ratio: str) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(["--ratio", ratio])
    assert caught.value.code == 2


def test_bad_base_url_and_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--base-url", "127.0.0.1:1"]) == 1
    assert "base_url must look like" in capsys.readouterr().out
    assert demo.main(["--cases", str(tmp_path / "missing")]) == 1
    assert "is not a file" in capsys.readouterr().out


# --- the server as a child


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that waits for its new parent does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def pids(log: Path) -> list[int]:
    """The processes of the stand-in, once it has said who they are."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        found = re.search(r"pids (\d+) (\d+)\n", log.read_text() if log.exists() else "")
        if found:
            return [int(found[1]), int(found[2])]
        time.sleep(0.02)
    raise AssertionError("the stand-in did not start")


def test_server_process_takes_its_children_along(tmp_path: Path) -> None:
    log = tmp_path / "build" / "server.log"
    with ServerProcess([sys.executable, str(FAKE), str(free_port())], log, grace=5) as server:
        running = pids(log)
        server.check()
        assert server.last_line().startswith("pids")
        assert all(map(alive, running))
    assert not any(map(alive, running))


def test_server_process_that_ignores_sigterm(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(99)"
    started = time.monotonic()
    with ServerProcess([sys.executable, "-c", code], tmp_path / "log", grace=0.3) as server:
        while not server.last_line():
            time.sleep(0.02)
    assert time.monotonic() - started < 20
    with pytest.raises(ServerDiedError, match="exit code -9"):
        server.check()


def test_server_that_dies_shows_its_log(tmp_path: Path) -> None:
    code = "import sys; print('no such model'); sys.exit(7)"
    with (
        pytest.raises(ServerDiedError, match=r"(?s)exit code 7.*no such model"),
        ServerProcess([sys.executable, "-c", code], tmp_path / "log") as server,
    ):
        for _ in range(1000):
            server.check()
            time.sleep(0.02)


def test_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(path, 3) == []
    path.write_bytes(b"x" * 20_000 + b"\n\n1\n2 \xff\n\n3\n")
    assert tail(path, 3) == ["1", "2 \N{REPLACEMENT CHARACTER}", "3"]
    assert len(tail(path, 9)[0]) < 16_384


def start_demo(tmp_path: Path, mode: str) -> subprocess.Popen[bytes]:
    """``main`` in a process of its own, with the stand-in as the server it starts."""
    code = (
        "import sys; from cb_loadtest import demo, local_server; "
        f"local_server.serve_command = lambda port: [sys.executable, {str(FAKE)!r}, str(port), {mode!r}]; "
        f"sys.exit(demo.main(['--json', {str(tmp_path / 'demo.json')!r}, "
        f"'--cases', {str(write_cases(tmp_path / 'cases.jsonl'))!r}]))"
    )
    environment = os.environ | {"http_proxy": "http://127.0.0.1:9", "PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)


def test_demo_with_a_server_of_its_own(tmp_path: Path) -> None:
    process = start_demo(tmp_path, "ok")
    printed = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 0, printed
    assert len(json.loads((tmp_path / "demo.json").read_text())) == 2
    assert not any(map(alive, pids(tmp_path / "demo-server.log")))


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_demo_interrupted_leaves_nothing_behind(tmp_path: Path, number: int, code: int) -> None:
    process = start_demo(tmp_path, "never-ready")
    running = pids(tmp_path / "demo-server.log")
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert not any(map(alive, running))
    assert not (tmp_path / "demo.json").exists()


def test_demo_whose_server_dies(tmp_path: Path) -> None:
    process = start_demo(tmp_path, "dies")
    printed = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 1
    assert "exit code 3" in printed and "out of luck" in printed
    assert not any(map(alive, pids(tmp_path / "demo-server.log")))
    assert not (tmp_path / "demo.json").exists()


def test_import_needs_neither_torch_nor_sglang() -> None:
    code = "import sys, cb_loadtest.demo; print(sorted({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
