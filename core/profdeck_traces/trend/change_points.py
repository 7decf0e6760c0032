"""Detects level changes in a series of measurements, with a low false-positive rate.

The candidate is the split with the largest Mann-Whitney score. Both sides of a split have at least five values. The
p-value of the largest score is the tail of the standardized Brownian bridge (Csörgő and Horváth, Limit Theorems in
Change-Point Analysis, 1997, theorem 1.3.3). Autocorrelation increases the variance of the score, as in
`profdeck_traces.analysis.rank_sum_test`.

That tail is far too heavy for short series. If the sides of a split are too far apart for autocorrelation to explain,
the exact p-values of all splits are summed instead. This detects, for example, an operator that is new in the second
half of 20 captures.

A test of the complete series misses a level that changes back. Therefore segments are tested as well, by seeded binary
segmentation (Kovács, Bühlmann, Li and Munk, Biometrika 110, 2023). The complete series gets half of the significance
level, and the segments share the other half. The search continues on both sides of each change. Finally, each change is
tested again between its neighbors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.rank_sum_test import cumulative, far_apart, inflation

MIN_VALUES = 5
"""Minimum number of values on each side of a change."""
LEVEL = 0.01
"""Significance level for all series that are tested together."""
MIN_CHANGE = 0.02
"""Smallest change to report, as a fraction of the previous level."""

_MIN_SEGMENT = 4 * MIN_VALUES
"""Minimum number of values in a segment."""
_MAX_EXACT = 40
"""Maximum number of values for which the exact distribution is computed."""
_MAX_PASSES = 50
_NEAR = 20
_ROUNDING = 1e-6
_DECAY = 0.5**0.5
"""Ratio between the lengths of consecutive layers of segments."""


@attrs.frozen
class ChangePoint:
    """A level change in a series."""

    index: int
    """Index of the first value after the change."""
    before: float
    """Median of the values since the previous change."""
    after: float
    """Median of the values until the next change."""
    p_value: float
    """Probability of such a change between its neighbors if the level is constant."""


def change_points(
    values: Sequence[float], *, level: float = LEVEL, min_change: float = MIN_CHANGE
) -> list[ChangePoint]:
    """Return the level changes of a series, sorted by index.

    Args:
        values: Measurements in chronological order.
        level: Significance level. For several series that are tested together, divide it by their number.
        min_change: Smallest change to report, as a fraction of the previous level.
    """
    series = np.asarray(values, dtype=float)
    indexes = _search(series, 0, level, min_change)
    for _ in range(_MAX_PASSES):
        edges = [0, *indexes, len(values)]
        spans = list(zip(edges, edges[1:], edges[2:], strict=False))
        refined = [begin + _refine(series[begin:end], index - begin) for begin, index, end in spans]
        tested = [
            (index, _test_split(values[begin:end], index - begin, min_change))
            for index, (begin, _, end) in zip(refined, spans, strict=True)
        ]
        significant = [index for index, (p_value, _, _) in tested if p_value < level]
        if significant == indexes:
            return [ChangePoint(index, before, after, p_value) for index, (p_value, before, after) in tested]
        indexes = significant
    return []  # the positions do not converge


def smallest_p_value(values: Sequence[float], *, min_change: float = MIN_CHANGE) -> float:
    """Return the p-value of a series: the smallest significance level at which the search finds a change.

    If no split is a candidate, the p-value is 1.
    """
    best = _best(np.asarray(values, dtype=float), min_change)
    return 1.0 if best is None else best[0]


def _search(values: NDArray[np.float64], offset: int, level: float, min_change: float) -> list[int]:
    best = _best(values, min_change)
    if best is None or best[0] >= level:
        return []
    index = best[1]
    return [
        *_search(values[:index], offset, level, min_change),
        offset + index,
        *_search(values[index:], offset + index, level, min_change),
    ]


def _best(values: NDArray[np.float64], min_change: float) -> tuple[float, int] | None:
    """Return the smallest p-value over all segments, corrected for multiple tests, and the index of its split."""
    segments = _segments(len(values))
    best: tuple[float, int] | None = None
    for begin, end in segments:
        segment = values[begin:end]
        index = _candidate(segment)
        if index is None:
            continue
        tests = 2 if end - begin == len(values) else 2 * (len(segments) - 1)
        p_value = _test_split(segment.tolist(), index, min_change)[0] * tests
        if best is None or p_value < best[0]:
            best = p_value, begin + index
    return best


def _segments(count: int) -> list[tuple[int, int]]:
    """Return the bounds of the segments to test: the complete series, then layers of shorter, overlapping segments."""
    segments = {(0, count): None}
    length = count * _DECAY
    while length >= _MIN_SEGMENT:
        number = 2 * math.ceil(count / length) - 1
        shift = (count - length) / (number - 1)
        starts = [shift * index for index in range(number)]
        segments |= {(math.floor(start), min(count, math.ceil(start + length))): None for start in starts}
        length *= _DECAY
    return list(segments)


def _scores(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], float] | None:
    """Return the standardized Mann-Whitney score of each allowed split, or ``None`` if all values are equal.

    Also return the factor by which ties raise the scores.
    """
    count = len(values)
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    rank = (np.cumsum(sizes) - (sizes - 1) / 2)[group]
    ties = float((sizes.astype(float) ** 3 - sizes).sum())
    spread = (count + 1 - ties / (count * (count - 1))) / 12
    if spread <= 0:
        return None
    left = np.arange(MIN_VALUES, count - MIN_VALUES + 1)
    sums = np.cumsum(rank)[left - 1] - left * (count + 1) / 2
    scores: NDArray[np.float64] = np.maximum(np.abs(sums) - 0.5, 0) / np.sqrt(left * (count - left) * spread)
    return scores, math.sqrt((count + 1) / 12 / spread)


def _candidate(values: NDArray[np.float64]) -> int | None:
    found = _scores(values) if len(values) >= 2 * MIN_VALUES else None
    return None if found is None else MIN_VALUES + int(found[0].argmax())


def _refine(values: NDArray[np.float64], index: int) -> int:
    """Return the split near `index` with the smallest total deviation from the medians of both sides.

    The rank test alone is imprecise, because ranks contain no distances.
    """

    def deviation(split: int) -> float:
        return sum(float(np.abs(side - np.median(side)).sum()) for side in (values[:split], values[split:]))

    splits = range(max(MIN_VALUES, index - _NEAR), min(len(values) - MIN_VALUES, index + _NEAR) + 1)
    return min(splits, key=deviation, default=index)


def _test_split(values: Sequence[float], index: int, min_change: float) -> tuple[float, float, float]:
    """Return the p-value of the change at `index`, and the medians of both sides."""
    before, after = values[:index], values[index:]
    if min(len(before), len(after)) < MIN_VALUES:
        return 1.0, 0.0, 0.0
    medians = statistics.median(before), statistics.median(after)
    found = _scores(np.asarray(values, dtype=float))
    if found is None or abs(medians[1] - medians[0]) <= min_change * abs(medians[0]):
        return 1.0, *medians
    scores, raised = found
    score = float(scores[index - MIN_VALUES]) / math.sqrt(inflation(before, after))
    p_value = _p_value(score, MIN_VALUES / len(values))
    if len(values) <= _MAX_EXACT and far_apart(before, after):
        p_value = min(p_value, _exact_bound(score / raised, len(values)))
    return p_value, *medians


def _exact_bound(score: float, count: int) -> float:
    """Bound the p-value: sum, over all allowed splits, the probability that the split's score is at least `score`."""
    total = 0.0
    for left in range(MIN_VALUES, count - MIN_VALUES + 1):
        pairs = left * (count - left)
        low = pairs / 2 - score * math.sqrt(pairs * (count + 1) / 12) - 0.5
        total += 2 * cumulative(left, count - left)[int(low + _ROUNDING)] if low > -_ROUNDING else 0.0
    return min(1.0, total)


def _p_value(score: float, margin: float) -> float:
    """Return the probability that the largest score of a series with a constant level exceeds `score`.

    Args:
        score: Largest score.
        margin: Fraction of the series at each end without allowed splits.
    """
    if score < 1:
        return 1.0
    width = 2 * math.log((1 - margin) / margin)
    tail = score * math.exp(-score * score / 2) / math.sqrt(2 * math.pi)
    return min(1.0, tail * (width - width / score**2 + 4 / score**2))
