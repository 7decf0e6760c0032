"""Arithmetic on many intervals at once. Times are integers (nanoseconds), so that every sum is exact."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]

# The vectorised nesting takes one round per level; a stack is faster for what is deeper than any real program.
_MAX_LEVELS = 2000


def self_times(track: Int, start: Int, end: Int) -> Int:
    """Return the time of each interval that no interval inside it takes.

    Each instant of a track belongs to one of the intervals open then: the one that started last (of those that
    start together the one that ends first, of equal ones the last). Where intervals nest, that is duration minus
    the durations of the direct children; where they overlap without nesting it is still well defined, and the
    sum over a track is the time in which anything was open.
    """
    own = end - start
    used = np.flatnonzero(own > 0)  # the empty ones own nothing and would blur the nesting
    order = used[np.lexsort((-end[used], start[used], track[used]))]
    limits = np.flatnonzero(np.diff(track[order])) + 1
    for of_track in np.split(order, limits):
        starts, ends = start[of_track], end[of_track]
        parent = _parents(starts, ends)
        if parent is None:
            own[of_track] = _owned(starts, ends)
        else:
            children = np.flatnonzero(parent >= 0)
            np.subtract.at(own, of_track[parent[children]], (ends - starts)[children])
    return own


def _parents(starts: Int, ends: Int) -> Int | None:
    """Return the index of each interval's parent, -1 for the outermost; ``None`` if they do not nest.

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
    return parent


def _owned(starts: Int, ends: Int) -> Int:
    """Give each instant to the interval that started last, with a stack; the intervals are sorted as above."""
    owned = [0] * len(starts)
    ends_list = ends.tolist()
    stack: list[int] = []
    now = 0

    def advance(until: int | None) -> None:
        nonlocal now
        while stack:
            top = stack[-1]
            stop = ends_list[top] if until is None else min(ends_list[top], until)
            if stop > now:
                owned[top] += stop - now
                now = stop
            if until is not None and ends_list[top] > until:
                return
            stack.pop()

    for index, begin in enumerate(starts.tolist()):
        advance(begin)
        now = begin
        stack.append(index)
    advance(None)
    return np.array(owned, dtype=np.int64)


def span_and_busy(start: Int, end: Int) -> tuple[int, int]:
    """Return the time from the first start to the last end, and how much of it any interval covers."""
    order = np.argsort(start)
    starts, reach = start[order], np.maximum.accumulate(end[order])
    gaps = starts[1:] - reach[:-1]
    span = int(reach[-1] - starts[0])
    return span, span - int(gaps[gaps > 0].sum())
