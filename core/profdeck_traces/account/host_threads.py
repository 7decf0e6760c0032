"""Host threads, split into segments by the innermost call."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.row_kinds import (
    CONTEXTS,
    LAST_ANNOTATION,
    LAST_CALL,
    OWNERS,
    SYNCS,
    RowKind,
)
from profdeck_traces.reading.event_names import is_external_wait, is_sleep
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int, segments

SLOW_LAUNCH_NS = 50_000
INITIAL_NS = 1_000_000  # frames that start within this time of the recording's start were already open
_NEAR = 0.5
"""Maximum time between the ends of a gap and of a collective, as a fraction of the wait until the earlier end."""
_OWNER = np.full(256, OwnerKind.BETWEEN, np.uint8)
_OWNER[list(OWNERS)] = list(OWNERS.values())


class State(IntEnum):
    """State of a thread during a segment."""

    GAP = 0
    WAITS = 1
    FRAME = 2
    WORKS = 3
    """Inside an operator, a runtime call or a collective."""


class HostThreads:
    """Segments of all threads as parallel arrays, sorted by thread and time.

    A segment ends where the next one starts. The last segment of a thread is the gap after its last event.

    Calls and annotations are separate layers because they do not nest. In traces with stacks, an annotation starts
    inside the ``__enter__`` frame and ends inside the ``__exit__`` frame.
    """

    def __init__(
        self,
        events: Events,
        kinds: NDArray[np.uint8],
        main: int | None,
        switches: tuple[Int, Int],
    ) -> None:
        """Split the threads into segments.

        Args:
            events: The trace.
            kinds: `RowKind` of each row.
            main: Track of the thread that annotates the steps, or ``None`` to use the thread with the most operators.
            switches: Sorted start and end times of intervals in which the main thread's gaps belong to the profiler.
        """
        is_host = (kinds > RowKind.OTHER) & (kinds <= LAST_CALL)
        is_call = is_host & (kinds > LAST_ANNOTATION)
        self.kinds = kinds
        self.main = main_track(events, kinds) if main is None else main
        self.first: dict[int, int] = {}
        """Index of the first segment of each track."""
        self.last: dict[int, int] = {}
        """Index of the last segment of each track."""
        parts: list[tuple[Int, NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint8]]] = []
        count = 0
        for begin, end in events.track_bounds():
            rows = begin + np.flatnonzero(is_host[begin:end])
            if not len(rows):
                continue
            part = self._cut(events, rows, is_call[rows])
            if len(part[0]):
                track = int(events.track[begin])
                if track == self.main:
                    part = _with_switches(switches, *part)
                    _mark_sleep(events, part[1], part[2], part[3])
                else:
                    _mark_initial_wait(events, *part)
                self.first[track], self.last[track] = count, count + len(part[0]) - 1
                count += len(part[0])
                parts.append(part)
        self.begin = np.concatenate([np.zeros(0, np.int64), *(part[0] for part in parts)])
        self.row = np.concatenate([np.zeros(0, np.int32), *(part[1] for part in parts)])
        """Row of the innermost call, or of the innermost annotation in gaps; -1 if there is neither."""
        self.owner = np.concatenate([np.zeros(0, np.uint8), *(part[2] for part in parts)])
        """`OwnerKind` of each segment."""
        self.state = np.concatenate([np.zeros(0, np.uint8), *(part[3] for part in parts)])
        """`State` of each segment."""
        number = np.arange(count, dtype=np.int32)
        self.last_work = np.maximum.accumulate(np.where(self.state >= State.FRAME, number, np.int32(-1)))
        """For each segment, the index of the last busy segment (`FRAME` or `WORKS`) up to and including it."""
        process = events.tracks[self.main][0] if self.main >= 0 else None
        self._find_helpers(events, kinds, process)
        self._find_stops(events, kinds)

    def segment_at(self, track: int, time_ns: int) -> int:
        """Return the index of the segment that is open just before a time, or -1 before the first segment."""
        first, last = self.first[track], self.last[track]
        place = int(self.begin[first : last + 1].searchsorted(time_ns)) - 1
        return -1 if place < 0 else first + place

    def end_of(self, segment: int) -> int:
        """Return the end of a segment. It must not be the last segment of its thread."""
        return int(self.begin[segment + 1])

    def waited_for(self, track: int, begin_ns: int, end_ns: int) -> tuple[int, int] | None:
        """Return the thread that a waiting thread waited for, and the time at which its work ended.

        A thread that is busy at `end_ns` takes precedence. Otherwise, this is the last thread that became idle after
        `begin_ns`.
        """
        best: tuple[int, int] | None = None
        runs = self.other_runs
        place = int(runs.begin.searchsorted(end_ns)) - 1
        if place >= 0 and runs.end[runs.longest[place]] > end_ns:
            best = int(runs.track[runs.longest[place]]), end_ns
        else:
            place = int(runs.ends.searchsorted(end_ns, side="right")) - 1
            if place >= 0 and runs.ends[place] > begin_ns:
                best = int(runs.track[runs.order[place]]), int(runs.ends[place])
        if track != self.main:
            worked = self._worked_until(self.main, end_ns)
            if worked is not None and worked > (best[1] if best else begin_ns):
                best = self.main, worked
        return None if best is None or best[0] == track else best

    def helped(self, begin_ns: int, end_ns: int) -> tuple[int, int] | None:
        """Return the thread and end time of the last helper run that the main thread waited for in a gap.

        The run is entirely within the gap, or it is a collective that ends near the end of the gap. A collective can
        start before the operator that launches it has finished, and end after the main thread was notified.
        """
        runs = self.helper_runs
        gap = np.array([begin_ns]), np.array([end_ns])
        if self._ends_in_collective(*gap)[0]:
            return int(runs.track[self._open_run(gap[1])[0]]), end_ns
        place = int(runs.ends.searchsorted(end_ns, side="right")) - 1
        for candidate in range(place, max(place - 64, -1), -1):
            if runs.ends[candidate] <= begin_ns:
                return None
            run = int(runs.order[candidate])
            track, ended_ns = int(runs.track[run]), int(runs.ends[candidate])
            is_covered = end_ns - ended_ns <= _NEAR * (ended_ns - begin_ns)
            if runs.begin[run] >= begin_ns or (
                is_covered and self.owner[self.segment_at(track, ended_ns)] == OwnerKind.COLLECTIVE
            ):
                return track, ended_ns
        return None

    def _open_run(self, end_ns: Int) -> Int:
        """Return the index of the helper run that ends last among the runs that started before each time, or -1."""
        place = self.helper_runs.begin.searchsorted(end_ns) - 1
        return np.append(self.helper_runs.longest, -1)[place]

    def _ends_in_collective(self, begin_ns: Int, end_ns: Int) -> NDArray[np.bool_]:
        """Return a mask of the main thread's gaps that end shortly before a collective ends."""
        runs, run = self.helper_runs, self._open_run(end_ns)
        if not len(runs.begin):
            return np.zeros(len(run), np.bool_)
        later_ns, waited_ns = runs.end[run] - end_ns, end_ns - np.maximum(begin_ns, runs.begin[run])
        is_near: NDArray[np.bool_] = (run >= 0) & (later_ns > 0) & (later_ns <= _NEAR * waited_ns)
        for gap in np.flatnonzero(is_near).tolist():
            segment = self.segment_at(int(runs.track[run[gap]]), int(end_ns[gap]))
            is_near[gap] = self.owner[segment] == OwnerKind.COLLECTIVE
        return is_near

    def main_worked(self, begin_ns: int, end_ns: int) -> tuple[int, int] | None:
        """Return the main thread and the end of its last work during a helper thread's gap, or ``None``."""
        worked = self._worked_until(self.main, end_ns)
        return None if worked is None or worked <= begin_ns else (self.main, worked)

    def _worked_until(self, track: int, time_ns: int) -> int | None:
        """Return the last time up to `time_ns` at which a thread was busy, or ``None``."""
        if track not in self.first:
            return None
        segment = self.segment_at(track, time_ns)
        work = int(self.last_work[segment]) if segment >= 0 else -1
        return None if work < self.first[track] else min(time_ns, self.end_of(work))

    def _cut(
        self, events: Events, rows: Int, is_call: NDArray[np.bool_]
    ) -> tuple[Int, NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the start, row, owner and state of each segment of a thread."""
        calls, annotations = rows[is_call], rows[~is_call]
        begin, place = segments(events.start_ns[calls], events.end_ns[calls])
        row = np.where(place >= 0, calls[place], -1).astype(np.int32) if len(place) else place
        owner = np.where(row >= 0, _OWNER[self.kinds[row]], OwnerKind.BETWEEN).astype(np.uint8)
        state = np.full(len(row), State.WORKS, np.uint8)
        of_row = self.kinds[row]
        state[(of_row >= RowKind.FRAME) & (of_row <= RowKind.GC_FRAME)] = State.FRAME
        state[of_row == RowKind.WAITING_FRAME] = State.WAITS
        state[row < 0] = State.GAP
        if len(annotations):
            begin, row, owner, state = _with_annotations(events, annotations, begin, row, owner, state)
        for kind, row_kinds in CONTEXTS.items():
            self._set_owner(events, rows, row_kinds, kind, begin, owner)
        return begin, row, owner, state

    def _set_owner(  # noqa: PLR0913, PLR0917 - one parameter per column
        self,
        events: Events,
        rows: Int,
        kinds: tuple[RowKind, ...],
        kind: OwnerKind,
        begin: Int,
        owner: NDArray[np.uint8],
    ) -> None:
        """Set the owner of all segments inside events of the given kinds.

        Collectives keep their owner, except inside garbage collection.
        """
        selected = rows[np.isin(self.kinds[rows], kinds)]
        if not len(selected):
            return
        change = np.zeros(len(begin) + 1, np.int32)
        np.add.at(change, begin.searchsorted(events.start_ns[selected]), 1)
        np.add.at(change, begin.searchsorted(events.end_ns[selected]), -1)
        is_inside = np.cumsum(change[:-1]) > 0
        owner[is_inside & ((owner != OwnerKind.COLLECTIVE) | (kind == OwnerKind.GARBAGE_COLLECTION))] = kind

    def _find_helpers(self, events: Events, kinds: NDArray[np.uint8], process: Id | None) -> None:
        """Find the busy intervals of the other threads in the main thread's process."""
        is_work = (kinds == RowKind.OPERATOR) | (kinds == RowKind.HOST_COLLECTIVE)
        with_work = np.bincount(events.track[is_work], minlength=len(events.tracks)) > 0
        others = [track for track in self.first if track != self.main and events.tracks[track][0] == process]
        self.helpers = {track for track in others if with_work[track]}
        self.other_runs = _Runs(self, others, State.FRAME)
        self.helper_runs = _Runs(self, sorted(self.helpers), State.WORKS)

    def _find_stops(self, events: Events, kinds: NDArray[np.uint8]) -> None:
        """Mark the segments at which the walk may leave the thread. Other segments are copied to the path."""
        call = np.where(self.state == State.GAP, RowKind.OTHER, kinds[self.row])
        is_stop = (self.state == State.WAITS) | np.isin(call, (*SYNCS, RowKind.COPY_CALL, RowKind.FREE))
        duration = events.duration_ns[self.row] if len(self.row) else np.zeros(0, np.int64)
        is_stop |= (call == RowKind.LAUNCH) & (duration > SLOW_LAUNCH_NS)
        is_gap = self.state == State.GAP
        for track in self.helpers if self.main in self.first else ():
            gaps = self.first[track] + np.flatnonzero(is_gap[self.first[track] : self.last[track]])
            is_stop[gaps[self._main_works(self.begin[gaps], self.begin[gaps + 1])]] = True
        if self.helpers and self.main in self.first:
            gaps = self.first[self.main] + np.flatnonzero(is_gap[self.first[self.main] : self.last[self.main]])
            ends = self.helper_runs.ends
            ended = ends.searchsorted(self.begin[gaps], side="right")
            is_stop[gaps[ends.searchsorted(self.begin[gaps + 1], side="right") > ended]] = True
            is_stop[gaps[self._ends_in_collective(self.begin[gaps], self.begin[gaps + 1])]] = True
        is_stop[list(self.last.values())] = True
        self.is_stop = is_stop
        self.index_stops()

    def _main_works(self, begin: Int, end: Int) -> NDArray[np.bool_]:
        """Return a mask of the intervals during which the main thread is busy."""
        first = self.first[self.main]
        segment = first + self.begin[first : self.last[self.main] + 1].searchsorted(end) - 1
        work = np.where(segment >= first, self.last_work[np.maximum(segment, first)], -1)
        works: NDArray[np.bool_] = (work >= first) & (self.begin[np.maximum(work, first) + 1] > begin)
        return works

    def index_stops(self) -> None:
        """Recompute the last stop up to each segment. Call this after changing `is_stop`."""
        number = np.arange(len(self.is_stop), dtype=np.int32)
        self.last_stop = np.maximum.accumulate(np.where(self.is_stop, number, np.int32(-1)))


class _Runs:
    """Uninterrupted busy intervals of several threads as parallel arrays, sorted by start time."""

    def __init__(self, threads: HostThreads, tracks: list[int], state: State) -> None:
        begins, ends, owners = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for track in tracks:
            own = slice(threads.first[track], threads.last[track] + 1)
            works = threads.state[own] >= state
            changes = np.flatnonzero(np.diff(works, prepend=False))  # an even count, because the last segment is a gap
            times = threads.begin[own][changes]
            begins.append(times[::2])
            ends.append(times[1::2])
            owners.append(np.full(len(times) // 2, track, np.int32))
        begin, end, track_of = np.concatenate(begins), np.concatenate(ends), np.concatenate(owners)
        order = np.argsort(begin, kind="stable")
        self.begin, self.end, self.track = begin[order], end[order], track_of[order]
        latest = np.maximum.accumulate(self.end) if len(order) else self.end
        number = np.arange(len(order), dtype=np.int32)
        self.longest = (
            np.maximum.accumulate(np.where(self.end == latest, number, np.int32(0))) if len(order) else number
        )
        """For each run, the index of the run with the latest end among all runs up to and including it."""
        self.order = np.argsort(self.end, kind="stable").astype(np.int32)
        self.ends = self.end[self.order]


def _with_annotations(  # noqa: PLR0913, PLR0917 - one parameter per column
    events: Events,
    annotations: Int,
    begin: Int,
    row: NDArray[np.int32],
    owner: NDArray[np.uint8],
    state: NDArray[np.uint8],
) -> tuple[Int, NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint8]]:
    """Split segments at the boundaries of annotations, and set the row of each gap to its annotation."""
    cut, place = segments(events.start_ns[annotations], events.end_ns[annotations])
    if not len(cut):
        return begin, row, owner, state
    begin, row, owner, state = _split(cut, begin, row, owner, state)
    annotation = np.maximum(cut.searchsorted(begin, side="right") - 1, 0)
    is_annotated = (state == State.GAP) & (begin >= cut[0]) & (place[annotation] >= 0)
    row[is_annotated] = annotations[place[annotation[is_annotated]]]
    return begin, row, owner, state


def _with_switches(
    switches: tuple[Int, Int],
    begin: Int,
    row: NDArray[np.int32],
    owner: NDArray[np.uint8],
    state: NDArray[np.uint8],
) -> tuple[Int, NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint8]]:
    """Split segments at the start and end of each switch between steps. Assign gaps in a switch to the profiler."""
    first_ns, last_ns = switches
    in_thread = (first_ns >= begin[0]) & (first_ns < last_ns) & (last_ns <= begin[-1])
    if not in_thread.any():
        return begin, row, owner, state
    cut = np.unique([first_ns[in_thread], last_ns[in_thread]])
    begin, row, owner, state = _split(cut, begin, row, owner, state)
    switch = first_ns.searchsorted(begin, side="right") - 1
    is_own = (state == State.GAP) & (switch >= 0) & (begin < last_ns[switch])
    row[is_own], owner[is_own] = -1, OwnerKind.PROFILER
    return begin, row, owner, state


def _split(
    cut: Int, begin: Int, row: NDArray[np.int32], owner: NDArray[np.uint8], state: NDArray[np.uint8]
) -> tuple[Int, NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint8]]:
    """Split segments at sorted times."""
    added = cut[begin.searchsorted(cut, side="right") == begin.searchsorted(cut)]
    at = begin.searchsorted(added)
    segment = np.cumsum(np.insert(np.ones(len(begin), np.int64), at, 0)) - 1
    # If a time precedes the first call, the thread starts with a gap.
    row, owner, state = (
        np.append(values, np.array(of_gap, values.dtype))[segment]
        for values, of_gap in ((row, -1), (owner, OwnerKind.BETWEEN), (state, State.GAP))
    )
    return np.insert(begin, at, added), row, owner, state


def _mark_sleep(events: Events, row: NDArray[np.int32], owner: NDArray[np.uint8], state: NDArray[np.uint8]) -> None:
    """Assign sleeps and waits for other processes to the thread itself, because it does not wait for another thread."""
    waits = np.flatnonzero(state == State.WAITS)
    if not len(waits):
        return
    names = [events.names[code] for code in events.name[row[waits]].tolist()]
    sleeps = waits[[is_sleep(name) for name in names]]
    state[sleeps] = State.FRAME
    owner[sleeps[owner[sleeps] == OwnerKind.WAIT_FOR_THREAD]] = OwnerKind.PYTHON
    state[waits[[is_external_wait(name) for name in names]]] = State.FRAME


def _mark_initial_wait(
    events: Events, begin: Int, row: NDArray[np.int32], owner: NDArray[np.uint8], state: NDArray[np.uint8]
) -> None:
    """Mark the innermost frame as a wait if it was already open when the recording started.

    Calls to C functions that are already in progress are not recorded. A thread that is blocked in such a call would
    otherwise look busy until the call returns.
    """
    is_opened = (state == State.FRAME) & (row >= 0) & (events.start_ns[row] == begin)
    is_opened &= begin < int(events.start_ns.min()) + INITIAL_NS
    depth = len(row) if is_opened.all() else int(is_opened.argmin())
    if depth:
        state[depth - 1], owner[depth - 1] = State.WAITS, OwnerKind.WAIT_FOR_THREAD


def main_track(events: Events, kinds: NDArray[np.uint8]) -> int:
    """Return the track with the most operators. Without operators, return the one with the most host events, or -1."""
    for selected in (kinds == RowKind.OPERATOR, (kinds > RowKind.OTHER) & (kinds <= LAST_CALL)):
        if selected.any():
            return int(np.bincount(events.track[selected]).argmax())
    return -1
