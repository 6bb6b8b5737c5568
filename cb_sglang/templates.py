"""Wrapping a query for the sender's context, and finding which of its tokens vote.

The wrapper's own words dilute the score, so only the bare question's rows vote; they are found by the tokenizer's
character offsets, never by searching the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cb_sglang.errors import InvalidRequestError

PLACEHOLDER = "{query}"
DEFAULT_TEMPLATE = "\n\nQuestion: {query}\nAnswer:"


@dataclass(frozen=True, slots=True)
class WrappedQuery:
    """Token ids of a query as they follow the sender's, and the half-open range of those that vote."""

    input_ids: list[int]
    vote_start: int
    vote_stop: int


def check_template(template: str) -> str:
    """The template unchanged. Raises InvalidRequestError unless it holds ``{query}`` exactly once."""
    if template.count(PLACEHOLDER) != 1:
        raise InvalidRequestError(f"query_template must contain {PLACEHOLDER} exactly once", param="query_template")
    return template


def wrap_query(tokenizer: Any, query: str, template: str = DEFAULT_TEMPLATE) -> WrappedQuery:
    """Tokenise ``template`` filled with ``query``; special tokens are never added or parsed into being added.

    A token votes when it covers at least one character of the query. Raises InvalidRequestError when none does
    (an empty or whitespace-only query).
    """
    before, after = check_template(template).split(PLACEHOLDER)
    if not query.strip():
        raise InvalidRequestError("the query is empty; ask a question")
    if not getattr(tokenizer, "is_fast", False):
        # No offsets: tokenise the parts apart, so that the borders are known.
        head, body, tail = (tokenizer.encode(p, add_special_tokens=False) for p in (before, query, after))
        return WrappedQuery([*head, *body, *tail], len(head), len(head) + len(body))
    encoded = tokenizer(before + query + after, add_special_tokens=False, return_offsets_mapping=True)
    start, stop = len(before), len(before) + len(query)
    votes = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < stop and b > start and b > a]
    if not votes:
        raise InvalidRequestError("no token of the query could be found; ask a question")
    return WrappedQuery(list(encoded["input_ids"]), votes[0], votes[-1] + 1)
