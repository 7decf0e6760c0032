"""Idle time of a device between its first and last event, and its longest idle gaps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from profdeck_traces.analysis.host_states import CAUSES, NOT_READ, Host, innermost
from profdeck_traces.analysis.model import Gap
from profdeck_traces.reading.columns import Columns
from profdeck_traces.reading.intervals import Int, Spans, complement

_NS_PER_US = 1000
MAX_GAPS = 10


def idle_times(
    busy: Spans, work: Columns, host: Host | None, origin_ns: int, step_at: Callable[[int], int | None]
) -> tuple[Int, tuple[Gap, ...]]:
    """Find the idle gaps of a device.

    Args:
        busy: Intervals in which the device is busy.
        work: Device events, sorted by start time.
        host: Host activity, or ``None`` if the trace has no host events.
        origin_ns: Time from which the start of each gap is measured.
        step_at: Function that returns the number of the step that the host is in at a given time.

    Returns:
        The time the host spends in each state while the device is idle, and the longest gaps. Gaps are sorted by
        descending duration, then by start time.
    """
    starts, ends = complement(busy, int(work.start_ns.min()), int(work.end_ns.max()))
    longest = np.argsort(starts - ends, kind="stable")[:MAX_GAPS]
    times, of_longest = np.zeros(len(CAUSES), dtype=np.int64), np.zeros((len(CAUSES), len(longest)), dtype=np.int64)
    for state, of_state in enumerate(host.times((starts, ends)) if host else ()):
        times[state], of_longest[state] = of_state.sum(), of_state[longest]
    names, gaps = work.tables.names, []
    for place, (begin_ns, end_ns) in enumerate(zip(starts[longest].tolist(), ends[longest].tolist(), strict=True)):
        event = innermost(host.open_in(begin_ns, end_ns)) if host else None
        gaps.append(
            Gap(
                start_us=(begin_ns - origin_ns) / _NS_PER_US,
                duration_us=(end_ns - begin_ns) / _NS_PER_US,
                cause=tuple(CAUSES)[int(of_longest[:, place].argmax())] if host else NOT_READ,
                host=None if event is None else names[event.name],
                step=step_at((begin_ns + end_ns) // 2),
                before=_name_at(work.end_ns, begin_ns, work),
                after=_name_at(work.start_ns, end_ns, work),
            )
        )
    return times, tuple(gaps)


def _name_at(times_ns: Int, time_ns: int, work: Columns) -> str | None:
    """Return the name of the event whose entry in `times_ns` is `time_ns`, or ``None`` if there is no such event.

    If there are several such events, choose the event that starts last.
    """
    events = np.flatnonzero(times_ns == time_ns)
    return work.tables.names[work.name[events[-1]]] if len(events) else None
