"""Device events of a trace (kernels, copies and fills), and the cause of each event's start time."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.row_kinds import RowKind
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.walking import NO_TIME

CLOCK_NS = 5_000
"""Tolerance for comparing device times with host times."""
_UNEXPLAINED_NS = 10_000  # for longer gaps, look for a cause on another stream
_MAX_LATENCY_NS, _MAX_GAP_NS, _QUEUED_NS = 20_000, 5_000, 20_000
_MAX_CANDIDATES = 64


class Cause(IntEnum):
    """Kind of event that a device event waited for before it started."""

    LAUNCH = 0
    PREVIOUS = 1
    """The previous event in the stream or graph."""
    STREAM_WAIT = 2
    """An event on another stream, through ``cudaStreamWaitEvent``."""
    OTHER_STREAM = 3
    """An event on another stream that ended during an otherwise unexplained gap."""
    UNKNOWN = 4


class DeviceEvents:
    """Device events as parallel arrays, sorted by track and start time. An index is a position in these arrays."""

    def __init__(self, events: Events, launch: NDArray[np.int32], kinds: NDArray[np.uint8]) -> None:
        """Find the cause of each event.

        Args:
            events: The trace.
            launch: Row of each event's launch call, or -1.
            kinds: `RowKind` of each row.
        """
        self.rows = rows = np.flatnonzero(kinds >= RowKind.KERNEL).astype(np.int32)
        self.start, self.end = events.start_ns[rows], events.end_ns[rows]
        self.track = events.track[rows]
        self.calls = np.flatnonzero((kinds >= RowKind.CALL) & (kinds <= RowKind.EVENT_SYNC)).astype(np.int32)
        self.launch = launch[rows]
        """Row of each event's launch call, or -1."""
        is_launched = self.launch >= 0
        call = np.maximum(self.launch, 0)
        self.launched = np.where(is_launched, events.start_ns[call], NO_TIME) if len(rows) else self.start
        self.order = np.argsort(self.end, kind="stable").astype(np.int32)
        """Indices sorted by end time."""
        self.ends = self.end[self.order]
        self.call_start: dict[int, int] = {}
        """Start time of each call that a ``cuda_sync`` record refers to, by correlation ID."""
        self._by_end = self._ends_by_stream()
        if not len(rows):
            self.cause, self.since, self.source = np.zeros(0, np.int8), self.start, self.rows
            self.first_of_run, self.latency_ns, self.gap_ns = np.zeros(0, np.int32), 0, 0
            self.waits: list[tuple[int, int]] = []
            self.streams: dict[int, tuple[Int, NDArray[np.int32]]] = {}
            self.sync_records = SyncRecords(events)
            return
        returned = np.minimum(events.end_ns[call], self.start)
        # A blocking call returns only after its own copy has finished, so use the call's start as the launch time.
        blocks = np.isin(kinds[call], (RowKind.COPY_CALL, RowKind.FREE)) & (self.end <= events.end_ns[call] + CLOCK_NS)
        self.returned = np.where(
            is_launched, np.where(blocks, np.minimum(self.launched, self.start), returned), NO_TIME
        )
        self._find_predecessors()
        self._find_causes()
        self.streams = self._launches_by_stream()
        self._find_stream_waits(events)
        self._find_other_streams()
        number = np.arange(len(rows))
        is_stop = (self.cause != Cause.PREVIOUS) | (self.source != number - 1)
        self.first_of_run = np.maximum.accumulate(np.where(is_stop, number, 0)).astype(np.int32)
        """Index of the first event in each event's run. The other events in a run wait only for their predecessor."""

    def ended_between(self, begin_ns: int, end_ns: int, track: int | None = None) -> int:
        """Return the index of the event that ended last in an interval, or -1.

        Events launched after the interval are ignored.

        Args:
            begin_ns: Start of a call that waits for the device.
            end_ns: End of the call.
            track: Track of a stream, or ``None`` for any stream.
        """
        order, ends = (self.order, self.ends) if track is None else self._by_end[track]
        last = int(ends.searchsorted(end_ns + CLOCK_NS, side="right")) - 1
        for place in range(last, max(last - 256, -1), -1):
            if ends[place] <= begin_ns:
                return -1
            index = int(order[place])
            if self.launched[index] < end_ns:
                return index
        return -1

    def launched_before(self, track: int, time_ns: int) -> int:
        """Return the index of the last event launched on a stream before a given time, or -1."""
        launched, index = self.streams[track]
        place = int(launched.searchsorted(time_ns)) - 1
        return int(index[place]) if place >= 0 else -1

    def ended_before(self, track: int, times_ns: Int) -> Int:
        """Return the index of the stream's last finished event at each time, or -1."""
        order, ends = self._by_end[track]
        return np.append(order, -1)[ends.searchsorted(times_ns, side="right") - 1]

    def outstanding(self, track: int, time_ns: int) -> int:
        """Return the number of events on a stream that were launched but not finished at a given time."""
        return int(self.streams[track][0].searchsorted(time_ns)) - int(self._by_end[track][1].searchsorted(time_ns))

    def ended_in(self, index: int, begin_ns: int, end_ns: int) -> bool:
        """Return whether an event ended during a call, allowing for clock error."""
        return bool(begin_ns < self.end[index] <= end_ns + CLOCK_NS)

    def stream_tracks(self, events: Events) -> dict[tuple[object, int], int]:
        """Return the track of each stream, keyed by device and stream ID."""
        _, first = np.unique(self.track, return_index=True)
        streams = events.arg("stream", self.rows[first]).tolist()
        return {
            (events.tracks[track][0], stream): track
            for track, stream in zip(self.track[first].tolist(), streams, strict=True)
            if stream >= 0
        }

    def _ends_by_stream(self) -> dict[int, tuple[NDArray[np.int32], Int]]:
        """Return, for each stream, the indices and ends of its events, sorted by end."""
        order = self.order[np.argsort(self.track[self.order], kind="stable")]
        ends = self.end[order]
        tracks, first = np.unique(self.track[order], return_index=True)
        bounds = np.append(first, len(order)).tolist()
        return {
            track: (order[begin:end], ends[begin:end])
            for track, begin, end in zip(tracks.tolist(), bounds[:-1], bounds[1:], strict=True)
        }

    def _launches_by_stream(self) -> dict[int, tuple[Int, NDArray[np.int32]]]:
        """Return, for each stream, the launch times and the indices of launched events, sorted by launch."""
        index = np.flatnonzero(self.launch >= 0).astype(np.int32)
        index = index[np.lexsort((self.launched[index], self.track[index]))]
        launched = self.launched[index]
        tracks = np.unique(self.track)
        bounds = np.append(self.track[index].searchsorted(tracks), len(index)).tolist()
        return {
            track: (launched[begin:end], index[begin:end])
            for track, begin, end in zip(tracks.tolist(), bounds[:-1], bounds[1:], strict=True)
        }

    def _find_predecessors(self) -> None:
        """Find each event's predecessor in its stream or graph."""
        number = np.arange(len(self.rows))
        previous = np.full(len(number), -1)
        begins = np.flatnonzero(np.append(True, self.track[1:] != self.track[:-1]))
        for first, last in zip(begins.tolist(), np.append(begins[1:], len(number)).tolist(), strict=True):
            latest = np.maximum.accumulate(self.end[first:last])
            is_latest = self.end[first:last] == latest
            place = np.maximum.accumulate(np.where(is_latest, number[first:last], first))
            previous[first + 1 : last] = place[:-1]
        self.is_first = np.ones(len(number), np.bool_)
        """False for every event of a graph launch except the first."""
        order = np.lexsort((self.start, self.launch))
        is_same = (self.launch[order][1:] == self.launch[order][:-1]) & (self.launch[order][1:] >= 0)
        later, before = order[1:][is_same], order[:-1][is_same]
        self.is_first[later] = False
        end = np.where(previous >= 0, np.minimum(self.end[np.maximum(previous, 0)], self.start), NO_TIME)
        is_better = np.minimum(self.end[before], self.start[later]) > end[later]
        later, before = later[is_better], before[is_better]
        previous[later] = before
        end[later] = np.minimum(self.end[before], self.start[later])
        self.previous, self._previous_end = previous.astype(np.int32), end

    def _find_causes(self) -> None:
        """Set each event's cause to its launch or predecessor: the later of the two, including their typical delays."""
        previous, end = self.previous, self._previous_end
        del self._previous_end
        by_launch = self.is_first & (self.launch >= 0)
        is_clear = by_launch & (end <= self.launched)
        delays = (self.start - self.returned)[is_clear]
        self.latency_ns = min(int(np.median(delays)), _MAX_LATENCY_NS) if len(delays) else 0
        is_queued = (previous >= 0) & (self.returned < end - _QUEUED_NS) & (self.end[previous] <= self.start)
        gaps = (self.start - end)[is_queued]
        self.gap_ns = min(int(np.median(gaps)), _MAX_GAP_NS) if len(gaps) else 0
        by_launch &= self.returned + max(0, self.latency_ns - self.gap_ns) >= end
        self.cause = np.where(previous >= 0, Cause.PREVIOUS, Cause.UNKNOWN).astype(np.int8)
        self.cause[by_launch] = Cause.LAUNCH
        self.since = np.where(by_launch, self.returned, end)
        """Earliest time at which each event could have started, given its cause."""
        self.source = np.where(by_launch, self.launch, previous).astype(np.int32)
        """Cause of each event: the row of its launch or the index of another device event; -1 if unknown."""

    def _find_stream_waits(self, events: Events) -> None:
        """Set the cause of events that waited for another stream, if the trace has ``cuda_sync`` records.

        The first device event launched on the waiting stream after ``cudaStreamWaitEvent`` is the waiting event. It
        waits for the last device event launched on the other stream before the CUDA event was recorded.
        """
        self.waits = []
        """Pairs of indices: the waiting event and the event it waits for."""
        self.sync_records = records = SyncRecords(events)
        if not len(records.rows):
            return
        ids = events.arg("correlation", self.calls)
        is_used = np.isin(ids, records.correlations())
        starts = events.start_ns[self.calls[is_used]].tolist()
        calls_start = self.call_start = dict(zip(ids[is_used].tolist(), starts, strict=True))
        tracks = self.stream_tracks(events)
        for device, stream, other, recorded, correlation in records.stream_waits():
            waiting, source = tracks.get((device, stream)), tracks.get((device, other))
            if waiting is None or source is None or waiting == source:
                continue
            if correlation not in calls_start or recorded not in calls_start:
                continue
            cause = self.launched_before(source, calls_start[recorded])
            launched, index = self.streams[waiting]
            place = int(launched.searchsorted(calls_start[correlation]))
            if cause < 0 or place >= len(index) or self.start[cause] >= self.start[index[place]]:
                continue
            effect = int(index[place])
            self.waits.append((effect, cause))
            until = min(int(self.end[cause]), int(self.start[effect]))
            if until > self.since[effect]:
                self.cause[effect], self.since[effect], self.source[effect] = Cause.STREAM_WAIT, until, cause

    def _find_other_streams(self) -> None:
        """Attribute long gaps to an event on another stream that was launched earlier and ended during the gap."""
        has_gap = (self.cause != Cause.STREAM_WAIT) & (self.since < self.start - _UNEXPLAINED_NS)
        if len(self.streams) == 1:
            return
        gaps = np.flatnonzero(has_gap)
        lasts = self.ends.searchsorted(self.start[gaps], side="right") - 1
        # Skip gaps during which no event ended.
        has_end = (lasts >= 0) & (self.ends[np.maximum(lasts, 0)] > self.since[gaps])
        for gap, last in zip(gaps[has_end].tolist(), lasts[has_end].tolist(), strict=True):
            for place in range(last, max(last - _MAX_CANDIDATES, -1), -1):
                index = int(self.order[place])
                if self.end[index] <= self.since[gap]:
                    break
                if self.track[index] != self.track[gap] and self.launched[index] < self.launched[gap]:
                    self.cause[gap], self.since[gap], self.source[gap] = Cause.OTHER_STREAM, self.end[index], index
                    break


class SyncRecords:
    """The ``cuda_sync`` records of a trace, which identify the stream or event that each synchronisation waits for."""

    def __init__(self, events: Events) -> None:
        self.rows = np.flatnonzero(events.has_category({"cuda_sync"}))
        self._names = [events.names[name] for name in events.name[self.rows].tolist()]
        self._devices = [events.tracks[track][0] for track in events.track[self.rows].tolist()]
        keys = ("stream", "wait_on_stream", "wait_on_cuda_event_record_corr_id", "correlation")
        self._args = np.stack([events.arg(key, self.rows) for key in keys], axis=1).tolist() if len(self.rows) else []
        self.by_correlation = {
            args[-1]: (name, device, *args[:-1])
            for name, device, args in zip(self._names, self._devices, self._args, strict=True)
        }
        """Record of each call, keyed by correlation ID.

        A record has the name, device, stream, awaited stream and correlation ID of the ``cudaEventRecord`` call.
        """

    def correlations(self) -> list[int]:
        """Return the correlation IDs of the synchronisations and of the awaited ``cudaEventRecord`` calls."""
        return list({correlation for args in self._args for correlation in args[-2:]})

    def stream_waits(self) -> list[tuple[object, int, int, int, int]]:
        """Return all stream waits.

        Each tuple has the device, the waiting stream, the awaited stream, and the correlation IDs of the
        ``cudaEventRecord`` and ``cudaStreamWaitEvent`` calls.
        """
        return [
            (device, *args)
            for name, device, args in zip(self._names, self._devices, self._args, strict=True)
            if name.startswith("Stream Wait") and args[2] >= 0
        ]
