"""State of the host at any time, derived from all its threads, to explain why a device waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.columns import (
    ANNOTATION,
    OPERATOR,
    PROFILER_OVERHEAD,
    PYTHON,
    RUNTIMES,
    TASK_QUEUES,
    Columns,
)
from profdeck_traces.reading.event_names import SYNCHRONISATIONS, CallKind, call_kind
from profdeck_traces.reading.intervals import Int, Spans, complement, groups, intersection, joined, time_before, union

CAUSES = {
    "profiler overhead": "the profiler itself worked: buffers, instrumentation",
    "launching": "a call was open that puts kernels, or graphs of them, onto a device",
    "allocating": "a call was open that allocates or frees memory",
    "copying": "a call was open that copies or fills memory",
    "other runtime calls": "another call into the device's runtime or driver was open",
    "operators": "an operator was open on a thread that did not wait for a device",
    "synchronising": "a thread waited for a device, or asked whether it was done",
    "Python and other host code": "nothing but annotations, Python frames and task queues was open",
    "nothing recorded": "no event of the host was open",
}
"""What can take idle time, each with the state of the host that it means.

A cause has the time, of a device that is idle, in which its state holds and none before it in this order; so the times
of all add up to the idle time. States of different threads compete like that as well, because the device waits for
what they do together. A thread that waits for a device tells least of the recorded calls; Python frames are open on
every thread all the time, where they are recorded, and tell even less.
"""

NOT_READ = "host not read"
"""The cause of idle time where the host was not read."""

NOTHING = "nothing recorded"
OUTSIDE_OPERATORS = frozenset({"Python and other host code", NOTHING})
"""The states in which the host is in no operator and in no call of the device's runtime."""

_STATES = tuple(CAUSES)
_OPERATORS, _SYNCHRONISING = _STATES.index("operators"), _STATES.index("synchronising")
_NOTHING = len(_STATES) - 1
_STATE_OF_CATEGORY = {
    PROFILER_OVERHEAD: "profiler overhead",
    OPERATOR: "operators",
    ANNOTATION: "Python and other host code",
    PYTHON: "Python and other host code",
    **dict.fromkeys(TASK_QUEUES, "Python and other host code"),
} | dict.fromkeys(RUNTIMES, "other runtime calls")
KNOWN_CATEGORIES = frozenset(_STATE_OF_CATEGORY)
"""Categories of host events."""
_STATE_OF_CALL = {
    **dict.fromkeys((*SYNCHRONISATIONS, CallKind.QUERY), "synchronising"),
    **dict.fromkeys((CallKind.LAUNCH, CallKind.OPERATOR_EXECUTION), "launching"),
    CallKind.COPY: "copying",
    **dict.fromkeys((CallKind.ALLOCATION, CallKind.FREE), "allocating"),
}


class HostEvent(NamedTuple):
    """An event of the host, whole."""

    state: int
    """Index into ``CAUSES``."""
    begin_ns: int
    end_ns: int
    track: int
    name: int


@attrs.frozen
class Host:
    """Host activity during the recording."""

    events: Columns
    """All events of the trace, sorted by start time."""
    state: NDArray[np.int8]
    """State of each event, as an index into ``CAUSES``. Device events have the last state."""
    busy: tuple[Spans, ...]
    """For each state, the intervals in which any thread is in that state or in one that precedes it in ``CAUSES``."""

    @classmethod
    def of(cls, events: Columns, annotations: NDArray[np.bool_] | None = None) -> Host:
        """Compute the host states.

        Args:
            events: All events of a trace, sorted by start time.
            annotations: For each event name, whether to treat it as an annotation regardless of its category.
        """
        tables = events.tables
        names = zip(tables.names, tables.name_category, strict=True)
        of_name = np.array([_state(name, tables.categories[category]) for name, category in names], dtype=np.int8)
        if annotations is not None:
            of_name[annotations] = _STATES.index(_STATE_OF_CATEGORY[ANNOTATION])
        state = of_name[events.name]
        busy = [(np.empty(0, dtype=np.int64),) * 2]
        for code in range(_NOTHING):
            of_state = np.flatnonzero(state == code)
            if code == _OPERATORS:
                spans = _working(events, of_state, np.flatnonzero(state == _SYNCHRONISING))
            else:
                spans = events.start_ns[of_state], events.end_ns[of_state]
            busy.append(union(*joined((busy[-1], spans))) if len(spans[0]) else busy[-1])
        return cls(events, state, tuple(busy[1:]))

    def times(self, spans: Spans) -> Iterator[Int]:
        """Yield the time in each state within each span, one state at a time in the order of ``CAUSES``.

        A matrix of all states would be the largest allocation of a summary.
        """
        starts, ends = spans
        up_to = np.zeros(len(starts), dtype=np.int64)
        for earlier, busy in zip((None, *self.busy), self.busy, strict=False):
            if busy is earlier:
                yield np.zeros(len(starts), dtype=np.int64)
                continue
            preceding, up_to = up_to, time_before(busy, ends)
            up_to -= time_before(busy, starts)
            yield up_to - preceding
        yield ends - starts - up_to

    def open_in(self, begin_ns: int, end_ns: int) -> list[HostEvent]:
        """Return the events that cover more than half of an interval."""
        # An event that covers more than half of the interval contains the interval's midpoint.
        middle_ns = (begin_ns + end_ns) // 2
        last = int(np.searchsorted(self.events.start_ns, middle_ns, side="right"))
        rows = np.flatnonzero(self.events.end_ns[:last] > middle_ns)
        rows = rows[self.state[rows] != _NOTHING]
        inside_ns = np.minimum(self.events.end_ns[rows], end_ns) - np.maximum(self.events.start_ns[rows], begin_ns)
        rows = rows[2 * inside_ns > end_ns - begin_ns]
        found = self.events[rows]
        columns = (self.state[rows], found.start_ns, found.end_ns, found.track, found.name)
        return list(map(HostEvent, *(column.tolist() for column in columns)))


def innermost(events: Iterable[HostEvent]) -> HostEvent | None:
    """Return the innermost event of the thread whose state comes first in ``CAUSES``.

    If several threads have that state, choose the one whose innermost event started last.
    """
    in_order = sorted(events, key=lambda event: (event.begin_ns, -event.end_ns, -event.state, event.name))
    of_thread = {event.track: event for event in in_order}  # keeps the innermost event of each thread
    return min(of_thread.values(), key=lambda event: (event.state, -event.begin_ns, event), default=None)


def state_of_call(name: str, category: str) -> str | None:
    """Return what a call into a device's runtime or driver does; None for every other event."""
    return _STATES[_state(name, category)] if category in RUNTIMES else None


def by_time(times_ns: Sequence[int]) -> list[tuple[str, int, float]]:
    """Return the states that took any of some time, longest first: the state, its time, its share of all.

    Args:
        times_ns: One of each of ``CAUSES``.
    """
    total_ns = sum(times_ns)
    found = [(state, time_ns) for state, time_ns in zip(_STATES, times_ns, strict=True) if time_ns]
    if len(found) > 1:
        found.sort(key=lambda item: -item[1])
    return [(state, time_ns, time_ns / total_ns) for state, time_ns in found]


def _working(columns: Columns, operators: Int, waits: Int) -> Spans:
    """Return the intervals in which an operator is running on a thread that is not waiting for a device."""
    track, start, end = columns.track, columns.start_ns, columns.end_ns
    waiting = np.isin(track[operators], np.unique(track[waits]))
    free, bound = operators[~waiting], operators[waiting]
    intervals = [(start[free], end[free])]
    waits_of = {int(track[waits[group[0]]]): waits[group] for group in groups(track[waits])}
    for group in groups(track[bound]):
        of_track = bound[group]
        waited = waits_of[int(track[of_track[0]])]
        open_spans, waits_spans = union(start[of_track], end[of_track]), union(start[waited], end[waited])
        if len(open_spans[0]):
            begin_ns = int(min(open_spans[0][0], waits_spans[0][0])) if len(waits_spans[0]) else int(open_spans[0][0])
            end_ns = int(max(open_spans[1][-1], waits_spans[1][-1])) if len(waits_spans[0]) else int(open_spans[1][-1])
            intervals.append(intersection(open_spans, complement(waits_spans, begin_ns, end_ns)))
    return joined(intervals)


def _state(name: str, category: str) -> int:
    state = _STATE_OF_CATEGORY.get(category, "nothing recorded")
    if category in RUNTIMES:
        state = _STATE_OF_CALL.get(call_kind(name), state)
    return _STATES.index(state)
