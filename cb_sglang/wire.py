"""The JSON of our HTTP API, shared by server and client. Every list, string and integer is bounded here."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cb_sglang.budget import MAX_RATIO
from cb_sglang.capacity import Limit, Policy

MAX_QUERIES = 256
MAX_SENDERS_A_CALL = 64
MAX_TRANSFERS = 1_024
MAX_RECEIVED = 64
MAX_EXCLUDED_MESSAGES = 1_024
MAX_PRIVATE_SPANS = 4_096
MAX_LATENT_STEPS = 1_024
MAX_PAYLOAD_CHARS = 64 << 20
MAX_TTL = 366 * 24 * 3600.0
MAX_QUERY_CHARS = 32_768
MAX_SENDER_TOKENS = 4_194_304
MAX_SENDER_CHARS = 16_777_216
MAX_CHAT_MESSAGES = 4_096
MAX_TEMPLATE_CHARS = 8_192
MAX_FIELDS = 64
DEFAULT_RATIO = 8.0

TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
Encoding: TypeAlias = Literal["token_ids", "embeddings", "mixed", "text"]
Ratio: TypeAlias = Annotated[float, Field(ge=1.0, le=MAX_RATIO, allow_inf_nan=False, strict=True)]
Budget: TypeAlias = Annotated[int, Field(ge=1, lt=1 << 31, strict=True)]
QueryText: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=MAX_QUERY_CHARS)]
QueryIds: TypeAlias = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_QUERY_CHARS, fail_fast=True)]
SenderIds: TypeAlias = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_SENDER_TOKENS, fail_fast=True)]
Template: TypeAlias = Annotated[str, StringConstraints(max_length=MAX_TEMPLATE_CHARS)]
SelectorName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Coverage: TypeAlias = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False, strict=True)]
CacheMiss: TypeAlias = Literal["evicted", "restarted"]
Position: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
Count: TypeAlias = Annotated[int, Field(ge=1, lt=1 << 31, strict=True)]
MessageId: TypeAlias = Annotated[str, StringConstraints(pattern=r"^msg_[0-9a-f]{32}$")]
SenderId: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: object) -> object:
        # One error is made for every unknown field; millions of them would hold up the server.
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"an object of {len(value)} fields; none here takes more than {MAX_FIELDS}")
        return value


class ChatMessage(_Request):
    """One turn for the model's chat template."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: Annotated[str, StringConstraints(max_length=MAX_SENDER_CHARS)]


class ReceivedMessage(BaseModel):
    """A message as a receiver hands it on: what POST .../messages returned; of its fields only these are read."""

    model_config = ConfigDict(extra="ignore")

    id: Annotated[str, StringConstraints(max_length=128)] = ""
    sender: Annotated[str, StringConstraints(max_length=128)] = ""
    encoding: Encoding
    token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_SENDER_TOKENS, fail_fast=True)] | None = None
    text: Annotated[str, StringConstraints(max_length=MAX_SENDER_CHARS)] | None = None
    payload: Annotated[str, StringConstraints(max_length=MAX_PAYLOAD_CHARS)] | None = None
    model_fingerprint: Annotated[str, StringConstraints(max_length=128)] = ""
    tokenizer_fingerprint: Annotated[str, StringConstraints(max_length=128)] = ""

    @model_validator(mode="after")
    def _has_content(self) -> ReceivedMessage:
        field = {"token_ids": "token_ids", "text": "text"}.get(self.encoding, "payload")
        if getattr(self, field) is None:
            raise ValueError(f"a message of encoding {self.encoding} needs its {field}")
        return self


def _message_form(value: object) -> str | None:
    if isinstance(value, str):
        return "id"
    return "object" if isinstance(value, dict | ReceivedMessage) else None


AnyMessage: TypeAlias = Annotated[
    Annotated[MessageId, Tag("id")] | Annotated[ReceivedMessage, Tag("object")],
    Discriminator(
        _message_form,
        custom_error_type="message_form",
        custom_error_message="a message is its id, or the message object as this API returned it",
    ),
]
ReceivedList: TypeAlias = Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_RECEIVED)]


class PrivateSpan(_Request):
    """What may never leave: characters or tokens [start, stop) of the new content, or every turn of a chat role."""

    chars: tuple[Position, Position] | None = None
    tokens: tuple[Position, Position] | None = None
    role: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None

    @model_validator(mode="after")
    def _one_run(self) -> PrivateSpan:
        given = [name for name in ("chars", "tokens", "role") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of chars, tokens and role")
        run = self.chars or self.tokens
        if run is not None and run[0] >= run[1]:
            raise ValueError(f"a span is [start, stop) with start before stop, not {list(run)}")
        return self


class _Content(_Request):
    """New content: exactly one of the three forms."""

    input_ids: SenderIds | None = None
    prompt: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SENDER_CHARS)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)] | None = None
    latent_steps: Annotated[int, Field(ge=0, le=MAX_LATENT_STEPS, strict=True)] = 0
    private: Annotated[list[PrivateSpan], Field(max_length=MAX_PRIVATE_SPANS)] = []
    ttl: Annotated[float, Field(gt=0, le=MAX_TTL, allow_inf_nan=False, strict=True)] | None = None

    @property
    def given(self) -> list[str]:
        """Which contents are there; exactly one, once validated."""
        return [name for name in ("input_ids", "prompt", "messages") if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _exactly_one(self) -> _Content:
        if len(self.given) != 1:
            given = " and ".join(self.given) or "none"
            raise ValueError(f"give exactly one of input_ids, prompt and messages, not {given}")
        for span in self.private:
            if span.chars is not None and self.prompt is None:
                raise ValueError("private chars are characters of prompt; without one give tokens or role")
            if span.role is not None and self.messages is None:
                raise ValueError("private roles are those of messages; without them give chars or tokens")
        return self


class SenderRequest(_Content):
    """Body of ``POST /v1/senders``.

    ``inherits``: messages that were received, which lead the new sender. ``latent_steps`` rolls that many latent rows
    behind it. ``private`` positions take part in scoring and never leave. ``ttl`` seconds without a query end it.
    """

    inherits: ReceivedList | None = None
    pin: StrictBool = False


class ExtendRequest(_Content):
    """Body of ``POST /v1/senders/{id}/extend``: content that follows the sender's."""


class SelectorOptions(_Request):
    """What a selector can be told: ``order`` p and dose ``alpha`` of cacheback, ``sink_free``, the seed of random."""

    order: Annotated[float, Field(gt=1.0, le=8.0, allow_inf_nan=False, strict=True)] = 2.0
    alpha: Annotated[float, Field(ge=0.0, le=16.0, allow_inf_nan=False, strict=True)] = 2.0
    sink_free: StrictBool = False
    seed: Annotated[int, Field(ge=0, lt=1 << 63, strict=True)] = 0


class _Options(_Request):
    """How to cut a message; on the call for all queries, or on one query for that query alone.

    ``coverage`` takes the smallest budget whose spans hold that share of the score. ``exclude`` names messages whose
    positions the receiver has already; ``since`` a message with all that it excluded itself.
    """

    ratio: Ratio | None = None
    budget: Budget | None = None
    coverage: Coverage | None = None
    exclude: Annotated[list[MessageId], Field(max_length=MAX_EXCLUDED_MESSAGES)] | None = None
    since: MessageId | None = None
    encoding: Encoding | None = None
    selector: SelectorName | None = None
    selector_options: SelectorOptions | None = None
    query_template: Template | None = None
    span_scores: StrictBool | None = None

    @field_validator("budget", "coverage")
    @classmethod
    def _one_budget(cls, value: float | None, info: ValidationInfo) -> float | None:
        for other in ("ratio", "budget"):
            if value is not None and other != info.field_name and info.data.get(other) is not None:
                raise ValueError(f"give {other} or {info.field_name}, not both")
        return value


class Query(_Options):
    """One query with options of its own; what it leaves out, the call decides."""

    query: Annotated[
        Annotated[QueryText, Tag("text")] | Annotated[QueryIds, Tag("token_ids")],
        Discriminator(lambda value: "token_ids" if isinstance(value, list) else "text"),
    ]


def _query_form(value: object) -> str | None:
    if isinstance(value, str):
        return "text"
    if isinstance(value, list | tuple):
        return "token_ids"
    return "object" if isinstance(value, dict | Query) else None


# Tagged by form, so that an error speaks of the form that was sent and not of all three.
AnyQuery: TypeAlias = Annotated[
    Annotated[QueryText, Tag("text")] | Annotated[QueryIds, Tag("token_ids")] | Annotated[Query, Tag("object")],
    Discriminator(
        _query_form,
        custom_error_type="query_form",
        custom_error_message="a query is a string, a list of token ids, or an object with the field query",
    ),
]


class Receiver(_Request):
    """Who reads the message, and what it can hold; what is left out is taken from this server's own engine.

    ``label`` names the receiver in the audit record. ``prompt_positions`` and ``reserved_output`` are its own prompt
    and the output it wants room for; ``senders`` how many messages it reads; ``concurrent`` how many receivers like it
    run at once; ``pool_positions`` its engine's KV pool, when that is elsewhere.
    """

    label: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    context_length: Count | None = None
    pool_positions: Count | None = None
    prompt_positions: Position = 0
    reserved_output: Position = 0
    senders: Annotated[int, Field(ge=1, le=MAX_SENDERS_A_CALL, strict=True)] = 1
    concurrent: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] = 1


class _Call(_Options):
    """Options that a call has, and a single query has not."""

    receiver: Receiver | None = None
    policy: Policy = "share"
    min_budget: Budget | None = None
    deadline: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False, strict=True)] | None = None
    stream: StrictBool = False


class MessagesRequest(_Call):
    """Body of ``POST /v1/senders/{id}/messages``."""

    queries: Annotated[list[AnyQuery], Field(min_length=1, max_length=MAX_QUERIES)]


class TransfersRequest(MessagesRequest):
    """Body of ``POST /v1/transfers``: every sender with every query, one message a pair."""

    senders: Annotated[list[SenderId], Field(min_length=1, max_length=MAX_SENDERS_A_CALL)]

    @model_validator(mode="after")
    def _few_pairs(self) -> TransfersRequest:
        pairs = len(self.senders) * len(self.queries)
        if pairs > MAX_TRANSFERS:
            raise ValueError(f"{pairs} pairs of sender and query; one call takes at most {MAX_TRANSFERS}")
        if len(set(self.senders)) < len(self.senders):
            raise ValueError("a sender is named twice; name each once")
        return self


class ChatExtension(_Call):
    """The ``cacheback`` object of a chat completion: messages it is answered from, made for it or given."""

    senders: Annotated[list[SenderId], Field(min_length=1, max_length=MAX_SENDERS_A_CALL)] | None = None
    query: QueryText | None = None
    messages: ReceivedList | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ChatExtension:
        if (self.senders is None) == (self.messages is None):
            raise ValueError("give senders, to be asked, or messages, to be read; one of the two")
        return self


class Sender(BaseModel):
    """A registered sender. ``positions`` counts its tokens and latent rows.

    ``cached_positions``, in the answer to a registration: how many of them the cache held already. ``inherited``
    leading positions came with messages, ``latent`` trailing ones are its own latent rows. ``expires`` is null without
    a TTL.
    """

    object: Literal["sender"] = "sender"
    id: str
    positions: int
    cached_positions: int | None = None
    inherited: int = 0
    latent: int = 0
    private_positions: int = 0
    parent: str | None = None
    fingerprint: str
    created: float
    expires: float | None = None
    pinned_positions: int = 0


class SenderList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Sender]


class DeletedSender(BaseModel):
    object: Literal["sender.deleted"] = "sender.deleted"
    id: str
    deleted: Literal[True] = True


class BudgetReport(BaseModel):
    """What was asked and what it came to, in positions."""

    ratio: float | None = None
    budget: int | None = None
    coverage: float | None = None
    positions: int


class GrantReport(BaseModel):
    """What the receiver can be given now (cb_sglang/capacity.py), in positions, which limit bound, and why."""

    asked: int
    granted: int
    limit: Limit
    reason: str


class SizeReport(BaseModel):
    """Bytes of what a receiver needs, and how many times as many other forms of the sender would take.

    ``against_full_kv``: the KV of all sender positions, in the model's dtype; ``against_embeddings``: the kept
    positions as input-embedding rows.
    """

    payload_bytes: int
    against_full_kv: float
    against_embeddings: float


class Timings(BaseModel):
    """Seconds, measured at the server: waiting for admission, in the engine, and in all for this message."""

    queue_seconds: float = 0.0
    engine_seconds: float
    total_seconds: float


class Message(BaseModel):
    """What a receiver gets: the sender positions that its query leans on, and their tokens or text.

    ``spans`` are the runs of neighbouring kept positions, [start, stop). ``span_scores``, on request, is the mean
    score of every 16-position span of the sender; null next to private positions. ``cached_positions`` are sender
    positions that the query found in the cache; ``cache_miss`` says why the sender had to be prefilled for it, if it
    had. ``payload``: the message as base64 of a safetensors file, where there are rows.
    """

    object: Literal["message"] = "message"
    id: str
    sender: str
    index: int
    encoding: Encoding
    selector: str
    sender_positions: int
    query_positions: int
    voting_positions: int
    cached_positions: int
    cache_miss: CacheMiss | None = None
    budget: BudgetReport
    positions: list[int]
    spans: list[tuple[int, int]]
    token_ids: list[int] | None = None
    text: str | None = None
    payload: str | None = None
    payload_bytes: int = 0
    size: SizeReport | None = None
    grant: GrantReport | None = None
    model_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    query_hash: str = ""
    span_scores: list[float | None] | None = None
    timings: Timings


class MessageList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Message]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """OpenAI's nested error shape."""

    error: ErrorBody


class Transfer(BaseModel):
    """One pair of a transfers call: its message, or what went wrong with it alone."""

    object: Literal["transfer"] = "transfer"
    sender: str
    query: int
    message: Message | None = None
    error: ErrorBody | None = None


class TransferList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Transfer]


class AuditEntry(BaseModel):
    """Which positions of a sender went to whom, and when."""

    message: str
    receiver: str | None
    created: float
    encoding: Encoding
    spans: list[tuple[int, int]]


class Audit(BaseModel):
    """Newest first; the record is bounded (``--max-audit``)."""

    object: Literal["audit"] = "audit"
    sender: str
    data: list[AuditEntry]


class Capacity(BaseModel):
    """The engine's pool and load, and what a receiver asking now would be granted for each sender's message."""

    object: Literal["capacity"] = "capacity"
    pool_positions: int
    used_positions: int
    pinned_positions: int
    context_length: int
    receivers: int
    running: int
    queued: int
    grant: GrantReport
