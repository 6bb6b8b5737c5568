"""The receiver: it reads what it was given, then its own prompt, and answers in a line."""

from __future__ import annotations

from collections.abc import Sequence

from cb_sglang.client import CacheBack, Completion

RECEIVER_PROMPT = "\n\nQuestion: {query}\nAnswer:"
ANSWER_TOKENS = 24


def reply(
    client: CacheBack,
    given: Sequence[int],
    query: str,
    *,
    prompt: str = RECEIVER_PROMPT,
    max_new_tokens: int = ANSWER_TOKENS,
) -> Completion:
    """A short greedy answer to ``query`` from the token ids ``given``; from the prompt alone when there are none."""
    text = prompt.replace("{query}", query)
    tail = client.tokenize(text if given else text.lstrip(), add_special_tokens=not given)
    return client.generate(input_ids=[*given, *tail], max_new_tokens=max_new_tokens, stop=["\n"])
