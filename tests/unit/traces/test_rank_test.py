"""The test of ranks: its distribution against counting, its false alarms and its power by simulation."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable

import pytest

from profdeck_traces.analysis.rank_sum_test import LEVEL, rank_test

BEFORE = [75.0, 79.0, 76.0, 81.0, 77.0, 80.0]
AFTER = [117.0, 82.0, 166.0, 83.5, 160.0, 118.0]


def counted(before: list[float], after: list[float]) -> float:
    """Count all ways to share the values out that are at least as far from the middle."""

    def greater(chosen: set[int], values: list[float]) -> float:
        return sum(
            values[late] > values[early] for early in chosen for late in range(len(values)) if late not in chosen
        )

    values = [*before, *after]
    middle = len(before) * len(after) / 2
    apart = abs(greater(set(range(len(before))), values) - middle)
    ways = Counter(
        abs(greater(set(chosen), values) - middle) >= apart
        for chosen in itertools.combinations(range(len(values)), len(before))
    )
    return ways[True] / ways.total()


@pytest.mark.parametrize(("n", "m"), [(5, 5), (5, 8), (6, 6), (7, 5)])
def test_distribution_is_exact(n: int, m: int) -> None:
    chance = random.Random(n * m)  # noqa: S311  # no secret
    for _ in range(10):
        before, after = ([chance.gauss(side, 1) for _ in range(count)] for side, count in ((0, n), (1, m)))
        result = rank_test(before, after)
        assert result is not None
        assert result.p_value == pytest.approx(counted(before, after))


def test_slowdown_of_all_steps_is_a_change_for_any_spread() -> None:
    for before, after in ((BEFORE, AFTER), (sorted(BEFORE), sorted(AFTER))):
        result = rank_test(before, after)
        assert result is not None
        assert result.p_value == pytest.approx(2 / math.comb(12, 6))
        assert result.shift == statistics.median(late - early for early in before for late in after)
        assert 0 < result.interval[0] <= result.shift <= result.interval[1]


def test_too_few_steps_have_no_result() -> None:
    assert rank_test([1, 2, 3, 4], AFTER) is None
    assert rank_test([], AFTER) is None


@pytest.mark.parametrize("values", [[5.0] * 10, [5.0] * 100, [1.0, 2.0] * 30])
def test_equal_steps_are_the_same(values: list[float]) -> None:
    result = rank_test(values, values)
    assert result is not None
    assert result.p_value > 0.5
    assert result.shift == 0


@pytest.mark.slow
def test_many_steps_take_no_time() -> None:
    chance = random.Random(1)  # noqa: S311  # no secret
    before, after = ([chance.gauss(side, 1) for _ in range(100_000)] for side in (0, 0.2))
    result = rank_test(before, after)
    assert result is not None
    assert result.p_value < 1e-6


def normal(chance: random.Random) -> float:
    return chance.gauss(100, 5)


def log_normal(chance: random.Random) -> float:
    return 100 * math.exp(chance.gauss(0, 0.25))


def two_modes(chance: random.Random) -> float:
    return chance.gauss(100, 2) + 40 * (chance.random() < 0.3)


def outlying(chance: random.Random) -> float:
    return chance.gauss(100, 25) + 300 * (chance.random() < 0.1)


@pytest.mark.parametrize("steps", [5, 6, 10, 20])
@pytest.mark.parametrize("times", [normal, log_normal, two_modes, outlying])
def test_false_alarms_are_rare(times: Callable[[random.Random], float], steps: int) -> None:
    chance, alarms, tries = random.Random(steps), 0, 400  # noqa: S311  # no secret
    for _ in range(tries):
        result = rank_test(*([times(chance) for _ in range(steps)] for _ in range(2)))
        assert result is not None
        alarms += result.p_value < LEVEL
    assert alarms <= 12  # 4 are expected; more occur by chance with a probability of 1/1000


def test_slowdown_is_found() -> None:
    chance, hits, tries = random.Random(3), 0, 200  # noqa: S311  # no secret
    for _ in range(tries):
        test = rank_test([outlying(chance) for _ in range(20)], [1.5 * outlying(chance) for _ in range(20)])
        assert test is not None
        hits += test.p_value < LEVEL
    assert hits / tries > 0.65


def drifting(chance: random.Random, related: float, steps: int) -> list[float]:
    """Return autocorrelated values with mean 0 and standard deviation 1."""
    values = [chance.gauss(0, 1)]
    while len(values) < steps:
        values.append(related * values[-1] + math.sqrt(1 - related**2) * chance.gauss(0, 1))
    return values


@pytest.mark.parametrize("outlier", [1, 20])
@pytest.mark.parametrize("related", [0.5, 0.95])
@pytest.mark.parametrize("steps", [10, 12, 20])
def test_steps_far_apart_differ_however_related(steps: int, related: float, outlier: int) -> None:
    chance = random.Random(steps)  # noqa: S311  # no secret
    for _ in range(50):
        before, after = (
            [scale * (1 + 0.05 * value) for value in drifting(chance, related, steps)] for scale in (2.9, 40)
        )
        result = rank_test([outlier * before[0], *before[1:]], after)
        assert result is not None
        assert result.p_value < LEVEL


def test_related_steps_close_together_are_mostly_the_same() -> None:
    chance, alarms, tries = random.Random(1), 0, 300  # noqa: S311  # no secret
    for _ in range(tries):
        result = rank_test(drifting(chance, 0.8, 40), drifting(chance, 0.8, 40))
        assert result is not None
        alarms += result.p_value < LEVEL
    assert alarms / tries < 0.1  # without a correction for autocorrelation, more than a third
