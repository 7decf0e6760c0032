"""Where a series of measurements changes its level: a test with few false alarms, for captures in their order.

For each place that leaves five values or more on both sides, the ranks of all values give the score of Mann and
Whitney; the place with the largest score is the candidate. How often chance alone gives such a largest score is the
formula of Csörgő and Horváth for the standardized Brownian bridge (Limit Theorems in Change-Point Analysis, 1997,
theorem 1.3.3). Values that depend on the ones before widen the distribution, as in
`profdeck_traces.analysis.rank_sum_test`.

A level that comes and goes hides from a test of the whole series, so parts of it are tested as well: those of seeded
binary segmentation (Kovács, Bühlmann, Li and Munk, Biometrika 110, 2023). The whole is tested at half of the level, and
the parts share the other half. Both sides of a change are searched again; in the end each change is tested once more
between its neighbours.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.rank_sum_test import inflation

FEWEST = 5
"""Values on each side of a change."""
LEVEL = 0.01
"""How often chance alone may give a change anywhere in all series that are looked at together."""
LEAST = 0.02
"""Smaller changes, as a fraction of the level before, are none."""

_SHORTEST = 4 * FEWEST
"""Values in a part of a series that is tested by itself."""
_MOST_PASSES = 50
_NEAR = 20
_DECAY = 0.5**0.5
"""The length of such a part by that of the next longer ones."""


@attrs.frozen
class ChangePoint:
    """A place where the level of a series changes."""

    index: int
    """Of the first value after it."""
    before: float
    """The median from the change before to here."""
    after: float
    """The median from here to the next change."""
    p_value: float
    """How often chance alone gives such a change anywhere between its neighbours."""


def change_points(values: Sequence[float], *, level: float = LEVEL, least: float = LEAST) -> list[ChangePoint]:
    """Return the changes of a series, in their order.

    Args:
        values: In the order in which they were measured.
        level: Changes that chance gives as often as this are none. Of several series that are looked at together, the
            level of all divided by their number.
        least: Smaller changes are none, as a fraction of the level before.
    """
    series = np.asarray(values, dtype=float)
    found = _search(series, 0, level, least)
    for _ in range(_MOST_PASSES):
        edges = [0, *found, len(values)]
        parts = list(zip(edges, edges[1:], edges[2:], strict=False))
        places = [begin + _nearest(series[begin:end], place - begin) for begin, place, end in parts]
        tested = [
            (place, _judged(values[begin:end], place - begin, least))
            for place, (begin, _, end) in zip(places, parts, strict=True)
        ]
        kept = [place for place, (p_value, _, _) in tested if p_value < level]
        if kept == found:
            return [ChangePoint(place, before, after, p_value) for place, (p_value, before, after) in tested]
        found = kept
    return []  # it moves on and on, so that no place can be told


def _search(values: NDArray[np.float64], offset: int, level: float, least: float) -> list[int]:
    parts = _parts(len(values))
    best: tuple[float, int] | None = None
    for begin, end in parts:
        part = values[begin:end]
        place = _candidate(part)
        if place is None:
            continue
        share = 2 if end - begin == len(values) else 2 * (len(parts) - 1)
        p_value = _judged(part.tolist(), place, least)[0] * share
        if p_value < level and (best is None or p_value < best[0]):
            best = p_value, begin + place
    if best is None:
        return []
    place = best[1]
    return [
        *_search(values[:place], offset, level, least),
        offset + place,
        *_search(values[place:], offset + place, level, least),
    ]


def _parts(count: int) -> list[tuple[int, int]]:
    """Return begin and end of the parts that are tested: the whole, and shorter and shorter ones that overlap by half
    or more.
    """
    found = {(0, count): None}
    length = count * _DECAY
    while length >= _SHORTEST:
        number = 2 * math.ceil(count / length) - 1
        shift = (count - length) / (number - 1)
        found |= {(math.floor(shift * one), min(count, math.ceil(shift * one + length))): None for one in range(number)}
        length *= _DECAY
    return list(found)


def _scores(values: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return the score of each place that leaves enough on both sides; None where all values are equal."""
    count = len(values)
    _, place, sizes = np.unique(values, return_inverse=True, return_counts=True)
    rank = (np.cumsum(sizes) - (sizes - 1) / 2)[place]
    ties = float((sizes.astype(float) ** 3 - sizes).sum())
    spread = (count + 1 - ties / (count * (count - 1))) / 12
    if spread <= 0:
        return None
    left = np.arange(FEWEST, count - FEWEST + 1)
    sums = np.cumsum(rank)[left - 1] - left * (count + 1) / 2
    scores: NDArray[np.float64] = np.maximum(np.abs(sums) - 0.5, 0) / np.sqrt(left * (count - left) * spread)
    return scores


def _candidate(values: NDArray[np.float64]) -> int | None:
    scores = _scores(values) if len(values) >= 2 * FEWEST else None
    return None if scores is None else FEWEST + int(scores.argmax())


def _nearest(values: NDArray[np.float64], place: int) -> int:
    """Return the place near this one from which the values on both sides are least far from their medians.

    Ranks tell that there is a change, but not where: once the sides do not overlap, they know no distance.
    """

    def distance(cut: int) -> float:
        return sum(float(np.abs(side - np.median(side)).sum()) for side in (values[:cut], values[cut:]))

    near = range(max(FEWEST, place - _NEAR), min(len(values) - FEWEST, place + _NEAR) + 1)
    return min(near, key=distance, default=place)


def _judged(values: Sequence[float], place: int, least: float) -> tuple[float, float, float]:
    """Return how often chance gives a change anywhere in the values like that at a place, and the medians beside it."""
    before, after = values[:place], values[place:]
    if min(len(before), len(after)) < FEWEST:
        return 1.0, 0.0, 0.0
    medians = statistics.median(before), statistics.median(after)
    scores = _scores(np.asarray(values, dtype=float))
    if scores is None or abs(medians[1] - medians[0]) <= least * abs(medians[0]):
        return 1.0, *medians
    score = float(scores[place - FEWEST]) / math.sqrt(inflation(before, after))
    return _chance(score, FEWEST / len(values)), *medians


def _chance(score: float, aside: float) -> float:
    """Return how often the largest score is greater than this.

    Args:
        score: Of one place.
        aside: The part of the series at each end in which no place is looked at.
    """
    if score < 1:
        return 1.0
    width = 2 * math.log((1 - aside) / aside)
    tail = score * math.exp(-score * score / 2) / math.sqrt(2 * math.pi)
    return min(1.0, tail * (width - width / score**2 + 4 / score**2))
