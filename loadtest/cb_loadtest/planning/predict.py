"""Four ways for receivers to use what senders have read, compared on one engine.

Every way is charged for one round: ``receivers`` receivers ask each of ``senders`` cached senders, read what they
get, and answer. Times are of the last receiver; nothing overlaps. That is pessimistic for all ways alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cb_loadtest.planning.engine import Engine
from cb_sglang.budget import check_window, positions_for_ratio
from cb_sglang.errors import ContextLengthError, InvalidRequestError

TOKEN_BYTES = 4
MAX_LENGTH = 1 << 24
MAX_RECEIVERS = 1 << 16


@dataclass(frozen=True, slots=True)
class Setting:
    """What is asked of the engine. Lengths are in positions.

    rows:    rows of a query.
    prompt:  the receiver's own prompt, read after the messages.
    answer:  tokens that the receiver decodes.
    report:  tokens of a text report; as many as a message keeps when None.
    link:    bytes a second between sender and receiver.
    """

    sender_length: int = 32_768
    ratio: float = 8.0
    rows: int = 32
    receivers: int = 16
    senders: int = 1
    prompt: int = 64
    answer: int = 128
    report: int | None = None
    link: float = 50e9

    def __post_init__(self) -> None:
        for name, most in (
            ("sender_length", MAX_LENGTH),
            ("rows", MAX_LENGTH),
            ("receivers", MAX_RECEIVERS),
            ("senders", MAX_RECEIVERS),
            ("prompt", MAX_LENGTH),
            ("answer", MAX_LENGTH),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise InvalidRequestError(f"{name} must be from 1 to {most}, not {getattr(self, name)}", param=name)
        if self.report is not None and not 1 <= self.report <= MAX_LENGTH:
            raise InvalidRequestError(f"report must be from 1 to {MAX_LENGTH}, not {self.report}", param="report")
        if not 0 < self.link < 1e15:
            raise InvalidRequestError(f"link must be above 0 and below 1e15 bytes/s, not {self.link:g}", param="link")
        positions_for_ratio(self.sender_length, 0, self.ratio)

    @property
    def kept(self) -> int:
        """Positions of a message."""
        return positions_for_ratio(self.sender_length, 0, self.ratio)

    @property
    def report_tokens(self) -> int:
        return self.kept if self.report is None else self.report


@dataclass(frozen=True, slots=True)
class Way:
    """One way, predicted.

    delivery:             seconds until every receiver holds what it reads, transfer included.
    answer:               seconds to the end of the last answer (TTEOA).
    messages_per_s:       messages or reports that the engine makes a second; None where it makes none.
    answers_per_s:        answers a second of the whole round.
    positions:            positions of a receiver at the end of its answer.
    receivers_that_fit:   receivers of that size in a pool that holds nothing else.
    window_overshoot:     what check_window says when the receiver's context is too short, else "".
    """

    name: str
    delivery: float
    answer: float
    messages_per_s: float | None
    answers_per_s: float
    positions: int
    receivers_that_fit: int
    window_overshoot: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """All ways, and where another way than the message is the better one (None: nowhere in the range searched).

    senders_that_fit:          whole senders in the pool, nothing else in it.
    senders_beside_receivers:  whole senders beside all receivers of messages.
    full_below_length:         longest sender for which reading all of it ends sooner than the message.
    kv_above_link:             bytes/s from which shipping the whole KV ends sooner.
    text_below_tokens:         longest text report that ends sooner.
    """

    setting: Setting
    pool_positions: int
    ways: tuple[Way, ...]
    senders_that_fit: int
    senders_beside_receivers: int
    full_below_length: int | None
    kv_above_link: float | None
    text_below_tokens: int | None

    def way(self, name: str) -> Way:
        return next(way for way in self.ways if way.name == name)

    @property
    def best(self) -> str:
        """The way whose answers end first."""
        return min(self.ways, key=lambda way: way.answer).name


def predict(engine: Engine, setting: Setting, *, kv_bytes_per_position: int) -> Prediction:
    """Raises HardwareError when the model does not fit the engine's memory."""
    planner = _Planner(engine, kv_bytes_per_position)
    ways = planner.ways(setting)
    message = ways[0]
    pool = engine.pool_positions
    room = pool - setting.receivers * message.positions
    return Prediction(
        setting=setting,
        pool_positions=pool,
        ways=ways,
        senders_that_fit=pool // setting.sender_length,
        senders_beside_receivers=max(0, room) // setting.sender_length,
        full_below_length=_last(planner.full_wins(setting), MAX_LENGTH),
        kv_above_link=planner.link_for_kv(setting, message),
        text_below_tokens=_last(planner.text_wins(setting, message), MAX_LENGTH),
    )


class _Planner:
    def __init__(self, engine: Engine, kv_bytes: int) -> None:
        self._engine = engine
        self._kv_bytes = kv_bytes

    def ways(self, setting: Setting) -> tuple[Way, ...]:
        return (
            self.message(setting),
            self.text_report(setting),
            self.full_context(setting),
            self.full_kv(setting),
        )

    def message(self, setting: Setting) -> Way:
        """Scored in one batch a sender, sent as token ids, prefilled by each receiver."""
        made = setting.senders * self._engine.scoring_seconds(
            queries=setting.receivers, rows=setting.rows, positions=setting.sender_length
        )
        read = setting.senders * setting.kept
        return self._way("message", setting, made, TOKEN_BYTES * setting.kept, new=read, held=read)

    def text_report(self, setting: Setting) -> Way:
        """Each sender decodes a report for every receiver, all receivers' reports in one batch."""
        tokens = setting.report_tokens
        prompts = setting.receivers * self._engine.prefill_seconds(rows=setting.rows, past=setting.sender_length)
        decoded = self._engine.decode_seconds(
            sequences=setting.receivers, positions=setting.sender_length, tokens=tokens
        )
        read = setting.senders * tokens
        made = setting.senders * (prompts + decoded)
        return self._way("text_report", setting, made, TOKEN_BYTES * tokens, new=read, held=read)

    def full_context(self, setting: Setting) -> Way:
        """The senders' tokens go over as they are; each receiver prefills all of them."""
        read = setting.senders * setting.sender_length
        return self._way("full_context", setting, 0.0, TOKEN_BYTES * setting.sender_length, new=read, held=read)

    def full_kv(self, setting: Setting) -> Way:
        """The senders' KV goes over; each receiver prefills only its prompt."""
        held = setting.senders * setting.sender_length
        return self._way("full_kv", setting, 0.0, self._kv_bytes * setting.sender_length, new=0, held=held)

    def _way(self, name: str, setting: Setting, made: float, payload: int, *, new: int, held: int) -> Way:
        """``new`` and ``held``: positions that a receiver prefills, and keeps, of what it was given."""
        pieces = setting.receivers * setting.senders
        delivery = made + pieces * payload / setting.link
        read = self._engine.prefill_seconds(rows=new + setting.prompt, past=held - new)
        answered = self._engine.decode_seconds(
            sequences=setting.receivers, positions=held + setting.prompt, tokens=setting.answer
        )
        positions = held + setting.prompt + setting.answer
        answer = delivery + setting.receivers * read + answered
        return Way(
            name=name,
            delivery=delivery,
            answer=answer,
            messages_per_s=pieces / made if made else None,
            answers_per_s=setting.receivers / answer,
            positions=positions,
            receivers_that_fit=self._engine.pool_positions // positions,
            window_overshoot=self._overshoot(setting, held),
        )

    def _overshoot(self, setting: Setting, held: int) -> str:
        try:
            check_window(
                context_length=self._engine.context_length,
                prompt=setting.prompt,
                messages=held,
                reserved_output=setting.answer,
            )
        except ContextLengthError as error:
            return error.message
        return ""

    def full_wins(self, setting: Setting) -> Callable[[int], bool]:
        def wins(length: int) -> bool:
            shorter = replace(setting, sender_length=length)
            return self.full_context(shorter).answer < self.message(shorter).answer

        return wins

    def text_wins(self, setting: Setting, message: Way) -> Callable[[int], bool]:
        return lambda tokens: self.text_report(replace(setting, report=tokens)).answer < message.answer

    def link_for_kv(self, setting: Setting, message: Way) -> float | None:
        """Only the transfer depends on the link, so the link follows from the seconds left for it."""
        kv = self.full_kv(setting)
        pieces = setting.receivers * setting.senders
        kv_sent = pieces * self._kv_bytes * setting.sender_length
        message_sent = pieces * TOKEN_BYTES * setting.kept
        without_link = (message.answer - message_sent / setting.link) - (kv.answer - kv_sent / setting.link)
        return (kv_sent - message_sent) / without_link if without_link > 0 else None


def _last(holds: Callable[[int], bool], most: int) -> int | None:
    """The largest number up to ``most`` for which ``holds``, which must hold up to some number and not after it."""
    if not holds(1):
        return None
    low, high = 1, 2
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
