"""What the host did while a device waited: the state of all threads together, at any time of a slice."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.columns import ANNOTATION, OPERATOR, Tables
from profdeck_traces.reading.intervals import Int, Spans, complement, groups, intersection, joined, time_before, union
from profdeck_traces.reading.time_slices import Slice

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

OUTSIDE_OPERATORS = frozenset({"Python and other host code", "nothing recorded"})
"""The states in which the host is in no operator and in no call of the device's runtime."""

_STATES = tuple(CAUSES)
_OPERATORS, _SYNCHRONISING = _STATES.index("operators"), _STATES.index("synchronising")
_NOTHING = len(_STATES) - 1
# Kineto's, but for the last: Ascend's runtime, whose events have no category, by the name of its process.
_RUNTIMES = (
    *("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "mtia_runtime", "glow_runtime"),
    *("privateuse1_runtime", "privateuse1_driver", "CANN"),
)
_STATE_OF_CATEGORY = {
    "overhead": "profiler overhead",
    OPERATOR: "operators",
    ANNOTATION: "Python and other host code",
    "python_function": "Python and other host code",
    "enqueue": "Python and other host code",
    "dequeue": "Python and other host code",
} | dict.fromkeys(_RUNTIMES, "other runtime calls")
# The first that is found in the name. CUDA, HIP, Level Zero and AscendCL share these words.
_STATE_OF_CALL = (
    ("synchronising", re.compile(r"[Ss]ynchronize|EventQuery|StreamQuery|QueryEventStatus")),
    ("launching", re.compile(r"[Ll]aunch|AscendCL@acl(nn(?!\w*GetWorkspaceSize)|opCompileAndExecute|opExecute)")),
    ("copying", re.compile(r"[Mm]emcpy|[Mm]emset|MemoryCopy|MemoryFill")),
    (
        "allocating",
        re.compile(
            r"[Mm]alloc|Free|HostAlloc|HostRegister|HostUnregister|MemAlloc|MemCreate|MemRelease|MemMap|MemUnmap"
        ),
    ),
)


class HostEvent(NamedTuple):
    """An event of the host, whole."""

    state: int
    """Index into ``CAUSES``."""
    begin_ns: int
    end_ns: int
    track: int
    name: int


@attrs.frozen
class HostSlice:
    """The host's side of one slice."""

    part: Slice
    events: Int
    """Which events of the slice are the host's."""
    state: NDArray[np.int8]
    """Index into ``CAUSES`` of each of these."""
    busy: tuple[Spans, ...]
    """The time in which some thread is in the first state, in one of the first two, and so on."""

    def times(self, spans: Spans) -> Int:
        """Return the time that each state takes of each span: a matrix of (states, spans)."""
        edges = np.stack(spans, axis=1).ravel()
        up_to = [np.zeros(len(spans[0]), dtype=np.int64)]
        for earlier, busy in zip((None, *self.busy), self.busy, strict=False):
            if busy is earlier:
                up_to.append(up_to[-1])
                continue
            before = time_before(busy, edges)
            up_to.append(before[1::2] - before[::2])
        return np.diff(np.stack([*up_to, spans[1] - spans[0]]), axis=0)

    def longer_than(self, least_ns: int) -> HostSlice:
        """Return the same with these events only."""
        columns = self.part.columns
        kept = np.flatnonzero((columns.end_ns - columns.start_ns)[self.events] > least_ns)
        return attrs.evolve(self, events=self.events[kept], state=self.state[kept])

    def open_in(self, begin_ns: int, end_ns: int) -> frozenset[HostEvent]:
        """Return what may have been open for most of a gap that has this part.

        These are the events that are open for more than half of the part, or at its end. Each of the others is in no
        later part, and either in no earlier one, or open at the end of that.
        """
        part, events = self.part, self.events
        starts, ends = part.columns.start_ns[events], part.columns.end_ns[events]
        inside_ns = np.minimum(ends, end_ns) - np.maximum(starts, begin_ns)
        matters = (inside_ns > (end_ns - begin_ns) // 2) | (ends >= end_ns)
        found = np.flatnonzero((inside_ns > 0) & matters)
        events = events[found]
        columns = (
            part.order_ns[events],
            part.whole_end_ns[events],
            part.columns.track[events],
            part.columns.name[events],
        )
        return frozenset(map(HostEvent, self.state[found].tolist(), *(column.tolist() for column in columns)))


class HostStates:
    """Tells what the host does in slices of one trace."""

    def __init__(self, tables: Tables, annotations: NDArray[np.bool_] | None = None) -> None:
        """Take what the codes of the trace mean.

        Args:
            tables: Those of all slices.
            annotations: Names that are annotations whatever their category is.
        """
        names = zip(tables.names, tables.name_category, strict=True)
        states = np.array([_state(name, tables.categories[category]) for name, category in names], dtype=np.int8)
        if annotations is not None:
            states[annotations] = _STATES.index(_STATE_OF_CATEGORY[ANNOTATION])
        self._state_of_name = states

    def of(self, part: Slice) -> HostSlice:
        """Return the host's side of a slice."""
        state = self._state_of_name[part.columns.name]
        events = np.flatnonzero(state != _NOTHING)
        state = state[events]
        starts, ends = part.columns.start_ns, part.columns.end_ns
        busy = [(np.empty(0, dtype=np.int64),) * 2]
        for code in range(_NOTHING):
            of_state = events[np.flatnonzero(state == code)]
            if code == _OPERATORS:
                spans = _working(part, of_state, events[np.flatnonzero(state == _SYNCHRONISING)])
            else:
                spans = starts[of_state], ends[of_state]
            busy.append(union(*joined((busy[-1], spans))) if len(spans[0]) else busy[-1])
        return HostSlice(part, events, state, tuple(busy[1:]))


def innermost(events: Iterable[HostEvent], begin_ns: int, end_ns: int) -> HostEvent | None:
    """Return the event that was open for more than half of a time, the innermost one of its thread.

    Of several threads, that of the state that comes first in ``CAUSES``, of these the one that started last.
    """
    most = [
        event for event in events if 2 * (min(event.end_ns, end_ns) - max(event.begin_ns, begin_ns)) > end_ns - begin_ns
    ]
    most.sort(key=lambda event: (event.begin_ns, -event.end_ns, -event.state, event.name))
    of_thread = {event.track: event for event in most}  # the last one of a thread stays
    return min(of_thread.values(), key=lambda event: (event.state, -event.begin_ns, event), default=None)


def state_of_call(name: str, category: str) -> str | None:
    """Return what a call into a device's runtime or driver does; None for every other event."""
    return _STATES[_state(name, category)] if category in _RUNTIMES else None


def by_time(times_ns: Int) -> list[tuple[str, int, float]]:
    """Return the states that took any of some time, longest first: the state, its time, its share of all.

    Args:
        times_ns: One of each of ``CAUSES``.
    """
    total_ns = int(times_ns.sum())
    found = [(state, time_ns) for state, time_ns in zip(CAUSES, times_ns.tolist(), strict=True) if time_ns]
    found.sort(key=lambda item: -item[1])
    return [(state, time_ns, time_ns / total_ns) for state, time_ns in found]


def _working(part: Slice, operators: Int, waits: Int) -> Spans:
    """Return intervals in which one of the operators is open on a thread that does not wait."""
    track, start, end = part.columns.track, part.columns.start_ns, part.columns.end_ns
    waiting = np.isin(track[operators], np.unique(track[waits]))
    free, bound = operators[~waiting], operators[waiting]
    found = [(start[free], end[free])]
    waits_of = {int(track[waits[group[0]]]): waits[group] for group in groups(track[waits])}
    for group in groups(track[bound]):
        of_track = bound[group]
        waited = waits_of[int(track[of_track[0]])]
        free_time = complement(union(start[waited], end[waited]), part.begin_ns, part.end_ns)
        found.append(intersection(union(start[of_track], end[of_track]), free_time))
    return joined(found)


def _state(name: str, category: str) -> int:
    state = _STATE_OF_CATEGORY.get(category, "nothing recorded")
    if category in _RUNTIMES:
        state = next((found for found, pattern in _STATE_OF_CALL if pattern.search(name)), state)
    return _STATES.index(state)
