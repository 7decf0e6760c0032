"""Whether a time changed, or only varies: medians of many samples, and their standard errors."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

import attrs

from profdeck_traces.analysis.diff_model import FEWEST_MEASUREMENTS, Change, Verdict
from profdeck_traces.analysis.rank_sum_test import RankTest

NOISE_ERRORS = 3
"""A change is told from noise if it is greater than so many of its standard errors."""
FLOOR = 0.001
"""Changes up to this share of the total of their section are none; sums and steps count for themselves."""
THRESHOLD = 0.05
"""Where the noise is not known, changes up to this fraction of the smaller time are none."""


# Measurements.


@attrs.frozen
class TimeSample:
    """Measurements of one time in one trace, by their median and median absolute deviation."""

    median_us: float
    mad_us: float
    count: int


@attrs.frozen
class _Estimate:
    """A time on one side."""

    time_us: float
    error_us: float | None
    """Its standard error; ``None`` if there are too few measurements."""


def sample_of(times_us: Sequence[float]) -> TimeSample:
    """Sum up durations as one sample."""
    median = statistics.median(times_us)
    return TimeSample(median, statistics.median(abs(time - median) for time in times_us), len(times_us))


def pooled(samples: Sequence[TimeSample]) -> _Estimate:
    """Estimate a time from several traces, or none: 0; see `diff_runs` for the formulas and their sources."""
    if not samples:
        return _Estimate(0.0, None)
    points = []
    for sample in samples:
        aside = sample.count // 2
        points += [(sample.median_us - sample.mad_us, aside), (sample.median_us + sample.mad_us, aside)]
        points.append((sample.median_us, sample.count % 2))
    if len(samples) == 1:
        median, mad = samples[0].median_us, samples[0].mad_us
    else:
        median = _weighted_median(points)
        mad = _weighted_median([(abs(time - median), weight) for time, weight in points])
    count = sum(sample.count for sample in samples)
    if count < FEWEST_MEASUREMENTS:
        return _Estimate(median, None)
    error = _asymptotic_error(mad, count) * count / (count - 2)
    if len(samples) >= FEWEST_MEASUREMENTS:
        between = sample_of([sample.median_us for sample in samples])
        error = max(error, _asymptotic_error(between.mad_us, between.count))
    return _Estimate(median, error)


def _asymptotic_error(mad_us: float, count: int) -> float:
    """Return the standard error of a median of many values."""
    return 1.4826 * mad_us * math.sqrt(math.pi / 2 / count)


def _weighted_median(points: Iterable[tuple[float, int]]) -> float:
    """Return the median of values, each repeated as often as its weight says."""
    ordered = sorted(points)
    passed = list(itertools.accumulate(weight for _, weight in ordered))
    middle = ((passed[-1] - 1) // 2, passed[-1] // 2)
    return statistics.fmean(ordered[bisect.bisect_right(passed, rank)][0] for rank in middle)


# Changes.


@attrs.frozen
class Measured:
    """A time on both sides, of each rank."""

    estimates: Sequence[tuple[_Estimate, _Estimate]]
    per: str
    share: float = 1.0
    """Of the steps that it is per, of all."""
    ranks: RankTest | None = None
    """Of steps, what the order of their durations says."""


def change_of(
    name: str,
    category: str | None,
    measured: Measured,
    sum_us: float | None = None,
    calls: tuple[float | None, float | None] = (None, None),
) -> Change:
    """Compare both sides; without a sum that it is a part of, a time counts for itself."""
    before_us, after_us = (statistics.fmean(sides[side].time_us for sides in measured.estimates) for side in (0, 1))
    errors = [
        None if old.error_us is None or new.error_us is None else math.hypot(old.error_us, new.error_us)
        for old, new in measured.estimates
    ]
    known = [error for error in errors if error is not None]
    noise_us = NOISE_ERRORS * statistics.fmean(known) if len(known) == len(errors) else None
    delta_us = after_us - before_us
    impact_us = delta_us * measured.share
    limit_us = THRESHOLD * min(before_us, after_us) if noise_us is None else noise_us
    least_us = FLOOR * (max(before_us, after_us) if sum_us is None else sum_us)
    ranks = measured.ranks
    verdict: Verdict
    if calls[0] == 0 and calls[1]:
        verdict = "appeared"
    elif calls[1] == 0 and calls[0]:
        verdict = "vanished"
    elif abs(impact_us) <= least_us:
        verdict = "same"
    elif ranks is not None:
        verdict = "same" if not ranks.is_significant else "slower" if ranks.shift > 0 else "faster"
    elif abs(delta_us) > limit_us:
        verdict = "slower" if delta_us > 0 else "faster"
    else:
        verdict = "same"
    return Change(
        name=name,
        category=category,
        per=measured.per,
        before_us=before_us,
        after_us=after_us,
        delta_us=delta_us,
        ratio=delta_us / before_us if before_us else None,
        impact_us=impact_us,
        noise_us=noise_us,
        p_value=None if ranks is None else ranks.p_value,
        shift_us=None if ranks is None else ranks.shift,
        shift_from_us=None if ranks is None else ranks.interval[0],
        shift_to_us=None if ranks is None else ranks.interval[1],
        drift_us=None if ranks is None else ranks.drift,
        verdict=verdict,
        calls_before=calls[0],
        calls_after=calls[1],
    )
