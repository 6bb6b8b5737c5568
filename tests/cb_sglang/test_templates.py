"""Which tokens of a wrapped query vote, with real tokenizers made on the spot."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from cb_sglang.errors import InvalidRequestError
from cb_sglang.templates import DEFAULT_TEMPLATE, WrappedQuery, check_template, wrap_query


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that a character can be several tokens; adds BOS when it is let."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<bos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>")


def word_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    """Words with the white space before them, so that the query's first token starts in the template."""
    vocabulary = {word: number for number, word in enumerate(["?", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s*\S+"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


BYTES = byte_tokenizer()


class SlowTokenizer:
    """No offsets: one token a character."""

    is_fast = False

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(c) for c in text]


def voters(tokenizer: Any, wrapped: WrappedQuery) -> str:
    return str(tokenizer.decode(wrapped.input_ids[wrapped.vote_start : wrapped.vote_stop]))


@given(
    query=st.text(min_size=1, max_size=40).filter(lambda text: text.strip()),
    before=st.text(st.characters(exclude_characters="{}"), max_size=20),
    after=st.text(st.characters(exclude_characters="{}"), max_size=20),
)
def test_exactly_the_query_s_tokens_vote(query: str, before: str, after: str) -> None:
    try:
        (before + query + after).encode()
    except UnicodeEncodeError:
        return  # no tokenizer takes a lone surrogate, and the wire schema refuses it
    wrapped = wrap_query(BYTES, query, f"{before}{{query}}{after}")
    assert BYTES.decode(wrapped.input_ids) == before + query + after
    assert voters(BYTES, wrapped) == query
    assert wrapped.vote_stop - wrapped.vote_start == len(query.encode())


def test_the_default_template() -> None:
    wrapped = wrap_query(BYTES, "Who won?")
    assert BYTES.decode(wrapped.input_ids) == "\n\nQuestion: Who won?\nAnswer:"
    assert voters(BYTES, wrapped) == "Who won?"
    assert 0 not in wrapped.input_ids, "the query continues the sender: no second BOS"


def test_words_that_also_stand_in_the_template() -> None:
    """The query is found by where it is, not by what it says."""
    wrapped = wrap_query(BYTES, "Question", "Question: {query} Question")
    assert (wrapped.vote_start, wrapped.vote_stop) == (len("Question: "), len("Question: Question"))


def test_a_token_that_is_partly_the_query_s_votes() -> None:
    tokenizer = word_tokenizer("Ask", ": who", " who", " won", "now")
    wrapped = wrap_query(tokenizer, "who won", "Ask {query} now")
    assert wrapped == WrappedQuery(tokenizer.encode("Ask who won now", add_special_tokens=False), 1, 3)


def test_braces_in_the_query_are_text() -> None:
    for query in ("{query}", "{0} {x!r}", "{"):
        assert voters(BYTES, wrap_query(BYTES, query)) == query


def test_a_tokenizer_without_offsets() -> None:
    wrapped = wrap_query(SlowTokenizer(), "who?", "Q: {query}\nA:")
    assert wrapped == WrappedQuery([ord(c) for c in "Q: who?\nA:"], 3, 7)


@pytest.mark.parametrize("query", ["", " ", "\n\t\r\n", "\u00a0\u2003", string.whitespace])
@pytest.mark.parametrize("tokenizer", [BYTES, SlowTokenizer()], ids=["offsets", "none"])
def test_an_empty_query(tokenizer: Any, query: str) -> None:
    with pytest.raises(InvalidRequestError, match="the query is empty; ask a question"):
        wrap_query(tokenizer, query)


def test_a_query_without_tokens() -> None:
    class Blind:
        is_fast = True

        def __call__(self, text: str, **options: Any) -> dict[str, Any]:
            return {"input_ids": [1], "offset_mapping": [(0, 0)]}

    with pytest.raises(InvalidRequestError, match="no token of the query"):
        wrap_query(Blind(), "\u200b")


@pytest.mark.parametrize("template", ["", "no place", "{query} and {query}", "{ query }", "{QUERY}"])
def test_templates_hold_the_query_once(template: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"\{query\} exactly once") as caught:
        check_template(template)
    assert caught.value.param == "query_template"


def test_good_templates_pass_unchanged() -> None:
    for template in ("{query}", DEFAULT_TEMPLATE, "{a} {{query}}"):
        assert check_template(template) is template
