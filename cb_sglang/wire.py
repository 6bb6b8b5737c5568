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

MAX_QUERIES = 256
MAX_QUERY_CHARS = 32_768
MAX_SENDER_TOKENS = 4_194_304
MAX_SENDER_CHARS = 16_777_216
MAX_CHAT_MESSAGES = 4_096
MAX_TEMPLATE_CHARS = 8_192
MAX_FIELDS = 64
DEFAULT_RATIO = 8.0

TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
Encoding: TypeAlias = Literal["token_ids", "text"]
Ratio: TypeAlias = Annotated[float, Field(ge=1.0, le=MAX_RATIO, allow_inf_nan=False, strict=True)]
Budget: TypeAlias = Annotated[int, Field(ge=1, lt=1 << 31, strict=True)]
QueryText: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=MAX_QUERY_CHARS)]
QueryIds: TypeAlias = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_QUERY_CHARS, fail_fast=True)]
SenderIds: TypeAlias = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_SENDER_TOKENS, fail_fast=True)]
Template: TypeAlias = Annotated[str, StringConstraints(max_length=MAX_TEMPLATE_CHARS)]
SelectorName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=256)]


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


class SenderRequest(_Request):
    """Body of ``POST /v1/senders``: exactly one of the three contents."""

    input_ids: SenderIds | None = None
    prompt: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SENDER_CHARS)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)] | None = None

    @property
    def given(self) -> list[str]:
        """Which contents are there; exactly one, once validated."""
        return [name for name in ("input_ids", "prompt", "messages") if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _exactly_one(self) -> SenderRequest:
        if len(self.given) != 1:
            given = " and ".join(self.given) or "none"
            raise ValueError(f"give exactly one of input_ids, prompt and messages, not {given}")
        return self


class SelectorOptions(_Request):
    """What a selector can be told: ``order`` p and dose ``alpha`` of cacheback, ``sink_free``, the seed of random."""

    order: Annotated[float, Field(gt=1.0, le=8.0, allow_inf_nan=False, strict=True)] = 2.0
    alpha: Annotated[float, Field(ge=0.0, le=16.0, allow_inf_nan=False, strict=True)] = 2.0
    sink_free: StrictBool = False
    seed: Annotated[int, Field(ge=0, lt=1 << 63, strict=True)] = 0


class _Options(_Request):
    """How to cut a message; on the call for all queries, or on one query for that query alone."""

    ratio: Ratio | None = None
    budget: Budget | None = None
    encoding: Encoding | None = None
    selector: SelectorName | None = None
    selector_options: SelectorOptions | None = None
    query_template: Template | None = None
    span_scores: StrictBool | None = None

    @field_validator("budget")
    @classmethod
    def _one_budget(cls, budget: int | None, info: ValidationInfo) -> int | None:
        if budget is not None and info.data.get("ratio") is not None:
            raise ValueError("give ratio or budget, not both")
        return budget


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


class MessagesRequest(_Options):
    """Body of ``POST /v1/senders/{id}/messages``."""

    queries: Annotated[list[AnyQuery], Field(min_length=1, max_length=MAX_QUERIES)]
    stream: StrictBool = False


class Sender(BaseModel):
    """A registered sender. ``positions`` counts its tokens.

    ``cached_positions``, in the answer to a registration: how many of them the cache held already.
    """

    object: Literal["sender"] = "sender"
    id: str
    positions: int
    cached_positions: int | None = None
    fingerprint: str
    created: float


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
    positions: int


class Timings(BaseModel):
    """Seconds, measured at the server: in the engine (queue and forward passes), and in all for this message."""

    engine_seconds: float
    total_seconds: float


class Message(BaseModel):
    """What a receiver gets: the sender positions that its query leans on, and their tokens or text.

    ``spans`` are the runs of neighbouring kept positions, [start, stop). ``span_scores``, on request, is the mean
    score of every 16-position span of the sender. ``cached_positions`` are sender positions that needed no prefill.
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
    budget: BudgetReport
    positions: list[int]
    spans: list[tuple[int, int]]
    token_ids: list[int] | None = None
    text: str | None = None
    span_scores: list[float] | None = None
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
