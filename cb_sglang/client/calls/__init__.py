"""Every request of the client, once; the sync and the async client only carry these over the wire."""

from __future__ import annotations

from cb_sglang.client.call import Answer, Call, StreamCall, error_of, parse
from cb_sglang.client.calls.chain import Hop, HopContent, chain_contents
from cb_sglang.client.calls.chat import ChatCompletion, ChatTurn, answered_from, chat, stream_chat
from cb_sglang.client.calls.messages import (
    AnyQuery,
    MessageOptions,
    capacity,
    create_messages,
    message_payloads,
    stream_messages,
    stream_transfers,
    transfers,
)
from cb_sglang.client.calls.senders import (
    AnyMessage,
    AnySender,
    SenderContent,
    SenderOptions,
    audit,
    create_sender,
    delete_sender,
    extend_sender,
    get_sender,
    list_senders,
)
from cb_sglang.client.calls.sglang import Completion, detokenize, generate, health, models, tokenize

__all__ = [
    "Answer",
    "AnyMessage",
    "AnyQuery",
    "AnySender",
    "Call",
    "ChatCompletion",
    "ChatTurn",
    "Completion",
    "Hop",
    "HopContent",
    "MessageOptions",
    "SenderContent",
    "SenderOptions",
    "StreamCall",
    "answered_from",
    "audit",
    "capacity",
    "chain_contents",
    "chat",
    "create_messages",
    "create_sender",
    "delete_sender",
    "detokenize",
    "error_of",
    "extend_sender",
    "generate",
    "get_sender",
    "health",
    "list_senders",
    "message_payloads",
    "models",
    "parse",
    "stream_chat",
    "stream_messages",
    "stream_transfers",
    "tokenize",
    "transfers",
]
