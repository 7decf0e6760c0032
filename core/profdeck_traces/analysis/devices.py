"""Busy and idle time of devices, overlap between kinds of work, and host activity while devices are idle.

All sums are integers and therefore exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.detail_model import StepOfDevice
from profdeck_traces.analysis.device_steps import (
    DeviceWork,
    idle_causes,
    of_all_devices,
    step_kind,
    steps_of_device,
    windows_on_device,
)
from profdeck_traces.analysis.gaps import idle_times
from profdeck_traces.analysis.host_states import Host
from profdeck_traces.analysis.model import DeviceSummary, Gap, StreamSummary
from profdeck_traces.analysis.step_names import GLOBAL_STEP
from profdeck_traces.analysis.steps import StepWindows, TraceSteps
from profdeck_traces.reading.columns import DEVICE_WORK, Columns
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int, groups, joined, total, union

_NS_PER_US = 1000
COMPUTES, COMMUNICATES, MOVES = range(3)
"""Kinds of device work. Copies and fills are `MOVES`; all other work except communication is `COMPUTES`."""


class DeviceTimes:
    """Busy and idle times of the devices in a trace."""

    def __init__(  # noqa: PLR0913, PLR0917 - one parameter per kind of input
        self,
        events: Columns,
        work: NDArray[np.integer],
        device_names: Mapping[Id, str],
        steps: TraceSteps,
        host: Host | None,
        unrecorded: NDArray[np.bool_],
    ) -> None:
        """Compute the times.

        Args:
            events: All events of the trace, sorted by start.
            work: For each event name, its kind of device work: `COMPUTES`, `COMMUNICATES` or `MOVES`.
            device_names: Names of the devices, by process.
            steps: Steps of the trace.
            host: Host activity, or ``None`` if the trace has no host events. In that case, the causes of idle time are
                unknown.
            unrecorded: For each step, whether its device work is missing from the trace.
        """
        self._tables = events.tables
        self._device_names = device_names
        self._has_host = host is not None
        self._on_host = steps.host[step_kind(steps) or GLOBAL_STEP]
        self._numbers = [steps.marks[name].step for name in steps.name.tolist()]
        self._origin_ns = int(events.start_ns[0]) if len(events) else 0
        windows = windows_on_device(steps)
        recorded = ~unrecorded[windows.step]
        windows = StepWindows(windows.step[recorded], windows.start_ns[recorded], _of(windows.end_ns, recorded))
        is_device = self._tables.names_of_categories(DEVICE_WORK)
        rows = np.flatnonzero(is_device[events.name])
        track = events.track[rows]
        devices = list(dict.fromkeys(self._tables.tracks[code][0] for code in np.unique(track).tolist()))
        number = {device: code for code, device in enumerate(devices)}
        of_track = np.array([number.get(device, -1) for device, _ in self._tables.tracks], dtype=np.int64)
        self._devices: dict[Id, _Device] = {}
        for group in groups(of_track[track]):
            of_device = events[rows[group]]
            device = self._tables.tracks[of_device.track[0]][0]
            self._devices[device] = _Device.of(
                device, of_device, work[of_device.name], windows, host, self._origin_ns, self._step_at
            )

    def spans(self) -> dict[Id, tuple[int, int]]:
        """Return the start of the first event and the end of the last event for each device."""
        return {device: (of_device.begin_ns, of_device.end_ns) for device, of_device in self._devices.items()}

    def summaries(self) -> tuple[DeviceSummary, ...]:
        """Return a summary of each device, sorted by device ID."""
        devices = sorted(self._devices.items(), key=lambda item: _order(item[0]))
        return tuple(self._summary(device, of_device) for device, of_device in devices)

    def by_step(self) -> dict[int, tuple[StepOfDevice, ...]]:
        """Return the work of all devices in each step, keyed by step index."""
        devices = sorted(self._devices.items(), key=lambda item: _order(item[0]))
        return of_all_devices([of_device.steps for _, of_device in devices])

    def _summary(self, device: Id, of_device: _Device) -> DeviceSummary:
        compute, communication, memory, others, busy = map(total, attrs.astuple(of_device.work, recurse=False))
        span_ns, overlap_ns = of_device.end_ns - of_device.begin_ns, communication + others - busy
        return DeviceSummary(
            device=device,
            name=self._device_names.get(device),
            events=sum(stream.events for _, stream in of_device.streams),
            span_us=span_ns / _NS_PER_US,
            busy_us=busy / _NS_PER_US,
            idle_us=(span_ns - busy) / _NS_PER_US,
            compute_us=compute / _NS_PER_US,
            communication_us=communication / _NS_PER_US,
            memory_us=memory / _NS_PER_US,
            overlap_us=overlap_ns / _NS_PER_US,
            exposed_communication_us=(communication - overlap_ns) / _NS_PER_US,
            streams=tuple(stream for _, stream in sorted(of_device.streams, key=lambda item: _order(item[1].stream))),
            idle=idle_causes(of_device.idle_ns.tolist()) if self._has_host else (),
            gaps=of_device.gaps,
        )

    def _step_at(self, time_ns: int) -> int | None:
        (step,) = self._on_host.of(np.array([time_ns]))
        return None if step < 0 else self._numbers[step]


def _order(one: Id) -> tuple[bool, int, str]:
    """Sort key for IDs that puts numbers before names."""
    is_number = isinstance(one, int)
    return not is_number, int(one) if isinstance(one, int) else 0, str(one)


def _of(values: Int | None, selected: NDArray[np.bool_]) -> Int | None:
    return None if values is None else values[selected]


@attrs.frozen
class _Device:
    """Times of one device."""

    streams: list[tuple[int, StreamSummary]]
    """Track code and summary of each stream."""
    work: DeviceWork
    begin_ns: int
    end_ns: int
    idle_ns: Int
    """Time the host spends in each state while the device is idle."""
    gaps: tuple[Gap, ...]
    steps: list[tuple[int, StepOfDevice]]

    @classmethod
    def of(  # noqa: PLR0913, PLR0917 - as `steps_of_device`
        cls,
        device: Id,
        events: Columns,
        kind: NDArray[np.integer],
        windows: StepWindows,
        host: Host | None,
        origin_ns: int,
        step_at: Callable[[int], int | None],
    ) -> _Device:
        """Compute a device's times from its events, sorted by start, and the kind of each event's work."""
        streams = []
        for stream in groups(events.track):
            track, of_stream = int(events.track[stream[0]]), events[stream]
            busy_ns = total(union(of_stream.start_ns, of_stream.end_ns))
            name = events.tables.tracks[track][1]
            streams.append((track, StreamSummary(stream=name, events=len(stream), busy_us=busy_ns / _NS_PER_US)))
        compute, communication, memory = (
            union(events.start_ns[kind == code], events.end_ns[kind == code])
            for code in (COMPUTES, COMMUNICATES, MOVES)
        )
        others = union(*joined((compute, memory)))
        work = DeviceWork(compute, communication, memory, others, union(*joined((communication, others))))
        begin_ns, end_ns = int(events.start_ns.min()), int(events.end_ns.max())
        idle_ns, gaps = idle_times(work.busy, events, host, origin_ns, step_at)
        steps = steps_of_device(device, work, windows, host, begin_ns, origin_ns)
        return cls(streams, work, begin_ns, end_ns, idle_ns, gaps, steps)
