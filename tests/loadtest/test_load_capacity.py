"""The search for the knee, the fitted costs and the curve, on servers whose truth is known."""

from __future__ import annotations

import asyncio
import math
import random
from types import SimpleNamespace
from typing import cast

import pytest

from cb_loadtest.load import fitting
from cb_loadtest.load.bench import Bench
from cb_loadtest.load.curve import CurveSetting, ReceiverCost, calibrate, capacity_curve
from cb_loadtest.load.search import Knee, KneeSearch, Probe, p99_with_failures, pace
from cb_loadtest.load.service_model import Observation, fit_service_model
from cb_loadtest.planning.fit import ServiceModel


class Server:
    """p99 grows with the load, and is blurred by up to ``noise`` of itself."""

    def __init__(self, milliseconds: float, noise: float = 0.0) -> None:
        self.milliseconds, self.noise = milliseconds, noise
        self.draw = random.Random(2)
        self.asked: list[float] = []

    async def measure(self, level: float) -> Probe | None:
        self.asked.append(level)
        p99 = self.milliseconds * level * (1 + self.draw.uniform(-self.noise, self.noise))
        return Probe(level, p99, 100, 0, level)


def search(
    server: Server, *, slo_ms: float = 1_000.0, highest: float = 512.0, whole: bool = True, probes: int = 60
) -> Knee:
    return asyncio.run(
        KneeSearch(
            server.measure,
            slo_ms=slo_ms,
            lowest=1.0 if whole else 0.25,
            highest=highest,
            whole=whole,
            max_probes=probes,
            out_of_time=lambda: None,
        ).run()
    )


@pytest.mark.parametrize("truth", [1, 2, 3, 7, 64, 100, 511])
def test_the_largest_whole_load_is_found(truth: int) -> None:
    knee = search(Server(1_000.0 / truth - 1e-9))
    assert (knee.level, knee.ended) == (truth, "found")


def test_rates_are_found_within_a_tenth() -> None:
    knee = search(Server(1_000.0 / 37.3), whole=False)
    assert knee.level is not None
    assert 37.3 / 1.1 <= knee.level <= 37.3


def test_close_things_are_measured_three_times_and_clear_ones_once() -> None:
    server = Server(1_000.0 / 20, noise=0.1)
    knee = search(server)
    assert knee.level is not None
    assert 17 <= knee.level <= 23
    assert [server.asked.count(level) for level in (1.0, 2.0, 4.0, 8.0, 32.0)] == [1, 1, 1, 1, 1]
    assert server.asked.count(20.0) in (2, 3)


@pytest.mark.parametrize(("others", "holds"), [([500.0, 500.0], True), ([500.0, 1_200.0], False)])
def test_a_close_thing_is_decided_by_two_votes(others: list[float], holds: bool) -> None:
    class Scripted(Server):
        async def measure(self, level: float) -> Probe | None:
            self.asked.append(level)
            if level != 2.0:
                return Probe(level, 500.0 if level < 2.0 else 5_000.0, 100, 0, level)
            return Probe(level, [1_050.0, *others][self.asked.count(2.0) - 1], 100, 0, level)

    server = Scripted(0.0)
    assert search(server).level == (2.0 if holds else 1.0)
    assert server.asked.count(2.0) == 3


@pytest.mark.parametrize(
    ("p99_ms", "pace", "times"), [(1_050.0, 1.0, 2), (1_050.0, 0.5, 1), (5_000.0, 0.96, 1), (500.0, 0.94, 2)]
)
def test_only_what_could_flip_is_measured_again(p99_ms: float, pace: float, times: int) -> None:
    class Falling(Server):
        async def measure(self, level: float) -> Probe | None:
            self.asked.append(level)
            return Probe(level, p99_ms, 100, 0, level, pace=pace)

    server = Falling(0.0)
    assert search(server, whole=False).level is None
    assert len(server.asked) == times


def test_a_rate_that_the_server_falls_behind_is_not_held() -> None:
    class Behind(Server):
        async def measure(self, level: float) -> Probe | None:
            return Probe(level, 10.0, 100, 0, level, pace=min(1.0, 20.0 / level))

    knee = search(Behind(0.0), whole=False)
    assert knee.level is not None
    assert 20.0 / 1.1 < knee.level <= 20.0 / 0.95


def test_pace_is_the_rate_of_completions_over_that_of_arrivals() -> None:
    steady = [(float(i), i + 3.0 + 0.5 * (i % 2)) for i in range(100)]
    assert pace(steady) == pytest.approx(1.0)
    assert pace([(float(i), 1.25 * i) for i in range(100)]) == pytest.approx(0.8)
    assert pace(steady[:1]) == pace([]) == 1.0


def test_the_ends_of_the_range_are_said() -> None:
    assert search(Server(2_000.0)).ended == "the smallest load does not hold"
    assert search(Server(2_000.0)).level is None
    knee = search(Server(1.0), highest=100.0)
    assert (knee.level, knee.ended) == (100.0, "the largest load allowed still holds")


def test_the_search_is_bounded_and_keeps_what_it_found() -> None:
    server = Server(1_000.0 / 300)
    knee = search(server, probes=6)
    assert len(server.asked) == len(knee.probes) == 6
    assert (knee.level, knee.ended) == (32.0, "all 6 probes are used up")


def test_a_measurement_that_was_cut_short_is_not_judged() -> None:
    class Dying(Server):
        async def measure(self, level: float) -> Probe | None:
            return None if level == 8 else await super().measure(level)

    knee = search(Dying(1.0))
    assert (knee.level, knee.ended) == (4.0, "cut short")


def test_failed_requests_count_as_endless() -> None:
    fast = [10.0] * 99
    assert p99_with_failures(fast, 1) == 10.0
    assert p99_with_failures(fast[:98], 2) == math.inf
    assert p99_with_failures([], 0) == math.inf
    assert p99_with_failures([float(i) for i in range(1, 201)], 0) == 198.0


TRUTH = ServiceModel(fixed=0.02, per_row=1e-4, per_row_position=3e-8)
GRID = [(batch, rows, positions) for batch in (1, 4, 16) for rows in (8, 32) for positions in (256, 512, 1_024)]


def observed(truth: ServiceModel, noise: float = 0.0) -> list[Observation]:
    draw = random.Random(4)
    return [Observation(b, r, t, truth.seconds(b * r, t) * (1 + draw.uniform(-noise, noise))) for b, r, t in GRID]


def test_the_fit_finds_the_costs() -> None:
    fit = fit_service_model(observed(TRUTH))
    assert fit.model.fixed == pytest.approx(TRUTH.fixed)
    assert fit.model.per_row == pytest.approx(TRUTH.per_row)
    assert fit.model.per_row_position == pytest.approx(TRUTH.per_row_position)
    assert fit.max_error < 1e-9


def test_noise_shows_in_the_errors_and_little_in_the_prediction() -> None:
    fit = fit_service_model(observed(TRUTH, noise=0.05))
    assert 0.005 < fit.median_error < 0.05
    assert fit.model.seconds(64, 800) == pytest.approx(TRUTH.seconds(64, 800), rel=0.05)


def test_no_cost_is_negative() -> None:
    shrinking = [Observation(1, r, t, 0.1 / (r * t)) for _, r, t in GRID]
    model = fit_service_model(shrinking).model
    assert min(model.fixed, model.per_row, model.per_row_position) >= 0.0


def test_too_few_observations_are_refused() -> None:
    with pytest.raises(ValueError, match="2 observations"):
        fit_service_model(observed(TRUTH)[:2])


def test_calls_that_took_no_time_are_refused() -> None:
    with pytest.raises(ValueError, match="no time"):
        fit_service_model([Observation(1, 8, 64, 0.0), *observed(TRUTH)])


def test_the_batch_effect_is_the_cost_of_a_message_among_others() -> None:
    effect = fit_service_model(observed(TRUTH)).batch_effect
    assert list(effect) == [1, 4, 16]
    assert effect[1] == 1.0
    assert 1.0 > effect[4] > effect[16] > 1 / 16


def setting(**changes: object) -> CurveSetting:
    given = {"slo_s": 1.0, "rows": 20, "prompt": 20, "calibration": 1.0, "pool": None, "measured": (256, 1_024)}
    return CurveSetting(**{**given, **changes})  # type: ignore[arg-type]


READER = ReceiverCost(fixed=0.01, per_position=1e-4)


def test_a_point_of_the_curve_is_the_last_load_that_fits() -> None:
    (point,) = capacity_curve(TRUTH, READER, setting(), [512], [8.0])
    n = point["receivers"]
    assert TRUTH.seconds(n * 20, 512) <= 1.0 < TRUTH.seconds((n + 1) * 20, 512)
    served = point["receivers_on_this_server"]

    def both(receivers: int) -> float:
        return TRUTH.seconds(receivers * 20, 512) + READER.fixed + receivers * (64 + 20) * READER.per_position

    assert both(served) <= 1.0 < both(served + 1)
    assert (point["kept"], point["limit"], point["extrapolated"]) == (64, "latency", False)


def test_longer_senders_and_smaller_ratios_never_serve_more() -> None:
    lengths, ratios = [256, 1_024, 8_192], [2.0, 8.0, 32.0]
    points = {(p["positions"], p["ratio"]): p for p in capacity_curve(TRUTH, READER, setting(), lengths, ratios)}
    for ratio in ratios:
        found = [points[length, ratio]["receivers"] for length in lengths]
        assert found == sorted(found, reverse=True)
    for length in lengths:
        assert len({points[length, ratio]["receivers"] for ratio in ratios}) == 1
        found = [points[length, ratio]["receivers_on_this_server"] for ratio in ratios]
        assert found == sorted(found)
    assert points[8_192, 2.0]["extrapolated"]


def test_the_pool_limits_too() -> None:
    (point,) = capacity_curve(TRUTH, READER, setting(pool=1_000), [512], [8.0])
    assert (point["receivers"], point["limit"]) == ((1_000 - 512) // 20, "memory")
    assert point["receivers_on_this_server"] == (1_000 - 512) // (20 + 64 + 20)


def test_what_the_model_leaves_out_is_calibrated_at_the_knee() -> None:
    (plain,) = capacity_curve(TRUTH, READER, setting(), [512], [8.0])
    (slower,) = capacity_curve(TRUTH, READER, setting(calibration=2.0), [512], [8.0])
    n = slower["receivers"]
    assert 2 * TRUTH.seconds(n * 20, 512) <= 1.0 < 2 * TRUTH.seconds((n + 1) * 20, 512)
    assert n < plain["receivers"]


def test_answers_do_not_calibrate_what_a_message_costs() -> None:
    assert calibrate(0.5, 750.0, answering=False) == (1.5, None)
    assert calibrate(0.5, 400.0, answering=False) == (1.0, None)
    for factor, why in (calibrate(0.5, 750.0, answering=True), calibrate(None, None, answering=False)):
        assert factor == 1.0 and why
    assert "answer" in (calibrate(0.5, 750.0, answering=True)[1] or "")


@pytest.mark.parametrize("answering", [False, True])
def test_the_curve_of_receivers_that_answer_is_not_calibrated(monkeypatch: pytest.MonkeyPatch, answering: bool) -> None:
    async def measured(*_: object) -> list[Observation]:
        return observed(TRUTH)

    async def reader(*_: object) -> ReceiverCost:
        return READER

    monkeypatch.setattr(fitting, "observe", measured)
    monkeypatch.setattr(fitting, "reader_cost", reader)
    bench = cast(Bench, SimpleNamespace(content=SimpleNamespace(questions=[SimpleNamespace(prompt_length=20)])))
    p99_ms = 3_000 * TRUTH.seconds(4 * 20, 1_024)
    found = asyncio.run(
        fitting.fitted_curve(bench, slo_ms=2_000.0, receivers=4, p99_ms=p99_ms, pool=None, answering=answering)
    )
    used = found["curve_setting"]
    assert used["calibration"] == pytest.approx(1.0 if answering else 3.0)
    assert (used["uncalibrated"] is not None) == answering


def test_an_objective_that_one_call_misses_serves_nobody() -> None:
    (point,) = capacity_curve(TRUTH, READER, setting(slo_s=0.01), [512], [8.0])
    assert point["receivers"] == point["receivers_on_this_server"] == 0
