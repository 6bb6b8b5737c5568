"""Inputs for the engine tests."""

from __future__ import annotations

import random
from functools import cache

import pytest
from engine_client import Ask
from tiny_models import FIRST_TOKEN, VOCABULARY

BOS = 2


# Engines quick enough for every test.
TINY = ("small", "paged", "hybrid")


def on_engines(*names: str) -> pytest.MarkDecorator:
    """Run a test on these engines only."""
    return pytest.mark.parametrize("engine_name", names, indirect=True)


def tokens(count: int, seed: int) -> tuple[int, ...]:
    """Random token ids that every model of the tests knows, none of them special."""
    rng = random.Random(f"{count}-{seed}")
    return tuple(rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count))


def random_ask(sender_len: int, query_len: int, *, seed: int, budget: int, **options: object) -> Ask:
    """A random query over a random sender."""
    sender, query = tokens(sender_len, seed), tokens(query_len, seed + 1000)
    return Ask(sender, query, budget, **options)  # type: ignore[arg-type]


@cache
def prose(count: int) -> tuple[int, ...]:
    """``count`` tokens of English for the embedded model, BOS first: Python's own language reference."""
    from pydoc_data.topics import topics

    from cb_sglang.embedded_model import ensure_embedded_model

    text = topics["comparisons"] + topics["assignment"]
    ids = _tokenizer(str(ensure_embedded_model()))(text, add_special_tokens=False).input_ids
    assert len(ids) >= count
    return (BOS, *ids[: count - 1])


def words(text: str) -> tuple[int, ...]:
    """A query in words for the embedded model."""
    from cb_sglang.embedded_model import ensure_embedded_model

    return tuple(_tokenizer(str(ensure_embedded_model()))(text, add_special_tokens=False).input_ids)


@cache
def _tokenizer(path: str):  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
