"""How far apart the clocks of two ranks are, by the calls of one collective."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from profdeck_traces.reading.intervals import Int

# Below this nothing is told apart, however well the ends agree.
MIN_NOISE_NS = 1000
# So many collectives give a better clock than the marks that recorders leave.
MIN_COLLECTIVES = 8
# What time servers keep the clocks of hosts within.
_CLOCKS_AGREE_NS = 10_000_000

# To find how two sequences of calls lie to each other, the times between so many calls are looked for in the other ...
_PROBE = 32
# ... and what is found is judged by so many pairs.
_JUDGED = 512


@attrs.frozen(eq=False)
class RankCalls:
    """The calls of one rank in one process group, by start."""

    name: Int
    start_ns: Int
    end_ns: Int
    index: Int = attrs.field(factory=lambda: np.zeros(0, np.int64))
    """Index of each call in the rank's `profdeck_traces.analysis.collectives.Collectives`."""
    step: Int | None = None
    """Number of the global step of each call, or -1. ``None`` if unknown."""


def match_calls(first: RankCalls, other: RankCalls) -> Int | None:
    """Return which call of the other rank is each of the first one's, or -1; ``None`` if they have nothing in common.

    The k-th call of one goes with the k-th of the other, but for calls that one of them missed before it began to
    record or after it ended. Half of the calls must then be under way on both at the same time. Most pairs whose global
    steps are known must be in the same step.
    """
    shift = _shift(first, other)
    if shift is None:
        return None
    mine, theirs = _overlap(len(first.name), len(other.name), shift)
    same = first.name[mine] == other.name[theirs]
    offset = median((first.end_ns[mine] - other.end_ns[theirs])[same])
    begin = np.maximum(first.start_ns[mine], other.start_ns[theirs] + offset)
    together = same & (begin <= np.minimum(first.end_ns[mine], other.end_ns[theirs] + offset) + MIN_NOISE_NS)
    if 2 * np.count_nonzero(together) < len(same):
        return None
    which = np.full(len(first.name), -1, dtype=np.int64)
    which[mine] = np.where(same, np.arange(theirs.start, theirs.stop), -1)
    return which


def _overlap(first: int, other: int, shift: int) -> tuple[slice, slice]:
    """Return what two sequences have in common if the element k of the other one is k + shift of the first."""
    begin, end = max(0, shift), min(first, other + shift)
    return slice(begin, end), slice(begin - shift, end - shift)


@attrs.frozen
class _Fit:
    shift: int
    calls: int
    offset_ns: int
    spread_ns: int


def _shift(first: RankCalls, other: RankCalls) -> int | None:
    """Return by how many calls the other sequence lies behind the first, ``None`` if it cannot be told.

    At the right shift the ends differ by a constant; at others by what the times between calls add up to, unless the
    calls are periodic. Of shifts that fit alike, that one is taken which makes the clocks agree, or else which leaves
    the least calls alone.
    """
    count, others = len(first.name), len(other.name)
    if count == others and (whole := _fit(first, other, 0)) and whole.spread_ns * 10 < _regularity(first.end_ns):
        return 0
    fits = [fit for shift in _candidates(first.end_ns, other.end_ns) if (fit := _fit(first, other, shift))]
    if not fits:
        return None
    limit = max(MIN_NOISE_NS, 2 * min(fit.spread_ns for fit in fits))
    alike = [fit for fit in fits if fit.spread_ns <= limit]
    agree = [fit for fit in alike if abs(fit.offset_ns) <= _CLOCKS_AGREE_NS]
    if agree:
        return min(agree, key=lambda fit: abs(fit.offset_ns)).shift
    return max(alike, key=lambda fit: fit.calls).shift


def _regularity(end_ns: Int) -> int:
    """Return how the times between calls vary: their median distance from their median."""
    if len(end_ns) < 3:  # noqa: PLR2004 - two times between calls are the least that can vary
        return 0
    between = np.diff(end_ns[:_JUDGED])
    return median(np.abs(between - median(between)))


def _candidates(first: Int, other: Int) -> Iterable[int]:
    """Return shifts that may be right: all, or of many those at which clocks or some times between calls agree.

    Args:
        first: The ends of the longer sequence.
        other: Those of the other one.
    """
    if len(first) <= 2 * _PROBE:
        return range(1 - len(other), len(first))
    middle = len(other) // 2
    nearest = int(np.searchsorted(first, other[middle])) - middle
    found = {0, len(first) - len(other), nearest - 1, nearest}
    between, others = np.diff(first), np.diff(other)
    probe = min(_PROBE, len(others))
    for quarter in (1, 2, 3):
        begin = (len(others) - probe) * quarter // 4
        distance = np.zeros(len(between) - probe + 1, dtype=np.int64)
        for gap in range(probe):
            distance += np.abs(between[gap : gap + len(distance)] - others[begin + gap])
        found.add(int(distance.argmin()) - begin)
    return found


def _fit(first: RankCalls, other: RankCalls, shift: int) -> _Fit | None:
    """Judge a shift. Return ``None`` if too few calls remain, or if at most half of the names or steps agree."""
    mine, theirs = _overlap(len(first.name), len(other.name), shift)
    calls = mine.stop - mine.start
    if calls < min(MIN_COLLECTIVES, len(first.name), len(other.name)):
        return None
    stride = max(1, calls // _JUDGED)
    some, others = slice(mine.start, mine.stop, stride), slice(theirs.start, theirs.stop, stride)
    same = first.name[some] == other.name[others]
    if 2 * np.count_nonzero(same) <= len(same):
        return None
    if first.step is not None and other.step is not None:
        step, of_other = first.step[some], other.step[others]
        is_known = same & (step >= 0) & (of_other >= 0)
        if is_known.any() and 2 * np.count_nonzero(is_known & (step == of_other)) <= np.count_nonzero(is_known):
            return None
    apart = (first.end_ns[some] - other.end_ns[others])[same]
    offset = median(apart)
    return _Fit(shift, calls, offset, median(np.abs(apart - offset)))


def median(values: Int) -> int:
    """Return the median, of an even number the lower middle: an exact integer."""
    middle = (len(values) - 1) // 2
    return int(np.partition(values, middle)[middle])
