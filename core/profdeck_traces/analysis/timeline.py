"""Pictures of a trace as numbers: what each device, stream and thread did in each of a thousand parts of a time."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.owned_path import OwnedPath
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.analysis.detail_model import Timeline, TimelineEvent, TimelineLane, TimelineMark
from profdeck_traces.analysis.host_states import CAUSES, Host
from profdeck_traces.analysis.pictures import FINEST_BUCKETS, MIN_EVENT_BUCKETS, packed_shares
from profdeck_traces.reading.columns import Columns, Tables
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int, Spans, complement, groups, intersection, joined, time_before, union

OVERLAPPED = "compute and communication"
"""The states of a device, before the causes of its idle time."""

_NS_PER_US = 1000
_STATES = tuple(CAUSES)
_MOST_DEVICES, _MOST_THREADS, _MOST_STREAMS = 64, 6, 8
_MOST_TRACKS = 256
"""Only so many threads and streams are added up, those with the most time."""
_MOST_EVENTS, _MOST_MARKS = 300, 400
_NAME_LENGTH = 160
# A stream or thread that does less is not seen.
_LEAST_SHARE = 0.001
_Key = tuple[str, Id, Id]


@attrs.frozen(eq=False)
class Kinds:
    """What the codes of names mean for pictures."""

    tables: Tables
    work: NDArray[np.integer]
    """Of each name: 0 compute, 1 communication, 2 copies; -1 for what runs on no device."""
    classes: Sequence[str]
    """Of each name: the class of a kernel."""
    thread_names: Mapping[tuple[Id, Id], str]
    device_spans: Mapping[Id, tuple[int, int]]
    """From the first to the last work of each device: before and after that it is not idle but perhaps not recorded."""
    track_ns: NDArray[np.integer]
    """Total duration of the events on each track."""

    @functools.cached_property
    def may_show(self) -> NDArray[np.bool_]:
        """Of each track: whether it may be among those that are shown."""
        shown = np.ones(len(self.tables.tracks), dtype=np.bool_)
        shown[np.argsort(self.track_ns, kind="stable")[:-_MOST_TRACKS]] = False
        return shown

    @functools.cached_property
    def devices(self) -> list[Id]:
        """The devices that are shown, in the order of their codes."""
        times_ns: dict[Id, int] = dict.fromkeys(self.device_spans, 0)
        for (device, _), time_ns in zip(self.tables.tracks, self.track_ns.tolist(), strict=True):
            if device in times_ns:
                times_ns[device] += time_ns
        return sorted(times_ns, key=lambda device: -times_ns[device])[:_MOST_DEVICES]

    @functools.cached_property
    def device_codes(self) -> NDArray[np.integer]:
        """Of each track: the code of its device; -1 of none that is shown."""
        codes = {device: code for code, device in enumerate(self.devices)}
        return np.array([codes.get(device, -1) for device, _ in self.tables.tracks], dtype=np.int64)

    @functools.cached_property
    def class_names(self) -> list[str]:
        """The classes, in the order of their codes."""
        return sorted(set(self.classes))

    @functools.cached_property
    def class_codes(self) -> NDArray[np.integer]:
        """Of each name: the code of its class."""
        codes = {name: code for code, name in enumerate(self.class_names)}
        return np.array([codes[name] for name in self.classes], dtype=np.int64)


class Picture:
    """Picture of one time interval in a trace."""

    def __init__(self, title: str, begin_ns: int, end_ns: int, kinds: Kinds) -> None:
        self.title = title
        self._kinds = kinds
        self._begin_ns, self._end_ns = begin_ns, max(end_ns, begin_ns + FINEST_BUCKETS)
        # Only differences are computed as floats, because floats cannot represent Unix times in nanoseconds exactly.
        self._edges = begin_ns + np.linspace(0, self._end_ns - begin_ns, FINEST_BUCKETS + 1).astype(np.int64)
        self._lanes: dict[_Key, dict[str, Int]] = {}
        self._events: dict[_Key, list[tuple[str, int, int]]] = {}

    def of(
        self,
        events: Columns,
        host: Host | None,
        marks: Sequence[TimelineMark],
        origin_ns: int,
        path: OwnedPath | None = None,
    ) -> Timeline:
        """Compute the picture.

        Args:
            events: All events of the trace, sorted by start.
            host: Host activity, or ``None`` if the trace has no host events.
            marks: Steps and stages of the trace. The picture shows those that overlap its interval.
            origin_ns: Time to which the times in the picture are relative.
            path: Critical path of the trace, if it has one.
        """
        if path is not None:
            self._add_path(path.overlapping(self._begin_ns, self._end_ns))
        self._add(events, host)
        return self._finish(marks, origin_ns)

    @property
    def _long_ns(self) -> int:
        """Minimum duration of events that are shown individually."""
        return MIN_EVENT_BUCKETS * (self._end_ns - self._begin_ns) // FINEST_BUCKETS

    def _add_path(self, path: OwnedPath) -> None:
        """Add the critical path as a lane, with owner kinds as its classes."""
        key = ("path", None, None)
        kinds = np.array([OwnerKind.from_label(owner.kind) for owner in path.owners], np.int64)[path.owner]
        for kind in np.unique(kinds).tolist():
            rows = np.flatnonzero(kinds == kind)
            self._cover(key, OwnerKind(kind).label, (path.begin_ns[rows], path.end_ns[rows]))
        for row in np.flatnonzero(path.end_ns - path.begin_ns >= self._long_ns).tolist():
            owner = path.owners[path.owner[row]]
            name = f"{owner.label}, {owner.origin}" if owner.origin else owner.label
            self._events.setdefault(key, []).append((name, int(path.begin_ns[row]), int(path.end_ns[row])))

    def _add(self, events: Columns, host: Host | None) -> None:
        inside = (events.end_ns > self._begin_ns) & (events.start_ns < self._end_ns)
        self._add_devices(events[np.flatnonzero(inside & (self._kinds.work[events.name] >= 0))], host)
        if host is not None:
            self._add_threads(host)
        shown = inside & self._kinds.may_show[events.track] & (events.duration_ns >= self._long_ns)
        self._add_events(events[np.flatnonzero(shown)])

    def _finish(self, marks: Sequence[TimelineMark], origin_ns: int) -> Timeline:
        lanes: list[TimelineLane] = []
        events: list[TimelineEvent] = []
        for key in self._chosen():
            kind, group, track = key
            shares = self._lanes[key]
            classes = list(shares)
            times_ns = np.array([shares[name] for name in classes], dtype=np.int64)
            lane = len(lanes)
            lanes.append(
                TimelineLane(
                    kind=kind,
                    name=self._name(kind, group, track),
                    group=str(group),
                    classes=tuple(classes),
                    shares=packed_shares(times_ns.reshape(len(classes), FINEST_BUCKETS) / np.diff(self._edges)),
                )
            )
            found = sorted(self._events.get(key, ()), key=lambda event: event[1] - event[2])[:_MOST_EVENTS]
            events += [
                TimelineEvent(
                    lane=lane,
                    name=name[:_NAME_LENGTH],
                    start_us=(start - origin_ns) / _NS_PER_US,
                    duration_us=(end - start) / _NS_PER_US,
                )
                for name, start, end in sorted(found, key=lambda event: (event[1], -event[2]))
            ]
        begin_us, end_us = ((time - origin_ns) / _NS_PER_US for time in (self._begin_ns, self._end_ns))
        inside = [mark for mark in marks if mark.start_us < end_us and mark.start_us + mark.duration_us > begin_us]
        inside.sort(key=lambda mark: -mark.duration_us)
        return Timeline(
            title=self.title,
            start_us=begin_us,
            duration_us=end_us - begin_us,
            buckets=FINEST_BUCKETS,
            lanes=tuple(lanes),
            marks=tuple(sorted(inside[:_MOST_MARKS], key=lambda mark: (mark.start_us, -mark.duration_us))),
            events=tuple(events),
        )

    def _chosen(self) -> list[_Key]:
        """Return the lanes to show: all devices, of streams and threads those with most time."""
        time_ns = {key: sum(int(of.sum()) for of in shares.values()) for key, shares in self._lanes.items()}
        chosen: list[_Key] = []
        for kind, most in (("path", None), ("device", None), ("stream", _MOST_STREAMS), ("thread", _MOST_THREADS)):
            least_ns = (self._end_ns - self._begin_ns) * _LEAST_SHARE if most else 0
            keys = [key for key in self._lanes if key[0] == kind and time_ns[key] > least_ns]
            keys = sorted(keys, key=lambda key: -time_ns[key])[:most] if most else keys
            chosen += sorted(keys, key=lambda key: (str(key[1]), str(key[2])))
        return chosen

    def _name(self, kind: str, group: Id, track: Id) -> str:
        if kind == "path":
            return "critical path"
        if kind == "device":
            return f"device {group}"
        if kind == "stream":
            return f"stream {track}"
        return self._kinds.thread_names.get((group, track)) or f"thread {track}"

    def _add_devices(self, work: Columns, host: Host | None) -> None:
        kinds, tables = self._kinds, self._kinds.tables
        shown = np.flatnonzero(kinds.may_show[work.track])
        for stream in groups(work.track[shown]):
            mine = work[shown[stream]]
            track = tables.tracks[mine.track[0]]
            for of_class in groups(kinds.class_codes[mine.name]):
                used = mine[of_class]
                class_name = kinds.class_names[kinds.class_codes[used.name[0]]]
                self._cover(("stream", *track), class_name, union(used.start_ns, used.end_ns))
        codes = kinds.device_codes[work.track]
        of_devices: dict[Id, Int] = dict.fromkeys(kinds.devices, np.empty(0, dtype=np.int64))
        for events in groups(codes):
            if (code := int(codes[events[0]])) >= 0:
                of_devices[kinds.devices[code]] = events
        for device, events in of_devices.items():
            mine = work[events]
            kind = kinds.work[mine.name]
            compute, communication, copies = (
                union(mine.start_ns[kind == code], mine.end_ns[kind == code]) for code in range(3)
            )
            both = intersection(compute, communication)
            busy = union(*joined((compute, communication)))
            key = ("device", device, None)
            self._cover(key, "compute", compute, less=both)
            self._cover(key, OVERLAPPED, both)
            self._cover(key, "communication", communication, less=both)
            self._cover(key, "copies", copies, less=intersection(copies, busy))
            first_ns, last_ns = kinds.device_spans[device]
            begin_ns, end_ns = max(self._begin_ns, first_ns), min(self._end_ns, last_ns)
            if begin_ns < end_ns:
                every = union(*joined((busy, copies)))
                within = np.maximum(every[0], begin_ns), np.minimum(every[1], end_ns)
                filled = within[0] < within[1]
                self._cover_idle(key, complement((within[0][filled], within[1][filled]), begin_ns, end_ns), host)

    def _cover_idle(self, key: _Key, idle: Spans, host: Host | None) -> None:
        if host is None:
            self._cover(key, "idle", idle)
            return
        before = None
        for state, busy in zip(_STATES, (*host.busy, idle), strict=True):
            inside = idle if state == _STATES[-1] else intersection(idle, busy)
            self._cover(key, f"idle: {state}", inside, less=before)
            before = inside

    def _add_threads(self, host: Host) -> None:
        events = host.events
        inside = (events.end_ns > self._begin_ns) & (events.start_ns < self._end_ns)
        inside &= self._kinds.may_show[events.track] & (host.state < len(_STATES) - 1)
        rows = np.flatnonzero(inside)
        for group in groups(events.track[rows]):
            of_thread = rows[group]
            states = host.state[of_thread]
            key = ("thread", *self._kinds.tables.tracks[int(events.track[of_thread[0]])])
            covered: Spans | None = None
            for code in range(len(_STATES) - 1):
                used = of_thread[states == code]
                if not len(used):
                    continue
                spans = union(events.start_ns[used], events.end_ns[used])
                everything = spans if covered is None else union(*joined((covered, spans)))
                self._cover(key, _STATES[code], everything, less=covered)
                covered = everything

    def _cover(self, key: _Key, name: str, spans: Spans, less: Spans | None = None) -> None:
        """Add the time of some spans to a class of a lane, without that of spans which lie inside of them."""
        time_ns = np.diff(time_before(spans, self._edges))
        if less is not None:
            time_ns -= np.diff(time_before(less, self._edges))
        shares = self._lanes.setdefault(key, {})
        if time_ns.any():
            shares[name] = time_ns

    def _add_events(self, events: Columns) -> None:
        tracks, names = self._kinds.tables.tracks, self._kinds.tables.names
        work = self._kinds.work[events.name]
        rows = zip(
            events.name.tolist(),
            events.track.tolist(),
            work.tolist(),
            events.start_ns.tolist(),
            events.end_ns.tolist(),
            strict=True,
        )
        for name, track, kind, start, end in rows:
            key = ("stream" if kind >= 0 else "thread", *tracks[track])
            found = self._events.setdefault(key, [])
            found.append((names[name], start, end))
