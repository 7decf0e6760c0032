"""Spread intervals over lanes in which they nest, as viewers need them. Times are integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.intervals import Int

_ALWAYS_OPEN = np.iinfo(np.int64).min


class NestedTracks:
    """The lanes of one track. Each interval gets the first lane in which it nests with those that are there.

    Two intervals nest if one contains the other or if they have no more than an end in common. Almost all tracks
    have one lane. What does not nest is placed one by one, but only that: the intervals that overlap with it, at
    any distance.

    Args:
        max_depth: How many intervals may be open at once on a lane, not counting empty ones.
    """

    MOST_LANES = 256
    """Nothing that was recorded needs as many; each costs time for all intervals that follow."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        # Those still open after the last call, longest first.
        self._open_ends = np.empty(0, dtype=np.int64)
        self._open_lanes = np.empty(0, dtype=np.int64)

    def place(self, start: Int, end: Int) -> Int:
        """Return the lane of each interval, from 0.

        Args:
            start: In order, and not before any start of the calls before.
            end: Of those that start together, the last one first.

        Raises:
            ValueError: More than `MOST_LANES` lanes are needed.
        """
        lanes = np.zeros(len(start), dtype=np.int64)
        solid = np.flatnonzero(end > start)  # the empty ones nest with all
        if not len(solid):
            return lanes
        still_open = len(self._open_ends)
        starts = np.concatenate([np.full(still_open, _ALWAYS_OPEN), start[solid]])
        ends = np.concatenate([self._open_ends, end[solid]])
        placed = np.concatenate([self._open_lanes, np.zeros(len(solid), dtype=np.int64)])
        unfit = ~self._fits(starts, ends)
        if unfit.any():
            reach = np.maximum.accumulate(ends)
            island = np.concatenate([[0], np.cumsum(starts[1:] >= reach[:-1])])
            mixed = np.flatnonzero(np.isin(island, island[unfit]))
            self._place_one_by_one(starts, ends, placed, mixed, still_open)
        lanes[solid] = placed[still_open:]
        left = np.flatnonzero(ends > starts[-1])
        left = left[np.argsort(-ends[left], kind="stable")]
        self._open_ends, self._open_lanes = ends[left], placed[left]
        return lanes

    def _fits(self, starts: Int, ends: Int) -> NDArray[np.bool_]:
        """Return which intervals lie inside the last earlier one that is one level up, or are outermost.

        The level of one is how many earlier ones are still open. If all intervals of an island (within which there
        is always one open) fit, they nest: see ``nesting`` in :mod:`profdeck_traces.reading.intervals`.
        """
        count = len(starts)
        index = np.arange(count)
        depth = index - np.searchsorted(np.sort(ends), starts, side="right")
        by_depth = np.sort(depth * count + index)
        above: Int = by_depth[np.searchsorted(by_depth, (depth - 1) * count + index) - 1] % count
        inside: NDArray[np.bool_] = (depth == 0) | (ends <= ends[above])
        return inside & (depth < self._max_depth)

    def _place_one_by_one(self, starts: Int, ends: Int, placed: Int, mixed: Int, still_open: int) -> None:
        """Set the lanes of the intervals ``mixed``; the first ``still_open`` of all have theirs."""
        stacks: list[list[int]] = [[] for _ in range(int(placed[:still_open].max(initial=-1)) + 1)]
        old = mixed[mixed < still_open]
        for lane, end in zip(placed[old].tolist(), ends[old].tolist(), strict=True):
            stacks[lane].append(end)
        new = mixed[mixed >= still_open]
        bounds = zip(starts[new].tolist(), ends[new].tolist(), strict=True)
        placed[new] = [self._first_fit(stacks, start, end) for start, end in bounds]

    def _first_fit(self, stacks: list[list[int]], start: int, end: int) -> int:
        """Put an interval on the first lane that takes it, and return which that is."""
        for lane, stack in enumerate(stacks):
            while stack and stack[-1] <= start:
                stack.pop()
            if not stack or (end <= stack[-1] and len(stack) < self._max_depth):
                stack.append(end)
                return lane
        if len(stacks) == self.MOST_LANES:
            raise ValueError(f"more than {self.MOST_LANES} events overlap on one track without nesting")
        stacks.append([end])
        return len(stacks) - 1
