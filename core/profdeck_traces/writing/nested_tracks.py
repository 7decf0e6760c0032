"""Spread intervals over lanes in which they nest, as viewers require. Times are integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.intervals import Int

MAX_LANES = 256
"""No recording needs as many. Each lane costs time for all intervals that follow."""


def place_on_lanes(start: Int, end: Int, max_depth: int) -> Int:
    """Return the lane of each interval of a track, from 0.

    Each interval gets the first lane in which it nests with earlier intervals. Two intervals nest if one contains the
    other, or if they have no more than an end in common. Almost all tracks have one lane. Only the intervals that
    overlap with an interval that does not nest, at any distance, are placed one by one.

    Args:
        start: Sorted. Of intervals that start together, the last to end comes first.
        end: End of each interval.
        max_depth: Maximum number of intervals that are open at once on a lane, not counting empty ones.

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
    """Return which intervals are inside the last earlier one that is one level up, or are outermost.

    The level of an interval is the number of earlier ones that are still open. If all intervals of an island (in which
    there is always one open) fit, they nest: see ``nesting`` in :mod:`profdeck_traces.reading.intervals`.
    """
    count = len(starts)
    index = np.arange(count)
    depth = index - np.searchsorted(np.sort(ends), starts, side="right")
    by_depth = np.sort(depth * count + index)
    above: Int = by_depth[np.searchsorted(by_depth, (depth - 1) * count + index) - 1] % max(1, count)
    inside: NDArray[np.bool_] = (depth == 0) | (ends <= ends[above])
    return inside & (depth < max_depth)


def _first_fit(stacks: list[list[int]], start: int, end: int, max_depth: int) -> int:
    """Put an interval on the first lane that accepts it, and return the lane."""
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
