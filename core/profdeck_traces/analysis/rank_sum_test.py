"""Whether the steps of one side take longer than those of the other, by their ranks alone.

The test of Mann and Whitney (Annals of Mathematical Statistics 18, 1947) with its exact distribution, and the shift of
Hodges and Lehmann (the same, 34, 1963) with the interval that goes with it. Neither asks how the times are
distributed, so a few slow steps on one side do not hide that all of them are slower.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence

import attrs

FEWEST = 5
"""Steps a side from which the test can say something: with four, chance alone gives 3 % at the least."""
LEVEL = 0.01
"""Differences that chance gives less often than this are changes; the interval covers the rest."""
_MOST_EXACT = 2500
_MOST_STEPS = 2000
_ENOUGH = 10
"""Steps a side from which it can be told whether they depend on each other."""
_RELATED = 1.645
"""Steps are taken to depend on the one before if their correlation has less than 5 % by chance (von Neumann, 1941)."""
_FAR = 2
"""Sides so many times further apart than either one is wide differ, however much their steps depend on each other."""
_ASIDE = 10
"""One of so many values at each end of a side does not count for its width."""
_FEWEST_OF_DRIFT = 6
"""Minimum number of steps per side to detect drift. With five, even a monotonic sequence has a p-value above 1 %."""
_MOST_OF_DRIFT = 200
_DRIFT_MARGIN = 1.25
"""Maximum ratio of shift to drift at which drift explains the shift. It is 1 if the drift continues across samples."""
_DRIFT_STEPS = 3
"""Drift explains a gap between two samples if it could cause the gap within this number of steps."""


@attrs.frozen
class RankTest:
    """What the ranks say of two samples."""

    p_value: float
    """How often chance alone gives such a difference, of either sign."""
    shift: float
    """The median of all differences of a value after and one before."""
    interval: tuple[float, float]
    """Where the shift may lie, at `LEVEL`."""
    drift: float = 0.0
    """Mean drift within the samples, in their unit, if it may explain the shift; otherwise 0."""

    @property
    def is_significant(self) -> bool:
        """True if neither chance nor drift explains the difference."""
        return self.p_value < LEVEL and not self.drift


def rank_test(before: Sequence[float], after: Sequence[float]) -> RankTest | None:
    """Compare two samples in the order in which they were measured; None if one has too few values."""
    before, after = _thinned(before), _thinned(after)
    n, m = len(before), len(after)
    if min(n, m) < FEWEST:
        return None
    differences = sorted(late - early for early in before for late in after)
    greater = sum(one > 0 for one in differences) + sum(one == 0 for one in differences) / 2
    low = min(greater, n * m - greater)
    ties = len({*before, *after}) < n + m
    deviation = math.sqrt(_variance(before, after))
    if n * m <= _MOST_EXACT and not ties:
        below = cumulative(n, m)
        p_value = min(1.0, 2 * below[int(low)])
        aside = next(number for number, share in enumerate(below) if share > LEVEL / 2)
    else:
        p_value = _two_sided((n * m / 2 - low - 0.5) / deviation) if deviation else 1.0
        aside = max(0, int(n * m / 2 - statistics.NormalDist().inv_cdf(1 - LEVEL / 2) * deviation))
    # If the samples do not overlap at all, they differ, even if consecutive steps are strongly correlated.
    related = inflation(before, after) if min(n, m) >= _ENOUGH and 0 < greater < n * m else 1.0
    shift, interval = statistics.median(differences), (differences[aside], differences[-1 - aside])
    drift = _drift(before, after, shift)
    if related > 1 and deviation:
        independent_p_value = p_value
        p_value = max(p_value, _two_sided((n * m / 2 - low - 0.5) / deviation / math.sqrt(related)))
        if independent_p_value < LEVEL <= p_value:  # a slow change that is not monotonic
            drift = max(drift, statistics.fmean(most - least for least, most in map(_middle, (before, after))))
    return RankTest(p_value, shift, interval, drift)


def _drift(before: Sequence[float], after: Sequence[float], shift: float) -> float:
    """Return the mean drift within the samples if it may explain their shift and the gap between them, otherwise 0."""
    drifts = [abs(drift_of(values)) for values in (before, after)]
    gap = max(min(after) - max(before), min(before) - max(after))
    per_step = statistics.fmean(drift / len(values) for drift, values in zip(drifts, (before, after), strict=True))
    drift = statistics.fmean(drifts)
    return drift if abs(shift) <= _DRIFT_MARGIN * drift and gap <= _DRIFT_STEPS * per_step else 0.0


def drift_of(values: Sequence[float]) -> float:
    """Return the change due to a monotonic trend over the length of the sample, or 0 if there is no trend.

    The trend is tested with the Mann-Kendall test at `LEVEL` (Mann, Econometrica 13, 1945). The slope is the median of
    all pairwise slopes (Sen, Journal of the American Statistical Association 63, 1968).
    """
    values = values[:: -(-len(values) // _MOST_OF_DRIFT)] if len(values) > _MOST_OF_DRIFT else values
    count = len(values)
    if count < _FEWEST_OF_DRIFT:
        return 0.0
    pairs = [(late - early, j - i) for (i, early), (j, late) in itertools.combinations(enumerate(values), 2)]
    score = abs(sum((change > 0) - (change < 0) for change, _ in pairs))
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    if _two_sided((score - 1) / deviation) >= LEVEL:
        return 0.0
    return statistics.median(change / steps for change, steps in pairs) * count


def _thinned(values: Sequence[float]) -> Sequence[float]:
    return values[:: -(-len(values) // _MOST_STEPS)] if len(values) > _MOST_STEPS else values


def _two_sided(score: float) -> float:
    return math.erfc(max(score, 0.0) / math.sqrt(2))


@functools.cache
def cumulative(n: int, m: int) -> tuple[float, ...]:
    """Return the cumulative distribution of the Mann-Whitney statistic for samples of `n` and `m` values.

    Element k is the probability that the first sample's value is greater in at most k of the ``n * m`` pairs. The
    numbers of arrangements are the coefficients of the Gaussian binomial, the product of
    ``(1 - q^(m + i)) / (1 - q^i)`` over i from 1 to n.
    """
    size = n * m + 1
    counts = [1] + [0] * (size - 1)
    for i in range(1, n + 1):
        for degree in range(size - 1, m + i - 1, -1):
            counts[degree] -= counts[degree - m - i]
        for degree in range(i, size):
            counts[degree] += counts[degree - i]
    total = math.comb(n + m, n)
    return tuple(passed / total for passed in itertools.accumulate(counts))


def _variance(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the variance of the number of pairs, corrected for ties."""
    n, m = len(before), len(after)
    count = n + m
    ties = sum(
        size**3 - size for size in (len(list(group)) for _, group in itertools.groupby(sorted((*before, *after))))
    )
    return n * m / 12 * (count + 1 - ties / (count * (count - 1)))


def far_apart(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return whether the gap between two sides is too wide to be explained by drift within them.

    Ranks can't show this: a drift of 1 % within a side affects them as much as a drift of 100 %.
    """
    (least, most), (low, high) = _middle(before), _middle(after)
    return max(low - most, least - high) > _FAR * max(most - least, high - low)


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """Return where values begin and end without those far out."""
    aside = len(values) // _ASIDE
    ordered = sorted(values)
    return ordered[aside], ordered[-1 - aside]


def inflation(before: Sequence[float], after: Sequence[float]) -> float:
    """Return by how much values that depend on the one before widen the distribution of the ranks of two sides.

    1 for independent values, for less than twenty of them, and for sides that are far apart.
    """
    if len(before) + len(after) < 2 * _ENOUGH or far_apart(before, after):
        return 1.0
    return _inflation(before, after)


def _inflation(*sides: Sequence[float]) -> float:
    """Return by how much steps that depend on the one before widen the distribution; 1 for independent ones.

    With a correlation r from one to the next, n values say as much as n (1 - r) / (1 + r) independent ones.
    """
    places = {value: place for place, value in enumerate(sorted({value for side in sides for value in side}))}
    products = squares = 0.0
    pairs = 0
    for side in sides:
        ranks = [places[value] for value in side]
        mean = statistics.fmean(ranks)
        apart = [rank - mean for rank in ranks]
        products += sum(one * other for one, other in itertools.pairwise(apart))
        squares += sum(one * one for one in apart)
        pairs += len(side) - 1
    if not squares:
        return 1.0
    correlation = products / squares + len(sides) / (pairs + len(sides))  # its bias in short series
    if correlation <= _RELATED / math.sqrt(pairs):
        return 1.0
    correlation = min(correlation, 0.95)
    return (1 + correlation) / (1 - correlation)
