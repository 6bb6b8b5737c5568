from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cb_loadtest import cases as cases_module
from cb_loadtest.cases import Case, CaseError, Context, GoldSpan, default_cases_path, load_cases

Row = dict[str, Any]


def row(**changes: Any) -> Row:
    """A valid row; a change to None removes the field."""
    base: Row = {
        "id": "a",
        "context": "The Merrimac was sunk.",
        "question": "Which ship went down?",
        "answer": [["Merrimac"]],
        "gold": [{"context": 0, "start": 4, "end": 12, "text": "Merrimac"}],
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


def write(directory: Path, *rows: Row | str | bytes) -> Path:
    path = directory / "cases.jsonl"
    lines = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def filed(name: str, **changes: Any) -> Row:
    return row(context=None, contexts=[{"id": "doc", "file": name}], **changes)


# --- what the loader accepts


def test_inline_context_is_short_for_one_context(tmp_path: Path) -> None:
    (case,) = load_cases(write(tmp_path, row()))
    assert case.contexts == (Context(id="a", text="The Merrimac was sunk."),)
    assert case.gold == (GoldSpan(context=0, start=4, end=12, text="Merrimac"),)
    assert case.answer == (("Merrimac",),)
    assert case.demo is False
    assert case.gold_texts() == ("Merrimac",)


def test_several_contexts_from_files_and_inline(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    # A byte-order mark, Windows line ends and the last line end are not part of the text.
    (tmp_path / "docs" / "one.txt").write_bytes(b"\xef\xbb\xbfFirst line.\r\nSecond \xe2\x80\x94 line.\r\n")
    contexts = [{"id": "one", "file": "docs/one.txt"}, {"id": "two", "text": "Inline\u2028text."}]
    gold = [{"context": 1, "start": 0, "end": 6}, {"start": 19, "end": 20, "text": "—"}]
    path = write(tmp_path, row(context=None, contexts=contexts, gold=gold))
    (case,) = load_cases(path)
    assert [context.text for context in case.contexts] == ["First line.\nSecond — line.", "Inline\u2028text."]
    assert case.contexts[0].file == "docs/one.txt"
    assert case.gold_texts() == ("Inline", "—")


def test_unescaped_line_separator_does_not_end_a_line(tmp_path: Path) -> None:
    line = json.dumps(row(context="The Merrimac\u2028was sunk."), ensure_ascii=False)
    (case,) = load_cases(write(tmp_path, line))
    assert "\u2028" in case.contexts[0].text


def test_blank_lines_are_skipped_and_limit_stops_early(tmp_path: Path) -> None:
    path = write(tmp_path, row(), "", row(id="b"), "   ", "not json")
    assert [case.id for case in load_cases(path, limit=2)] == ["a", "b"]
    with pytest.raises(CaseError, match="line 5"):
        load_cases(path)


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one_is_refused(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ValueError, match="limit must be at least 1"):
        load_cases(write(tmp_path, row()), limit=limit)


@pytest.mark.parametrize("missing", ["gold", "answer"])
def test_gold_or_answer_may_be_left_out(tmp_path: Path, missing: str) -> None:
    (case,) = load_cases(write(tmp_path, row(**{missing: None})))
    assert getattr(case, missing) == ()


def test_cases_are_frozen(tmp_path: Path) -> None:
    (case,) = load_cases(write(tmp_path, row()))
    with pytest.raises(ValidationError, match="frozen"):
        case.question = "Another?"


def test_a_document_used_by_many_cases_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.txt").write_text("The Merrimac was sunk.\n")
    monkeypatch.setattr(cases_module, "MAX_DOCUMENT_BYTES_TOTAL", 30)  # one reading fits, two would not
    first, second = load_cases(write(tmp_path, filed("d.txt"), filed("./d.txt", id="b")))
    assert first.contexts[0].text is second.contexts[0].text


# --- what it refuses, and how


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"id": ', r"line 2: not JSON: .* at column 7"),
        ("[1]", r"line 2: Input should be an object"),
        (row(id=None), r"line 2: field `id`: Field required"),
        (row(id=""), r"line 2: field `id`: "),
        (row(id=7), r"line 2: field `id`: Input should be a valid string"),
        (row(question=None), r"line 2: field `question`: Field required"),
        (row(question="  "), r"line 2: `question` is blank"),
        (row(qestion="typo"), r"line 2: field `qestion`: unknown field"),
        (row(demo="yes"), r"line 2: field `demo`: "),
        (row(answer="Merrimac"), r"line 2: field `answer`: "),
        (row(answer=["Merrimac"]), r"line 2: field `answer.0`: "),
        (row(answer=[[]]), r"line 2: field `answer.0`: "),
        (row(answer=[["a"], [""]]), r"line 2: field `answer.1.0`: "),
        (row(answer=[], gold=[]), r"line 2: give `answer`, `gold` or both"),
        (row(context=None), r"line 2: give exactly one of `contexts` and `context`"),
        (row(context=""), r"line 2: field `context`: "),
        (row(contexts=[{"id": "x", "text": "y"}]), r"line 2: give exactly one of `contexts` and `context`"),
        (row(context=None, contexts=[]), r"line 2: field `contexts`: List should have at least 1 item"),
        (
            row(context=None, contexts=[{"id": "x"}]),
            r"line 2: field `contexts.0`: give exactly one of `text`",
        ),
        (
            row(context=None, contexts=[{"id": "x", "text": "The Merrimac"}, {"id": "x", "text": "z"}]),
            r"line 2: `contexts` repeats an id",
        ),
        (row(gold=[{"start": 4, "end": "12"}]), r"line 2: field `gold.0.end`: "),
        (row(gold=[{"start": -1, "end": 4}]), r"line 2: field `gold.0.start`: "),
        (row(gold=[{"start": 4, "end": 4}]), r"line 2: field `gold.0`: start 4 must be smaller than end 4"),
        (row(gold=[{"start": 4, "end": 23}]), r"line 2: field `gold.0`: end 23 is past the end .* \(22 char"),
        (
            row(gold=[{"context": 1, "start": 4, "end": 12}]),
            r"line 2: field `gold.0`: context 1 does not exist",
        ),
        (
            row(gold=[{"start": 0, "end": 3}, {"start": 4, "end": 12, "text": "Monitor"}]),
            r"line 2: field `gold.1`: text 'Monitor' is not what context 'a' has .*: 'Merrimac'",
        ),
        (row(id="first"), r"line 2: field `id`: 'first' is already the id of line 1"),
        (filed("nope.txt"), r"line 2: field `contexts.0.file`: .*nope.txt is not a file"),
        (filed("."), r"line 2: field `contexts.0.file`: .* is not a file"),
        (filed("a\0b"), r"line 2: field `contexts.0.file`: .*not a usable path"),
        (filed("empty.txt"), r"line 2: field `contexts.0.file`: 'empty.txt' is empty"),
        (filed("latin1.txt"), r"line 2: field `contexts.0.file`: 'latin1.txt' is not UTF-8 \(byte 3\)"),
        (b'{"id": "\xff"}', r"line 2: not JSON: "),
    ],
)
def test_bad_line_is_named(tmp_path: Path, bad: Row | str | bytes, message: str) -> None:
    (tmp_path / "empty.txt").write_bytes(b"\n")
    (tmp_path / "latin1.txt").write_bytes("Café".encode("latin-1"))
    path = write(tmp_path, row(id="first"), bad)
    with pytest.raises(CaseError, match=re.escape(str(path)) + ", " + message):
        load_cases(path)


@pytest.mark.parametrize(
    "reference",
    ["../secret.txt", "sub/../../secret.txt", "link.txt", "{absolute}", "C:\\secret.txt", "..\\secret.txt"],
)
def test_documents_outside_the_directory_are_refused(tmp_path: Path, reference: str) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("The Merrimac was sunk.")
    home = tmp_path / "home"
    (home / "sub").mkdir(parents=True)
    (home / "link.txt").symlink_to(secret)
    path = write(home, filed(reference.replace("{absolute}", str(secret))))
    with pytest.raises(CaseError, match=r"field `contexts.0.file`: .*outside the case file's directory"):
        load_cases(path)


def test_file_without_cases_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="no cases"):
        load_cases(write(tmp_path, "", " "))
    with pytest.raises(CaseError, match="is not a file"):
        load_cases(tmp_path / "missing.jsonl")
    with pytest.raises(CaseError, match="is not a file"):
        load_cases(tmp_path)


def test_size_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.txt").write_text("The Merrimac was sunk." + " So it was." * 100)
    (tmp_path / "e.txt").write_text("The Merrimac was sunk." + " So it was." * 100)
    path = write(tmp_path, filed("d.txt"), filed("e.txt", id="b"))
    size = path.stat().st_size
    document = (tmp_path / "d.txt").stat().st_size
    assert size < document

    monkeypatch.setattr(cases_module, "MAX_FILE_BYTES", document)
    assert len(load_cases(path)) == 2
    monkeypatch.setattr(cases_module, "MAX_FILE_BYTES", document - 1)
    with pytest.raises(CaseError, match=r"line 1: field `contexts.0.file`: .*d.txt is longer than"):
        load_cases(path)
    monkeypatch.setattr(cases_module, "MAX_FILE_BYTES", size - 1)
    with pytest.raises(CaseError, match=rf"cases.jsonl is longer than {size - 1} bytes"):
        load_cases(path)
    monkeypatch.setattr(cases_module, "MAX_FILE_BYTES", document)
    monkeypatch.setattr(cases_module, "MAX_DOCUMENT_BYTES_TOTAL", 2 * document - 1)
    with pytest.raises(CaseError, match=r"line 2: field `contexts.0.file`: the documents come to more than"):
        load_cases(path)


def test_line_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases_module, "MAX_LINES", 3)
    assert len(load_cases(write(tmp_path, row(), row(id="b"), row(id="c")))) == 3
    with pytest.raises(CaseError, match="4 lines, more than the 3 allowed"):
        load_cases(write(tmp_path, row(), row(id="b"), row(id="c"), row(id="d")))


def test_import_needs_neither_torch_nor_sglang() -> None:
    code = "import sys, cb_loadtest.cases; print(sorted({'torch', 'sglang'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


# --- the shipped cases


@pytest.fixture(scope="module")
def shipped() -> list[Case]:
    return load_cases(default_cases_path())


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def test_shipped_counts(shipped: list[Case]) -> None:
    assert 28 <= len(shipped) <= 32
    assert len({case.id for case in shipped}) == len(shipped)
    assert len({case.question for case in shipped}) == len(shipped)
    per_document = Counter(case.contexts[0].id for case in shipped)
    assert 8 <= len(per_document) <= 10
    assert set(per_document.values()) <= {3, 4}
    assert sum(len(case.gold) >= 2 for case in shipped) >= 6


def test_every_shipped_document_is_used_and_of_the_right_size(shipped: list[Case]) -> None:
    directory = default_cases_path().parent
    used = {context.file for case in shipped for context in case.contexts}
    assert used == {f"documents/{path.name}" for path in (directory / "documents").iterdir()}
    for text in {context.text for case in shipped for context in case.contexts}:
        assert 8_000 <= len(text) <= 12_000
        assert text == text.strip()
        assert "  " not in text and "\r" not in text and "\t" not in text


def test_shipped_answers_stand_in_their_gold_text(shipped: list[Case]) -> None:
    for case in shipped:
        assert case.gold and case.answer
        gold = " ".join(case.gold_texts()).lower()
        for group in case.answer:
            assert group[0].lower() in gold, case.id
            assert all(reference.lower() not in case.question.lower() for reference in group), case.id


def test_shipped_spans_are_short_unique_and_apart(shipped: list[Case]) -> None:
    for case in shipped:
        for span, text in zip(case.gold, case.gold_texts(), strict=True):
            assert span.text == text
            assert 30 <= len(text) <= 250, case.id
            assert case.contexts[span.context].text.count(text) == 1, case.id
        starts = sorted((span.start, span.end) for span in case.gold)
        assert all(end <= start for (_, end), (start, _) in pairwise(starts)), case.id


def test_shipped_evidence_is_spread_over_the_documents(shipped: list[Case]) -> None:
    thirds = Counter(int(3 * case.gold[0].start / len(case.contexts[0].text)) for case in shipped)
    assert min(thirds[0], thirds[1], thirds[2]) >= 8


def test_shipped_questions_do_not_copy_their_evidence(shipped: list[Case]) -> None:
    for case in shipped:
        question = words(case.question)
        runs = {tuple(question[i : i + 5]) for i in range(len(question) - 4)}
        for text in case.gold_texts():
            gold = words(text)
            assert not runs & {tuple(gold[i : i + 5]) for i in range(len(gold) - 4)}, case.id


def test_shipped_demo_is_two_questions_over_each_of_four_documents(shipped: list[Case]) -> None:
    demo = Counter(case.contexts[0].id for case in shipped if case.demo)
    assert len(demo) == 4 and set(demo.values()) == {2}
