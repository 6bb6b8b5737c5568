"""The files that a report is made of, read and checked. Keys that a report does not show are ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from cb_sglang.errors import InvalidRequestError

MAX_INPUT_BYTES = 64 << 20
Number = Annotated[float, Field(allow_inf_nan=False, ge=0)]
Positive = Annotated[float, Field(allow_inf_nan=False, gt=0)]
Count = Annotated[int, Field(ge=0)]
NEEDED = {"p50": 1, "p90": 10, "p95": 20, "p99": 100}
"""Samples from which on a percentile is another number than their maximum."""
ModelT = TypeVar("ModelT", bound=BaseModel)


class ReportInputError(InvalidRequestError):
    """A file is not what a report can be made of; the message says which command writes it."""

    code = "invalid_report_input"


class Times(BaseModel):
    """Milliseconds over ``n`` samples; None where there were none."""

    n: Count = 0
    mean: Number | None = None
    max: Number | None = None
    p50: Number | None = None
    p90: Number | None = None
    p95: Number | None = None
    p99: Number | None = None

    def percentile(self, name: str) -> tuple[float | None, bool]:
        """``p50``, ``p90``, ``p95`` or ``p99``, and whether it is the maximum instead, of too few samples."""
        few = self.n < NEEDED[name]
        return (self.max if few else getattr(self, name)), few


class Step(BaseModel):
    """One way at one load; ``level`` is receivers (closed loop) or requests a second (open loop).

    cut_off:      requests that were sent and neither finished nor failed: the run was interrupted, or the server died.
    sent_late_ms: the generator's lateness; the server's own queue is ``server_queue_ms``.
    """

    way: Annotated[str, Field(max_length=100)]
    answering: bool
    mode: Literal["closed", "open"]
    level: Positive
    completed: Count
    failed: Count
    cut_off: Count = 0
    messages_per_s: Number
    request_goodput: Number
    time_to_message_ms: Times
    tteoa_ms: Times | None
    sent_late_ms: Times = Field(validation_alias=AliasChoices("sent_late_ms", "queue_ms"))  # its older name
    server_queue_ms: Times = Times()
    server_engine_ms: Times = Times()
    chat_itl_ms: Times
    cached_share: Number | None
    mean_kept_positions: Number
    mean_payload_bytes: Number
    receiver_cached_tokens: Number | None = None
    errors: dict[str, Count] = {}
    grants: dict[str, Count] = {}
    server: dict[str, Any] | None = None


class Provenance(BaseModel):
    """Where figures come from."""

    command: str = ""
    finished: str = ""
    server: str = ""
    server_info: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    versions: dict[str, str] = {}
    stopped: str | None = None
    problems: list[str] = []


class Cache(BaseModel):
    """Whether senders were found in the cache, and full contexts were not.

    misses: None where the server's page size is not known, by which a hit is told from a miss.
    """

    model_config = ConfigDict(extra="allow")

    misses: Count | None = None
    warm_full_contexts: Count | None = None


class Chats(BaseModel):
    """Ordinary chats beside the load: their inter-token latency before it, and errors by kind."""

    alone_itl_ms: Times
    errors: dict[str, Count] = {}


class RunSummary(Provenance):
    """The summary of ``cb-loadtest run``."""

    format: Literal["cb-loadtest run 1"]
    steps: list[Step] = Field(max_length=10_000)
    mode: Literal["closed", "open"]
    slo_ms: Positive
    seed: int
    workload: dict[str, Any]
    cache: Cache
    generator: dict[str, Any]
    chats: Chats | None = None


class Probe(BaseModel):
    """One measured load of the search; ``p99_ms`` is None where more than 1 % failed.

    pace:        rate of completions over rate of arrivals, in an open loop.
    chat_itl_ms: of the chats beside it.
    """

    level: Positive
    p99_ms: Number | None
    requests: Count
    failed: Count
    pace: Number = 1.0
    chat_itl_ms: Times = Times()


class Knee(BaseModel):
    level: Positive | None
    p99_ms: Number | None
    ended: str


class CurvePoint(BaseModel):
    positions: Positive
    ratio: Positive
    receivers: Count
    limit: str
    receivers_on_this_server: Count
    limit_on_this_server: str
    extrapolated: bool


class ServiceModel(BaseModel):
    """Fitted costs, in seconds; ``batch_effect``: messages in one call -> time of each, as a share of one alone."""

    fixed: Number
    per_row: Number
    per_row_position: Number
    median_relative_error: Number | None = None
    max_relative_error: Number | None = None
    batch_effect: dict[str, Number] = {}
    reader_fixed: Number | None = None
    reader_per_position: Number | None = None


class Calibration(BaseModel):
    """Factor on the fitted times of the curve; ``uncalibrated`` says why it is 1 where it was not measured."""

    calibration: Positive
    uncalibrated: str | None = None


class CapacitySummary(Provenance):
    """The result of ``cb-loadtest capacity``."""

    format: Literal["cb-loadtest capacity 1"]
    mode: Literal["closed", "open"]
    slo_p99_ms: Positive
    knee: Knee
    probes: list[Probe] = Field(max_length=10_000)
    chats: Chats | None = None
    service_model: ServiceModel | None
    curve_setting: Calibration | None = None
    curve: list[CurvePoint] = Field(max_length=10_000)


def read_run(path: Path) -> RunSummary:
    """Raises ReportInputError."""
    return _read(path, RunSummary, "cb-loadtest run --json")


def read_capacity(path: Path) -> CapacitySummary:
    """Raises ReportInputError."""
    return _read(path, CapacitySummary, "cb-loadtest capacity --json")


def _read(path: Path, model: type[ModelT], command: str) -> ModelT:
    try:
        if path.stat().st_size > MAX_INPUT_BYTES:
            raise ReportInputError(f"{path} is longer than {MAX_INPUT_BYTES} bytes; give the file of {command}")
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ReportInputError(f"{path} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ReportInputError(
            f"{path} is not what {command} writes: {where}: {first['msg']} ({error.error_count()} problems)"
        ) from None
