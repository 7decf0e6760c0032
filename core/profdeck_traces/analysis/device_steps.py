"""What devices did in each step: between the step's first work on the device and that of the next step."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from profdeck_traces.analysis.detail_model import IdleCause, StepOfDevice
from profdeck_traces.analysis.host_states import CAUSES, NOT_READ, Host, by_time
from profdeck_traces.analysis.step_names import GLOBAL_STEP, ITERATION
from profdeck_traces.analysis.steps import StepWindows, TraceSteps
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int, Spans, complement, intersection, time_before

_NS_PER_US = 1000
# A step follows at once if the host pauses no longer than this, or than this share of the step.
_PAUSE_NS, _PAUSE_SHARE = 1_000_000, 0.1


def step_kind(steps: TraceSteps) -> str | None:
    """Return which kind of step divides a trace: global steps where it has some, else iterations; None without any."""
    return next((kind for kind in (GLOBAL_STEP, ITERATION) if len(steps.host[kind].step)), None)


def windows_on_device(steps: TraceSteps) -> StepWindows:
    """Return the device windows of the steps. They have end times and do not overlap.

    A window lasts from the step's first device work to that of the next step. If no step follows immediately, it ends
    with the step's own device work. The window of a global step between two pauses also contains the step on the host.
    """
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
    if kind == GLOBAL_STEP:
        is_alone = ~at_once & ~np.append(False, at_once)[:-1]
        end = np.where(is_alone, np.minimum(np.maximum(end, steps.end_ns[step]), follows), end)
        earliest = np.append(0, end)[:-1]
        start = np.where(is_alone, np.maximum(np.minimum(start, steps.start_ns[step]), earliest), start)
    return StepWindows(step, start, end)


@attrs.frozen
class DeviceWork:
    """Intervals in which a device is busy, by kind of work."""

    compute: Spans
    communication: Spans
    memory: Spans
    others: Spans
    """Compute and memory together."""
    busy: Spans


def steps_of_device(  # noqa: PLR0913, PLR0917 - one parameter per kind of input
    device: Id, work: DeviceWork, windows: StepWindows, host: Host | None, begin_ns: int, origin_ns: int
) -> list[tuple[int, StepOfDevice]]:
    """Return one device's work in each step, preceded by the index of the step.

    Args:
        device: ID of the device.
        work: Intervals in which the device is busy.
        windows: Windows of the steps on the device; see `windows_on_device`.
        host: Host activity, or ``None`` if the trace has no host events.
        begin_ns: Start of the device's first event. Steps that end before it are omitted.
        origin_ns: Time to which ``start_us`` is relative.
    """
    assert windows.end_ns is not None  # noqa: S101 - for the type checker; `windows_on_device` always sets it
    used = windows.end_ns > begin_ns
    step, start, end = windows.step[used], windows.start_ns[used], windows.end_ns[used]
    is_followed = np.append(end[:-1] == start[1:], False)[: len(step)]
    spans = (work.busy, work.compute, work.communication, work.others, work.memory)
    times = [time_before(of_kind, end) - time_before(of_kind, start) for of_kind in spans]
    idle = None if host is None else _idle_of_steps(work.busy, start, end, host).T.tolist()
    steps = []
    for row, (number, start_ns, end_ns, followed, busy, compute, communication, others, memory) in enumerate(
        zip(*(values.tolist() for values in (step, start, end, is_followed, *times)), strict=True)
    ):
        duration_ns = end_ns - start_ns
        idle_ns = duration_ns - busy
        if idle is not None:
            causes = idle_causes(idle[row])
        else:
            causes = (IdleCause(cause=NOT_READ, idle_us=idle_ns / _NS_PER_US, share=1.0),) if idle_ns else ()
        steps.append(
            (
                number,
                StepOfDevice(
                    device=device,
                    start_us=(start_ns - origin_ns) / _NS_PER_US,
                    duration_us=duration_ns / _NS_PER_US,
                    is_followed=followed,
                    busy_us=busy / _NS_PER_US,
                    compute_us=compute / _NS_PER_US,
                    communication_us=communication / _NS_PER_US,
                    exposed_communication_us=(busy - others) / _NS_PER_US,
                    memory_us=memory / _NS_PER_US,
                    idle=causes,
                ),
            )
        )
    return steps


def _idle_of_steps(busy: Spans, start: Int, end: Int, host: Host) -> Int:
    """Return the idle time by host state and step, as an array of shape (states, steps)."""
    times = np.zeros((len(CAUSES), len(start)), dtype=np.int64)
    filled = start < end
    if not filled.any():
        return times
    first_ns, last_ns = int(start[filled][0]), int(end[filled].max())
    before = (busy[1] > first_ns) & (busy[0] < last_ns)
    inside = np.maximum(busy[0][before], first_ns), np.minimum(busy[1][before], last_ns)
    idle = intersection(complement(inside, first_ns, last_ns), _touching_joined(start[filled], end[filled]))
    # Split idle spans that extend over several adjacent steps.
    idle = _cut(idle, start[filled])
    of_step = np.searchsorted(start, idle[0], side="right") - 1
    for row, of_state in enumerate(host.times(idle)):
        # A 64-bit float represents any whole number of nanoseconds up to 104 days exactly.
        times[row] = np.bincount(of_step, weights=of_state, minlength=len(start))
    return times


def idle_causes(times_ns: Sequence[int]) -> tuple[IdleCause, ...]:
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
