"""What a sender is made of: its token ids, and which of them are private for the characters and roles that are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_engine import VOCABULARY, RecordingEngine, rows
from small_tokenizers import TOKENIZERS

from cb_sglang import wire
from cb_sglang.content import Part, concatenated, new_content
from cb_sglang.errors import InvalidRequestError

HEADERS = (
    "{{ bos_token }}{% for m in messages %}### {{ m.role | capitalize }}, 26 Jul 2024\n{{ m.content | trim }}\n"
    "{% endfor %}"
)


def content(tokenizer: Any, *, leads: bool = True, **request: Any) -> Part:
    engine = RecordingEngine(tokenizer=tokenizer)
    body = wire.SenderRequest(**request)
    return asyncio.run(new_content(engine, body, leads=leads))  # type: ignore[arg-type]


def shown(tokenizer: Any, part: Part) -> tuple[str, str]:
    """The text of the public tokens, and of the private ones."""
    private = {p for start, stop in part.private for p in range(start, stop)}
    split = [[each for n, each in enumerate(part.input_ids) if (n in private) is which] for which in (False, True)]
    public, hidden = (tokenizer.decode(ids, skip_special_tokens=True) for ids in split)
    return public, hidden


# --- private characters


@pytest.mark.parametrize("secret", ["4711", "🐋鯨", " 4711", "\n\n \t", "é"], ids=ascii)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_token_that_holds_a_private_character_is_private(name: str, secret: str) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = f"the key is{secret}under the stone"
    chars = [10, 10 + len(secret)]
    public, hidden = shown(tokenizer, content(tokenizer, prompt=prompt, private=[{"chars": chars}]))
    secrets = {c for c in secret if c != " "}
    assert not secrets & set(public) and "�" not in public, "not even a byte of one"
    assert secrets <= set(hidden)


@pytest.mark.parametrize("name", ["byte_level", "byte_level_trimmed", "sentencepiece"])
def test_white_space_can_be_private_too(name: str) -> None:
    """Where offsets leave it out, also."""
    tokenizer = TOKENIZERS[name]
    public, hidden = shown(tokenizer, content(tokenizer, prompt="key   under", private=[{"chars": [3, 6]}]))
    assert " " not in public and hidden.count(" ") == 3


letters = st.text(st.sampled_from("ab \né🐋"), min_size=1, max_size=10)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), letters, st.text(st.sampled_from("XYZ鯨"), min_size=1, max_size=6), letters)
def test_whatever_stands_around_is_public(name: str, before: str, secret: str, after: str) -> None:
    tokenizer = TOKENIZERS[name]
    chars = [len(before), len(before) + len(secret)]
    public, _ = shown(tokenizer, content(tokenizer, prompt=before + secret + after, private=[{"chars": chars}]))
    assert not set(secret) & set(public) and "�" not in public
    # No merge of these tokenizers joins the secret's letters with others: all else stays.
    assert public.replace(" ", "") == (before + after).replace(" ", "")


def test_the_bos_is_public_and_only_leads() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    first = content(tokenizer, prompt="key", private=[{"chars": [0, 3]}])
    assert first.input_ids[0] == tokenizer.bos_token_id and first.private == ((1, len(first.input_ids)),)
    later = content(tokenizer, prompt="key", private=[{"chars": [0, 3]}], leads=False)
    assert later.input_ids == first.input_ids[1:] and later.private == ((0, len(later.input_ids)),)


class Slow:
    """A tokenizer that tells no offsets."""

    is_fast = False

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]


def test_without_offsets_only_tokens_can_be_private() -> None:
    assert content(Slow(), prompt="key", private=[{"tokens": [1, 2]}]).private == ((1, 2),)
    with pytest.raises(InvalidRequestError, match="mark private tokens") as caught:
        content(Slow(), prompt="key", private=[{"chars": [1, 2]}])
    assert caught.value.param == "private"


def test_token_spans_are_joined_with_the_others() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    spans = [{"tokens": [2, 4]}, {"tokens": [3, 6]}, {"tokens": [0, 1]}]
    assert content(tokenizer, input_ids=[5] * 6, private=spans).private == ((0, 1), (2, 6))


# --- private roles


def chat(name: str, *turns: tuple[str, str], private: list[str], leads: bool = True) -> tuple[Part, str, str]:
    tokenizer = TOKENIZERS[name]
    tokenizer.chat_template = HEADERS
    try:
        messages = [{"role": role, "content": text} for role, text in turns]
        part = content(tokenizer, messages=messages, private=[{"role": role} for role in private], leads=leads)
        return part, *shown(tokenizer, part)
    finally:
        tokenizer.chat_template = None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_all_turns_of_a_private_role_are_private(name: str) -> None:
    turns = [("system", " 4711\n"), ("user", "who?"), ("system", "4712"), ("tool", "")]
    _, public, hidden = chat(name, *turns, private=["system", "tool"])
    assert "4711" not in public and "4712" not in public and "who?" in public
    assert "4711" in hidden and "4712" in hidden


@pytest.mark.parametrize("secret", ["26", "2024", "System", "em", "user", "who"])
def test_a_secret_is_found_where_it_stands_and_not_where_the_template_says_the_same(secret: str) -> None:
    """What a template writes around a turn, and what other turns say, may be the very text that is private."""
    _, public, hidden = chat("byte_level", ("user", "who"), ("system", secret), ("user", "26"), private=["system"])
    headers = ["### User, 26 Jul 2024", "who", "### System, 26 Jul 2024", "", "### User, 26 Jul 2024", "26"]
    assert secret in hidden
    assert public.split() == "\n".join(headers).split()


def test_turns_that_follow_bring_no_second_bos() -> None:
    turns = [("system", "4711"), ("user", "who?")]
    first, *shown_first = chat("byte_level", *turns, private=["system"])
    later, *shown_later = chat("byte_level", *turns, private=["system"], leads=False)
    assert later.input_ids == first.input_ids[1:]
    assert later.private == tuple((start - 1, stop - 1) for start, stop in first.private)
    assert shown_first == shown_later


def test_a_template_that_changes_the_text_hides_where_it_is() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    try:
        with pytest.raises(InvalidRequestError, match="mark tokens") as caught:
            content(tokenizer, messages=[{"role": "system", "content": "key"}], private=[{"role": "system"}])
        assert caught.value.param == "private"
    finally:
        tokenizer.chat_template = None


# --- ids and parts


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=f"token id {VOCABULARY} is not in the vocabulary") as caught:
        content(Slow(), input_ids=[VOCABULARY - 1, VOCABULARY])
    assert caught.value.param == "input_ids"


def test_concatenated_parts_keep_rows_and_private_runs_in_place() -> None:
    first = Part([5, 0], rows(1.0).at([1]), ((0, 1),))
    second = Part([6, 7, 0], rows(2.0).at([2]), ((0, 2),))
    found = concatenated([first, Part([]), second])
    assert found.input_ids == [5, 0, 6, 7, 0]
    assert found.rows == rows(1.0, 2.0).at([1, 4])
    assert found.private == ((0, 1), (2, 4))
    assert concatenated([]) == Part([])
