"""Idle time of a device between its first and last event, and its longest idle gaps."""

from __future__ import annotations

import attrs
import numpy as np

from profdeck_traces.analysis.host_states import CAUSES, Host, HostEvent, innermost
from profdeck_traces.reading.columns import Columns
from profdeck_traces.reading.intervals import Int, Spans, complement

MAX_GAPS = 10


@attrs.frozen
class IdleGap:
    """An interval in which a device is idle."""

    begin_ns: int
    end_ns: int
    times: Int
    """Time that the host spends in each state during the gap."""
    host: HostEvent | None
    """Innermost host event that covers most of the gap."""
    before: int | None
    """Name code of the last event before the gap."""
    after: int | None
    """Name code of the first event after the gap."""


@attrs.frozen
class IdleTimes:
    """Idle time of a device between its first and last event."""

    begin_ns: int
    end_ns: int
    times: Int
    """Time that the host spends in each state while the device is idle."""
    longest: tuple[IdleGap, ...]
    """The longest gaps, in descending order of duration. Gaps of equal duration are sorted by start."""

    @classmethod
    def of(cls, busy: Spans, work: Columns, host: Host | None) -> IdleTimes:
        """Find the idle gaps of a device.

        Args:
            busy: Intervals in which the device is busy.
            work: Events of the device, sorted by start.
            host: Host activity, or ``None`` if the trace has no host events.
        """
        begin_ns, end_ns = int(work.start_ns.min()), int(work.end_ns.max())
        starts, ends = complement(busy, begin_ns, end_ns)
        longest = np.argsort(starts - ends, kind="stable")[:MAX_GAPS]
        times, of_longest = np.zeros(len(CAUSES), dtype=np.int64), np.zeros((len(CAUSES), len(longest)), dtype=np.int64)
        for state, of_state in enumerate(host.times((starts, ends)) if host else ()):
            times[state], of_longest[state] = of_state.sum(), of_state[longest]
        gaps = []
        for place, gap in enumerate(longest.tolist()):
            limits = int(starts[gap]), int(ends[gap])
            gaps.append(
                IdleGap(
                    *limits,
                    of_longest[:, place],
                    innermost(host.open_in(*limits)) if host else None,
                    _name_at(work.end_ns, limits[0], work),
                    _name_at(work.start_ns, limits[1], work),
                )
            )
        return cls(begin_ns, end_ns, times, tuple(gaps))


def _name_at(times_ns: Int, time_ns: int, work: Columns) -> int | None:
    """Return the name code of the event with this time. If several events have it, choose the one that starts last."""
    events = np.flatnonzero(times_ns == time_ns)
    return int(work.name[events[-1]]) if len(events) else None
