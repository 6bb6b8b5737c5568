"""Workload files: what the load consists of, as a small TOML file. ``data/workloads/README.md`` explains the fields."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cb_sglang.budget import MAX_RATIO, positions_for_budget, positions_for_ratio
from cb_sglang.capacity import Policy
from cb_sglang.errors import InvalidRequestError
from cb_sglang.wire import MAX_SENDER_TOKENS

MAX_FILE_BYTES = 1 << 20
MAX_POSITIONS_TOTAL = 16_777_216
MAX_REQUESTS = 1_000_000
MAX_CONCURRENCY = 4_096
"""Requests on their way at once, at most. In an open loop those beyond wait at the generator, and it counts."""

Count: TypeAlias = Annotated[int, Field(ge=1)]
Share: TypeAlias = Annotated[float, Field(ge=0.0, le=1.0)]
Answers: TypeAlias = Literal["off", "on", "both"]


class WorkloadError(InvalidRequestError):
    """A workload file is not usable; the message names the file and what to change."""

    code = "invalid_workload"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Lengths(_Model):
    """A distribution of whole numbers from ``low`` to ``high``, both included.

    ``lognormal`` has its median at the geometric mean of the two, and they stand two standard deviations away.
    """

    low: Count
    high: Count
    shape: Literal["uniform", "lognormal"] = "uniform"

    @model_validator(mode="after")
    def _ordered(self) -> Lengths:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) must not exceed high ({self.high})")
        return self


class Senders(_Model):
    """``count`` senders of ``positions`` tokens each, out of the packaged documents or of their words at random."""

    count: Annotated[int, Field(ge=1, le=4_096)] = 1
    positions: Lengths = Lengths(low=1_024, high=1_024)
    text: Literal["documents", "words"] = "documents"

    @model_validator(mode="after")
    def _bounded(self) -> Senders:
        if not 16 <= self.positions.low <= self.positions.high <= MAX_SENDER_TOKENS:
            raise ValueError(f"positions must lie between 16 and {MAX_SENDER_TOKENS}")
        if self.count * self.positions.high > MAX_POSITIONS_TOTAL:
            raise ValueError(f"all senders together may have {MAX_POSITIONS_TOTAL} positions; lower count or positions")
        return self


class Queries(_Model):
    """``count`` different questions of ``words`` words; ``repeated_share`` of the requests ask one again."""

    count: Annotated[int, Field(ge=1, le=4_096)] = 64
    words: Lengths = Lengths(low=8, high=16)
    repeated_share: Share = 0.0

    @model_validator(mode="after")
    def _bounded(self) -> Queries:
        if self.words.high > 1_024:
            raise ValueError("words.high must not exceed 1024")
        return self


class Receivers(_Model):
    """What receivers ask for, and whether they then answer with exactly ``max_new_tokens`` tokens.

    ``policy``: how the server treats a message that does not fit now; None leaves it to the server.
    """

    answers: Answers = "off"
    max_new_tokens: Annotated[int, Field(ge=1, le=8_192)] = 16
    ratio: Annotated[float, Field(ge=1.0, le=MAX_RATIO)] | None = None
    budget: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    encoding: Literal["token_ids", "text"] = "token_ids"
    policy: Policy | None = None

    @model_validator(mode="after")
    def _one_size(self) -> Receivers:
        if (self.ratio is None) == (self.budget is None):
            raise ValueError("give exactly one of ratio and budget")
        return self

    def kept(self, positions: int) -> int:
        """Positions of a message over a sender of ``positions``, by the budget law."""
        if self.budget is not None:
            return positions_for_budget(positions, self.budget)
        return positions_for_ratio(positions, 0, self.ratio or 1.0)

    @property
    def answer_stages(self) -> tuple[bool, ...]:
        """Whether receivers answer, for every stage of the run."""
        return {"off": (False,), "on": (True,), "both": (False, True)}[self.answers]


class Chats(_Model):
    """Ordinary chat traffic beside the load: so many streams at any time, each of a prompt and an answer."""

    concurrency: Annotated[int, Field(ge=0, le=256)] = 0
    prompt_positions: Annotated[int, Field(ge=1, le=65_536)] = 64
    max_new_tokens: Annotated[int, Field(ge=2, le=8_192)] = 128


class Workload(_Model):
    """A whole workload.

    tenants:        senders are dealt out to so many API keys.
    requests:       measured requests of a step, for each way.
    baseline_share: share of them for text reports and full contexts, which take longer. Every round of a closed loop
                    has at least two requests for each receiver all the same.
    rounds:         the ways take turns so many times in a step, so that a noisy machine hits all of them.
    warmup:         requests of each way that are made first and not counted.
    """

    name: Annotated[str, Field(min_length=1, max_length=64)]
    tenants: Annotated[int, Field(ge=1, le=256)] = 1
    requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] = 64
    baseline_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.25
    rounds: Annotated[int, Field(ge=1, le=100)] = 1
    warmup: Annotated[int, Field(ge=0, le=1_000)] = 1
    senders: Senders = Senders()
    queries: Queries = Queries()
    receivers: Receivers
    chats: Chats = Chats()

    @model_validator(mode="after")
    def _enough_senders(self) -> Workload:
        if self.tenants > self.senders.count:
            raise ValueError(f"{self.tenants} tenants need as many senders; raise senders.count")
        return self


def shipped_workloads() -> list[str]:
    """Names of the workloads that come with the package."""
    folder = files("cb_loadtest") / "data" / "workloads"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_workload(name: str) -> Workload:
    """A shipped workload by its name, or the file at a path. Raises WorkloadError."""
    if name in shipped_workloads():
        return parse_workload((files("cb_loadtest") / "data" / "workloads" / f"{name}.toml").read_bytes(), name)
    path = Path(name)
    if not path.is_file():
        raise WorkloadError(f"no workload {name!r}; give a file, or one of {', '.join(shipped_workloads())}")
    with path.open("rb") as stream:
        return parse_workload(stream.read(MAX_FILE_BYTES + 1), name)


def parse_workload(data: bytes, where: str) -> Workload:
    """Raises WorkloadError that names ``where``, the field, and what is wrong with it."""
    if len(data) > MAX_FILE_BYTES:
        raise WorkloadError(f"{where}: more than {MAX_FILE_BYTES} bytes; this is no workload file")
    try:
        return Workload.model_validate(tomllib.loads(data.decode()))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise WorkloadError(f"{where}: no TOML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise WorkloadError(f"{where}: {field}: {first['msg'].removeprefix('Value error, ')}") from None
