"""What devices did in each step: between the step's first work on the device and that of the next step."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from profdeck_traces.analysis.detail_model import IdleCause, StepOfDevice
from profdeck_traces.analysis.host_states import CAUSES, NOT_READ, HostSlice, by_time
from profdeck_traces.analysis.step_names import GLOBAL_STEP, ITERATION
from profdeck_traces.analysis.steps import StepWindows, TraceSteps
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int, Spans, complement, intersection, time_before
from profdeck_traces.reading.time_slices import Slice

_NS_PER_US = 1000
# A step follows at once if the host pauses no longer than this, or than this share of the step.
_PAUSE_NS, _PAUSE_SHARE = 1_000_000, 0.1


def step_kind(steps: TraceSteps) -> str | None:
    """Return which kind of step divides a trace: global steps where it has some, else iterations; None without any."""
    return next((kind for kind in (GLOBAL_STEP, ITERATION) if len(steps.host[kind].step)), None)


def windows_on_device(steps: TraceSteps) -> StepWindows:
    """Return where the steps of a trace are on its devices, with ends: no two of them overlap."""
    kind = step_kind(steps)
    none = np.empty(0, dtype=np.int64)
    if kind is None:
        return StepWindows(none, none, none)
    found, work = steps.device[kind], steps.work[kind]
    step, start = found.step, found.start_ns
    own_end = steps.end_ns.copy()
    if work.end_ns is not None:
        own_end[work.step] = work.end_ns
    follows = np.append(start[1:], np.iinfo(np.int64).max)
    pause = steps.start_ns[step[1:]] - steps.end_ns[step[:-1]]
    allowed = np.maximum(_PAUSE_NS, _PAUSE_SHARE * (steps.end_ns - steps.start_ns)[step[:-1]])
    at_once = np.append(pause <= allowed, np.zeros(min(1, len(step)), dtype=bool))
    end = np.where(at_once, follows, np.minimum(np.maximum(own_end[step], start), follows))
    return StepWindows(step, start, end)


@attrs.frozen
class DeviceWork:
    """What ran on a device in a slice of time."""

    compute: Spans
    communication: Spans
    memory: Spans
    others: Spans
    """Compute and memory together."""
    busy: Spans


_NEVER = (np.empty(0, dtype=np.int64),) * 2
NO_WORK = DeviceWork(_NEVER, _NEVER, _NEVER, _NEVER, _NEVER)


class DeviceStepTimes:
    """Adds up the work of one device by step, slice by slice."""

    def __init__(self, windows: StepWindows, begin_ns: int) -> None:
        """Take where the steps are, and when the device did its first work."""
        assert windows.end_ns is not None  # noqa: S101 - for the type checker: `windows_on_device` gives them
        used = windows.end_ns > begin_ns
        self._step = windows.step[used]
        self._start, self._end = np.maximum(windows.start_ns[used], begin_ns), windows.end_ns[used]
        self._times = np.zeros((5, len(self._step)), dtype=np.int64)
        self._idle = np.zeros((len(CAUSES), len(self._step)), dtype=np.int64)
        self._host_was_read = False

    def add(self, work: DeviceWork, part: Slice, host: HostSlice | None) -> None:
        """Take a slice."""
        first = int(np.searchsorted(self._end, part.begin_ns, side="right"))
        last = int(np.searchsorted(self._start, part.end_ns, side="left"))
        if first >= last:
            return
        window = slice(first, last)
        start = np.clip(self._start[window], part.begin_ns, part.end_ns)
        end = np.clip(self._end[window], part.begin_ns, part.end_ns)
        for row, spans in enumerate((work.busy, work.compute, work.communication, work.others, work.memory)):
            self._times[row, window] += time_before(spans, end) - time_before(spans, start)
        if host is None:
            return
        self._host_was_read = True
        filled = start < end
        idle = intersection(
            complement(work.busy, part.begin_ns, part.end_ns), _touching_joined(start[filled], end[filled])
        )
        # Where two steps touch, one span of idle time may lie in both.
        idle = _cut(idle, start[filled])
        of_step = np.searchsorted(start, idle[0], side="right") - 1 + first
        times = host.times(idle)
        for row in range(len(CAUSES)):
            np.add.at(self._idle[row], of_step, times[row])

    def summaries(self, device: Id, origin_ns: int) -> list[tuple[int, StepOfDevice]]:
        """Return the rows of the steps, each with what the device did in it."""
        found = []
        busy, compute, communication, others, memory = self._times.tolist()
        for row, step in enumerate(self._step.tolist()):
            duration_ns = int(self._end[row] - self._start[row])
            found.append(
                (
                    step,
                    StepOfDevice(
                        device=device,
                        start_us=(int(self._start[row]) - origin_ns) / _NS_PER_US,
                        duration_us=duration_ns / _NS_PER_US,
                        busy_us=busy[row] / _NS_PER_US,
                        compute_us=compute[row] / _NS_PER_US,
                        communication_us=communication[row] / _NS_PER_US,
                        exposed_communication_us=(busy[row] - others[row]) / _NS_PER_US,
                        memory_us=memory[row] / _NS_PER_US,
                        idle=self._causes(row, duration_ns - busy[row]),
                    ),
                )
            )
        return found

    def _causes(self, row: int, idle_ns: int) -> tuple[IdleCause, ...]:
        if not self._host_was_read:
            return (IdleCause(cause=NOT_READ, idle_us=idle_ns / _NS_PER_US, share=1.0),) if idle_ns else ()
        return idle_causes(self._idle[:, row])


def idle_causes(times_ns: Int) -> tuple[IdleCause, ...]:
    """Return what took idle time, longest first.

    Args:
        times_ns: One of each of ``CAUSES``.
    """
    return tuple(
        IdleCause(cause=cause, idle_us=time_ns / _NS_PER_US, share=share) for cause, time_ns, share in by_time(times_ns)
    )


def of_all_devices(devices: Sequence[list[tuple[int, StepOfDevice]]]) -> dict[int, tuple[StepOfDevice, ...]]:
    """Return what all devices did, by the row of the step."""
    found: dict[int, list[StepOfDevice]] = {}
    for device in devices:
        for step, of_device in device:
            found.setdefault(step, []).append(of_device)
    return {step: tuple(of_devices) for step, of_devices in found.items()}


def _touching_joined(start: Int, end: Int) -> Spans:
    """Return windows that do not overlap as spans, of which no two touch."""
    begins = np.append(True, start[1:] > end[:-1])[: len(start)]
    ends = np.append(start[1:] > end[:-1], True)[: len(start)]
    return start[begins], end[ends]


def _cut(spans: Spans, at: Int) -> Spans:
    """Cut spans at some instants, of which those outside of all spans do nothing."""
    inside = at[time_before(spans, at + 1) - time_before(spans, at) > 0] if len(at) else at
    inside = np.setdiff1d(inside, spans[0])
    return np.sort(np.concatenate((spans[0], inside))), np.sort(np.concatenate((spans[1], inside)))
