"""How busy devices were, what they did at the same time, and what the host did while they did nothing.

All is summed over slices of time in integers, so that it does not depend on where a trace is cut into slices.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck.traces.analysis.host_states import CAUSES, HostEvent, HostSlice, HostStates, innermost
from profdeck.traces.analysis.model import DeviceSummary, Gap, IdleCause, StreamSummary
from profdeck.traces.reading.columns import DEVICE_CATEGORIES, DEVICE_PROCESSES, Columns, Tables
from profdeck.traces.reading.identifiers import Id
from profdeck.traces.reading.intervals import Int, Spans, complement, groups, joined, total, union
from profdeck.traces.reading.time_slices import Slice

NOT_READ = "not read"
"""The cause of gaps where the host was not read."""

_MAX_GAPS = 10
_NS_PER_US = 1000
_COMPUTE, _COMMUNICATION, _MEMORY = range(3)


class DeviceTimes:
    """Sums up what the devices of a trace did, slice by slice."""

    def __init__(
        self,
        tables: Tables,
        communication: NDArray[np.bool_],
        memory: NDArray[np.bool_],
        device_names: Mapping[Id, str],
        *,
        host: HostStates | None,
    ) -> None:
        """Take what the codes of the trace mean.

        Args:
            tables: Those of all slices.
            communication: Of each name, whether it is communication of a device.
            memory: Of each name, whether it is a copy or a fill; what is neither is compute.
            device_names: By process.
            host: Tells what the host did; if the slices have no events of it, nobody knows the causes of idle time.
        """
        self._tables = tables
        self._is_device = tables.names_of_categories(DEVICE_CATEGORIES | DEVICE_PROCESSES)
        self._kind = np.where(communication, _COMMUNICATION, np.where(memory, _MEMORY, _COMPUTE)).astype(np.int8)
        self._device_names = device_names
        self._host = host
        self._devices: dict[Id, _Device] = {}
        self._origin_ns: int | None = None

    def add(self, part: Slice) -> None:
        """Take the next slice."""
        if self._origin_ns is None:
            self._origin_ns = part.begin_ns
        host = self._host.of(part) if self._host else None
        events = np.flatnonzero(self._is_device[part.columns.name])
        columns, first = part.columns[events], part.first[events]
        streams: dict[Id, list[Int]] = {}
        for stream in groups(columns.track):
            streams.setdefault(self._tables.tracks[columns.track[stream[0]]][0], []).append(stream)
        for device in self._devices.keys() - streams.keys():
            self._devices[device].idle.wait(part, host)
        for device, of_device in streams.items():
            found = self._devices.setdefault(device, _Device())
            for stream in of_device:
                found.add_stream(columns[stream], first[stream])
            work = columns[np.concatenate(of_device)]
            busy = found.add_work(work, self._kind[work.name])
            found.idle.add(busy, int(work.start_ns.min()), int(work.end_ns.max()), part, host)

    def summaries(self) -> tuple[DeviceSummary, ...]:
        """Return the devices in the order of their ids."""
        devices = sorted(self._devices.items(), key=lambda item: _order(item[0]))
        return tuple(self._summary(device, found) for device, found in devices)

    def _summary(self, device: Id, found: _Device) -> DeviceSummary:
        span_ns, overlap_ns = found.idle.end_ns - found.idle.begin_ns, found.overlap_ns
        return DeviceSummary(
            device=device,
            name=self._device_names.get(device),
            events=sum(stream.events for stream in found.streams.values()),
            span_us=span_ns / _NS_PER_US,
            busy_us=found.busy_ns / _NS_PER_US,
            idle_us=(span_ns - found.busy_ns) / _NS_PER_US,
            compute_us=found.kind_ns[_COMPUTE] / _NS_PER_US,
            communication_us=found.kind_ns[_COMMUNICATION] / _NS_PER_US,
            memory_us=found.kind_ns[_MEMORY] / _NS_PER_US,
            overlap_us=overlap_ns / _NS_PER_US,
            exposed_communication_us=(found.kind_ns[_COMMUNICATION] - overlap_ns) / _NS_PER_US,
            streams=tuple(
                StreamSummary(
                    stream=self._tables.tracks[track][1], events=stream.events, busy_us=stream.busy_ns / _NS_PER_US
                )
                for track, stream in sorted(found.streams.items(), key=self._stream)
            ),
            idle=_causes(found.idle.times) if self._host else (),
            gaps=tuple(map(self._gap, found.idle.longest())),
        )

    def _stream(self, item: tuple[int, _Stream]) -> tuple[bool, int, str]:
        return _order(self._tables.tracks[item[0]][1])

    def _gap(self, gap: _OpenGap) -> Gap:
        host = innermost(gap.open_events, gap.begin_ns, gap.end_ns)
        return Gap(
            start_us=(gap.begin_ns - (self._origin_ns or 0)) / _NS_PER_US,
            duration_us=gap.duration_ns / _NS_PER_US,
            cause=tuple(CAUSES)[int(gap.times.argmax())] if self._host else NOT_READ,
            host=None if host is None else self._tables.names[host.name],
        )


def _order(one: Id) -> tuple[bool, int, str]:
    """Put numbers before names."""
    is_number = isinstance(one, int)
    return not is_number, int(one) if isinstance(one, int) else 0, str(one)


def _causes(times: Int) -> tuple[IdleCause, ...]:
    idle_ns = int(times.sum())
    found = [(cause, time_ns) for cause, time_ns in zip(CAUSES, times.tolist(), strict=True) if time_ns]
    found.sort(key=lambda item: -item[1])
    return tuple(
        IdleCause(cause=cause, idle_us=time_ns / _NS_PER_US, share=time_ns / idle_ns) for cause, time_ns in found
    )


@attrs.define
class _Stream:
    events: int = 0
    busy_ns: int = 0


class _Device:
    """The sums of one device."""

    def __init__(self) -> None:
        self.streams: dict[int, _Stream] = {}
        """By the code of the track."""
        self.kind_ns = [0, 0, 0]
        self.overlap_ns = 0
        self.busy_ns = 0
        self.idle = _Idle()

    def add_stream(self, work: Columns, first: NDArray[np.bool_]) -> None:
        stream = self.streams.setdefault(int(work.track[0]), _Stream())
        stream.events += int(first.sum())
        stream.busy_ns += total(union(work.start_ns, work.end_ns))

    def add_work(self, work: Columns, kind: NDArray[np.int8]) -> Spans:
        """Take all events of the device in a slice; return the time in which anything ran."""
        spans = [union(work.start_ns[kind == code], work.end_ns[kind == code]) for code in range(len(self.kind_ns))]
        for code, of_kind in enumerate(spans):
            self.kind_ns[code] += total(of_kind)
        others = union(*joined((spans[_COMPUTE], spans[_MEMORY])))
        busy = union(*joined((spans[_COMMUNICATION], others)))
        self.busy_ns += total(busy)
        self.overlap_ns += total(spans[_COMMUNICATION]) + total(others) - total(busy)
        return busy


@attrs.frozen
class _OpenGap:
    """A time in which a device did nothing."""

    begin_ns: int
    end_ns: int
    times: Int
    """How much of it each state of the host takes."""
    open_events: frozenset[HostEvent]
    """Those of the host that may have been open for most of it."""

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns

    def order(self) -> tuple[int, int]:
        """The longest first, of equal ones the earliest."""
        return -self.duration_ns, self.begin_ns


class _Idle:
    """The time between the first and the last event of a device in which nothing ran, and its longest parts."""

    def __init__(self) -> None:
        self.begin_ns = self.end_ns = 0
        self.times: Int = np.zeros(len(CAUSES), dtype=np.int64)
        """How much of it each state of the host takes."""
        self._has_begun = False
        self._closed: list[_OpenGap] = []
        self._open: _OpenGap | None = None  # at the last event, if that is an empty one after which nothing ran
        self._since: _OpenGap | None = None  # the time since the last event: idle if another one follows

    def longest(self) -> list[_OpenGap]:
        """Return the longest gaps, longest first, of equal ones the earliest."""
        found = [*self._closed, self._open] if self._open else self._closed
        return sorted(found, key=_OpenGap.order)[:_MAX_GAPS]

    def wait(self, part: Slice, host: HostSlice | None) -> None:
        """Take a slice without events."""
        since = _Gaps.of(np.array([part.begin_ns]), np.array([part.end_ns]), host)
        self._since = _following(self._since, since[0])

    def add(self, busy: Spans, first_ns: int, last_ns: int, part: Slice, host: HostSlice | None) -> None:
        """Take a slice with events: where they ran, when the first of them starts and the last one ends."""
        if self._since:
            self.times += self._since.times
            self._open = _following(self._open, self._since)
        if not self._has_begun:
            self._has_begun, self.begin_ns = True, first_ns
        begin_ns, self.end_ns = max(self.begin_ns, part.begin_ns), last_ns
        idle = complement(busy, begin_ns, last_ns)
        gaps = _Gaps.of(np.append(idle[0], last_ns), np.append(idle[1], part.end_ns), host)
        count = len(gaps) - 1  # behind them is the time since the last event
        self.times += gaps.times[:, :count].sum(axis=1)
        inner = range(count)
        if inner and gaps.starts[0] == begin_ns:
            self._open = _following(self._open, gaps[0])
            inner = inner[1:]
        if len(busy[0]):
            self._close(self._open)
            self._open = None
            if inner and gaps.starts[inner[-1]] == busy[1][-1]:
                self._open = gaps[inner[-1]]
                inner = inner[:-1]
        self._close_longest(gaps, inner)
        self._since = gaps[count] if last_ns < part.end_ns else None

    def _close_longest(self, gaps: _Gaps, inner: range) -> None:
        """Keep those of the gaps that may be among the longest."""
        durations = (gaps.ends - gaps.starts)[inner.start : inner.stop]
        least_ns = self._closed[-1].duration_ns if len(self._closed) == _MAX_GAPS else 0
        found = np.flatnonzero(durations > least_ns)
        found = found[np.argsort(-durations[found], kind="stable")[:_MAX_GAPS]]
        if len(found):
            gaps = gaps.with_host_longer_than(int(durations[found[-1]]) // 2)
            for gap in found.tolist():
                self._close(gaps[inner[gap]])

    def _close(self, gap: _OpenGap | None) -> None:
        if gap:
            self._closed = sorted([*self._closed, gap], key=_OpenGap.order)[:_MAX_GAPS]


@attrs.frozen
class _Gaps:
    """Times of a slice in which a device did nothing, and what the host did."""

    starts: Int
    ends: Int
    times: Int
    host: HostSlice | None

    @classmethod
    def of(cls, starts: Int, ends: Int, host: HostSlice | None) -> _Gaps:
        times = host.times((starts, ends)) if host else np.zeros((len(CAUSES), len(starts)), dtype=np.int64)
        return cls(starts, ends, times, host)

    def with_host_longer_than(self, least_ns: int) -> _Gaps:
        """Return the same without the host's events that are shorter."""
        return attrs.evolve(self, host=self.host and self.host.longer_than(least_ns))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, which: int) -> _OpenGap:
        begin_ns, end_ns = int(self.starts[which]), int(self.ends[which])
        open_events = self.host.open_in(begin_ns, end_ns) if self.host else frozenset()
        return _OpenGap(begin_ns, end_ns, self.times[:, which].copy(), open_events)


def _following(earlier: _OpenGap | None, later: _OpenGap) -> _OpenGap:
    """Return both as one: the later one begins where the earlier one ends."""
    if earlier is None:
        return later
    open_events = earlier.open_events | later.open_events
    return _OpenGap(earlier.begin_ns, later.end_ns, earlier.times + later.times, open_events)
