"""Case files from published data sets: FanOutQA's dev set and LongBench v2, from the files as they are published.

Nothing is downloaded here. Documents are written as text files into a folder next to the case file, each once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from cb_loadtest.cases import MAX_DOCUMENT_BYTES_TOTAL, MAX_FILE_BYTES, CaseError, load_cases

MAX_SOURCE_BYTES = 1 << 30
MAX_CONTEXTS = 256
MAX_SENTENCE = 600
"""Longest gold span, in characters to each side of the answer: tables and lists have no sentences."""

T = TypeVar("T")


class ConvertError(ValueError):
    """The source cannot be converted; the message says what to change."""


@dataclass(slots=True)
class Converted:
    """What was written, and what was left out, by reason."""

    cases: int = 0
    documents: int = 0
    gold: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


# --- FanOutQA (dev set: a list of questions with their decomposition; evidence is a page at a revision)


class _Evidence(BaseModel):
    pageid: int
    revid: int
    title: str


class _SubQuestion(BaseModel):
    answer: Any = None
    evidence: _Evidence | None = None
    decomposition: list[_SubQuestion] = []


class _Question(BaseModel):
    id: str = Field(min_length=1)
    question: str = Field(min_length=1)
    answer: Any
    decomposition: list[_SubQuestion]
    necessary_evidence: list[_Evidence] = []

    def steps(self) -> Iterator[_SubQuestion]:
        """Every sub-question that has a page, in order."""
        stack = self.decomposition[::-1]
        while stack:
            step = stack.pop()
            if step.evidence is not None:
                yield step
            stack += step.decomposition[::-1]

    def pages(self) -> list[_Evidence]:
        """The question's pages, each once."""
        found = [step.evidence for step in self.steps() if step.evidence is not None]
        return list({page.pageid: page for page in [*found, *self.necessary_evidence]}.values())


def convert_fanoutqa(
    source: Path, target: Path, evidence: Path, *, limit: int | None = None, max_chars: int | None = None
) -> Converted:
    """Write FanOutQA questions as cases with one context a page.

    evidence: folder with the pages' texts: ``PAGEID-dated.md`` (the published cache), ``PAGEID-REVID`` or ``PAGEID``,
              with ``.md`` or ``.txt``.

    The gold is found, not published: for every sub-question, the sentence in which its page first states the answer.
    Reference groups are the answer's strings, keys and values, as FanOutQA's own score counts them. Questions with a
    missing page are left out. Raises ConvertError.
    """
    if not evidence.is_dir():
        raise ConvertError(f"{evidence} is no folder; give the folder with the pages' texts")
    questions = _read(source, TypeAdapter(list[_Question]), "FanOutQA's dev set, a JSON list of questions")
    writer = _Writer(target, limit, max_chars)
    for question in questions:
        if writer.full:
            break
        pages = question.pages()
        texts = [_page_text(evidence, page) for page in pages]
        groups = _reference_groups(question.answer)
        if not pages or None in texts:
            writer.leave_out("a page whose text is not in the evidence folder" if pages else "no page")
            continue
        gold = _gold_spans(question, {page.pageid: n for n, page in enumerate(pages)}, [text or "" for text in texts])
        writer.add(
            question.id,
            question.question,
            [
                (f"{page.title[:200]} ({page.pageid})", f"{page.pageid}-{page.revid}", text or "")
                for page, text in zip(pages, texts, strict=True)
            ],
            groups,
            gold,
        )
    return writer.close()


def _page_text(folder: Path, page: _Evidence) -> str | None:
    for stem in (f"{page.pageid}-dated", f"{page.pageid}-{page.revid}", f"{page.pageid}"):
        for ending in (".md", ".txt"):
            path = folder / f"{stem}{ending}"
            if path.is_file():
                try:
                    return _clean(path.read_text(encoding="utf-8-sig", errors="replace")) or None
                except OSError as error:
                    raise ConvertError(f"{path} cannot be read: {error.strerror}") from None
    return None


def _primitives(answer: Any) -> list[Any]:
    """The strings, numbers and truths of an answer; of a dict the keys too, of anything nested the inside."""
    found: list[Any] = []
    stack = [answer]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack += [part for pair in item.items() for part in pair][::-1]
        elif isinstance(item, list):
            stack += item[::-1]
        elif item is not None:
            found.append(item)
    return found


def _said(value: Any) -> str:
    """How an answer says a value."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _reference_groups(answer: Any) -> list[list[str]]:
    return [[text] for text in dict.fromkeys(map(_said, _primitives(answer))) if text]


def _gold_spans(question: _Question, number_of: dict[int, int], texts: list[str]) -> list[dict[str, Any]]:
    spans: set[tuple[int, int, int]] = set()
    for step in question.steps():
        assert step.evidence is not None
        number = number_of[step.evidence.pageid]
        for value in _primitives(step.answer):
            sentence = None if isinstance(value, bool) else _sentence_with(texts[number], _said(value))
            if sentence is not None:
                spans.add((number, *sentence))
    return [{"context": context, "start": start, "end": end} for context, start, end in sorted(spans)]


_BEFORE = re.compile(r"[.!?]\s+|\n\s*")
_AFTER = re.compile(r"[.!?](?=\s|$)|\n")


def _sentence_with(text: str, answer: str) -> tuple[int, int] | None:
    """Characters [start, end) of the sentence, or line, in which ``text`` first states ``answer``; None when never."""
    words = answer.split()
    if not words:
        return None
    plain = [word.replace(",", "") for word in words]
    parts = [",?".join(word) if word.isdigit() else re.escape(own) for word, own in zip(plain, words, strict=True)]
    found = re.search(r"(?<!\w)" + r"\s+".join(parts) + r"(?!\w)", text, re.IGNORECASE)
    if found is None:
        return None
    low, high = max(0, found.start() - MAX_SENTENCE), min(len(text), found.end() + MAX_SENTENCE)
    borders = [low, *(match.end() for match in _BEFORE.finditer(text, low, found.start()))]
    after = _AFTER.search(text, found.end(), high)
    end = high if after is None else after.start() if after[0] == "\n" else after.end()
    return borders[-1], end


# --- LongBench v2 (a list of rows with four choices and one long context)


class _Row(BaseModel):
    id: str = Field(alias="_id", min_length=1)
    question: str = Field(min_length=1)
    choice_A: str
    choice_B: str
    choice_C: str
    choice_D: str
    answer: Literal["A", "B", "C", "D"]
    context: str


def convert_longbench_v2(
    source: Path, target: Path, *, limit: int | None = None, max_chars: int | None = None
) -> Converted:
    """Write LongBench v2's rows as cases with one context, the choices in the question and the letter as the answer.

    The data set marks no evidence, so the cases have no gold: they measure answers, not recall. Raises ConvertError.
    """
    rows = _read(source, TypeAdapter(list[_Row]), "LongBench v2's data.json, a JSON list of rows")
    writer = _Writer(target, limit, max_chars)
    for row in rows:
        if writer.full:
            break
        text = _clean(row.context)
        choices = {"A": row.choice_A, "B": row.choice_B, "C": row.choice_C, "D": row.choice_D}
        question = "\n".join(
            [row.question.strip(), *(f"({letter}) {choice.strip()}" for letter, choice in choices.items())]
        )
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        if text:
            writer.add(row.id, question, [("context", name, text)], [[f"({row.answer})"]], [])
        else:
            writer.leave_out("an empty context")
    return writer.close()


# --- both


def _read(path: Path, adapter: TypeAdapter[T], what: str) -> T:
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            raise ConvertError(f"{path} is longer than {MAX_SOURCE_BYTES} bytes; split it")
        return adapter.validate_json(path.read_bytes())
    except OSError as error:
        raise ConvertError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConvertError(f"{path} is not {what}: {f'{place}: ' if place else ''}{first['msg']}") from None


def _clean(text: str) -> str:
    """Line ends as the case loader reads them back, and no white space around the text."""
    return re.sub(r"\r+\n", "\n", text.encode(errors="replace").decode()).strip()


class _Writer:
    """Writes cases and their documents; ``close`` checks the whole by loading it."""

    def __init__(self, target: Path, limit: int | None, max_chars: int | None) -> None:
        self._target = target
        self._folder = target.with_name(f"{target.stem}_documents")
        self._limit = limit
        self._max_chars = max_chars
        self._lines: list[str] = []
        self._files: set[str] = set()
        self._bytes = 0
        self._made = Converted()

    @property
    def full(self) -> bool:
        return self._limit is not None and self._made.cases >= self._limit

    def leave_out(self, reason: str) -> None:
        self._made.left_out[reason] += 1

    def add(
        self,
        name: str,
        question: str,
        contexts: list[tuple[str, str, str]],
        answer: list[list[str]],
        gold: list[dict[str, Any]],
    ) -> None:
        """``contexts`` are (id, file name without ending, text)."""
        problem = self._problem(contexts, answer, gold)
        if problem is not None:
            self.leave_out(problem)
            return
        for _, stem, text in contexts:
            self._write(stem, text)
        row: dict[str, Any] = {
            "id": name,
            "contexts": [{"id": key, "file": f"{self._folder.name}/{stem}.txt"} for key, stem, _ in contexts],
            "question": question,
            "answer": answer,
            "gold": gold,
        }
        self._lines.append(json.dumps({key: value for key, value in row.items() if value}, ensure_ascii=False))
        self._made.cases += 1
        self._made.gold += len(gold)

    def _problem(self, contexts: list[tuple[str, str, str]], answer: list[Any], gold: list[Any]) -> str | None:
        if not answer and not gold:
            return "neither an answer nor gold"
        if len(contexts) > MAX_CONTEXTS:
            return f"more than {MAX_CONTEXTS} contexts"
        if self._max_chars is not None and any(len(text) > self._max_chars for _, _, text in contexts):
            return f"a context of more than {self._max_chars} characters"
        if any(len(text.encode()) > MAX_FILE_BYTES for _, _, text in contexts):
            return f"a context of more than {MAX_FILE_BYTES} bytes"
        return None

    def _write(self, stem: str, text: str) -> None:
        if stem in self._files:
            return
        data = text.encode() + b"\n"
        self._bytes += len(data)
        if self._bytes > MAX_DOCUMENT_BYTES_TOTAL:
            raise ConvertError(f"the documents exceed {MAX_DOCUMENT_BYTES_TOTAL} bytes; use --limit or --max-chars")
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{stem}.txt").write_bytes(data)
        self._files.add(stem)
        self._made.documents += 1

    def close(self) -> Converted:
        """Raises ConvertError when there is no case, or when the case file could not be loaded again."""
        if not self._lines:
            reasons = "; ".join(f"{count} with {reason}" for reason, count in self._made.left_out.items())
            raise ConvertError(f"no case was made{': ' if reasons else ''}{reasons}")
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._target.write_text("\n".join(self._lines) + "\n", encoding="utf-8")
        try:
            load_cases(self._target)
        except CaseError as error:
            raise ConvertError(f"the converted file cannot be loaded: {error}") from None
        return self._made
