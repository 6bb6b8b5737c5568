"""The files that a report is made of, read and checked. Keys that a report does not show are ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from cb_sglang.errors import InvalidRequestError

MAX_INPUT_BYTES = 64 << 20
Number = Annotated[float, Field(allow_inf_nan=False, ge=0)]
Positive = Annotated[float, Field(allow_inf_nan=False, gt=0)]
Count = Annotated[int, Field(ge=0)]
ModelT = TypeVar("ModelT", bound=BaseModel)


class ReportInputError(InvalidRequestError):
    """A file is not what a report can be made of; the message says which command writes it."""

    code = "invalid_report_input"


class Times(BaseModel):
    """Milliseconds over ``n`` requests; None where there were none."""

    n: Count = 0
    mean: Number | None = None
    p50: Number | None = None
    p90: Number | None = None
    p95: Number | None = None
    p99: Number | None = None


class Step(BaseModel):
    """One way at one load; ``level`` is receivers (closed loop) or requests a second (open loop)."""

    way: Annotated[str, Field(max_length=100)]
    answering: bool
    mode: Literal["closed", "open"]
    level: Positive
    completed: Count
    failed: Count
    messages_per_s: Number
    request_goodput: Number
    time_to_message_ms: Times
    tteoa_ms: Times | None
    queue_ms: Times
    chat_itl_ms: Times
    cached_share: Number | None
    mean_kept_positions: Number
    mean_payload_bytes: Number
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


class RunSummary(Provenance):
    """The summary of ``cb-loadtest run``."""

    format: Literal["cb-loadtest run 1"]
    steps: list[Step] = Field(max_length=10_000)
    mode: Literal["closed", "open"]
    slo_ms: Positive
    seed: int
    workload: dict[str, Any]
    cache: dict[str, Any]
    generator: dict[str, Any]
    problems: list[str] = []


class Probe(BaseModel):
    """One measured load of the search; ``p99_ms`` is None where more than 1 % failed."""

    level: Positive
    p99_ms: Number | None
    requests: Count
    failed: Count


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


class CapacitySummary(Provenance):
    """The result of ``cb-loadtest capacity``."""

    format: Literal["cb-loadtest capacity 1"]
    mode: Literal["closed", "open"]
    slo_p99_ms: Positive
    knee: Knee
    probes: list[Probe] = Field(max_length=10_000)
    service_model: dict[str, Any] | None
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
