"""How busy devices were, what they did at the same time, and what the host did while they did nothing.

All is summed over slices of time in integers, so that it does not depend on where a trace is cut into slices.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.detail_model import StepOfDevice
from profdeck_traces.analysis.device_steps import (
    NO_WORK,
    DeviceStepTimes,
    DeviceWork,
    idle_causes,
    of_all_devices,
    step_kind,
    windows_on_device,
)
from profdeck_traces.analysis.gaps import UNKNOWN, IdleTimes, OpenGap
from profdeck_traces.analysis.host_states import CAUSES, NOT_READ, HostSlice, innermost
from profdeck_traces.analysis.model import DeviceSummary, Gap, StreamSummary
from profdeck_traces.analysis.step_names import GLOBAL_STEP
from profdeck_traces.analysis.steps import TraceSteps
from profdeck_traces.reading.columns import DEVICE_CATEGORIES, DEVICE_PROCESSES, Columns, Tables
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int, groups, joined, total, union
from profdeck_traces.reading.time_slices import Slice

_NS_PER_US = 1000
COMPUTES, COMMUNICATES, MOVES = range(3)
"""What work on a device is: copies and fills move data; what is neither that nor communication computes."""


class DeviceTimes:
    """Sums up what the devices of a trace did, slice by slice."""

    def __init__(
        self,
        tables: Tables,
        work: NDArray[np.integer],
        device_names: Mapping[Id, str],
        steps: TraceSteps,
        *,
        with_host: bool,
    ) -> None:
        """Take what the codes of the trace mean.

        Args:
            tables: Those of all slices.
            work: Of each name, what it is if it runs on a device: `COMPUTES`, `COMMUNICATES` or `MOVES`.
            device_names: By process.
            steps: Those of the trace.
            with_host: Whether the slices have events of the host; if not, nobody knows the causes of idle time.
        """
        self._tables = tables
        self._is_device = tables.names_of_categories(DEVICE_CATEGORIES | DEVICE_PROCESSES)
        self._kind = work
        self._device_names = device_names
        self._with_host = with_host
        self._windows = windows_on_device(steps)
        self._on_host = steps.host[step_kind(steps) or GLOBAL_STEP]
        self._numbers = [steps.marks[name].step for name in steps.name.tolist()]
        self._devices: dict[Id, _Device] = {}
        self._origin_ns: int | None = None

    def add(self, part: Slice, host: HostSlice | None) -> None:
        """Take the next slice, with the host's side of it if that was read."""
        if self._origin_ns is None:
            self._origin_ns = part.begin_ns
        events = np.flatnonzero(self._is_device[part.columns.name])
        columns, first = part.columns[events], part.first[events]
        streams: dict[Id, list[Int]] = {}
        for stream in groups(columns.track):
            streams.setdefault(self._tables.tracks[columns.track[stream[0]]][0], []).append(stream)
        for device in self._devices.keys() - streams.keys():
            self._devices[device].idle.wait(part, host)
            self._devices[device].steps.add(NO_WORK, part, host)
        for device, of_device in streams.items():
            work = columns[np.concatenate(of_device)]
            if device not in self._devices:
                self._devices[device] = _Device(DeviceStepTimes(self._windows, int(work.start_ns.min())))
            found = self._devices[device]
            for stream in of_device:
                found.add_stream(columns[stream], first[stream])
            done = found.add_work(work, self._kind[work.name])
            found.idle.add(done.busy, work, part, host)
            found.steps.add(done, part, host)

    def spans(self) -> dict[Id, tuple[int, int]]:
        """Return the times of the first and the last work of each device."""
        return {device: (found.idle.begin_ns, found.idle.end_ns) for device, found in self._devices.items()}

    def summaries(self) -> tuple[DeviceSummary, ...]:
        """Return the devices in the order of their ids."""
        devices = sorted(self._devices.items(), key=lambda item: _order(item[0]))
        return tuple(self._summary(device, found) for device, found in devices)

    def by_step(self) -> dict[int, tuple[StepOfDevice, ...]]:
        """Return what each device did in each step, by the row of the step."""
        devices = sorted(self._devices.items(), key=lambda item: _order(item[0]))
        return of_all_devices([found.steps.summaries(device, self._origin_ns or 0) for device, found in devices])

    def _summary(self, device: Id, found: _Device) -> DeviceSummary:
        span_ns, overlap_ns = found.idle.end_ns - found.idle.begin_ns, found.overlap_ns
        return DeviceSummary(
            device=device,
            name=self._device_names.get(device),
            events=sum(stream.events for stream in found.streams.values()),
            span_us=span_ns / _NS_PER_US,
            busy_us=found.busy_ns / _NS_PER_US,
            idle_us=(span_ns - found.busy_ns) / _NS_PER_US,
            compute_us=found.kind_ns[COMPUTES] / _NS_PER_US,
            communication_us=found.kind_ns[COMMUNICATES] / _NS_PER_US,
            memory_us=found.kind_ns[MOVES] / _NS_PER_US,
            overlap_us=overlap_ns / _NS_PER_US,
            exposed_communication_us=(found.kind_ns[COMMUNICATES] - overlap_ns) / _NS_PER_US,
            streams=tuple(
                StreamSummary(
                    stream=self._tables.tracks[track][1], events=stream.events, busy_us=stream.busy_ns / _NS_PER_US
                )
                for track, stream in sorted(found.streams.items(), key=self._stream)
            ),
            idle=idle_causes(found.idle.times) if self._with_host else (),
            gaps=tuple(map(self._gap, found.idle.longest())),
        )

    def _stream(self, item: tuple[int, _Stream]) -> tuple[bool, int, str]:
        return _order(self._tables.tracks[item[0]][1])

    def _gap(self, gap: OpenGap) -> Gap:
        host = innermost(gap.open_events, gap.begin_ns, gap.end_ns)
        return Gap(
            start_us=(gap.begin_ns - (self._origin_ns or 0)) / _NS_PER_US,
            duration_us=gap.duration_ns / _NS_PER_US,
            cause=tuple(CAUSES)[int(gap.times.argmax())] if self._with_host else NOT_READ,
            host=None if host is None else self._tables.names[host.name],
            step=self._step_at((gap.begin_ns + gap.end_ns) // 2),
            before=self._name(gap.before),
            after=self._name(gap.after),
        )

    def _step_at(self, time_ns: int) -> int | None:
        (step,) = self._on_host.of(np.array([time_ns]))
        return None if step < 0 else self._numbers[step]

    def _name(self, code: int) -> str | None:
        return None if code == UNKNOWN else self._tables.names[code]


def _order(one: Id) -> tuple[bool, int, str]:
    """Put numbers before names."""
    is_number = isinstance(one, int)
    return not is_number, int(one) if isinstance(one, int) else 0, str(one)


@attrs.define
class _Stream:
    events: int = 0
    busy_ns: int = 0


class _Device:
    """The sums of one device."""

    def __init__(self, steps: DeviceStepTimes) -> None:
        self.streams: dict[int, _Stream] = {}
        """By the code of the track."""
        self.kind_ns = [0, 0, 0]
        self.overlap_ns = 0
        self.busy_ns = 0
        self.idle = IdleTimes()
        self.steps = steps

    def add_stream(self, work: Columns, first: NDArray[np.bool_]) -> None:
        stream = self.streams.setdefault(int(work.track[0]), _Stream())
        stream.events += int(first.sum())
        stream.busy_ns += total(union(work.start_ns, work.end_ns))

    def add_work(self, work: Columns, kind: NDArray[np.integer]) -> DeviceWork:
        """Take all events of the device in a slice; return when something ran."""
        spans = [union(work.start_ns[kind == code], work.end_ns[kind == code]) for code in range(len(self.kind_ns))]
        for code, of_kind in enumerate(spans):
            self.kind_ns[code] += total(of_kind)
        others = union(*joined((spans[COMPUTES], spans[MOVES])))
        busy = union(*joined((spans[COMMUNICATES], others)))
        self.busy_ns += total(busy)
        self.overlap_ns += total(spans[COMMUNICATES]) + total(others) - total(busy)
        compute, communication, memory = spans
        return DeviceWork(compute, communication, memory, others, busy)
