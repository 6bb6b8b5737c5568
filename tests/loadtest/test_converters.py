"""The converters on small files of the shapes in which FanOutQA and LongBench v2 are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cb_loadtest.cases import load_cases
from cb_loadtest.converters import ConvertError, convert_fanoutqa, convert_longbench_v2

CALDER = (
    "# Calder Peak\n\n| Height | 4,807 m |\n\n"
    "Calder Peak is a mountain. It was first climbed in 1911 by Ana Ruiz! Few go.\n"
)
TARN = "Tarn Hill lies in the north.\r\nIts summit is at 912 metres, and Tarn Hill was first climbed in 1865."


def page(number: int, title: str) -> dict[str, Any]:
    return {"pageid": number, "revid": 7, "title": title, "url": f"https://example.org/{number}"}


def step(answer: Any, evidence: dict[str, Any] | None, decomposition: list[Any] | None = None) -> dict[str, Any]:
    return {
        "id": "s",
        "question": "?",
        "decomposition": decomposition or [],
        "answer": answer,
        "depends_on": [],
        "evidence": evidence,
    }


def question(name: str, answer: Any, steps: list[Any]) -> dict[str, Any]:
    evidence = [s["evidence"] for s in steps if s["evidence"]]
    return {
        "id": name,
        "question": "How high are the peaks?",
        "decomposition": steps,
        "answer": answer,
        "necessary_evidence": evidence,
        "categories": ["Geography"],
    }


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    folder = tmp_path / "wikicache"
    folder.mkdir()
    (folder / "11-dated.md").write_bytes(CALDER.encode())
    (folder / "12-7.txt").write_bytes(TARN.encode())
    return folder


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_fanoutqa(tmp_path: Path, pages: Path) -> None:
    nested = step(None, None, [step(912, page(12, "Tarn Hill")), step(True, page(12, "Tarn Hill"))])
    source = write(
        tmp_path / "dev.json",
        [
            question(
                "q1",
                {"Calder Peak": 4807, "Tarn Hill": 912.0},
                [step({"height": 4807, "climber": "ana ruiz"}, page(11, "Calder Peak")), nested],
            ),
            question("q2", True, [step("unheard of", page(12, "Tarn Hill"))]),
            question("q3", "x", [step("x", page(99, "Lost"))]),
        ],
    )
    made = convert_fanoutqa(source, tmp_path / "out" / "fanout.jsonl", pages)
    assert (made.cases, made.documents, made.gold) == (2, 2, 3)
    assert dict(made.left_out) == {"a page whose text is not in the evidence folder": 1}
    first, second = load_cases(tmp_path / "out" / "fanout.jsonl")
    assert first.id == "q1" and [c.id for c in first.contexts] == ["Calder Peak (11)", "Tarn Hill (12)"]
    assert first.contexts[0].text == CALDER.strip() and first.contexts[1].text == TARN.replace("\r\n", "\n")
    assert first.answer == (("Calder Peak",), ("4807",), ("Tarn Hill",), ("912",))
    # The number is found with its separator; the sentence ends where the sentence or the line does.
    assert first.gold_texts() == (
        "| Height | 4,807 m |",
        "It was first climbed in 1911 by Ana Ruiz!",
        "Its summit is at 912 metres, and Tarn Hill was first climbed in 1865.",
    )
    assert [span.context for span in first.gold] == [0, 0, 1]
    assert second.answer == (("yes",),) and second.gold == ()
    assert second.contexts[0].file == "fanout_documents/12-7.txt"


def test_fanoutqa_limits(tmp_path: Path, pages: Path) -> None:
    rows = [question(f"q{n}", "1865", [step("1865", page(12, "Tarn Hill"))]) for n in range(3)]
    source = write(tmp_path / "dev.json", rows)
    assert convert_fanoutqa(source, tmp_path / "a.jsonl", pages, limit=2).cases == 2
    with pytest.raises(ConvertError, match="no case was made: 3 with a context of more than 10 characters"):
        convert_fanoutqa(source, tmp_path / "b.jsonl", pages, max_chars=10)
    with pytest.raises(ConvertError, match="is no folder"):
        convert_fanoutqa(source, tmp_path / "c.jsonl", tmp_path / "nowhere")


def test_a_short_answer_is_not_found_inside_a_word(tmp_path: Path, pages: Path) -> None:
    (pages / "13.md").write_text("It rose by 19110 in 19. A cat sat. The art of it.")
    source = write(tmp_path / "dev.json", [question("q", "19 art", [step(["19", "art", ""], page(13, "Cat"))])])
    convert_fanoutqa(source, tmp_path / "a.jsonl", pages)
    (case,) = load_cases(tmp_path / "a.jsonl")
    assert case.gold_texts() == ("It rose by 19110 in 19.", "The art of it.")


def longbench_row(name: str, context: str, **changes: Any) -> dict[str, Any]:
    row = {
        "_id": name,
        "domain": "Single-Document QA",
        "sub_domain": "Literary",
        "difficulty": "easy",
        "length": "short",
        "question": "Who climbed it?",
        "choice_A": "Ana",
        "choice_B": "Ben",
        "choice_C": "Cid",
        "choice_D": "Dov",
        "answer": "B",
        "context": context,
    }
    return row | changes


def test_longbench_v2(tmp_path: Path) -> None:
    texts = ["Ben climbed it.\r\n\u2028He did.\n\n", "Ben climbed it.\n\u2028He did.", " \n", "long " * 10]
    rows = [longbench_row(f"r{number}", text) for number, text in enumerate(texts)]
    source = write(tmp_path / "data.json", rows)
    made = convert_longbench_v2(source, tmp_path / "lb.jsonl", max_chars=40)
    assert (made.cases, made.documents, made.gold) == (2, 1, 0)  # the same text is written once
    assert dict(made.left_out) == {"an empty context": 1, "a context of more than 40 characters": 1}
    first, second = load_cases(tmp_path / "lb.jsonl")
    assert first.question == "Who climbed it?\n(A) Ana\n(B) Ben\n(C) Cid\n(D) Dov"
    assert first.answer == (("(B)",),) and first.gold == ()
    assert first.contexts[0].text == second.contexts[0].text == "Ben climbed it.\n\u2028He did."


@pytest.mark.parametrize(
    "content, said",
    [
        (b"{", "Invalid JSON"),
        (b"{}", "valid array"),
        (json.dumps([longbench_row("r", "x", answer="E")]).encode(), "0.answer"),
        (json.dumps([{"_id": "r"}]).encode(), "0.question"),
        (b"[" * 100_000, "Invalid JSON"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    source = tmp_path / "data.json"
    source.write_bytes(content)
    with pytest.raises(ConvertError, match=said):
        convert_longbench_v2(source, tmp_path / "lb.jsonl")
    assert not (tmp_path / "lb.jsonl").exists()
    with pytest.raises(ConvertError, match="cannot be read"):
        convert_longbench_v2(tmp_path / "missing", tmp_path / "lb.jsonl")
