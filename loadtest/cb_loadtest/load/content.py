"""The texts of a workload, tokenised by the server once, before anything is measured."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from cb_loadtest.load.transport import Link
from cb_loadtest.load.workload import Lengths, Workload
from cb_loadtest.receiver import RECEIVER_PROMPT
from cb_sglang.client import calls
from cb_sglang.client.errors import APIResponseError

REPORT_PROMPT = "\n\nReport of what the text above says on the question, for a colleague:"
PREAMBLE_POSITIONS = 8
"""Tokens in front of what a receiver was given, drawn anew for every request: what comes first (a system prompt,
another agent's turn) differs between agents, so no prefix that is in the cache fits theirs."""

_MIN_BODY = 1_024  # tokens that a corpus must have


@dataclass(frozen=True, slots=True)
class SenderText:
    """Token ids of one sender, whose tenant it is, and the ids as they stand in JSON, rendered once."""

    ids: tuple[int, ...]
    tenant: int
    json_ids: str


@dataclass(frozen=True, slots=True)
class Question:
    """A query as text; as the end of a receiver's prompt, in text and in token ids; and asking for a report."""

    text: str
    prompt: str
    json_prompt_ids: str
    prompt_length: int
    json_report_ids: str
    report_length: int


@dataclass(frozen=True, slots=True)
class Content:
    """Everything that requests are made of.

    ``bos`` are the ids that the tokenizer puts first; ``words`` real ids, ``vocabulary`` real words.
    """

    senders: tuple[SenderText, ...]
    questions: tuple[Question, ...]
    bos: tuple[int, ...]
    words: tuple[int, ...]
    vocabulary: tuple[str, ...]

    def digest(self) -> str:
        """Hash of all senders and questions: equal for equal load."""
        found = hashlib.sha256()
        for sender in self.senders:
            found.update(f"{sender.tenant}:{sender.json_ids};".encode())
        for question in self.questions:
            found.update(f"{question.text}\n".encode())
        return found.hexdigest()

    def preamble(self, draw: random.Random) -> list[int]:
        """A receiver's own first tokens."""
        return [*self.bos, *draw.choices(self.words, k=PREAMBLE_POSITIONS)]

    def preamble_text(self, draw: random.Random) -> str:
        """As many words, which may be more tokens; the server's tokenizer puts ``bos`` first."""
        return " ".join(draw.choices(self.vocabulary, k=PREAMBLE_POSITIONS)) + "\n\n"


NOTHING = Content((), (), (), (), ())
"""No sender and no question: of a run that was stopped before they were made."""


async def prepare(link: Link, workload: Workload, seed: int) -> Content:
    """Make the texts of ``workload``; the same seed and tokenizer give the same. Raises the client's errors."""
    draw = random.Random(f"content/{seed}")
    text = _documents()
    whole = await _tokenize(link, text, special=True)
    body = await _tokenize(link, text, special=False)
    if len(body) < _MIN_BODY or whole[-len(body) :] != body:
        raise APIResponseError("the server's tokenizer does not only put special tokens first; nothing can be cut")
    bos = whole[: -len(body)]
    senders = [_sender(workload, number, bos, body, draw) for number in range(workload.senders.count)]
    vocabulary = text.split()
    questions = [
        await _question(link, " ".join(draw.choices(vocabulary, k=draw_length(workload.queries.words, draw))))
        for _ in range(workload.queries.count)
    ]
    return Content(tuple(senders), tuple(questions), tuple(bos), tuple(body), tuple(vocabulary))


def draw_length(lengths: Lengths, draw: random.Random) -> int:
    """One number of the distribution."""
    if lengths.shape == "uniform":
        return draw.randint(lengths.low, lengths.high)
    low, high = math.log(lengths.low), math.log(lengths.high)
    value = math.exp(draw.gauss((low + high) / 2, (high - low) / 4))
    return min(lengths.high, max(lengths.low, round(value)))


def sender_text(ids: Sequence[int], tenant: int = 0) -> SenderText:
    return SenderText(tuple(ids), tenant, ",".join(map(str, ids)))


def _sender(workload: Workload, number: int, bos: list[int], body: list[int], draw: random.Random) -> SenderText:
    length = draw_length(workload.senders.positions, draw) - len(bos)
    if workload.senders.text == "words":
        ids = draw.choices(body, k=length)
    else:
        # Every sender starts elsewhere, so that no two share a prefix; the texts go round when they are too short.
        start = draw.randrange(len(body))
        turned = body[start:] + body[:start]
        ids = (turned * (length // len(body) + 1))[:length]
    return sender_text([*bos, *ids], number % workload.tenants)


async def _question(link: Link, words: str) -> Question:
    text = f"What does it say of {words}?"
    prompt = RECEIVER_PROMPT.replace("{query}", text)
    prompt_ids = await _tokenize(link, prompt, special=False)
    report_ids = await _tokenize(link, f"\n\nQuestion: {text}{REPORT_PROMPT}", special=False)
    return Question(
        text=text,
        prompt=prompt,
        json_prompt_ids=",".join(map(str, prompt_ids)),
        prompt_length=len(prompt_ids),
        json_report_ids=",".join(map(str, report_ids)),
        report_length=len(report_ids),
    )


async def _tokenize(link: Link, text: str, *, special: bool) -> list[int]:
    return await link.run(calls.tokenize(text, add_special_tokens=special))


def _documents() -> str:
    folder = files("cb_loadtest") / "data" / "documents"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".txt"))
    return "\n\n".join((folder / name).read_text(encoding="utf-8") for name in names)
