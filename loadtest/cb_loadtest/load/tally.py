"""What one step measured: a record a request, counters, bounded samples, and their summary."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from cb_loadtest.load.calls import Outcome
from cb_loadtest.load.samples import Samples
from cb_loadtest.load.schedule import Planned

MAX_ERROR_KINDS = 64


@dataclass(frozen=True, slots=True)
class Step:
    """One load on the server. ``level``: the concurrency of a closed loop, the rate (per second) of an open one."""

    way: str
    answering: bool
    mode: str
    level: float

    @property
    def label(self) -> str:
        """What the step's requests are drawn by; the ways and stages share it."""
        return f"{self.mode}/{self.level:g}"

    @property
    def title(self) -> str:
        unit = "receivers" if self.mode == "closed" else "requests/s"
        return f"{self.way}{' + answer' if self.answering else ''}, {self.level:g} {unit}"


@dataclass(frozen=True, slots=True)
class Record:
    """One finished request; times on the loop's clock. Either ``outcome`` or ``error`` (status and code) is there."""

    planned: Planned
    round: int
    tenant: int
    due_at: float
    sent_at: float
    ended_at: float
    outcome: Outcome | None
    error: str | None = None

    @property
    def seconds(self) -> float:
        """From the moment it was due to its end."""
        return self.ended_at - self.due_at

    def line(self, step: Step, start: float) -> dict[str, Any]:
        """As a JSON object; ``start`` is the loop's time that offsets count from."""
        found: dict[str, Any] = {
            "kind": "request",
            "way": step.way,
            "answering": step.answering,
            "mode": step.mode,
            "level": step.level,
            "round": self.round,
            "index": self.planned.index,
            "sender": self.planned.sender,
            "query": self.planned.question,
            "tenant": self.tenant,
            "due_s": round(self.due_at - start, 6),
            "sent_late_ms": _ms(self.sent_at - self.due_at),
            "e2e_latency_ms": _ms(self.seconds),
            "success": self.error is None,
            "error": self.error,
        }
        if self.outcome is not None:
            outcome = self.outcome
            first = outcome.first_token_at
            found |= {
                "time_to_message_ms": _ms(outcome.message_at - self.due_at),
                "ttft_ms": None if first is None else _ms(first - self.due_at),
                "input_len": outcome.input_tokens,
                "output_len": outcome.output_tokens,
                "sender_positions": outcome.sender_positions,
                "cached_positions": outcome.cached_positions,
                "kept": outcome.kept,
                "payload_bytes": outcome.payload_bytes,
                "asked": outcome.asked,
                "grant_limit": outcome.grant_limit,
                "receiver_cached_tokens": outcome.receiver_cached_tokens,
                "server_queue_ms": None if outcome.server is None else _ms(outcome.server.queue_seconds),
                "server_engine_ms": None if outcome.server is None else _ms(outcome.server.engine_seconds),
            }
        return found


class Tally:
    """Adds up the records of one step, over all its rounds.

    slo_ms:    objective for the whole request, from the moment it was due.
    page_size: of the server's cache; a hit may miss less than one page of the sender. None: no hit can be judged.
    """

    def __init__(self, step: Step, slo_ms: float, page_size: int | None = 1) -> None:
        self.step = step
        self.slo_ms = slo_ms
        self._page_size = page_size
        self.seconds = 0.0
        self.started = self.completed = self.failed = 0
        self.errors: Counter[str] = Counter()
        self.grants: Counter[str] = Counter()
        self.tenants: dict[int, Samples] = {}
        self.end_to_end, self.to_message, self.first_token = Samples(), Samples(), Samples()
        self.sent_late, self.token_gaps, self.answer_tokens = Samples(), Samples(), Samples()
        self.server_queue, self.server_engine = Samples(), Samples()
        self.chat_gaps = Samples()
        self.hits = self.warm_contexts = self._sender_positions = self._cached = 0
        self._read = self._read_cached = self._asked = 0
        self._kept = self._bytes = self._input = self._output = self._within = 0

    def add(self, record: Record) -> None:
        self.sent_late.add(record.sent_at - record.due_at)
        if record.outcome is None:
            self.failed += 1
            error = record.error or "unknown"
            self.errors[error if error in self.errors or len(self.errors) < MAX_ERROR_KINDS else "other"] += 1
            return
        outcome = record.outcome
        self.completed += 1
        self._within += record.seconds * 1_000 <= self.slo_ms
        self.end_to_end.add(record.seconds)
        self.to_message.add(outcome.message_at - record.due_at)
        self.tenants.setdefault(record.tenant, Samples()).add(record.seconds)
        if outcome.first_token_at is not None:
            self.first_token.add(outcome.first_token_at - record.due_at)
            self.token_gaps.extend(outcome.answer_gaps)
            if outcome.answer_gaps:
                self.answer_tokens.add(sum(outcome.answer_gaps) / len(outcome.answer_gaps))
        if outcome.grant_limit is not None:
            self.grants[outcome.grant_limit] += 1
        if outcome.server is not None:
            self.server_queue.add(outcome.server.queue_seconds)
            self.server_engine.add(outcome.server.engine_seconds)
        if outcome.receiver_cached_tokens is not None:
            self._read += 1
            self._read_cached += outcome.receiver_cached_tokens
        self.hits += outcome.cached_positions > outcome.sender_positions - (self._page_size or 1)
        self.warm_contexts += self.step.way == "full_context" and outcome.cached_positions > 0
        self._asked += outcome.kept if outcome.asked is None else outcome.asked
        self._sender_positions += outcome.sender_positions
        self._cached += outcome.cached_positions
        self._kept += outcome.kept
        self._bytes += outcome.payload_bytes
        self._input += outcome.input_tokens
        self._output += outcome.output_tokens

    @property
    def messages_per_s(self) -> float:
        return self.completed / self.seconds if self.seconds > 0 else 0.0

    @property
    def misses(self) -> int | None:
        """Requests whose sender was not in the cache; None where no hit can be judged."""
        return None if self._page_size is None else self.completed - self.hits

    @property
    def cached_share(self) -> float | None:
        """Share of the senders' positions that needed no prefill."""
        return self._cached / self._sender_positions if self._sender_positions else None

    @property
    def asked_and_kept(self) -> tuple[float, float]:
        """Mean positions of a message as they were asked for and as they came."""
        done = max(self.completed, 1)
        return self._asked / done, self._kept / done

    def within_slo(self) -> float:
        """Share of the finished requests, failed ones included, that met the objective."""
        finished = self.completed + self.failed
        return self._within / finished if finished else 0.0

    def summary(self) -> dict[str, Any]:
        """Keys as in ``sglang.benchmark.serving`` where the meaning is the same; ours besides.

        Times count from the moment a request was due. Where nothing was measured there is None, never NaN.
        """
        step, seconds, done = self.step, self.seconds, max(self.completed, 1)
        rate = 1.0 / seconds if seconds > 0 else 0.0
        closed, judged = step.mode == "closed", self._page_size is not None
        return {
            "kind": "step",
            "backend": "cb-sglang",
            "way": step.way,
            "answering": step.answering,
            "mode": step.mode,
            "level": step.level,
            "request_rate": "inf" if closed else step.level,
            "max_concurrency": int(step.level) if closed else None,
            "duration": round(seconds, 6),
            "completed": self.completed,
            "failed": self.failed,
            "cut_off": self.started - self.completed - self.failed,
            "errors": dict(self.errors),
            "total_input_tokens": self._input,
            "total_output_tokens": self._output,
            "request_throughput": self.completed * rate,
            "input_throughput": self._input * rate,
            "output_throughput": self._output * rate,
            "total_throughput": (self._input + self._output) * rate,
            "concurrency": self._latency_sum() * rate,
            **self.end_to_end.benchmark_keys("e2e_latency"),
            **self.first_token.benchmark_keys("ttft"),
            **self.token_gaps.benchmark_keys("itl"),
            **self.answer_tokens.benchmark_keys("tpot"),
            "goodput_slos_ms": {"e2el": self.slo_ms},
            "request_goodput": self._within * rate,
            "slo_attainment": self.within_slo(),
            "messages_per_s": self.messages_per_s,
            "time_to_message_ms": self.to_message.milliseconds(),
            "tteoa_ms": self.end_to_end.milliseconds() if step.answering else None,
            "sent_late_ms": self.sent_late.milliseconds(),
            "server_queue_ms": self.server_queue.milliseconds(),
            "server_engine_ms": self.server_engine.milliseconds(),
            "chat_itl_ms": self.chat_gaps.milliseconds(),
            "cached_share": self.cached_share,
            "receiver_cached_tokens": self._read_cached / self._read if self._read else None,
            "verified_hits": self.hits if judged else None,
            "misses": self.misses,
            "warm_full_contexts": self.warm_contexts,
            "mean_sender_positions": self._sender_positions / done,
            "mean_kept_positions": self._kept / done,
            "mean_payload_bytes": self._bytes / done,
            "grants": dict(self.grants),
            "tenants": {str(tenant): found.milliseconds() for tenant, found in sorted(self.tenants.items())},
        }

    def _latency_sum(self) -> float:
        mean = self.end_to_end.milliseconds()["mean"]
        return 0.0 if mean is None else mean / 1_000 * self.completed


def _ms(seconds: float) -> float:
    return round(seconds * 1_000, 3)
