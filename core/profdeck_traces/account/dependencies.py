"""Dependency graph of a recording, including dependencies that delayed no event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.borders import HOST
from profdeck_traces.account.device_work import Cause
from profdeck_traces.account.host_threads import State
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.recording import RecordingPath
from profdeck_traces.account.row_kinds import OWNERS, SYNCS
from profdeck_traces.account.walk import LATENCY_NS, OnDevice
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.intervals import Int

_RETURN_NS = 2_000  # maximum time from the end of device work to the return of the call that waited for it
_SYNC_CALL_NS = 4_000  # maximum duration of a synchronisation that has nothing to wait for
# Use narrow types, because the columns are the largest arrays in the account.
_TYPES = (np.int64, np.int32, np.int64, np.uint8, np.int32, np.int64, np.int32, np.bool_)
_Mask = NDArray[np.bool_]


class _Wait(NamedTuple):
    """A thread's wait for another thread or for a device event."""

    track: int
    end: int
    segment: int
    """Segment of the waiting thread, or -1 for the time before its first segment."""
    until: int
    """Time at which the other thread's work or the device event ended."""
    kind: int
    """`OwnerKind` of the time from `until` to `end`."""
    other: int
    """Track of the other thread, or -1."""
    event: int
    """Index of the device event, or -1."""


class _Edges:
    """Dependencies between nodes, stored as groups of parallel arrays.

    The time of a node is the maximum of source time + `work` + `delay` over its dependencies. `work` is the time of the
    source's device event. If `is_thread` is set, the dependency connects consecutive nodes of a thread, and `delay` is
    the time between them.
    """

    def __init__(self) -> None:
        self.groups: list[tuple[NDArray[Any], ...]] = []

    def add(  # noqa: PLR0913 - one parameter per column
        self,
        source: Int,
        target: Int,
        *,
        delay: Int,
        kind: int | NDArray[Any],
        row: int | NDArray[Any] = -1,
        work: int | Int = 0,
        event: int | Int = -1,
        is_thread: bool | _Mask = False,
    ) -> None:
        """Add a group of dependencies."""
        columns = np.broadcast_arrays(source, target, delay, kind, row, work, event, is_thread)
        self.groups.append(tuple(columns))

    def columns(self) -> list[NDArray[Any]]:
        """Return the source, target, delay, kind, row, work, event and `is_thread` columns of all dependencies."""
        columns = zip(zip(*self.groups, strict=True), _TYPES, strict=True)
        return [np.concatenate(parts, dtype=dtype, casting="unsafe") for parts, dtype in columns]


class Dependencies:
    """Dependency graph of a recording, including dependencies that delayed no event.

    Nodes are the starts of device events, the step borders, and the times at which a thread launches work, waits, or
    is waited for. A replay with the recorded durations reproduces all recorded times. To ensure this, each node has a
    dependency that matches its time exactly, and no dependency leads to a later time. A start without a recorded cause
    keeps its recorded time.
    """

    def __init__(self, recording: RecordingPath, events: Events) -> None:
        """Build the graph.

        Args:
            recording: The critical path.
            events: The trace.
        """
        self._events, self._recording = events, recording
        self._threads, self._work = recording.threads, recording.work
        self._begin, self._end = int(recording.borders.times[0]), int(recording.borders.times[-1])
        self.segment_kind = self._threads.owner.copy()
        work = self._work
        self._start = np.clip(work.start, self._begin, self._end)
        self._stop = np.clip(work.end, self._begin, self._end)
        self._is_replayed = (work.end > self._begin) & (work.start < self._end)
        self.device_kind = np.full(256, OwnerKind.KERNEL, np.uint8)
        self.device_kind[list(OWNERS)] = list(OWNERS.values())
        self.device_kind = self.device_kind[recording.kinds[work.rows]]
        self._edges = _Edges()
        self._collect()
        del self._device_node, self._start, self._stop, self._is_replayed
        self._sort()
        self._cut_segments()
        del self._code_of_node, self._codes, self._class

    def _collect(self) -> None:
        waits = self._waits()
        work, borders = self._work, self._recording.borders
        launched = np.flatnonzero(self._is_replayed & (work.start > self._begin) & (work.launch >= 0))
        launched = launched[work.is_first[launched]] if len(launched) else launched
        tracks = self._events.track[work.launch[launched]].astype(np.int64)
        known = np.zeros(len(self._events.tracks) + 1, np.bool_)
        known[list(self._threads.first)] = True
        is_known = known[tracks] & (work.returned[launched] > self._begin) if len(launched) else known[tracks]
        launched, tracks = launched[is_known], tracks[is_known]
        returned = work.returned[launched] if len(launched) else launched
        host_ends = np.clip(borders.host_ends, self._begin, self._end)
        self._place_threads(waits, tracks, returned, host_ends)
        count = 1 + len(self._codes)
        self._device_node = np.full(len(work.rows), -1)
        replayed = np.flatnonzero(self._is_replayed)
        self._device_node[replayed] = count + np.arange(len(replayed))
        count += len(replayed)
        self.border_nodes = count + np.arange(len(borders.times))
        node_times = [self._codes % self._span + self._begin, self._start[replayed], borders.times]
        self.time = np.concatenate([np.array([self._begin]), *node_times])
        sizes = (1, len(self._codes), len(replayed), len(borders.times))
        self._class = np.repeat(np.array([0, 1, 3, 4], np.int8), sizes)
        self._add_threads(waits)
        if len(launched):
            slack = work.start[launched] - returned
            is_cause = work.cause[launched] == Cause.LAUNCH
            delay = np.where(is_cause, slack, np.minimum(slack, work.latency_ns))
            kind = np.where(is_cause & (slack > LATENCY_NS), OwnerKind.DEVICE_HELD, OwnerKind.LAUNCH_LATENCY)
            source, target = self._host_nodes(tracks, returned), self._device_node[launched]
            self._edges.add(source, target, delay=delay, kind=kind, row=work.rows[launched])
        self._add_streams()
        self._add_borders(host_ends)

    def _waits(self) -> list[_Wait]:
        """Use the walk to find the cause of each thread's waits and of its first event."""
        threads = self._threads
        stops = np.flatnonzero(threads.is_stop)
        firsts = np.array(list(threads.first.values()), np.int64)
        tracks = np.array(list(threads.first), np.int64)[firsts.searchsorted(stops, side="right") - 1]
        # Track, time and segment. The segment is -1 for a thread's first event.
        queries = [
            (track, begin, -1)
            for track, begin in zip(threads.first, threads.begin[firsts].tolist(), strict=True)
            if track != threads.main and self._begin < begin < self._end
        ]
        for segment, track in zip(stops.tolist(), tracks.tolist(), strict=True):
            is_last = segment == threads.last[track]
            end = self._end if is_last else min(threads.end_of(segment), self._end)
            is_inside = threads.begin[segment] < end and end > self._begin
            if is_inside and (not is_last or track == threads.main):
                queries.append((track, end, segment))
        waits = []
        for track, end, segment in queries:
            until, kind, at = self._recording.walk.continuation(track, end, self._begin)
            if segment >= 0 and kind >= 0:
                self.segment_kind[segment] = kind
            other, event = (-1, at.number) if isinstance(at, OnDevice) else (at.track, -1)
            if until > self._begin and kind >= 0 and other != track:
                waits.append(_Wait(track, end, segment, until, kind, other, event))
        return waits

    def _place_threads(self, waits: Sequence[_Wait], tracks: Int, returned: Int, host_ends: Int) -> None:
        """Compute the thread nodes as sorted codes that combine track and time."""
        threads = self._threads
        self._span = self._end - self._begin + 1
        firsts = {track: max(int(threads.begin[first]), self._begin) for track, first in threads.first.items()}
        places = [(track, time) for track, time in firsts.items() if time < self._end]
        for wait in waits:
            places.append((wait.track, wait.end))
            if wait.segment >= 0:
                places.append((wait.track, max(int(threads.begin[wait.segment]), self._begin)))
            if wait.other >= 0:
                places.append((wait.other, wait.until))
        self._syncs = self._sync_ends()
        places += [(track, end) for track, end, _ in self._syncs]
        pairs = np.array(places, np.int64).reshape(-1, 2)
        all_tracks, all_times = np.append(pairs[:, 0], tracks), np.append(pairs[:, 1], returned)
        if threads.main in threads.first:
            all_tracks = np.append(all_tracks, np.full(len(host_ends), threads.main))
            all_times = np.append(all_times, host_ends)
        self._codes = np.unique(all_tracks * self._span + np.clip(all_times, self._begin, self._end) - self._begin)

    def _sync_ends(self) -> list[tuple[int, int, int]]:
        """Return the track, end and row of each synchronisation."""
        rows = np.flatnonzero(np.isin(self._recording.kinds, SYNCS))
        ends = self._events.end_ns[rows]
        is_inside = (ends > self._begin) & (ends <= self._end)
        rows, ends = rows[is_inside], ends[is_inside]
        syncs = zip(self._events.track[rows].tolist(), ends.tolist(), rows.tolist(), strict=True)
        return [sync for sync in syncs if sync[0] in self._threads.first] if len(self._work.rows) else []

    def _host_nodes(self, tracks: Int, times: Int) -> Int:
        """Return the thread nodes at the given tracks and times."""
        return 1 + self._codes.searchsorted(tracks * self._span + times - self._begin)

    def _add_threads(self, waits: Sequence[_Wait]) -> None:
        threads, edges = self._threads, self._edges
        tracks, times = self._codes // self._span, self._codes % self._span
        columns = np.array(waits, np.int64).reshape(-1, 7)
        track, end, segment, until, kind, other, event = columns.T
        waiting = self._host_nodes(track, end)
        self._class[waiting] = 2
        row = np.where(segment >= 0, threads.row[segment], -1) if len(waits) else segment
        # Connect each node of a thread to the previous one.
        later = 1 + np.flatnonzero(tracks[1:] == tracks[:-1])
        cost = np.full(1 + len(self._codes), np.iinfo(np.int64).max)
        if len(waits):
            is_call = (segment >= 0) & (threads.state[segment] == State.WORKS)
            cost[waiting] = np.where(is_call, _SYNC_CALL_NS, 0)
        owner = np.full(1 + len(self._codes), -1)
        owner[waiting] = row
        kind_of = np.zeros(1 + len(self._codes), np.int64)
        kind_of[waiting] = kind
        target = 1 + later
        length = times[later] - times[later - 1]
        is_thread = cost[target] == np.iinfo(np.int64).max
        delay = np.minimum(length, cost[target])
        edges.add(target - 1, target, delay=delay, kind=kind_of[target], row=owner[target], is_thread=is_thread)
        on_thread, on_device = other >= 0, event >= 0
        source = self._host_nodes(other[on_thread], until[on_thread])
        edges.add(source, waiting[on_thread], delay=(end - until)[on_thread], kind=kind[on_thread], row=row[on_thread])
        self._add_work(event[on_device], waiting[on_device], end[on_device], kind=kind[on_device], row=row[on_device])
        awaited = [(*sync, event) for sync in self._syncs for event in self._recording.walk.awaited(sync[-1])]
        track, end, row, event = np.array(awaited, np.int64).reshape(-1, 4).T
        target = self._host_nodes(track, end)
        self._add_work(event, target, end, kind=OwnerKind.SYNCHRONISATION, row=row, most=_RETURN_NS)

    def _add_work(  # noqa: PLR0913 - one parameter per column
        self,
        event: Int,
        target: Int,
        time: Int,
        *,
        kind: int | NDArray[Any],
        row: int | NDArray[Any],
        most: int | Int | None = None,
    ) -> None:
        """Add dependencies on the ends of device events. Delays are capped at `most` ns unless it is ``None`` or -1."""
        is_used = (self._device_node[event] >= 0) & (self._start[event] <= time)
        kind, row, most = (
            np.broadcast_to(-1 if part is None else part, len(event))[is_used] for part in (kind, row, most)
        )
        event, target, time = event[is_used], target[is_used], time[is_used]
        ended = np.minimum(self._stop[event], time)
        delay = time - ended
        delay = np.where(most >= 0, np.minimum(delay, most), delay)
        work = ended - self._start[event]
        self._edges.add(self._device_node[event], target, delay=delay, kind=kind, row=row, work=work, event=event)

    def _add_streams(self) -> None:
        """Add dependencies between device events."""
        work = self._work
        if not len(work.rows):
            return
        later = np.flatnonzero(self._is_replayed & (work.start > self._begin))
        previous = later[work.previous[later] >= 0]
        overlaps = work.end[work.previous[previous]] > work.start[previous]
        is_cause = work.cause[previous] == Cause.PREVIOUS
        # An event that overlaps its predecessor and has another cause only has to start after the predecessor starts.
        after = previous[overlaps & ~is_cause]
        before = work.previous[after]
        has_node = self._device_node[before] >= 0
        source, target = self._device_node[before[has_node]], self._device_node[after[has_node]]
        self._edges.add(source, target, delay=np.zeros(len(source), np.int64), kind=OwnerKind.DEVICE_GAP)
        previous, is_cause = previous[~overlaps | is_cause], is_cause[~overlaps | is_cause]
        self._add_gaps(previous, work.previous[previous], is_cause)
        effects, causes = np.array(work.waits, np.int64).reshape(-1, 2).T
        is_cause = (work.cause[effects] == Cause.STREAM_WAIT) & (work.source[effects] == causes)
        is_later = self._is_replayed[effects] & (work.start[effects] > self._begin)
        self._add_gaps(effects[is_later], causes[is_later], is_cause[is_later])
        other = later[work.cause[later] == Cause.OTHER_STREAM]
        self._add_gaps(other, work.source[other], np.ones(len(other), np.bool_))

    def _add_gaps(self, event: Int, before: Int, is_cause: _Mask) -> None:
        work = self._work
        start = self._start[event]
        is_long = is_cause & (start - self._stop[before] > LATENCY_NS)
        kind = np.where(is_long, OwnerKind.DEVICE_HELD, OwnerKind.DEVICE_GAP)
        most = np.where(is_cause, -1, work.gap_ns)
        self._add_work(before, self._device_node[event], start, kind=kind, row=work.rows[event], most=most)

    def _add_borders(self, host_ends: Int) -> None:
        borders, threads, nodes = self._recording.borders, self._threads, self.border_nodes
        none = np.zeros(len(nodes), np.int64)
        if threads.main in threads.first:
            source = self._host_nodes(none + threads.main, host_ends)
            self._edges.add(source, nodes, delay=none, kind=OwnerKind.BETWEEN)
        self._edges.add(nodes[:-1], nodes[1:], delay=none[1:], kind=OwnerKind.BETWEEN)
        if borders.rule != HOST:
            gap = OwnerKind.DEVICE_GAP
            for track in self._work.streams:
                ended = self._work.ended_before(track, borders.times)
                has_end = ended >= 0
                # No delay: the boundary could come right after the end of the work.
                self._add_work(ended[has_end], nodes[has_end], borders.times[has_end], kind=gap, row=-1, most=0)

    def _sort(self) -> None:
        """Sort nodes by time and dependencies by target."""
        order = np.lexsort((self._class, self.time))
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        self.time, self.border_nodes = self.time[order], place[self.border_nodes].astype(np.int64)
        self._code_of_node = (order - 1).astype(np.int32)  # only meaningful for thread nodes
        columns = self._edges.columns()
        self._edges.groups.clear()
        columns[0], columns[1] = place[columns[0]].astype(np.int64), place[columns[1]]
        is_ordered = columns[0] < columns[1]
        columns = [column[is_ordered] for column in columns]
        # A node without a dependency that matches its time keeps the recorded time.
        recorded = self.time[columns[1]] - self.time[columns[0]]
        fits = np.zeros(len(order), np.bool_)
        fits[columns[1][columns[2] + columns[5] == recorded]] = True
        fixed = 1 + np.flatnonzero(~fits[1:])
        recorded = self.time[fixed] - self._begin
        values: tuple[Any, ...] = 0, fixed, recorded, OwnerKind.NOT_RECORDED, -1, 0, -1, False
        columns = [
            np.append(column, np.broadcast_to(value, len(fixed)).astype(column.dtype))
            for column, value in zip(columns, values, strict=True)
        ]
        order = np.argsort(columns[1], kind="stable")
        self.source, self.target, self.delay, self.kind, self.row, self.event_work, self.event, self.is_thread = (
            column[order] for column in columns
        )
        self.first_edge = np.searchsorted(self.target, np.arange(len(self.time) + 1, dtype=np.int32))

    def _cut_segments(self) -> None:
        """Find the segment of each thread node, and the node's offset from the start of the segment."""
        threads = self._threads
        begin = np.maximum(threads.begin, self._begin)
        is_inside = (self._code_of_node >= 0) & (self._code_of_node < len(self._codes))
        nodes = np.flatnonzero(is_inside)
        codes = self._codes[self._code_of_node[nodes]]
        tracks, times = codes // self._span, codes % self._span + self._begin
        self.segment = np.zeros(len(self.time), np.int32)
        self.offset = np.zeros(len(self.time), np.int64)
        for track, first in threads.first.items():
            part = np.flatnonzero(tracks == track)
            own = threads.begin[first : threads.last[track] + 1]
            segment = first + np.maximum(own.searchsorted(times[part], side="right") - 1, 0)
            self.segment[nodes[part]] = segment
            self.offset[nodes[part]] = np.maximum(times[part] - begin[segment], 0)
        self.length = np.diff(np.clip(threads.begin, self._begin, self._end), append=0)
        self.length[list(threads.last.values())] = 0
