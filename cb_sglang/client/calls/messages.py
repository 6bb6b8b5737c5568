"""Messages of one sender, transfers of several, and the capacity that both are granted from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar

from cb_sglang.capacity import Policy
from cb_sglang.client.call import Answer, Call, StreamCall, check_names, encode, parse, reader, validated
from cb_sglang.client.calls.senders import AnySender, sender_ids, sender_path
from cb_sglang.client.errors import APIResponseError
from cb_sglang.client.events import ItemStream
from cb_sglang.errors import InvalidRequestError
from cb_sglang.payload import MEDIA_TYPE, MessagePayload, PayloadLimits, decode_batch
from cb_sglang.wire import (
    Capacity,
    Encoding,
    Message,
    MessageList,
    MessagesRequest,
    Query,
    Receiver,
    SelectorOptions,
    Transfer,
    TransferList,
    TransfersRequest,
)

AnyQuery: TypeAlias = str | Sequence[int] | Query | Mapping[str, Any]
"""A query as text, as token ids, or with options of its own."""

AnyForm = TypeVar("AnyForm", Message, MessagePayload)


class MessageOptions(TypedDict, total=False):
    """How to cut messages. What is left out, the server decides. Of the three budgets at most one.

    ratio:   1 or more; keeps ceil(T / ratio) of the sender's T positions.
    budget:  keeps min(budget, T) positions.
    coverage: the smallest budget whose spans hold that share of the score, above 0 and up to 1.
    exclude: messages (or their ids) whose positions the receiver has already.
    since:   a message (or its id): excludes it, and all that it excluded itself.
    encoding: ``token_ids``, ``embeddings``, ``mixed`` or ``text``.
    selector: name of the scoring rule; ``selector_options`` go to it.
    query_template: what the query is wrapped in; contains ``{query}`` once.
    span_scores: also return the mean score of every 16-position span.
    receiver: who reads the messages, and what it can hold.
    policy:  ``fixed``, ``fit`` or ``share``: how a message that does not fit now is treated.
    min_budget: the fewest positions worth having.
    deadline: seconds that the call may wait for room.
    """

    ratio: float | None
    budget: int | None
    coverage: float | None
    exclude: Sequence[Message | str] | None
    since: Message | str | None
    encoding: Encoding | None
    selector: str | None
    selector_options: SelectorOptions | Mapping[str, Any] | None
    query_template: str | None
    span_scores: bool | None
    receiver: Receiver | Mapping[str, Any] | None
    policy: Policy | None
    min_budget: int | None
    deadline: float | None


def create_messages(sender: AnySender, queries: Sequence[AnyQuery], options: Mapping[str, Any]) -> Call[list[Message]]:
    """The messages in the order of ``queries``."""
    body = _messages_request(queries, options)
    count = len(body.queries)

    def read(answer: Answer) -> list[Message]:
        return _in_order(parse(MessageList, answer.body).data, count)

    return Call("POST", _messages_path(sender), read, encode(body))


def message_payloads(
    sender: AnySender, queries: Sequence[AnyQuery], options: Mapping[str, Any]
) -> Call[list[MessagePayload]]:
    """The same in binary form."""
    body = _messages_request(queries, options)
    count = len(body.queries)

    def read(answer: Answer) -> list[MessagePayload]:
        try:
            decoded = decode_batch(answer.body, limits=PayloadLimits(file_bytes=len(answer.body), messages=count))
        except InvalidRequestError as error:
            raise APIResponseError(
                f"the server's answer is no batch of messages: {error.message}", status=answer.status
            ) from error
        return _in_order(decoded, count)

    return Call("POST", _messages_path(sender), read, encode(body), media_type=MEDIA_TYPE)


def stream_messages(sender: AnySender, queries: Sequence[AnyQuery], options: Mapping[str, Any]) -> StreamCall[Message]:
    """The messages as they finish."""
    body = _messages_request(queries, options, stream=True)
    awaited = range(len(body.queries))

    def read(limit: int) -> ItemStream[Message]:
        return ItemStream("message", Message, lambda message: message.index, awaited, limit)

    return StreamCall(_messages_path(sender), encode(body), read)


def transfers(
    senders: Sequence[AnySender], queries: Sequence[AnyQuery], options: Mapping[str, Any]
) -> Call[list[Transfer]]:
    """One transfer a pair: the first sender with every query, then the next."""
    body = _transfers_request(senders, queries, options)
    pairs = _pairs(body)

    def read(answer: Answer) -> list[Transfer]:
        data = parse(TransferList, answer.body).data
        found = {_pair(each): each for each in data}
        if len(data) != len(pairs) or found.keys() != set(pairs):
            raise APIResponseError(
                f"the answer's {len(data)} transfers are not the {len(pairs)} pairs that were asked for",
                status=answer.status,
            )
        return [found[pair] for pair in pairs]

    return Call("POST", "/v1/transfers", read, encode(body))


def stream_transfers(
    senders: Sequence[AnySender], queries: Sequence[AnyQuery], options: Mapping[str, Any]
) -> StreamCall[Transfer]:
    """The transfers as they finish."""
    body = _transfers_request(senders, queries, options, stream=True)
    pairs = _pairs(body)
    return StreamCall(
        "/v1/transfers", encode(body), lambda limit: ItemStream("transfer", Transfer, _pair, pairs, limit)
    )


def capacity() -> Call[Capacity]:
    return Call("GET", "/v1/capacity", reader(Capacity))


def option_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """MessageOptions as the wire has them. Raises InvalidRequestError for an unknown one."""
    check_names(options, MessageOptions.__optional_keys__)
    fields = dict(options)
    if fields.get("exclude") is not None:
        if isinstance(fields["exclude"], str):
            raise InvalidRequestError("exclude must be a list of messages; put the message into one", param="exclude")
        fields["exclude"] = [_message_id(message) for message in fields["exclude"]]
    if fields.get("since") is not None:
        fields["since"] = _message_id(fields["since"])
    return fields


def _messages_path(sender: AnySender) -> str:
    return sender_path(sender) + "/messages"


def _messages_request(
    queries: Sequence[AnyQuery], options: Mapping[str, Any], *, stream: bool = False
) -> MessagesRequest:
    return validated(MessagesRequest, _fields(queries, options, stream))


def _transfers_request(
    senders: Sequence[AnySender], queries: Sequence[AnyQuery], options: Mapping[str, Any], *, stream: bool = False
) -> TransfersRequest:
    return validated(TransfersRequest, {"senders": sender_ids(senders), **_fields(queries, options, stream)})


def _fields(queries: Sequence[AnyQuery], options: Mapping[str, Any], stream: bool) -> dict[str, Any]:
    if isinstance(queries, str | bytes | Mapping):
        raise InvalidRequestError("queries must be a list; put the query into one", param="queries")
    return {"queries": queries, "stream": stream, **option_fields(options)}


def _message_id(message: Message | str) -> str:
    return message.id if isinstance(message, Message) else message


def _in_order(messages: Iterable[AnyForm], count: int) -> list[AnyForm]:
    found = sorted(messages, key=lambda message: message.index)
    if [message.index for message in found] != list(range(count)):
        raise APIResponseError(f"{count} queries were answered by the messages {[m.index for m in found]}", status=200)
    return found


def _pairs(body: TransfersRequest) -> list[tuple[str, int]]:
    return [(sender, query) for sender in body.senders for query in range(len(body.queries))]


def _pair(transfer: Transfer) -> tuple[str, int]:
    if (transfer.message is None) == (transfer.error is None):
        raise APIResponseError(f"transfer {transfer.query} of {transfer.sender} needs a message, or an error")
    return transfer.sender, transfer.query
