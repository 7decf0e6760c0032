"""Backward walk through a recording, from each event to the event that delayed it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.device_work import CLOCK_NS, Cause, DeviceEvents
from profdeck_traces.account.host_threads import SLOW_LAUNCH_NS, HostThreads, State
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.row_kinds import OWNERS, SYNCS, RowKind
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.walking import NO_TIME

LATENCY_NS = 100_000
"""Longest delay that is attributed to launch latency or a device gap; longer delays are `DEVICE_HELD`."""
_FULL_QUEUE = 900  # outstanding launches at which a slow launch is attributed to a full queue
_MAX_STALLED = 64
_HOST_RUN, _DEVICE_RUN = -1, -2
_FIELDS = 5
# Enum member lookups are slow in Python 3.11.
_WAITS, _LAUNCH, _FREE, _COPY_CALL = map(int, (State.WAITS, RowKind.LAUNCH, RowKind.FREE, RowKind.COPY_CALL))
_BETWEEN, _WAIT_FOR_THREAD = int(OwnerKind.BETWEEN), int(OwnerKind.WAIT_FOR_THREAD)
_SYNCS, _COPIES = frozenset(map(int, SYNCS)), frozenset({_COPY_CALL, _FREE})


class OnThread(NamedTuple):
    """Position of a walk on a thread."""

    track: int


class OnDevice(NamedTuple):
    """Position of a walk in a device event."""

    number: int
    """Index of the event in `DeviceEvents`."""


Position = OnThread | OnDevice


@attrs.frozen(eq=False)
class Path:
    """Segments of a path as parallel arrays, sorted by time, without gaps or overlaps."""

    begin: Int
    end: Int
    kind: NDArray[np.uint8]
    """`OwnerKind` of each segment."""
    row: NDArray[np.int32]
    """Row of the owner's event in the trace; -1 if there is none."""

    def __len__(self) -> int:
        return len(self.begin)

    def between(self, begin_ns: int, end_ns: int) -> Path:
        """Return the part of the path inside an interval."""
        part = slice(int(self.end.searchsorted(begin_ns, side="right")), max(0, int(self.begin.searchsorted(end_ns))))
        return Path(
            np.maximum(self.begin[part], begin_ns), np.minimum(self.end[part], end_ns), self.kind[part], self.row[part]
        )


class BackwardWalk:
    """Finds the critical path of one trace."""

    def __init__(self, events: Events, kinds: NDArray[np.uint8], threads: HostThreads, work: DeviceEvents) -> None:
        self._events, self._kinds, self._threads, self._work = events, kinds, threads, work
        self._owner = np.full(256, OwnerKind.KERNEL, np.uint8)
        self._owner[list(OWNERS)] = list(OWNERS.values())
        self._begin_ns, self._out = 0, array("q")
        # First device event of each launch.
        launched = np.flatnonzero(work.launch >= 0)
        order = launched[np.lexsort((launched, work.launch[launched]))]
        rows = work.launch[order]
        is_first = np.diff(rows, prepend=-1) != 0
        self._launch_rows, self._launch_work = rows[is_first], order[is_first]
        self._launch_row = self._launch_rows.data
        is_launch = (kinds == RowKind.LAUNCH)[work.calls]
        lost = work.calls[is_launch & ~np.isin(work.calls, self._launch_rows)]
        self._lost = lost[np.argsort(events.start_ns[lost], kind="stable")]
        self._lost_start = events.start_ns[self._lost]
        self._has_work = bool(len(work.rows))
        self._pass_asynchronous_copies()
        # Memory views, because reading a Python integer from an array takes three times as long.
        self._segment_begin, self._segment_row = threads.begin.data, threads.row.data
        self._segment_state, self._segment_stop = threads.state.data, threads.last_stop.data
        self._tracks: dict[object, int] | None = None
        self._launches_of_thread: dict[int, tuple[Int, Int]] = {}

    def _pass_asynchronous_copies(self) -> None:
        """Remove copy calls that cannot have waited from the stops, so that the walk does not check each call."""
        threads, events = self._threads, self._events
        stops = np.flatnonzero(threads.is_stop & (threads.row >= 0))
        stops = stops[self._kinds[threads.row[stops]] == RowKind.COPY_CALL]
        rows = threads.row[stops]
        is_launch = np.isin(rows, self._launch_rows)
        waits = events.duration_ns[rows] > SLOW_LAUNCH_NS
        works = self._launch_work[self._launch_rows.searchsorted(rows[is_launch])]
        called, returned = events.start_ns[rows[is_launch]], events.end_ns[rows[is_launch]]
        waits[is_launch] |= (called < self._work.end[works]) & (self._work.end[works] <= returned + CLOCK_NS)
        threads.is_stop[stops[~waits]] = False
        threads.index_stops()

    def path(self, begin_ns: int, end_ns: int, start: Position) -> Path:
        """Walk backward from the end of an interval to its start.

        Args:
            begin_ns: Start of the interval.
            end_ns: End of the interval.
            start: Position at the end of the interval.
        """
        del self._out[:]
        self._walk(begin_ns, end_ns, start)
        return self._expanded(self._steps())[0]

    def paths(self, walks: Sequence[tuple[int, int, Position]]) -> tuple[Path, Int]:
        """Walk backward through several intervals.

        Args:
            walks: Arguments of `path` for each walk.

        Returns:
            The segments of all walks, sorted by time within each walk, and the index of each segment's walk.
        """
        del self._out[:]
        counts = []
        # `_steps` reverses the order of the steps and thus of the walks.
        for begin_ns, end_ns, start in reversed(walks):
            before = len(self._out)
            self._walk(begin_ns, end_ns, start)
            counts.append((len(self._out) - before) // _FIELDS)
        path, step = self._expanded(self._steps())
        return path, np.repeat(np.arange(len(walks)), counts[::-1])[step]

    def _steps(self) -> Int:
        """Return the collected steps, sorted by time within each walk."""
        return np.frombuffer(self._out, np.int64).reshape(-1, _FIELDS)[::-1]

    def _walk(self, begin_ns: int, end_ns: int, start: Position) -> None:
        """Collect the steps of one walk."""
        self._begin_ns = begin_ns
        at: Position = start
        time, stalled = end_ns, 0
        while time > begin_ns:
            before = time
            if isinstance(at, OnDevice):
                time, at = self._on_device(at.number, time)
            else:
                time, at = self._on_host(at.track, time)
            stalled = stalled + 1 if time >= before else 0
            if stalled > _MAX_STALLED:
                self._out.extend((begin_ns, time, OwnerKind.NOT_RECORDED, -1, -1))
                break

    def continuation(self, track: int, time_ns: int, begin_ns: int) -> tuple[int, int, Position]:
        """Move one event back from a point on a thread.

        Args:
            track: Track of the thread.
            time_ns: Time on the thread.
            begin_ns: Earliest time of the walk.

        Returns:
            The time at which the walk continues, the `OwnerKind` of the time in between, and the next position. The
            kind is -1 if the step covers a run of segments.
        """
        self._begin_ns = begin_ns
        del self._out[:]
        until, at = self._on_host(track, time_ns)
        return until, self._out[2], at

    def awaited(self, row: int) -> list[int]:
        """Return the last device event on each stream that a synchronisation waits for.

        The list is empty if the trace does not identify the stream. The events may have ended before the call.
        """
        work, kind = self._work, int(self._kinds[row])
        called = int(self._events.start_ns[row])
        if kind == RowKind.DEVICE_SYNC:
            awaited = [work.launched_before(track, called) for track in work.streams]
        elif (recorded := self._recorded_stream(row)) is not None:
            track, recorded_at = recorded
            awaited = [work.launched_before(track, called if recorded_at is None else recorded_at)]
        elif kind == RowKind.STREAM_SYNC:
            awaited = [self._last_launch(int(self._events.track[row]), called)]
        else:
            awaited = []
        return [index for index in awaited if index >= 0]

    def _on_device(self, index: int, time: int) -> tuple[int, Position]:
        work = self._work
        first = int(work.first_of_run[index])
        if work.start[first] < self._begin_ns and first < index:
            first = max(
                first, first + int(work.start[first : index + 1].searchsorted(self._begin_ns, side="right")) - 1
            )
        self._out.extend((self._begin_ns, time, _DEVICE_RUN, first, index))
        time = min(time, max(int(work.start[first]), self._begin_ns))
        if time <= self._begin_ns:
            return self._begin_ns, OnDevice(first)
        cause, source = int(work.cause[first]), int(work.source[first])
        since = min(max(int(work.since[first]), self._begin_ns), time)
        row = int(work.rows[first])
        if cause == Cause.UNKNOWN:
            self._out.extend((self._begin_ns, time, OwnerKind.NOT_RECORDED, row, -1))
            return self._begin_ns, OnDevice(first)
        is_short = time - since <= LATENCY_NS
        at: Position
        if cause == Cause.LAUNCH:
            kind = OwnerKind.LAUNCH_LATENCY if is_short else OwnerKind.DEVICE_HELD
            at = OnThread(int(self._events.track[source]))
        else:
            kind = OwnerKind.DEVICE_GAP if is_short else OwnerKind.DEVICE_HELD
            at = OnDevice(source)
        self._out.extend((since, time, kind, row, -1))
        return since, at

    def _on_host(self, track: int, time: int) -> tuple[int, Position]:
        threads = self._threads
        if track not in threads.first:
            self._out.extend((self._begin_ns, time, OwnerKind.NOT_RECORDED, -1, -1))
            return self._begin_ns, OnThread(track)
        segment = threads.segment_at(track, time)
        if segment < 0:
            return self._silent(track, self._begin_ns, time, -1)
        stop = self._segment_stop[segment]
        if stop < segment:
            lowest = max(stop + 1, threads.first[track])
            begin = self._segment_begin[lowest]
            if begin < self._begin_ns:
                lowest += int(threads.begin[lowest : segment + 1].searchsorted(self._begin_ns, side="right")) - 1
                begin = self._begin_ns
            self._out.extend((begin, time, _HOST_RUN, lowest, segment))
            return begin, OnThread(track)
        begin = max(self._segment_begin[segment], self._begin_ns)
        row, state = self._segment_row[segment], self._segment_state[segment]
        if state <= _WAITS:
            return self._silent(track, begin, time, segment)
        return self._in_call(track, segment, row, begin, time)

    def _silent(self, track: int, begin: int, time: int, segment: int) -> tuple[int, Position]:
        """Handle a gap or wait on a thread."""
        threads = self._threads
        is_wait = segment >= 0 and self._segment_state[segment] == _WAITS
        if is_wait and threads.owner[segment] != _WAIT_FOR_THREAD:
            # Data loading and similar work often waits for processes that were not recorded.
            self._out.extend((begin, time, int(threads.owner[segment]), self._segment_row[segment], -1))
            return begin, OnThread(track)
        row = -1 if segment < 0 else self._segment_row[segment]
        if is_wait:
            found = threads.waited_for(track, begin, time)
        elif track == threads.main:
            found = threads.helped(begin, time)
        else:
            found = threads.main_worked(begin, time)
        if found is not None and found[1] >= self._begin_ns:
            other, until = found
            self._out.extend((until, time, _WAIT_FOR_THREAD if is_wait else _BETWEEN, row, -1))
            return until, OnThread(other)
        self._out.extend((begin, time, _BETWEEN if segment < 0 else int(threads.owner[segment]), row, -1))
        return begin, OnThread(track)

    def _in_call(self, track: int, segment: int, row: int, begin: int, time: int) -> tuple[int, Position]:
        """Handle a runtime call that may have waited for the device."""
        work, kind = self._work, int(self._kinds[row])
        owner = int(self._threads.owner[segment])
        called, returned = int(self._events.start_ns[row]), int(self._events.end_ns[row])
        index, waits_as = -1, OwnerKind.SYNCHRONISATION
        if self._has_work:
            if kind in _SYNCS:
                index = self._sync_target(row, kind, called, returned)
            elif returned - called > SLOW_LAUNCH_NS and kind in {_LAUNCH, _COPY_CALL}:
                index, waits_as = self._queue_head(row, called, returned), OwnerKind.QUEUE_FULL
            if index < 0 and kind in _COPIES:
                index, waits_as = self._copy_target(row, kind, called, returned), OwnerKind.SYNCHRONISATION
        if kind in _SYNCS and len(self._lost):
            place = int(self._lost_start.searchsorted(called)) - 1
            if place >= 0 and (index < 0 or self._lost_start[place] > work.launched[index]):
                # The device work of a later launch is missing from the trace.
                index = index if index >= 0 and work.start[index] < time else -1
                launch_end = int(self._events.end_ns[self._lost[place]])
                ended = int(work.end[index]) if index >= 0 else NO_TIME
                until = max(begin, launch_end, ended)
                if until < time:
                    self._out.extend((until, time, OwnerKind.NOT_RECORDED, int(self._lost[place]), -1))
                    return until, OnDevice(index) if until == ended else OnThread(track)
        if index >= 0 and work.start[index] < time:  # otherwise the walk came from this event
            until = min(int(work.end[index]), time)
            if until > begin:
                self._out.extend((until, time, waits_as, row, -1))
                return until, OnDevice(index)
        self._out.extend((begin, time, owner, row, -1))
        return begin, OnThread(track)

    def _sync_target(self, row: int, kind: int, called: int, returned: int) -> int:
        """Return the device event that a synchronisation waited for, or -1."""
        work = self._work
        if kind == RowKind.DEVICE_SYNC:
            return work.ended_between(called, returned)
        recorded = self._recorded_stream(row)
        if recorded is not None:
            track, recorded_at = recorded
            if recorded_at is None:
                return work.ended_between(called, returned, track)
            index = work.launched_before(track, recorded_at)
            return index if index >= 0 and work.ended_in(index, called, returned) else -1
        if kind == RowKind.STREAM_SYNC:
            index = self._last_launch(int(self._events.track[row]), called)
            if index >= 0:
                target = work.ended_between(called, returned, int(work.track[index]))
                if target >= 0:
                    return target
        return work.ended_between(called, returned)

    def _recorded_stream(self, row: int) -> tuple[int, int | None] | None:
        """Return the stream that a synchronisation waits for, according to its ``cuda_sync`` record.

        The second item is the time at which the CUDA event was recorded, or ``None`` for a stream synchronisation.
        """
        work = self._work
        records = work.sync_records.by_correlation
        record = records.get(int(self._events.arg("correlation", np.array([row]))[0])) if records else None
        if record is None:
            return None
        name, device, stream, other, recorded = record
        if self._tracks is None:
            self._tracks = dict(work.stream_tracks(self._events))
        if name.startswith("Stream") and (device, stream) in self._tracks:
            return self._tracks[device, stream], None
        if name.startswith("Event") and (device, other) in self._tracks and recorded in work.call_start:
            return self._tracks[device, other], work.call_start[recorded]
        return None

    def _last_launch(self, track: int, time: int) -> int:
        """Return the last device event launched by a thread before a given time, or -1."""
        if track not in self._launches_of_thread:
            work = self._work
            index = np.flatnonzero((work.launch >= 0) & (self._events.track[work.launch] == track))
            index = index[np.argsort(work.launched[index], kind="stable")]
            self._launches_of_thread[track] = work.launched[index], index
        launched, index = self._launches_of_thread[track]
        place = int(launched.searchsorted(time)) - 1
        return int(index[place]) if place >= 0 else -1

    def _work_of(self, row: int) -> int:
        """Return the first device event of a launch, or -1."""
        # NumPy would convert all rows to the type of a Python integer.
        place = bisect_left(self._launch_row, row)
        return int(self._launch_work[place]) if place < len(self._launch_row) and self._launch_row[place] == row else -1

    def _queue_head(self, row: int, called: int, returned: int) -> int:
        """Return the device event that freed a queue slot for a launch, or -1."""
        own = self._work_of(row)
        if own < 0:
            return -1
        track = int(self._work.track[own])
        if self._work.outstanding(track, returned) < _FULL_QUEUE:
            return -1
        return self._work.ended_between(called, returned, track)

    def _copy_target(self, row: int, kind: int, called: int, returned: int) -> int:
        """Return the device event that a blocking copy or free call waited for, or -1."""
        own = self._work_of(row)
        if own >= 0 and self._work.ended_in(own, called, returned):
            return own
        return self._work.ended_between(called, returned) if kind == _FREE else -1

    def _expanded(self, steps: Int) -> tuple[Path, Int]:
        """Replace each run with its segments and gaps. Also return the index of the step that contains each segment."""
        is_host, is_device = steps[:, 2] == _HOST_RUN, steps[:, 2] == _DEVICE_RUN
        # Each event in a device run becomes two segments: its work and the gap after it.
        first, last = steps[:, 3], steps[:, 4]
        counts = np.where(is_host, last - first + 1, np.where(is_device, 2 * (last - first + 1), 1))
        source = np.repeat(np.arange(len(steps)), counts)
        offset = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin, end = steps[source, 0], steps[source, 1]
        kind, row = steps[source, 2], steps[source, 3]
        inside = np.flatnonzero(is_host[source])
        segment = first[source[inside]] + offset[inside]
        threads, work = self._threads, self._work
        begin[inside] = np.maximum(begin[inside], threads.begin[segment])
        end[inside] = np.minimum(end[inside], threads.begin[segment + 1])
        kind[inside], row[inside] = threads.owner[segment], threads.row[segment]
        inside = np.flatnonzero(is_device[source])
        if len(inside):
            index, is_gap = first[source[inside]] + offset[inside] // 2, offset[inside] % 2 == 1
            following = np.minimum(index + 1, len(work.rows) - 1)
            until = np.where(index == last[source[inside]], end[inside], work.start[following])
            worked = np.minimum(work.end[index], until)
            gap_ns = until - worked
            owner_row = np.where(is_gap & (index < last[source[inside]]), work.rows[following], work.rows[index])
            of_work = self._owner[self._kinds[work.rows[index]]]
            of_gap = np.where(gap_ns > LATENCY_NS, OwnerKind.DEVICE_HELD, OwnerKind.DEVICE_GAP)
            begin[inside] = np.maximum(begin[inside], np.where(is_gap, worked, work.start[index]))
            end[inside] = np.minimum(end[inside], np.where(is_gap, until, worked))
            kind[inside], row[inside] = np.where(is_gap, of_gap, of_work), owner_row
        keep = end > begin
        times = np.append(begin[keep], end[keep][-1:])
        return Path(times[:-1], times[1:], kind[keep].astype(np.uint8), row[keep].astype(np.int32)), source[keep]
