"""Gains: the time that steps would save if an owner took no time, computed by replaying recorded dependencies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

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
_BLOCK = 1 << 14  # number of segments summed at once, because NumPy converts both columns to 8 bytes
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


class _Owned(NamedTuple):
    """The time of an owner, as indices."""

    segments: Int
    work: Int
    """Device events."""
    edges: Int
    """Dependencies that do not connect nodes of a thread, and whose delay belongs to the owner."""


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
        self._other = np.flatnonzero(~self._graph.is_thread).astype(np.int32)
        """Dependencies that do not connect nodes of a thread."""
        self._place, self._slot = _places(self._graph.segment, len(self._graph.length))
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
        owned = self._owned(_mask_of(kinds), is_owner)
        self._add(gain, self._weights_without(owned), owned)

    def add_gain_without_waits(self, gain: Gain, is_sync: _Mask, kinds: Iterable[OwnerKind], is_owner: _Mask) -> None:
        """Replay the recording as if some synchronisations did not wait for device work, and without an owner's time.

        Args:
            gain: The gain to update.
            is_sync: Mask of the rows of these synchronisations and copies in the trace, with an extra last element.
            kinds: Kinds of the owner; see `add_gain`.
            is_owner: Mask of the owner's rows.
        """
        graph = self._graph
        is_cut = (graph.kind == OwnerKind.SYNCHRONISATION) & (graph.event >= 0) & is_sync[graph.row]
        owned = self._owned(_mask_of(kinds), is_owner)
        self._add(gain, np.where(is_cut, _NEVER, self._weights_without(owned)), owned)

    def _add(self, gain: Gain, weight: Int, owned: _Owned) -> None:
        graph = self._graph
        if not self.is_exact:
            gain.is_known = False
            return
        times, path = self._times(weight)
        recorded, replayed = graph.time[graph.border_nodes], times[graph.border_nodes]
        del times, weight  # as large as the graph's largest columns
        saved = (np.diff(recorded) - np.diff(replayed))[self._is_used]
        gain.saved_ns += int(saved.sum())
        gain.path_ns += self._times_of_kinds(path, owned)

    def _owned(self, is_kind: _Mask, is_owner: _Mask) -> _Owned:
        graph = self._graph
        segments = np.flatnonzero(is_kind[graph.segment_kind])
        work = np.flatnonzero(is_kind[graph.device_kind])
        edges = self._other[is_kind[graph.kind[self._other]]]
        return _Owned(
            segments[is_owner[self._segment_row[segments]]],
            work[is_owner[self._work_row[work]]],
            edges[is_owner[graph.row[edges]]],
        )

    def _of_nodes(self, segments: Int) -> Int:
        """Return the owner's cumulative time at each node. Only differences within a thread are meaningful."""
        graph = self._graph
        of_place = np.bincount(self._slot[segments], graph.length[segments], len(graph.time) + 1).astype(np.int64)
        owned: Int = np.cumsum(of_place)[self._place]
        is_owned = np.zeros(len(graph.length) + 1, np.bool_)
        is_owned[segments] = True
        np.add(owned, graph.offset, out=owned, where=is_owned[graph.segment])
        return owned

    def _weights_without(self, owned: _Owned) -> Int:
        """Return the duration of each dependency without the owner's time."""
        graph = self._graph
        weight: Int = graph.delay + graph.event_work
        if len(owned.segments):
            of_nodes = self._of_nodes(owned.segments)
            saved = of_nodes[graph.target]
            saved -= of_nodes[graph.source]
            np.subtract(weight, saved, out=weight, where=graph.is_thread)
        if len(owned.work):
            is_owned = np.zeros(len(graph.device_kind) + 1, np.bool_)
            is_owned[owned.work] = True
            np.subtract(weight, graph.event_work, out=weight, where=is_owned[graph.event])
        weight[owned.edges] -= graph.delay[owned.edges]
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

    def _times_of_kinds(self, path: Int, owned: _Owned) -> NDArray[np.float64]:
        """Return the time that each owner kind has on the critical path of a replay."""
        graph = self._graph
        on_thread = path[graph.is_thread[path]]
        source, target = graph.source[on_thread], graph.target[on_thread]
        # Consecutive dependencies of a thread cover its segments from the first source to the last target.
        source, target = source[source != np.append(target[1:], -1)], target[target != np.append(-1, source[:-1])]
        first, last = graph.segment[source], graph.segment[target]
        visits = np.zeros(len(graph.length), np.int32)
        np.add.at(visits, first, 1)
        np.subtract.at(visits, last, 1)
        np.cumsum(visits, out=visits)
        visits[owned.segments] = 0
        times = np.zeros(256)
        for begin in range(0, len(visits), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            times += np.bincount(graph.segment_kind[block], visits[block] * graph.length[block], minlength=256)
        is_left = np.ones(len(visits), np.bool_)
        is_left[owned.segments] = False
        times -= np.bincount(graph.segment_kind[first], graph.offset[source] * is_left[first], minlength=256)
        times += np.bincount(graph.segment_kind[last], graph.offset[target] * is_left[last], minlength=256)
        path = path[~graph.is_thread[path]]
        is_work = graph.event[path] >= 0
        work_ns = np.zeros(len(graph.device_kind), np.int64)
        np.add.at(work_ns, graph.event[path[is_work]], graph.event_work[path[is_work]])
        work_ns[owned.work] = 0
        times += np.bincount(graph.device_kind, work_ns, minlength=256)
        is_owned = np.zeros(len(graph.kind), np.bool_)
        is_owned[owned.edges] = True
        path = path[~is_owned[path]]
        times += np.bincount(graph.kind[path], graph.delay[path], minlength=256)
        return times


def _places(segment: NDArray[np.int32], count: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Sort nodes by segment.

    Args:
        segment: Segment of each node.
        count: Number of segments.

    Returns:
        The place of each node, and for each segment the place of the first node in a later segment.
    """
    place = np.empty(len(segment), np.int32)
    place[np.argsort(segment, kind="stable")] = np.arange(len(segment), dtype=np.int32)
    return place, np.cumsum(np.bincount(segment, minlength=count), dtype=np.int32)
