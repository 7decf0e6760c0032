"""Assigns intervals to lanes in which they nest, as viewers require. Times are integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.intervals import Int

MAX_LANES = 256
"""Maximum number of lanes. No known recording needs this many, and each lane slows down placing later intervals."""


def place_on_lanes(start: Int, end: Int, max_depth: int) -> Int:
    """Return the lane of each interval on a track, numbered from 0.

    Each interval goes to the first lane in which it nests with the earlier intervals. Two intervals nest if one
    contains the other, or if they share at most an endpoint. Almost all tracks need only one lane. Intervals are placed
    one by one only in groups of overlapping intervals that do not all nest.

    Args:
        start: Start of each interval, sorted. If intervals start together, the one that ends last comes first.
        end: End of each interval.
        max_depth: Maximum number of intervals open at the same time on a lane, not counting empty ones.

    Raises:
        ValueError: More than `MAX_LANES` lanes are needed.
    """
    lanes = np.zeros(len(start), dtype=np.int64)
    solid = np.flatnonzero(end > start)  # empty intervals nest with all others
    starts, ends = start[solid], end[solid]
    unfit = ~_fits(starts, ends, max_depth)
    if unfit.any():
        reach = np.maximum.accumulate(ends)
        island = np.concatenate([[0], np.cumsum(starts[1:] >= reach[:-1])])
        mixed = solid[np.isin(island, island[unfit])]
        stacks: list[list[int]] = []
        bounds = zip(start[mixed].tolist(), end[mixed].tolist(), strict=True)
        lanes[mixed] = [_first_fit(stacks, *limits, max_depth) for limits in bounds]
    return lanes


def _fits(starts: Int, ends: Int, max_depth: int) -> NDArray[np.bool_]:
    """Return a mask of intervals that are outermost, or lie inside the last earlier interval one level up.

    The level of an interval is the number of earlier intervals that are still open; it must be below `max_depth`. If
    all intervals of an island (a range in which an interval is always open) fit, they nest, as explained in
    ``nesting`` in :mod:`profdeck_traces.reading.intervals`.
    """
    count = len(starts)
    index = np.arange(count)
    depth = index - np.searchsorted(np.sort(ends), starts, side="right")
    by_depth = np.sort(depth * count + index)
    above: Int = by_depth[np.searchsorted(by_depth, (depth - 1) * count + index) - 1] % max(1, count)
    inside: NDArray[np.bool_] = (depth == 0) | (ends <= ends[above])
    return inside & (depth < max_depth)


def _first_fit(stacks: list[list[int]], start: int, end: int, max_depth: int) -> int:
    """Place an interval on the first lane that accepts it, and return the lane."""
    for lane, stack in enumerate(stacks):
        while stack and stack[-1] <= start:
            stack.pop()
        if not stack or (end <= stack[-1] and len(stack) < max_depth):
            stack.append(end)
            return lane
    if len(stacks) == MAX_LANES:
        raise ValueError(f"more than {MAX_LANES} events overlap on one track without nesting")
    stacks.append([end])
    return len(stacks) - 1
