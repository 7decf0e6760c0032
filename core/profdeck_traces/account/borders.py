"""Step borders on the critical path."""

from __future__ import annotations

import attrs
import numpy as np

from profdeck_traces.account.device_work import DeviceEvents
from profdeck_traces.account.host_threads import HostThreads
from profdeck_traces.account.walk import OnDevice, OnThread, Position
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.walking import NO_TIME

HOST, DEVICE, RECORDING = "host", "device", "recording"
"""Border rules.

HOST: a step ends when the next annotation starts. DEVICE: a step ends when its device work ends. RECORDING: the entire
recording is one step.
"""
BORDER_TEXTS = {
    HOST: "A step lasts from the start of its annotation to the start of the next one.",
    DEVICE: "A step ends when its device work ends.",
    RECORDING: "The recording has no steps and is treated as a single step.",
}
"""Description of each border rule."""
_GROWTH = 0.2  # fraction of the median step


@attrs.frozen(eq=False)
class Borders:
    """Borders of consecutive steps. Step *i* lasts from border *i* to border *i* + 1."""

    rule: str
    times: Int
    host_ends: Int
    """For each border, the time at which the host finished its part of the step that ends there."""
    end: Position
    """Position at the last border, where the backward walk starts."""


def times_done(launched: Int, ends: Int, begin: Int, end: Int) -> Int:
    """Return the time at which each step's annotation and the device work launched in it have both ended.

    Args:
        launched: Start time of each device event's launch, sorted.
        ends: End time of each device event.
        begin: Start times of the annotations.
        end: End times of the annotations.
    """
    done = end.copy()
    for step, (first, last) in enumerate(zip(launched.searchsorted(begin), launched.searchsorted(end), strict=True)):
        if last > first:
            done[step] = max(int(end[step]), int(ends[first:last].max()))
    return done


def border_rule(done: Int, begin: Int, end: Int) -> str:
    """Return the rule for step borders.

    The lag of a step is the time from the end of its annotation to the end of the device work launched in it. If the
    lag grows by more than 20 % of a step, or if there is only one step, steps end when their device work ends.
    Otherwise, a step lasts from the start of its annotation to the start of the next one.

    Args:
        done: Completion time of each step; see `times_done`.
        begin: Start times of the annotations, sorted.
        end: End times of the annotations.
    """
    lag = done - end
    growth = lag[-1] - (lag[0] if len(lag) > 1 else 0)
    return DEVICE if growth > (_GROWTH * float(np.median(end - begin)) if len(lag) > 1 else 0) else HOST


def find_borders(threads: HostThreads, work: DeviceEvents, begin: Int, end: Int, rule: str | None = None) -> Borders:
    """Find the step borders.

    Args:
        threads: Host threads.
        work: Device events.
        begin: Start times of the annotations, sorted.
        end: End times of the annotations.
        rule: Border rule. `RECORDING` divides the recording at `begin`. Default: the result of `border_rule`, or
            `RECORDING` if there are no annotations.
    """
    on_host = OnThread(threads.main)
    if not len(begin):
        return _whole_recording(threads, work)
    if rule == RECORDING:
        whole = _whole_recording(threads, work)
        times, host_ends = np.append(begin, whole.times[-1]), np.append(begin, whole.host_ends[-1])
        return Borders(RECORDING, times, host_ends, whole.end)
    order = np.argsort(work.launched, kind="stable")
    done = times_done(work.launched[order], work.end[order], begin, end)
    if (rule or border_rule(done, begin, end)) == DEVICE:
        times = np.maximum.accumulate(np.append(max(int(begin[0]), _earlier_work_ns(work, int(begin[0]))), done))
        last = np.flatnonzero((work.end == times[-1]) & (work.launched < times[-1]))
        host_ends = np.append(times[0], end)
        return Borders(DEVICE, times, host_ends, OnDevice(int(last[0])) if len(last) else on_host)
    times = np.append(begin, max(int(end.max()), int(begin[-1])))
    return Borders(HOST, times, times, on_host)


def _earlier_work_ns(work: DeviceEvents, begin_ns: int) -> int:
    """Return the end of the device work before the first step. Its launch may be missing from the trace."""
    own = work.start[work.launched >= begin_ns]
    first = int(own.min()) if len(own) else begin_ns
    is_earlier = (work.launched < begin_ns) & ((work.launched > NO_TIME) | (work.start < first))
    return int(work.end[is_earlier].max()) if is_earlier.any() else NO_TIME


def _whole_recording(threads: HostThreads, work: DeviceEvents) -> Borders:
    """Return borders at the start and end of the recording."""
    begins, ends = ([int(work.start.min())], [int(work.ends[-1])]) if len(work.rows) else ([], [])
    first, last = list(threads.first.values()), list(threads.last.values())
    host_begins, host_ends = threads.begin[first].tolist(), threads.begin[last].tolist()
    if not begins and not host_begins:
        return Borders(RECORDING, np.zeros(0, np.int64), np.zeros(0, np.int64), OnThread(threads.main))
    times = np.array([min(begins + host_begins), max(ends + host_ends)])
    ends_on_device = bool(ends) and (
        threads.main not in threads.last or ends[0] >= threads.begin[threads.last[threads.main]]
    )
    if not ends_on_device:
        return Borders(RECORDING, times, times, OnThread(threads.main))
    host_end = int(threads.begin[threads.last[threads.main]]) if threads.main in threads.last else int(times[0])
    return Borders(RECORDING, times, np.array([times[0], host_end]), OnDevice(int(work.order[-1])))
