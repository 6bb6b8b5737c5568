"""The Python client of a cb-sglang server, sync and async, on httpx. Imports neither SGLang nor torch.

    with CacheBack("http://127.0.0.1:30000") as client:
        sender = client.create_sender(prompt=document)
        (message,) = client.messages(sender, ["Who won?"], ratio=8)

Nothing is retried: a failing call raises at once, and ``APIError.retry_after`` says what the server advises.
"""

from __future__ import annotations

from cb_sglang.client.aio import AsyncCacheBack
from cb_sglang.client.calls import ChatCompletion, Completion, Hop, MessageOptions, SenderContent, SenderOptions
from cb_sglang.client.errors import APIConnectionError, APIError, APIResponseError, APITimeoutError
from cb_sglang.client.sync import CacheBack
from cb_sglang.payload import MessagePayload
from cb_sglang.wire import (
    Audit,
    Capacity,
    ChatMessage,
    Message,
    PrivateSpan,
    Query,
    ReceivedMessage,
    Receiver,
    SelectorOptions,
    Sender,
    Transfer,
)

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIResponseError",
    "APITimeoutError",
    "AsyncCacheBack",
    "Audit",
    "CacheBack",
    "Capacity",
    "ChatCompletion",
    "ChatMessage",
    "Completion",
    "Hop",
    "Message",
    "MessageOptions",
    "MessagePayload",
    "PrivateSpan",
    "Query",
    "ReceivedMessage",
    "Receiver",
    "SelectorOptions",
    "Sender",
    "SenderContent",
    "SenderOptions",
    "Transfer",
]
