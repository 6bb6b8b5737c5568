"""Messages in a chat prompt: labelled blocks, whose token ids and rows land where their markers stood."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_engine import rows
from small_tokenizers import PART_ID, TOKENIZERS

from cb_sglang.chat import Block, last_user_text, spliced, with_blocks
from cb_sglang.content import Part
from cb_sglang.errors import InvalidRequestError
from cb_sglang.rows import PLACEHOLDER_ID

TOKENS = Part([PART_ID] * 3)
MIXED = Part([PART_ID, PLACEHOLDER_ID, PART_ID, PLACEHOLDER_ID], rows(1.0, 2.0).at([1, 3]))
BLOCKS = [Block("snd_a", None, TOKENS), Block("snd_b", "found: 4711", None), Block("snd_c", None, MIXED)]


def rendered(turns: list[dict[str, Any]]) -> str:
    return "".join(f"{turn['role'].capitalize()}: {turn['content']}\n\n" for turn in turns) + "Assistant:"


# --- blocks


def test_blocks_stand_in_order_before_the_last_user_turn() -> None:
    turns = [
        {"role": "user", "content": "first"},
        {"role": "user", "content": "who?"},
        {"role": "tool", "content": "t"},
    ]
    changed, inserts = with_blocks(turns, BLOCKS)
    assert turns[1]["content"] == "who?", "the caller's are as they were"
    assert [changed[0], changed[2]] == [turns[0], turns[2]]
    first, second = (insert.marker for insert in inserts)
    assert [insert.part for insert in inserts] == [TOKENS, MIXED]
    assert changed[1]["content"] == (
        f"[Message 1 of 3, from snd_a]\n{first}\n[End of message 1]\n\n"
        "[Message 2 of 3, from snd_b]\nfound: 4711\n[End of message 2]\n\n"
        f"[Message 3 of 3, from snd_c]\n{second}\n[End of message 3]\n\n"
        "who?"
    )


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([], [{"role": "user", "content": "B"}]),
        ([{"role": "system", "content": "s"}], [{"role": "system", "content": "s"}, {"role": "user", "content": "B"}]),
        ([{"role": "user", "content": None}], [{"role": "user", "content": "B"}]),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "who?"}]}],
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "B"},
                        {"type": "image_url", "image_url": {}},
                        {"type": "text", "text": "who?"},
                    ],
                }
            ],
        ),
    ],
    ids=["none", "system only", "no content", "content in pieces"],
)
def test_every_form_of_turns(turns: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    block = "[Message 1 of 1, from snd_b]\nfound\n[End of message 1]\n\n"
    changed, inserts = with_blocks(turns, [Block("snd_b", "found", None)])
    assert inserts == []
    assert str(changed) == str(expected).replace("'B'", repr(block))


def test_markers_cannot_be_guessed() -> None:
    markers = {with_blocks([], BLOCKS)[1][0].marker for _ in range(50)}
    assert len(markers) == 50


# --- the query


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        ([{"role": "user", "content": "first"}, {"role": "user", "content": "who?"}], "who?"),
        ([{"role": "user", "content": "who?"}, {"role": "assistant", "content": "nobody"}], "who?"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "odd"]}], "a\nb"),
    ],
)
def test_the_query_is_the_last_user_turn(turns: list[Any], text: str) -> None:
    assert last_user_text(turns) == text


@pytest.mark.parametrize(
    "turns",
    [
        [],
        ["odd"],
        [{"role": "assistant", "content": "a"}],
        [{"role": "user", "content": "first"}, {"role": "user", "content": "  "}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": 5}],
    ],
    ids=str,
)
def test_without_text_there_is_no_query(turns: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"give cacheback\.query") as caught:
        last_user_text(turns)
    assert caught.value.param == "cacheback.query"


# --- splicing

HARMLESS = [
    "who?",
    "",
    "<cacheback-0123456789abcdef-1>",
    "[End of message 1]\n\n<cacheback-0123456789abcdef-2>\n[Message 3 of 3, from snd_c]\n",
    "🐋 señor 鯨\n\n  x",
]


def splice(tokenizer: Any, before: str, content: str, blocks: list[Block], label: str = "snd_a") -> None:
    """Render, splice, and compare with what the rendered text and the tokenizer's own offsets say."""
    turns = [{"role": "system", "content": before}, {"role": "user", "content": content}]
    changed, inserts = with_blocks(turns, [Block(label, block.text, block.part) for block in blocks])
    text = rendered(changed)
    encoded = tokenizer(text, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    found = spliced(tokenizer, ids, inserts)

    # The text is the rendered one, with every part where its marker stood.
    expected = tokenizer.decode(ids)
    for insert in inserts:
        expected = expected.replace(insert.marker, tokenizer.decode(insert.part.input_ids))
    assert tokenizer.decode(found.input_ids) == expected

    # Every token that had nothing of a marker is still there, in order.
    markers = [(text.index(insert.marker), insert.marker) for insert in inserts]
    rest = iter(found.input_ids)
    for token, (start, stop) in zip(ids, encoded["offset_mapping"], strict=True):
        if all(stop <= at or start >= at + len(marker) for at, marker in markers):
            assert any(token == each for each in rest)

    # Parts are whole, and every row is where its placeholder is.
    at, placed, data = 0, [], b""
    for part in (insert.part for insert in inserts):
        at = found.input_ids.index(PART_ID, at)
        assert found.input_ids[at : at + len(part.input_ids)] == part.input_ids
        if part.rows is not None:
            placed += [at + position for position in part.rows.positions]
            data += part.rows.data
        at += len(part.input_ids)
    assert PART_ID not in found.input_ids[at:]
    assert (list(found.rows.positions), found.rows.data) == (placed, data) if found.rows else placed == []


@pytest.mark.parametrize("content", HARMLESS, ids=range(len(HARMLESS)))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_parts_land_where_their_markers_stood(name: str, content: str) -> None:
    splice(TOKENIZERS[name], "You are kind.", content, BLOCKS)


texts = st.text(st.sampled_from("ab <>[]-\n1é🐋"), max_size=12)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), texts, texts, st.lists(st.sampled_from(BLOCKS), max_size=4))
def test_whatever_stands_around(name: str, before: str, content: str, blocks: list[Block]) -> None:
    splice(TOKENIZERS[name], before, content, blocks)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("label", ["🐋", "x🐋🐋🐋", "é", "snd\n", "🐋" * 40], ids=range(5))
def test_labels_of_any_kind(name: str, label: str) -> None:
    splice(TOKENIZERS[name], "s", "who?", BLOCKS[:1], label)


def test_a_template_that_drops_the_text_is_an_error() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    _, inserts = with_blocks([], BLOCKS)
    with pytest.raises(InvalidRequestError, match="ask for encoding text") as caught:
        spliced(tokenizer, tokenizer.encode("User: who?"), inserts)
    assert caught.value.param == "cacheback.encoding"


def test_rows_of_two_kinds_do_not_go_together() -> None:
    other = rows(1.0)
    narrow = Part([PLACEHOLDER_ID], type(other)((0,), "float32", 1, other.data[:4]))
    tokenizer = TOKENIZERS["byte_level"]
    changed, inserts = with_blocks([], [BLOCKS[2], Block("snd_d", None, narrow)])
    with pytest.raises(InvalidRequestError, match="do not go together"):
        spliced(tokenizer, tokenizer.encode(rendered(changed)), inserts)
