"""``cb-loadtest plan`` and ``cb-loadtest simulate``: what can be said without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from cb_loadtest.guard import guarded
from cb_loadtest.planning.engine import Roofline
from cb_loadtest.planning.fit import FittedEngine, read_fit
from cb_loadtest.planning.hardware import GPUS, parse_gpu
from cb_loadtest.planning.model import ModelShape, built_in_names, load_shape
from cb_loadtest.planning.predict import Setting, predict
from cb_loadtest.planning.scenario import Outcome, Scenario
from cb_loadtest.planning.simulation import simulate as run_simulation
from cb_loadtest.planning.view import prediction_view, simulation_view
from cb_loadtest.recall_plan import PlanError, parse_list
from cb_loadtest.recall_report import write_text
from cb_sglang.admission import AdmissionLimits
from cb_sglang.capacity import Policy
from cb_sglang.errors import InvalidRequestError

Config = Annotated[str, typer.Option(help=f"A config.json or one of {', '.join(built_in_names())}.")]
Gpu = Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}, or FLOP/s,bytes/s,bytes as in 989e12,3.35e12,80e9.")]
Tp = Annotated[int, typer.Option(min=1, max=64, help="GPUs of a server (communication is left out).")]
ComputeEfficiency = Annotated[float, typer.Option(min=0.01, max=1, help="Share of the FLOP/s that is reached.")]
BandwidthEfficiency = Annotated[float, typer.Option(min=0.01, max=1, help="Share of the bandwidth that is reached.")]
Fit = Annotated[Path | None, typer.Option(help="Take times from this service model (cb-loadtest capacity).")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write everything there, as JSON.")]
"""Options that both commands share."""
_LIMITS = AdmissionLimits()


def plan(
    config: Config = "Qwen3-8B",
    gpu: Gpu = "H100",
    tp: Tp = 1,
    fit: Fit = None,
    sender_length: Annotated[int, typer.Option(min=1, help="Positions of a sender.")] = 32_768,
    ratio: Annotated[float, typer.Option(min=1, help="Sender positions for one kept position.")] = 8.0,
    rows: Annotated[int, typer.Option(min=1, help="Tokens of a query.")] = 32,
    receivers: Annotated[int, typer.Option(min=1, help="Receivers at the same time.")] = 16,
    senders: Annotated[int, typer.Option(min=1, help="Senders that each receiver reads.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a receiver's own prompt.")] = 64,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    report_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a text report; as many as a message keeps.")
    ] = None,
    link: Annotated[float, typer.Option(min=1e-6, help="Between sender and receiver, in GB/s.")] = 50.0,
    compute_efficiency: ComputeEfficiency = 0.5,
    bandwidth_efficiency: BandwidthEfficiency = 0.85,
    json_path: Json = None,
) -> None:
    """Predict messages/s, time to the end of the answer and what fits, for a model and a GPU; no server needed.

    Compares messages with text reports, full context and full KV over the link. Exit status: 0, 2 for unusable
    arguments.
    """
    with _usable_arguments():
        shape = load_shape(config)
        engine = _engine(shape, gpu, tp, compute_efficiency, bandwidth_efficiency, fit)
        setting = Setting(
            sender_length=sender_length,
            ratio=ratio,
            rows=rows,
            receivers=receivers,
            senders=senders,
            prompt=prompt,
            answer=answer,
            report=report_tokens,
            link=link * 1e9,
        )
        found = predict(engine, setting, kv_bytes_per_position=shape.kv_bytes_per_position)

    def run(console: Console) -> None:
        console.print(prediction_view(found, shape.name, engine.name))
        if json_path is not None:
            _write(
                json_path,
                {
                    "model": {**asdict(shape), "kv_bytes_per_position": shape.kv_bytes_per_position},
                    "engine": asdict(engine),
                    "best": found.best,
                    **asdict(found),
                },
            )

    guarded(run)


def simulate(
    config: Config = "Qwen3-8B",
    gpu: Gpu = "H100",
    tp: Tp = 1,
    fit: Fit = None,
    agents: Annotated[str, typer.Option(help="How many agents; several numbers are compared.")] = "500,2000",
    policies: Annotated[str, typer.Option(help="Budget policies to compare.")] = ",".join(get_args(Policy)),
    servers: Annotated[int, typer.Option(min=1, help="Servers, each with its own engine.")] = 16,
    tenants: Annotated[int, typer.Option(min=1, help="Tenants, over whom agents are spread evenly.")] = 4,
    senders: Annotated[int, typer.Option(min=1, help="Senders over all servers.")] = 256,
    sender_length: Annotated[int, typer.Option(min=2, help="Mean positions of a sender.")] = 16_384,
    popularity: Annotated[float, typer.Option(min=0, help="Zipf's exponent over senders; 0: all alike.")] = 0.8,
    pinned: Annotated[int, typer.Option(min=0, help="Pinned senders a server.")] = 0,
    ratio: Annotated[float, typer.Option(min=1, help="Sender positions for one kept position, as asked.")] = 8.0,
    rows: Annotated[int, typer.Option(min=1, help="Tokens of a query.")] = 32,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a receiver's own prompt.")] = 64,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    think: Annotated[float, typer.Option(min=0.001, help="Mean pause of an agent, in seconds.")] = 10.0,
    seconds: Annotated[float, typer.Option(min=0.001, help="Simulated time.")] = 60.0,
    min_budget: Annotated[int, typer.Option(min=1, help="Fewest positions a message may shrink to.")] = 128,
    max_running_work: Annotated[int, typer.Option(min=1, help="Admission: rows x positions at once.")] = (
        _LIMITS.max_running_work
    ),
    max_running_rows: Annotated[int, typer.Option(min=1, help="Admission: rows at once.")] = _LIMITS.max_running_rows,
    max_queued_work: Annotated[int, typer.Option(min=1, help="Admission: work that waits.")] = _LIMITS.max_queued_work,
    max_waiting: Annotated[int, typer.Option(min=1, help="Admission: requests that wait.")] = _LIMITS.max_waiting,
    tenant_share: Annotated[float, typer.Option(help="Admission: what one tenant may hold.")] = _LIMITS.tenant_share,
    deadline: Annotated[float, typer.Option(help="Admission: seconds to wait.")] = _LIMITS.default_deadline,
    max_requests: Annotated[int, typer.Option(min=1, help="End each run after so many requests.")] = 500_000,
    compute_efficiency: ComputeEfficiency = 0.5,
    bandwidth_efficiency: BandwidthEfficiency = 0.85,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same numbers.")] = 0,
    json_path: Json = None,
) -> None:
    """Simulate many agents over many servers with the server's own budget and admission code; no server needed.

    Exit status: 0, 2 for unusable arguments, 130 after Ctrl-C.
    """
    with _usable_arguments():
        shape = load_shape(config)
        engine = _engine(shape, gpu, tp, compute_efficiency, bandwidth_efficiency, fit)
        base = Scenario(
            servers=servers,
            tenants=tenants,
            senders=senders,
            sender_length=sender_length,
            popularity=popularity,
            pinned=pinned,
            ratio=ratio,
            rows=rows,
            prompt=prompt,
            answer=answer,
            think=think,
            seconds=seconds,
            min_budget=min_budget,
            max_requests=max_requests,
            seed=seed,
            limits=AdmissionLimits(
                max_running_work=max_running_work,
                max_running_rows=max_running_rows,
                max_queued_work=max_queued_work,
                max_waiting=max_waiting,
                tenant_share=tenant_share,
                default_deadline=deadline,
            ),
        )
        scenarios = [replace(base, agents=number) for number in _agent_counts(agents)]
        chosen = _policies(policies)
        pool = engine.pool_positions

    def run(console: Console) -> None:
        found: list[tuple[Scenario, Outcome]] = []
        for scenario in scenarios:
            for policy in chosen:
                with console.status(f"{scenario.agents} agents, policy {policy}"):
                    found.append((scenario, run_simulation(scenario, engine, policy)))
        console.print(simulation_view(found, shape.name, engine.name))
        if json_path is not None:
            runs = [{"scenario": asdict(scenario), **outcome.as_dict()} for scenario, outcome in found]
            _write(json_path, {"model": asdict(shape), "engine": asdict(engine), "pool_positions": pool, "runs": runs})

    guarded(run)


def _agent_counts(text: str) -> list[int]:
    parts = parse_list(text, "--agents")
    if not all(part.isdecimal() for part in parts):
        raise InvalidRequestError(f"--agents takes whole numbers separated by commas, not {text!r}")
    return [int(part) for part in parts]


def _policies(text: str) -> list[Policy]:
    known: dict[str, Policy] = {name: name for name in get_args(Policy)}
    parts = parse_list(text, "--policies")
    for part in parts:
        if part not in known:
            raise InvalidRequestError(f"--policies knows {', '.join(known)}, not {part!r}")
    return [known[part] for part in parts]


def _engine(
    shape: ModelShape, gpu: str, tp: int, compute: float, bandwidth: float, fit: Path | None
) -> Roofline | FittedEngine:
    hardware = replace(parse_gpu(gpu).times(tp), compute_efficiency=compute, bandwidth_efficiency=bandwidth)
    roofline = Roofline(shape, hardware)
    return roofline if fit is None else FittedEngine(read_fit(fit), roofline)


@contextmanager
def _usable_arguments() -> Iterator[None]:
    try:
        yield
    except (InvalidRequestError, PlanError) as error:
        raise typer.BadParameter(str(error)) from None


def _write(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
