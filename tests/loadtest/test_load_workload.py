"""Workload files, and the requests that are drawn from them."""

from __future__ import annotations

import random
from itertools import islice, pairwise

import pytest

from cb_loadtest.load.content import draw_length
from cb_loadtest.load.run import requests_of
from cb_loadtest.load.schedule import Planned, plan
from cb_loadtest.load.tally import Step
from cb_loadtest.load.workload import (
    Lengths,
    Queries,
    WorkloadError,
    load_workload,
    parse_workload,
    shipped_workloads,
)

SMALLEST = 'name = "x"\n[receivers]\nratio = 8.0\n'


@pytest.mark.parametrize("name", shipped_workloads())
def test_shipped_workloads_load_under_their_own_name(name: str) -> None:
    assert load_workload(name).name == name


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name = ", "no TOML"),
        ('name = "x"', "receivers: Field required"),
        (SMALLEST + "budget = 3\n", "exactly one of ratio and budget"),
        (SMALLEST.replace("8.0", "0.5"), "receivers.ratio"),
        (SMALLEST.replace("8.0", "nan"), "receivers.ratio"),
        ("speed = 3\n" + SMALLEST, "speed: Extra inputs"),
        ("tenants = 2\n" + SMALLEST, "2 tenants need as many senders"),
        (SMALLEST + "[senders]\npositions = { low = 9, high = 5 }\n", "low (9) must not exceed high (5)"),
        (SMALLEST + "[senders]\npositions = { low = 5, high = 9 }\n", "between 16 and"),
        (SMALLEST + "[senders]\ncount = 4096\npositions = { low = 16, high = 999999 }\n", "all senders together"),
        (SMALLEST + "#" * (1 << 20), "no workload file"),
    ],
)
def test_unusable_files_are_refused_with_what_to_change(text: str, complaint: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_workload(text.encode(), "w.toml")
    assert complaint in caught.value.message
    assert caught.value.message.startswith("w.toml: ")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(WorkloadError, match="one_sender"):
        load_workload("no_such_workload")


def test_message_sizes_follow_the_budget_law() -> None:
    by_ratio = parse_workload(SMALLEST.encode(), "w").receivers
    by_budget = parse_workload(SMALLEST.replace("ratio = 8.0", "budget = 100").encode(), "w").receivers
    assert by_ratio.kept(1_001) == 126
    assert (by_budget.kept(1_001), by_budget.kept(60)) == (100, 60)


def test_lognormal_lengths_stay_inside_and_centre_on_the_geometric_mean() -> None:
    draw = random.Random(3)
    lengths = Lengths(low=100, high=10_000, shape="lognormal")
    drawn = sorted(draw_length(lengths, draw) for _ in range(4_000))
    assert drawn[0] >= 100
    assert drawn[-1] <= 10_000
    assert 930 < drawn[2_000] < 1_070
    assert 100 < drawn[640] < 330  # 16 % lie below the median over exp(one deviation): about 316


def requests(count: int, **options: object) -> list[Planned]:
    given: dict[str, object] = {"seed": 1, "label": "a", **options}
    return list(plan(Queries(count=50, repeated_share=0.3), 7, count, **given))  # type: ignore[arg-type]


def test_equal_seeds_give_equal_requests_and_other_steps_others() -> None:
    assert requests(200) == requests(200)
    assert requests(200) != requests(200, seed=2)
    assert requests(200) != requests(200, label="b")
    assert requests(50) == requests(200)[:50]


def test_the_rate_changes_when_but_not_what() -> None:
    slow, fast = requests(200, rate=1.0), requests(200, rate=4.0)
    assert [(r.sender, r.question) for r in slow] == [(r.sender, r.question) for r in fast]
    assert [r.offset for r in slow] == pytest.approx([4 * r.offset for r in fast])


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    offsets = [r.offset for r in requests(20_000, rate=5.0)]
    gaps = [b - a for a, b in pairwise(offsets)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.2, rel=0.03)
    assert deviation == pytest.approx(0.2, rel=0.05)  # exponential: as large as the mean


@pytest.mark.parametrize(
    ("level", "rounds", "each"), [(1.0, 1, 4), (1.0, 2, 2), (4.0, 2, 8), (16.0, 1, 32), (16.0, 2, 32), (16.0, 4, 32)]
)
def test_every_receiver_asks_at_least_twice_in_every_round(level: float, rounds: int, each: int) -> None:
    chosen = load_workload("one_sender").model_copy(update={"rounds": rounds})
    assert requests_of(chosen, Step("text_report", False, "closed", level)) == each
    assert requests_of(chosen, Step("text_report", False, "open", level)) == round(4 / rounds)


def test_new_questions_come_before_any_is_asked_as_new_again() -> None:
    found = list(plan(Queries(count=50), 1, 50, seed=1, label="a"))
    assert sorted(r.question for r in found) == list(range(50))


def test_the_share_of_repeated_questions_is_kept() -> None:
    asked = list(islice(plan(Queries(count=4_096, repeated_share=0.4), 1, 4_000, seed=1, label="a"), 4_000))
    assert len({r.question for r in asked}) / len(asked) == pytest.approx(0.6, abs=0.03)
