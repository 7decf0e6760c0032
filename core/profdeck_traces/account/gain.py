"""Gains: the time that steps would save if an owner took no time, computed by replaying recorded dependencies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.dependencies import Dependencies
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.recording import RecordingPath
from profdeck_traces.reading import compiled
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.intervals import Int

MAX_EVENTS, MAX_EVENTS_WITHOUT_LIBRARY = 100_000_000, 500_000
"""Maximum number of events for which gains are computed, with and without the compiled library.

Computing gains takes about as long as the rest of the account. `windows.MAX_EVENTS` limits its memory use.
"""
_NO_GAIN = frozenset({
    OwnerKind.WAIT_FOR_THREAD, OwnerKind.QUEUE_FULL, OwnerKind.DEVICE_HELD, OwnerKind.NOT_RECORDED,
})  # fmt: skip
_NEVER = -(1 << 60)  # weight of a dependency that never delays its target
_Mask = NDArray[np.bool_]


@attrs.define(eq=False)
class Gain:
    """Result of replaying steps without an owner's time."""

    saved_ns: int = 0
    """Time saved over all steps in the account."""
    is_known: bool = True
    path_ns: NDArray[np.float64] = attrs.field(factory=lambda: np.zeros(256))
    """Time of each `OwnerKind` on the critical paths of the replays."""

    @property
    def limit(self) -> OwnerKind:
        """Owner kind with the most time on the critical paths of the replays."""
        return OwnerKind(int(self.path_ns.argmax()))


def too_large(events: Events) -> str | None:
    """Return a note if the trace is too large to compute gains, otherwise ``None``."""
    limit = MAX_EVENTS if compiled.load_library() else MAX_EVENTS_WITHOUT_LIBRARY
    if events.complete <= limit:
        return None
    return f"Gains are not computed for traces with more than {limit:,} events."


def _mask_of(kinds: Iterable[OwnerKind]) -> _Mask:
    mask = np.zeros(256, np.bool_)
    mask[list(kinds)] = True
    return mask


class Replay:
    """Replays the dependencies of a recording with modified durations."""

    def __init__(self, recording: RecordingPath, events: Events, is_used: _Mask) -> None:
        """Build the dependency graph.

        Args:
            recording: The critical path.
            events: The trace.
            is_used: Mask of the intervals between borders that are steps in the account.
        """
        self._is_used, self._graph = is_used, Dependencies(recording, events)
        self._segment_row, self._work_row = recording.threads.row, recording.work.rows
        self.is_exact = bool((self._times(self._graph.delay + self._graph.event_work)[0] == self._graph.time).all())
        """True if the replay reproduces all recorded times."""

    def add_gain(self, gain: Gain, kind: OwnerKind, is_owner: _Mask) -> None:
        """Replay the recording without an owner's time, and add the saved time to a gain.

        Args:
            gain: The gain to update.
            kind: Owner kind.
            is_owner: Mask of the owner's rows in the trace. An extra last element represents time without an event.
        """
        if kind in _NO_GAIN:
            gain.is_known = False
            return
        self.add_gain_of(gain, [kind], is_owner)

    def add_gain_of(self, gain: Gain, kinds: Iterable[OwnerKind], is_owner: _Mask) -> None:
        """Replay the recording without the time of several owner kinds at once; see `add_gain`."""
        is_kind = _mask_of(kinds)
        self._add(gain, self._weights_without(is_kind, is_owner), is_kind, is_owner)

    def add_gain_without_waits(self, gain: Gain, is_sync: _Mask) -> None:
        """Replay the recording as if some synchronisations did not wait for device work.

        Args:
            gain: The gain to update.
            is_sync: Mask of the rows of these synchronisations and copies in the trace, with an extra last element.
        """
        graph = self._graph
        is_cut = (graph.kind == OwnerKind.SYNCHRONISATION) & (graph.event >= 0) & is_sync[graph.row]
        self._add(gain, np.where(is_cut, _NEVER, graph.delay + graph.event_work), _mask_of(()), is_sync)

    def _add(self, gain: Gain, weight: Int, is_kind: _Mask, is_owner: _Mask) -> None:
        graph = self._graph
        if not self.is_exact:
            gain.is_known = False
            return
        times, path = self._times(weight)
        recorded, replayed = graph.time[graph.border_nodes], times[graph.border_nodes]
        saved = (np.diff(recorded) - np.diff(replayed))[self._is_used]
        gain.saved_ns += int(saved.sum())
        gain.path_ns += self._times_of_kinds(path, is_kind, is_owner)

    def _of_segments(self, is_owner: _Mask) -> Int:
        """Return the owner's cumulative time at each node. Only differences within a thread are meaningful."""
        graph = self._graph
        before = np.append(0, np.cumsum(np.where(is_owner, graph.length, 0)))
        if not len(is_owner):
            return graph.offset
        owned: Int = before[graph.segment]
        np.add(owned, graph.offset, out=owned, where=is_owner[graph.segment])
        return owned

    def _weights_without(self, is_kind: _Mask, is_owner: _Mask) -> Int:
        """Return the duration of each dependency without the owner's time."""
        graph = self._graph
        of_segments = self._of_segments(is_kind[graph.segment_kind] & is_owner[self._segment_row])
        weight: Int = of_segments[graph.source]
        weight -= of_segments[graph.target]
        weight[~graph.is_thread] = 0
        of_device = np.append(is_kind[graph.device_kind] & is_owner[self._work_row], False)
        np.add(weight, graph.event_work, out=weight, where=~of_device[graph.event])
        is_owned = is_kind[graph.kind] & is_owner[graph.row]
        is_owned &= ~graph.is_thread
        np.add(weight, graph.delay, out=weight, where=~is_owned)
        return weight

    def _times(self, weight: Int) -> tuple[Int, Int]:
        """Return the time of each node, and the dependencies on the critical path to the last border."""
        graph = self._graph
        last, begin_ns = int(graph.border_nodes[-1]), int(graph.time[0])
        library = compiled.load_library()
        if library is not None:
            lengths, path = compiled.longest_paths(library, graph.first_edge, graph.source, weight, last)
            return lengths + begin_ns, path
        times_ns, latest_edge = [begin_ns], [-1]
        sources, weights = graph.source.tolist(), weight.tolist()
        for first, end in itertools.pairwise(graph.first_edge[1:].tolist()):
            time_ns, edge = max((times_ns[sources[edge]] + weights[edge], -edge) for edge in range(first, end))
            times_ns.append(time_ns)
            latest_edge.append(-edge)
        edges: list[int] = []
        while last > 0:
            edges.append(latest_edge[last])
            last = sources[edges[-1]]
        return np.array(times_ns, np.int64), np.array(edges, np.int64)

    def _times_of_kinds(self, path: Int, is_kind: _Mask, is_owner: _Mask) -> NDArray[np.float64]:
        """Return the time that each owner kind has on the critical path of a replay."""
        graph = self._graph
        times = np.zeros(256)
        on_thread = path[graph.is_thread[path]]
        source, target = graph.source[on_thread], graph.target[on_thread]
        count, (first, last) = len(graph.length), (graph.segment[source], graph.segment[target])
        of_segment = np.cumsum(np.bincount(first, minlength=count) - np.bincount(last, minlength=count)) * graph.length
        np.subtract.at(of_segment, first, graph.offset[source])
        np.add.at(of_segment, last, graph.offset[target])
        is_left = ~(is_kind[graph.segment_kind] & is_owner[self._segment_row])
        times += np.bincount(graph.segment_kind[is_left], of_segment[is_left], minlength=256)
        path = path[~graph.is_thread[path]]
        is_work = graph.event[path] >= 0
        event = graph.event[path[is_work]]
        is_left = ~(is_kind[graph.device_kind[event]] & is_owner[self._work_row[event]])
        times += np.bincount(graph.device_kind[event[is_left]], graph.event_work[path[is_work]][is_left], minlength=256)
        is_left = ~(is_kind[graph.kind[path]] & is_owner[graph.row[path]])
        times += np.bincount(graph.kind[path[is_left]], graph.delay[path[is_left]], minlength=256)
        return times
