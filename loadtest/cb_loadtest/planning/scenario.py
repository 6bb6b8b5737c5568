"""What is simulated, and what came out of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from cb_loadtest.load.samples import Samples
from cb_sglang.admission import AdmissionLimits
from cb_sglang.budget import positions_for_ratio
from cb_sglang.capacity import Policy
from cb_sglang.errors import InvalidRequestError

MAX_AGENTS = 100_000
MAX_SERVERS = 4_096
MAX_SENDERS = 1_000_000
MAX_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Agents that ask, wait for the answer, think, and ask again. Lengths are in positions, times in seconds.

    senders:        contexts over all servers; each lives on one server and is asked the more, the lower its number.
    sender_length:  their mean length; drawn evenly from half to one and a half of it.
    popularity:     exponent of Zipf's law over senders; 0 asks all alike.
    pinned:         the most popular senders of each server that are never evicted, while they fill at most half its
                    pool.
    think:          mean of the exponential pause before each request; also after a refusal, on top of its Retry-After.
    min_budget:     fewest positions that a message may shrink to.
    max_requests:   the simulation ends after so many, whatever the time.

    Raises InvalidRequestError for values out of range.
    """

    agents: int = 2_000
    servers: int = 16
    tenants: int = 4
    senders: int = 256
    sender_length: int = 16_384
    popularity: float = 0.8
    pinned: int = 0
    ratio: float = 8.0
    rows: int = 32
    prompt: int = 64
    answer: int = 128
    think: float = 10.0
    seconds: float = 60.0
    min_budget: int = 128
    max_requests: int = 500_000
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("agents", 1, MAX_AGENTS),
            ("servers", 1, MAX_SERVERS),
            ("tenants", 1, MAX_AGENTS),
            ("senders", 1, MAX_SENDERS),
            ("sender_length", 2, 1 << 24),
            ("popularity", 0, 10),
            ("pinned", 0, MAX_SENDERS),
            ("rows", 1, 1 << 20),
            ("prompt", 1, 1 << 24),
            ("answer", 1, 1 << 24),
            ("think", 0.001, MAX_SECONDS),
            ("seconds", 0.001, MAX_SECONDS),
            ("min_budget", 1, 1 << 24),
            ("max_requests", 1, 100_000_000),
        ):
            if not low <= getattr(self, name) <= high:
                raise InvalidRequestError(
                    f"{name} must be from {low:g} to {high:g}, not {getattr(self, name):g}", param=name
                )
        positions_for_ratio(self.sender_length, 0, self.ratio)


@dataclass(slots=True)
class Outcome:
    """What happened after the warm-up, under one policy.

    message, answer:  seconds from the request to the message, and to the end of the answer.
    queued:           seconds in the admission queue, after the grant.
    kept:             granted / asked positions.
    refused:          refusals by what refused: ``tenant_share``, ``queue_full``, ``deadline``, ``pool``, ``context``;
                      the first two also where too many wait for room in the pool.
    grants:           granted messages by the limit that bound.
    rebuilds:         senders prefilled again because they had been evicted.
    counted_seconds:  simulated time after the warm-up.
    complete:         False when ``max_requests`` ended the simulation.
    """

    policy: Policy
    requests: int = 0
    messages: int = 0
    answers: int = 0
    rebuilds: int = 0
    evictions: int = 0
    counted_seconds: float = 0.0
    complete: bool = True
    message: Samples = field(default_factory=Samples)
    answer: Samples = field(default_factory=Samples)
    queued: Samples = field(default_factory=Samples)
    kept: Samples = field(default_factory=Samples)
    refused: Counter[str] = field(default_factory=Counter)
    grants: Counter[str] = field(default_factory=Counter)

    @property
    def messages_per_s(self) -> float:
        return self.messages / self.counted_seconds if self.counted_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; times in milliseconds, as in the summaries of load tests."""
        return {
            "policy": self.policy,
            "messages_per_s": self.messages_per_s,
            "requests": self.requests,
            "messages": self.messages,
            "answers": self.answers,
            "refused": dict(self.refused),
            "grants": dict(self.grants),
            "kept_share": {"median": self.kept.percentile(50), "p5": self.kept.percentile(5)},
            "message_ms": self.message.milliseconds(),
            "tteoa_ms": self.answer.milliseconds(),
            "queued_ms": self.queued.milliseconds(),
            "rebuilds": self.rebuilds,
            "evictions": self.evictions,
            "counted_seconds": self.counted_seconds,
            "complete": self.complete,
        }
