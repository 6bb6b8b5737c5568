"""Load the cases of the recall harness: documents, a question, reference answers and gold character spans.

The file format is described in ``cb_loadtest/data/README.md``. Everything a case file says is checked here,
so a `Case` can be trusted: texts are read, spans lie inside them and say what the file claims they say.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path, PureWindowsPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_FILE_BYTES = 64 << 20
"""Largest case file, and largest document a case file may refer to, in bytes."""

MAX_LINES = 100_000
"""Most lines of a case file, blank ones included."""

MAX_DOCUMENT_BYTES_TOTAL = 512 << 20
"""Most bytes of all documents one case file refers to, each document counted once."""

Name = Annotated[str, Field(min_length=1, max_length=256)]
References = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1, max_length=1_000)]


class CaseError(ValueError):
    """A case file is not usable; the message names the file, the line, the field and what to change."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class GoldSpan(_Model):
    """Characters ``start`` to ``end`` (exclusive) of context number ``context``: (part of) the evidence.

    Offsets count Unicode code points from 0. ``text`` repeats the characters; when given, it must match.
    """

    context: int = Field(default=0, ge=0)
    start: int = Field(ge=0)
    end: int = Field(ge=1)
    text: str | None = None


class Context(_Model):
    """One document that a question may be asked of; ``file`` says which file the text came from, if any."""

    id: Name
    text: str = Field(min_length=1)
    file: str | None = None


class Case(_Model):
    """One question over one or more contexts.

    ``answer`` is a list of groups: a strict score wants one string of every group in the reply, a loose score
    counts the groups hit. ``answer`` or ``gold`` may be empty (then that measure does not apply), not both.
    """

    id: Name
    contexts: tuple[Context, ...]
    question: str = Field(min_length=1)
    answer: tuple[References, ...] = ()
    gold: tuple[GoldSpan, ...] = ()
    demo: bool = False

    @model_validator(mode="after")
    def _check_spans(self) -> Case:
        for number, span in enumerate(self.gold):
            problem = self._span_problem(span)
            if problem:
                raise ValueError(f"field `gold.{number}`: {problem}")
        return self

    def _span_problem(self, span: GoldSpan) -> str | None:
        if span.context >= len(self.contexts):
            return f"context {span.context} does not exist; the case has {len(self.contexts)}, counted from 0"
        context = self.contexts[span.context]
        if span.start >= span.end:
            return f"start {span.start} must be smaller than end {span.end}"
        if span.end > len(context.text):
            return f"end {span.end} is past the end of context {context.id!r} ({len(context.text)} characters)"
        found = context.text[span.start : span.end]
        if span.text is not None and span.text != found:
            return (
                f"text {_short(span.text)} is not what context {context.id!r} has at characters "
                f"{span.start} to {span.end}: {_short(found)}"
            )
        return None

    def gold_texts(self) -> tuple[str, ...]:
        """The characters of every gold span, in the order of ``gold``."""
        return tuple(self.contexts[span.context].text[span.start : span.end] for span in self.gold)


class _ContextRow(_Model):
    """A context as the file writes it: exactly one of ``text`` and ``file``."""

    id: Name
    text: str | None = Field(default=None, min_length=1)
    file: str | None = Field(default=None, min_length=1, max_length=1_024)

    @model_validator(mode="after")
    def _check_source(self) -> _ContextRow:
        if (self.text is None) == (self.file is None):
            raise ValueError("give exactly one of `text` and `file`")
        return self


class _CaseRow(_Model):
    """A case as the file writes it: ``contexts``, or ``context`` as short for one inline text."""

    id: Name
    contexts: Annotated[tuple[_ContextRow, ...], Field(min_length=1, max_length=256)] | None = None
    context: str | None = Field(default=None, min_length=1)
    question: str = Field(min_length=1)
    answer: Annotated[tuple[References, ...], Field(max_length=1_000)] = ()
    gold: Annotated[tuple[GoldSpan, ...], Field(max_length=1_000)] = ()
    demo: bool = False

    @model_validator(mode="after")
    def _check_row(self) -> _CaseRow:
        if (self.contexts is None) == (self.context is None):
            raise ValueError("give exactly one of `contexts` and `context`")
        if not self.question.strip():
            raise ValueError("`question` is blank")
        if not self.answer and not self.gold:
            raise ValueError("give `answer`, `gold` or both; without either there is nothing to measure")
        names = [row.id for row in self.contexts or ()]
        if len(set(names)) != len(names):
            raise ValueError("`contexts` repeats an id; every context of a case needs its own")
        return self


class _Documents:
    """Reads the documents of one case file, each once, only from inside the case file's directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._texts: dict[Path, str] = {}
        self._bytes = 0

    def read(self, reference: str) -> str:
        path = self._locate(reference)
        if path not in self._texts:
            data = _read_bounded(path)
            self._bytes += len(data)
            if self._bytes > MAX_DOCUMENT_BYTES_TOTAL:
                raise CaseError(
                    f"the documents come to more than {MAX_DOCUMENT_BYTES_TOTAL} bytes; split the case file"
                )
            try:
                text = data.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise CaseError(f"{reference!r} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
            text = text.replace("\r\n", "\n").removesuffix("\n")
            if not text:
                raise CaseError(f"{reference!r} is empty; give a document with text")
            self._texts[path] = text
        return self._texts[path]

    def _locate(self, reference: str) -> Path:
        outside = CaseError(f"{reference!r} lies outside the case file's directory; use a relative path in or below it")
        # Windows parsing also finds drive letters and backslashes, which must mean the same on every system.
        windows = PureWindowsPath(reference)
        if windows.drive or windows.root or "\\" in reference:
            raise outside
        try:
            path = (self._directory / reference).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise CaseError(f"{reference!r} is not a usable path ({error})") from error
        if not path.is_relative_to(self._directory):
            raise outside
        return path


def default_cases_path() -> Path:
    """Path of the case file that ships with the package.

    Raises:
        CaseError: the package data is missing, or the package runs from a zip archive.
    """
    resource = files("cb_loadtest").joinpath("data/cases.jsonl")
    path = Path(str(resource))
    if not path.is_file():
        raise CaseError(f"the shipped cases are not at {path}; reinstall cb-sglang as an ordinary directory")
    return path


def load_cases(path: Path, *, limit: int | None = None) -> list[Case]:
    """Read and check the cases of a JSONL file.

    Args:
        path: the case file, UTF-8, one JSON object a line; blank lines are skipped.
        limit: stop after this many cases (the lines after them are not looked at); None reads all.

    Returns:
        The cases, in the order of the file, at least one.

    Raises:
        CaseError: the file, a line of it or a document it names is unusable; the message says which and why.
        ValueError: `limit` is smaller than 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    path = Path(path)
    data = _read_bounded(path)
    count = data.count(b"\n") + (not data.endswith(b"\n"))
    if count > MAX_LINES:
        raise CaseError(f"{path}: {count} lines, more than the {MAX_LINES} allowed; split the file")
    documents = _Documents(path.parent)
    cases: list[Case] = []
    lines_of: dict[str, int] = {}
    # Only b"\n" ends a line: JSON strings may hold U+2028 and the like, which str.splitlines would cut at.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        case = _parse_line(line, where, documents)
        if case.id in lines_of:
            raise CaseError(f"{where}: field `id`: {case.id!r} is already the id of line {lines_of[case.id]}")
        lines_of[case.id] = number
        cases.append(case)
        if limit is not None and len(cases) == limit:
            break
    if not cases:
        raise CaseError(f"{path}: no cases; write one JSON object a line")
    return cases


def _parse_line(line: bytes, where: str, documents: _Documents) -> Case:
    try:
        row = _CaseRow.model_validate_json(line)
        contexts = _resolve(row, where, documents)
        return Case(
            id=row.id,
            contexts=contexts,
            question=row.question,
            answer=row.answer,
            gold=row.gold,
            demo=row.demo,
        )
    except ValidationError as error:
        raise CaseError(f"{where}: {_explain(error)}") from error


def _resolve(row: _CaseRow, where: str, documents: _Documents) -> tuple[Context, ...]:
    if row.contexts is None:
        assert row.context is not None  # _CaseRow checked it
        return (Context(id=row.id, text=row.context),)
    contexts: list[Context] = []
    for number, entry in enumerate(row.contexts):
        text = entry.text
        if entry.file is not None:
            try:
                text = documents.read(entry.file)
            except CaseError as error:
                raise CaseError(f"{where}: field `contexts.{number}.file`: {error}") from error
        assert text is not None  # _ContextRow checked it
        contexts.append(Context(id=entry.id, text=text, file=entry.file))
    return tuple(contexts)


def _read_bounded(path: Path) -> bytes:
    """The bytes of a regular file of at most `MAX_FILE_BYTES`."""
    if not path.is_file():
        raise CaseError(f"{path} is not a file; check the path")
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CaseError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise CaseError(f"{path} is longer than {MAX_FILE_BYTES} bytes; split it")
    return data


def _explain(error: ValidationError) -> str:
    """The first problem pydantic found, as "field `x`: what"."""
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ").removeprefix("Invalid JSON: ")
    if first["type"] == "json_invalid":
        # pydantic saw one line of the file, so its own "line 1" would only mislead.
        return f"not JSON: {message.replace('at line 1 column', 'at column')}; write one JSON object a line"
    if first["type"] == "extra_forbidden":
        message = "unknown field; remove it or correct its name"
    field = ".".join(str(part) for part in first["loc"])
    return f"field `{field}`: {message.replace('Tuple should', 'List should')}" if field else message


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
