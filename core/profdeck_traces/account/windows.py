"""Critical path of a trace, computed in windows of consecutive steps to limit memory use."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.borders import DEVICE, RECORDING, border_rule, times_done
from profdeck_traces.account.host_threads import main_track
from profdeck_traces.account.recording import RecordingPath, StepAnnotations, path_of
from profdeck_traces.account.row_kinds import LAST_CALL, RowKind
from profdeck_traces.attribution.rows import Attribution, values_at
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.walking import NO_TIME

MAX_EVENTS = 1 << 20
"""Maximum number of complete events in a window, unless a single step has more."""
MAX_WHOLE_EVENTS = 2 * MAX_EVENTS
"""Traces with at most this many complete events are not divided into windows."""
_BLOCK = 4096
_SAMPLED = 64
_SECTIONS = 32
_CONTEXT = 8  # the context on each side of a window is one eighth of its steps
_ARGS = ("correlation", "stream", "wait_on_stream", "wait_on_cuda_event_record_corr_id")


@attrs.frozen(eq=False)
class PathWindow:
    """Critical path of a window of consecutive steps.

    As context, the path also covers a few steps before and after the window. The path through a step depends on earlier
    events, and on the point at which the backward walk enters the step from the next one.
    """

    recording: RecordingPath
    events: Events
    rows: Int | None
    """Row in the trace of each event in `events`, or ``None`` if `events` contains the entire trace."""
    is_used: NDArray[np.bool_]
    """True for each interval between borders that is counted as a step in the account."""

    def rows_of_trace(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Convert rows in `events` to rows in the trace. -1 remains unchanged."""
        return rows if self.rows is None else values_at(self.rows.astype(np.int32), rows)


class PathWindows:
    """Windows of a trace. Iteration computes the path of one window at a time."""

    def __init__(
        self, names: Attribution, kinds: NDArray[np.uint8], steps: StepAnnotations, excluded: NDArray[np.bool_]
    ) -> None:
        """Divide the steps into windows. A small trace is a single window.

        Args:
            names: Events of the trace and their launches.
            kinds: `profdeck_traces.account.row_kinds.RowKind` of each complete event.
            steps: Step annotations. If several threads have annotations, only the thread with the most is used.
            excluded: Mask of the cold steps, which are not counted.
        """
        self.kinds = kinds
        self.has_steps = len(steps.track) > 0
        self._names, self._events = names, names.events
        main = steps.track == np.bincount(steps.track).argmax() if self.has_steps else np.zeros(0, np.bool_)
        self._steps = steps[main]
        self._excluded = excluded[main]
        self._parts: list[tuple[int, int]] = []
        if self._events.complete > MAX_WHOLE_EVENTS and (self.has_steps or main_track(self._events, kinds) >= 0):
            if not self.has_steps:
                self._steps = self._sections()
                self._excluded = np.zeros(len(self._steps.track), np.bool_)
            if len(self._steps.track):
                self._parts = self._divided()

    def __len__(self) -> int:
        return max(1, len(self._parts))

    def __iter__(self) -> Iterator[PathWindow]:
        return map(self._window, *zip(*self._parts, strict=True)) if self._parts else iter([self._whole])

    @functools.cached_property
    def work(self) -> Int:
        """Rows of the device events."""
        return np.flatnonzero(self.kinds >= RowKind.KERNEL)

    @functools.cached_property
    def _whole(self) -> PathWindow:
        recording = path_of(self._events, self._names.launch, self.kinds, self._steps)
        is_used = ~self._excluded if self.has_steps else np.ones(max(0, len(recording.borders.times) - 1), np.bool_)
        return PathWindow(recording, self._events, None, is_used)

    def _sections(self) -> StepAnnotations:
        """Divide a recording without steps into intervals with roughly equal event counts.

        If no event has a duration, there are no intervals.
        """
        start_ns, is_event = self._events.start_ns, self.kinds > RowKind.OTHER
        # Host events without a duration do not start a recording.
        is_event &= (self._events.duration_ns > 0) | (self.kinds > LAST_CALL)
        rows = np.flatnonzero(is_event)
        if not len(rows):
            return self._steps
        begin = np.sort(start_ns[rows[::_SAMPLED]])[:: max(1, MAX_EVENTS // _SECTIONS // _SAMPLED)]
        begin = np.unique(np.append(begin, start_ns[rows].min()))
        end_ns = int(self._blocks[2].max())
        track = np.full(len(begin), main_track(self._events, self.kinds))
        return StepAnnotations(track, begin, np.append(begin[1:], end_ns))

    def _divided(self) -> list[tuple[int, int]]:
        """Return the index of the first step in each window, and the index after its last step."""
        before = np.zeros(len(self._steps.begin), np.int64)  # number of events that start before each step
        for first, last in self._events.track_bounds():
            before += self._events.start_ns[first:last].searchsorted(self._steps.begin)
        firsts = [0]
        for step, before_next in enumerate([*before[1:].tolist(), self._events.complete]):
            if step > firsts[-1] and before_next - before[firsts[-1]] > MAX_EVENTS:
                firsts.append(step)
        return list(zip(firsts, [*firsts[1:], len(before)], strict=True))

    def _window(self, first: int, last: int) -> PathWindow:
        """Compute the path through the steps from `first` up to, but not including, `last`."""
        margin = max(1, (last - first) // _CONTEXT)
        begin, end = max(0, first - margin), min(len(self._steps.track), last + margin)
        steps = self._steps[begin:end]
        rule, done = self._borders
        end_ns = int(done[begin:end].max()) if rule == DEVICE else max(int(steps.end.max()), int(steps.begin[-1]))
        rows = self._rows(int(steps.begin[0]), end_ns)
        events = self._events.selected(rows, _ARGS)
        launch = self._names.launch[rows]
        launch = np.where(launch >= 0, rows.searchsorted(launch), -1).astype(np.int32)
        is_used = np.zeros(end - begin, np.bool_)
        is_used[first - begin : last - begin] = ~self._excluded[first:last]
        self._events.storage.release()
        return PathWindow(path_of(events, launch, self.kinds[rows], steps, rule), events, rows, is_used)

    def _rows(self, begin_ns: int, end_ns: int) -> Int:
        """Return the rows of events that overlap an interval or were launched in it, and of their launch calls."""
        events, (block, starts, ends) = self._events, self._blocks
        near = np.flatnonzero((starts < end_ns) & (ends > begin_ns))
        sizes = block[near + 1] - block[near]
        rows = np.repeat(block[near] - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
        start_ns = events.start_ns[rows]
        rows = rows[(start_ns < end_ns) & (start_ns + events.duration_ns[rows] > begin_ns)]
        launched, work = self._launched
        rows = np.union1d(rows, work[slice(*launched.searchsorted((begin_ns, end_ns)).tolist())])
        calls = self._names.launch[rows]
        return np.union1d(rows, calls[calls >= 0])

    @functools.cached_property
    def _borders(self) -> tuple[str, Int]:
        """Border rule, and the time at which each step is done."""
        if not self.has_steps:
            return RECORDING, self._steps.end
        launched, work = self._launched
        ends = self._events.start_ns[work] + self._events.duration_ns[work]
        done = times_done(launched, ends, self._steps.begin, self._steps.end)
        return border_rule(done, self._steps.begin, self._steps.end), done

    @functools.cached_property
    def _launched(self) -> tuple[Int, Int]:
        """Sorted launch times of the device events, and the rows of the device events in the same order."""
        launch = self._names.launch[self.work]
        launched = np.where(launch >= 0, self._events.start_ns[launch], NO_TIME)
        order = np.argsort(launched, kind="stable")
        return launched[order], self.work[order]

    @functools.cached_property
    def _blocks(self) -> tuple[Int, Int, Int]:
        """Bounds of row blocks that do not cross tracks, and the earliest start and latest end in each block."""
        firsts = [np.arange(first, last, _BLOCK) for first, last in self._events.track_bounds()]
        bounds = np.append(np.concatenate(firsts), self._events.complete)
        start_ns, duration_ns = self._events.start_ns, self._events.duration_ns
        ends = [
            int((start_ns[first:last] + duration_ns[first:last]).max())
            for first, last in itertools.pairwise(bounds.tolist())
        ]
        return bounds, start_ns[bounds[:-1]], np.array(ends, np.int64)
