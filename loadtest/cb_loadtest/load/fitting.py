"""Measuring what messages and prefills cost, and the curve that follows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np

from cb_loadtest.load.bench import Bench
from cb_loadtest.load.calls import cut_messages, prefill
from cb_loadtest.load.curve import CurveSetting, ReceiverCost, calibrate, capacity_curve
from cb_loadtest.load.service_model import Observation, fit_costs, fit_service_model

RATIOS = (2.0, 4.0, 8.0, 16.0, 32.0)
_BATCHES = (1, 4, 16)
_ROWS = (8, 32, 128)
_MAX_BATCH_ROWS = 512  # keeps the fit short where prefill is slow
_REPEATS = 3
_CURVE_REACH = 8  # the curve goes on to so many times the longest sender measured


async def fitted_curve(
    bench: Bench,
    *,
    slo_ms: float,
    receivers: int | None,
    p99_ms: float | None,
    pool: int | None,
    answering: bool = False,
) -> dict[str, Any]:
    """Measure, fit, and draw the curve for an objective of ``slo_ms``. Raises the client's errors.

    receivers, p99_ms: the knee of a closed loop, where it is known; the curve is calibrated to it.
    pool:              positions of the server's KV pool, where it is known.
    answering:         whether the knee's receivers answered; then there is no calibration.
    """
    observations = await observe(bench)
    fit = fit_service_model(observations)
    reader = await reader_cost(bench)
    lengths = sorted({o.positions for o in observations})
    # The receiver's prompt is worded like the server's default query template, so it has the query's rows.
    rows = round(median(question.prompt_length for question in bench.content.questions))
    # All receivers ask at once and are served together; p99 is the last one's time.
    modelled = None if receivers is None else fit.model.seconds(receivers * rows, lengths[-1])
    calibration, uncalibrated = calibrate(modelled, p99_ms, answering=answering)
    setting = CurveSetting(
        slo_s=slo_ms / 1_000,
        rows=rows,
        prompt=max(question.prompt_length for question in bench.content.questions),
        calibration=calibration,
        uncalibrated=uncalibrated,
        pool=pool,
        measured=(lengths[0], lengths[-1]),
    )
    return {
        "service_model": fit.report()
        | {
            "reader_fixed": reader.fixed,
            "reader_per_position": reader.per_position,
            "observations": [asdict(o) for o in observations],
        },
        "curve_setting": asdict(setting) | {"measured": [*setting.measured]},
        "curve": capacity_curve(fit.model, reader, setting, _curve_lengths(lengths, setting.pool), RATIOS),
    }


async def observe(bench: Bench) -> list[Observation]:
    """Median seconds of calls over parts of the longest sender, for several batches and query sizes.

    Raises the client's errors.
    """
    draw = bench.fresh("fit")
    loop = asyncio.get_running_loop()
    sender = max(bench.content.senders, key=lambda one: len(one.ids))
    link = bench.links[sender.tenant]
    found: list[Observation] = []
    for length in sorted({max(16, len(sender.ids) // part) for part in (4, 2, 1)}):
        registered = await bench.register(link, sender.ids[:length])
        for rows in _ROWS:
            for batch in _BATCHES:
                if rows * batch > _MAX_BATCH_ROWS:
                    continue
                seconds = []
                for _ in range(_REPEATS):
                    queries = [draw.choices(bench.content.words, k=rows) for _ in range(batch)]
                    started = loop.time()
                    await cut_messages(link, registered.id, queries, {"ratio": 8.0, "encoding": "token_ids"})
                    seconds.append(loop.time() - started)
                found.append(Observation(batch, rows, length, median(seconds)))
    return found


async def reader_cost(bench: Bench) -> ReceiverCost:
    """What a receiver's prefill costs, by prompts of several lengths that nobody has seen."""
    draw = bench.fresh("reader")
    loop, link = asyncio.get_running_loop(), bench.links[0]
    longest = max(len(sender.ids) for sender in bench.content.senders)
    lengths, seconds = [], []
    for length in sorted({max(16, longest // part) for part in (16, 8, 4, 2)}):
        for _ in range(_REPEATS):
            prompt = [*bench.content.bos, *draw.choices(bench.content.words, k=length)]
            started = loop.time()
            await prefill(link, ",".join(map(str, prompt)))
            lengths.append(float(len(prompt)))
            seconds.append(loop.time() - started)
    values = np.asarray(seconds)
    terms = np.stack([np.ones_like(values), np.asarray(lengths)], axis=1)
    fixed, per_position = fit_costs(terms, values)
    return ReceiverCost(float(fixed), float(per_position))


def _curve_lengths(measured: Sequence[int], pool: int | None) -> list[int]:
    """The measured lengths, and doublings of the longest as far as the pool holds them."""
    lengths, most = list(measured), measured[-1] * _CURVE_REACH
    while lengths[-1] * 2 <= (most if pool is None else min(most, pool)):
        lengths.append(lengths[-1] * 2)
    return lengths
