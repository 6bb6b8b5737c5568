"""A chain: senders in a row, each of which has read the message of the one before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cb_sglang.client.call import check_names
from cb_sglang.client.calls.messages import AnyQuery, create_messages
from cb_sglang.client.calls.senders import SenderContent, create_sender
from cb_sglang.errors import InvalidRequestError
from cb_sglang.wire import Message, Sender

MAX_HOPS = 64

HopContent: TypeAlias = str | SenderContent
"""What a hop adds: a prompt, or the fields of a sender's content."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A sender of the chain, and its message to the next one (of the last hop: the chain's result)."""

    sender: Sender
    message: Message


def chain_contents(hops: Sequence[HopContent], query: AnyQuery, options: Mapping[str, Any]) -> list[SenderContent]:
    """The hops' contents in order. Raises InvalidRequestError for anything wrong, before the first request."""
    if isinstance(hops, str | Mapping) or not 1 <= len(hops) <= MAX_HOPS:
        raise InvalidRequestError(f"hops must be a list of 1 to {MAX_HOPS} contents", param="hops")
    create_messages("any", [query], options)
    contents: list[SenderContent] = [{"prompt": hop} if isinstance(hop, str) else hop for hop in hops]
    for number, content in enumerate(contents):
        try:
            check_names(content, SenderContent.__optional_keys__)
            create_sender(**content)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"hop {number}: {error.message}", param="hops") from error
    return contents
