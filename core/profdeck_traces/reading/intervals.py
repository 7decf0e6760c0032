"""Arithmetic on many intervals at once. Times are integers (nanoseconds), so that every sum is exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading import compiled

Int = NDArray[np.int64]
Spans = tuple[Int, Int]
"""Starts and ends of intervals in the order of time, none of them empty, with time between each and the next."""

# The vectorised nesting takes one round per level; a stack is faster for what is deeper than any real program.
_MAX_LEVELS = 2000
_MAX_INT16 = 2**15 - 1


def self_times(track: NDArray[np.integer], start: Int, end: Int) -> Int:
    """Return the self time of each interval, which is the time not covered by intervals inside it.

    Each instant on a track belongs to the open interval that started last. If several intervals started together, it
    belongs to the one that ends first or, if they also end together, to the last of them. For nested intervals, the
    self time is the duration minus the durations of the direct children. The self times of a track add up to the time
    during which any interval is open.
    """
    own = end - start
    used = np.flatnonzero(own > 0)  # empty intervals have no self time and would make the nesting ambiguous
    used = used[nesting_order(track[used], start[used], end[used])]
    tracks, starts, ends = track[used], start[used], end[used]
    parent = parents(tracks, starts, ends)
    above = _ending_later(parent, ends)
    # The time of each interval is deducted from the intervals that are open when it starts, innermost first.
    taker = np.flatnonzero(parent >= 0)
    giver, since = parent[taker], starts[taker]
    while len(taker):
        until = np.minimum(ends[taker], ends[giver])
        np.subtract.at(own, used[giver], until - since)
        continues = (until < ends[taker]) & (above[giver] >= 0)
        taker, giver, since = taker[continues], above[giver[continues]], until[continues]
    return own


def _ending_later(parent: NDArray[np.int32], ends: Int) -> NDArray[np.int32]:
    """Return, for each interval, the innermost ancestor that ends after it, or -1."""
    above = parent.copy()
    rows = np.flatnonzero(above >= 0)
    while len(rows := rows[ends[above[rows]] <= ends[rows]]):
        above[rows] = above[above[rows]]
        rows = rows[above[rows] >= 0]
    return above


def parents(track: NDArray[np.integer], start: Int, end: Int) -> NDArray[np.int32]:
    """Return, for each interval, the innermost interval open on the same track when it starts, or -1.

    Intervals must be sorted by track, then by start, longest first.
    """
    library = compiled.load_library()
    if library is not None:
        return compiled.nest(library, track, start, end)
    parent = np.empty(len(track), np.int32)
    ends: list[int] = end.tolist()
    opened: list[int] = []
    current = -1
    for row, (of_track, begin) in enumerate(zip(track.tolist(), start.tolist(), strict=True)):
        if of_track != current:
            opened.clear()
            current = of_track
        while opened and ends[opened[-1]] <= begin:
            opened.pop()
        parent[row] = opened[-1] if opened else -1
        opened.append(row)
    return parent


def segments(start: Int, end: Int) -> tuple[Int, NDArray[np.int32]]:
    """Split one track into segments. Each segment belongs to the open interval that started last.

    Intervals must be sorted by start time, longest first if they start together. Empty intervals are ignored.

    Returns:
        Start time of each segment, and the index of its interval, or -1 for a gap. Each segment ends where the next one
        starts. The last segment is the gap after all intervals.
    """
    library = compiled.load_library()
    if library is not None:
        return compiled.flatten(library, start, end)
    begins: list[int] = []
    rows: list[int] = []
    opened: list[int] = []
    ends: list[int] = end.tolist()

    def put(time: int, row: int) -> None:
        if begins and begins[-1] == time:
            rows[-1] = row
        else:
            begins.append(time)
            rows.append(row)

    def close(time: int | None) -> None:
        while opened and (time is None or ends[opened[-1]] <= time):
            closed = ends[opened[-1]]
            while opened and ends[opened[-1]] <= closed:
                opened.pop()
            put(closed, opened[-1] if opened else -1)

    for row, begin in enumerate(start.tolist()):
        close(begin)
        if ends[row] > begin:
            opened.append(row)
            put(begin, row)
    close(None)
    return np.array(begins, np.int64), np.array(rows, np.int32)


def nesting_order(track: NDArray[np.integer], start: Int, end: Int) -> Int:
    """Return the order by track, then start, the longest first."""
    if len(start) and (np.diff(start) >= 0).all():  # then tracks, of which there are few, are sorted in linear time
        order = np.argsort(track.astype(np.int16) if track.max() <= _MAX_INT16 else track, kind="stable")
        together = (np.diff(track[order]) == 0) & (np.diff(start[order]) == 0)
        if not (together & (np.diff(end[order]) > 0)).any():
            return order
    return np.lexsort((-end, start, track))


def order_by(key: Int, then: Callable[[Int], NDArray[np.generic]]) -> Int:
    """Return the indices that sort by `key`, then by `then`, which is computed only for elements with equal keys.

    Args:
        key: Primary sort key, with few equal values.
        then: Returns the secondary sort key for the given indices.
    """
    order = np.argsort(key, kind="stable")
    key = key[order]
    same = key[1:] == key[:-1]
    tied = np.zeros(len(order), np.bool_)
    tied[1:] |= same
    tied[:-1] |= same
    at = np.flatnonzero(tied)
    order[at] = order[at][np.lexsort((then(order[at]), key[at]))]
    return order


class Nesting(NamedTuple):
    """How intervals lie in each other."""

    parent: Int
    """The index of each one's parent, -1 for the outermost."""
    levels: list[Int]
    """The indices of the outermost, of those inside of these, and so on."""


def nesting(starts: Int, ends: Int) -> Nesting | None:
    """Return how intervals lie in each other; ``None`` if they do not nest.

    The intervals are sorted by start, longest first. The depth of one is how many earlier ones are still open.
    If they nest, the parent is the last earlier interval one level up. If each lies inside the parent found that
    way, its ancestors are as many as the intervals open at its start, so they are these: all of them nest.
    """
    count = len(starts)
    depth = np.arange(count) - np.searchsorted(np.sort(ends), starts, side="right")
    if count and depth.max() > _MAX_LEVELS:
        return None
    levels = np.split(np.argsort(depth, kind="stable"), np.cumsum(np.bincount(depth))[:-1]) if count else []
    parent = np.full(count, -1)
    for above, level in itertools.pairwise(levels):
        found = np.searchsorted(above, level) - 1
        if (found < 0).any():
            return None
        parent[level] = above[found]
        if (ends[level] > ends[parent[level]]).any():
            return None
    return Nesting(parent, levels)


def groups(keys: NDArray[np.integer]) -> list[Int]:
    """Return the indices of each key, in the order of the keys; within one they keep their order."""
    order = np.argsort(keys, kind="stable")
    return [group for group in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1) if len(group)]


def joined(parts: Sequence[Spans]) -> Spans:
    """Return the starts and the ends of all parts, in their order; they may overlap then."""
    starts, ends = zip(*parts, strict=True)
    return np.concatenate(starts), np.concatenate(ends)


def union(start: Int, end: Int) -> Spans:
    """Return the time that any of the intervals covers.

    Starts and ends are sorted each for itself. Everything that has begun is over at the ``i``-th end, counted from 0,
    exactly if the ``i + 1``-th start comes after it: ``i + 1`` intervals have ended then, and no more have begun.
    """
    # Columns come almost in order, which this kind of sort makes use of.
    starts, ends = np.sort(start, kind="stable"), np.sort(end, kind="stable")
    is_first, is_last = np.ones((2, len(starts)), dtype=np.bool_)
    is_first[1:] = is_last[:-1] = starts[1:] > ends[:-1]
    starts, ends = starts[is_first], ends[is_last]
    filled = starts < ends
    return starts[filled], ends[filled]


def intersection(one: Spans, other: Spans) -> Spans:
    """Return the time that both cover.

    No more than one interval of each is open at a time. So both are open from the ``i + 1``-th start of all to the
    ``i``-th end of all, if that comes later.
    """
    starts = np.sort(np.concatenate((one[0], other[0])), kind="stable")[1:]
    ends = np.sort(np.concatenate((one[1], other[1])), kind="stable")[:-1]
    both = starts < ends
    return starts[both], ends[both]


def complement(spans: Spans, begin: int, end: int) -> Spans:
    """Return the time from begin to end that the spans, which lie in between, leave."""
    starts, ends = np.append(begin, spans[1]), np.append(spans[0], end)
    filled = starts < ends
    return starts[filled], ends[filled]


def time_before(spans: Spans, instants: Int) -> Int:
    """Return for each instant how much of the spans lies before it."""
    starts, ends = spans
    if not len(starts):
        return np.zeros(len(instants), dtype=np.int64)
    last = np.searchsorted(starts, instants, side="right") - 1
    is_before = last < 0
    np.maximum(last, 0, out=last)
    remaining = ends[last] - instants
    np.maximum(remaining, 0, out=remaining)
    time: Int = np.cumsum(ends - starts)[last]
    time -= remaining
    time[is_before] = 0
    return time


def total(spans: Spans) -> int:
    """Return the time that the spans cover."""
    return int((spans[1] - spans[0]).sum())
