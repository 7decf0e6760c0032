"""The tree of calls of a trace with stacks: Python functions, and the operators and annotations inside of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.detail_model import FunctionTime, StackFrame
from profdeck_traces.reading.columns import PYTHON, Columns
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import groups, nesting, nesting_order

_OTHERS = "(other calls)"
# A program that runs for long has far fewer places from which something is called.
_MOST_NODES = 100_000
_MOST_FRAMES, _MOST_FUNCTIONS = 2000, 200
_LEAST_SHARE = 0.001
_NS_PER_US = 1000


@attrs.define
class _Node:
    parent: int
    """-1: it is a thread."""
    name: int
    """-1: a thread, or other calls."""
    count: int = 0
    total_ns: int = 0
    self_ns: int = 0


class CallTree:
    """Counts and times of calls, summed by call path. Empty if no stacks were recorded."""

    def __init__(
        self, events: Columns, is_other_call: NDArray[np.bool_], thread_names: Mapping[tuple[Id, Id], str]
    ) -> None:
        """Build the tree.

        Args:
            events: All events of the trace.
            is_other_call: For each event name, whether it is an operator or an annotation. False for step annotations,
                because otherwise each step would have its own tree.
            thread_names: Thread names, by process and thread.
        """
        self._tables = events.tables
        self._thread_names = thread_names
        self._is_python = self._tables.names_of_categories(frozenset({PYTHON}))
        self._nodes: list[_Node] = []
        self._ids: dict[tuple[int, int], int] = {}
        self._threads: dict[int, int] = {}
        """The node of each track."""
        if self._is_python.any():
            is_call = (self._is_python | is_other_call)[events.name]
            # Skip events without a duration, because their nesting is ambiguous.
            calls = events[np.flatnonzero(is_call & (events.end_ns > events.start_ns))]
            for of_track in groups(calls.track):
                self._add_track(calls[of_track])

    def _add_track(self, calls: Columns) -> None:
        calls = calls[nesting_order(calls.track, calls.start_ns, calls.end_ns)]
        thread = self._thread(int(calls.track[0]))
        nested = nesting(calls.start_ns, calls.end_ns)
        if nested is None:
            self._add_overlapping(calls, thread)
            return
        duration = calls.duration_ns
        own = duration.copy()
        inner = np.flatnonzero(nested.parent >= 0)
        np.subtract.at(own, nested.parent[inner], duration[inner])
        node, above = np.empty((2, len(calls)), dtype=np.int64)
        for level in nested.levels:
            above[level] = np.where(nested.parent[level] >= 0, node[nested.parent[level]], thread)
            keys = above[level] * len(self._tables.names) + calls.name[level]
            places, which = np.unique(keys, return_inverse=True)
            ids = [self._node(*divmod(key, len(self._tables.names))) for key in places.tolist()]
            node[level] = np.array(ids)[which]
        found, which = np.unique(node, return_inverse=True)
        sums = np.zeros((3, len(found)), dtype=np.int64)
        # Calls nested in "(other calls)" share its node, and the total of the node already includes their duration.
        for row, values in enumerate((np.ones_like(own), np.where(node == above, 0, duration), own)):
            np.add.at(sums[row], which, values)
        for number, (count, total_ns, self_ns) in zip(found.tolist(), sums.T.tolist(), strict=True):
            one = self._nodes[number]
            one.count += count
            one.total_ns += total_ns
            one.self_ns += self_ns
        self._nodes[thread].total_ns += int(duration[nested.parent < 0].sum())

    def _add_overlapping(self, calls: Columns, thread: int) -> None:  # noqa: C901 - one sweep over time
        """Add calls that overlap without nesting. Each call is treated as nested in the calls that are already open."""
        starts, ends, names = calls.start_ns.tolist(), calls.end_ns.tolist(), calls.name.tolist()
        changes = sorted(
            [*((end, 0, at) for at, end in enumerate(ends)), *((begin, 1, at) for at, begin in enumerate(starts))]
        )
        open_calls: list[int] = []
        place_of: dict[int, int] = {}  # index in `open_calls`
        path: list[int] = [thread]
        depth: Counter[int] = Counter()  # number of times that each node occurs in the path
        entered: dict[int, int] = {}

        def push(node: int, time_ns: int) -> None:
            path.append(node)
            depth[node] += 1
            if depth[node] == 1:
                entered[node] = time_ns

        def pop(time_ns: int) -> None:
            node = path.pop()
            depth[node] -= 1
            if not depth[node]:
                self._nodes[node].total_ns += time_ns - entered[node]

        since = 0
        for time_ns, begins, at in changes:
            if open_calls:
                self._nodes[path[-1]].self_ns += time_ns - since
            since = time_ns
            if begins:
                if not open_calls:
                    entered[thread] = time_ns
                place_of[at] = len(open_calls)
                open_calls.append(at)
                push(self._node(path[-1], names[at]), time_ns)
                self._nodes[path[-1]].count += 1
                continue
            place = place_of.pop(at)
            del open_calls[place]
            while len(path) > place + 1:
                pop(time_ns)
            for other in open_calls[place:]:
                place_of[other] -= 1
                push(self._node(path[-1], names[other]), time_ns)
            if not open_calls:
                self._nodes[thread].total_ns += time_ns - entered[thread]

    def _thread(self, track: int) -> int:
        if track not in self._threads:
            self._threads[track] = len(self._nodes)
            self._nodes.append(_Node(-1, -1))
        return self._threads[track]

    def _node(self, parent: int, name: int) -> int:
        if self._nodes[parent].parent >= 0 and self._nodes[parent].name < 0:
            return parent
        if len(self._nodes) >= _MOST_NODES:
            name = -1
        if (parent, name) not in self._ids:
            self._ids[parent, name] = len(self._nodes)
            self._nodes.append(_Node(parent, name))
        return self._ids[parent, name]

    def functions(self) -> tuple[FunctionTime, ...]:
        """Return the Python functions."""
        found: dict[int, list[int]] = {}
        outer: list[frozenset[int]] = []
        for node in self._nodes:
            above = outer[node.parent] if node.parent >= 0 else frozenset()
            is_python = node.name >= 0 and bool(self._is_python[node.name])
            outer.append(above | {node.name} if is_python and node.name not in above else above)
            if is_python:
                sums = found.setdefault(node.name, [0, 0, 0])
                sums[0] += node.count
                sums[1] += node.self_ns
                sums[2] += 0 if node.name in above else node.total_ns
        in_order = sorted(found.items(), key=lambda item: (-item[1][1], self._tables.names[item[0]]))
        return tuple(
            FunctionTime(
                name=self._tables.names[name],
                count=count,
                self_us=self_ns / _NS_PER_US,
                total_us=total_ns / _NS_PER_US,
            )
            for name, (count, self_ns, total_ns) in in_order[:_MOST_FUNCTIONS]
        )

    def frames(self) -> tuple[StackFrame, ...]:
        """Return the nodes that take the most time, parents before what they call; what is left out is its caller's."""
        all_ns = sum(self._nodes[thread].total_ns for thread in self._threads.values())
        least_ns = max(1, all_ns * _LEAST_SHARE)
        large = [number for number, node in enumerate(self._nodes) if node.total_ns >= least_ns]
        # A node has no more time than its parent and comes behind it, so that the parents of all that stay do, too.
        large = sorted(sorted(large, key=lambda number: (-self._nodes[number].total_ns, number))[:_MOST_FRAMES])
        place = {number: index for index, number in enumerate(large)}
        own = {number: self._nodes[number].self_ns for number in large}
        for number, node in enumerate(self._nodes):
            if number not in place and node.parent in place:
                own[node.parent] += node.total_ns
        threads = {node: track for track, node in self._threads.items()}
        return tuple(
            StackFrame(
                name=self._name(number, threads),
                parent=place.get(self._nodes[number].parent),
                count=self._nodes[number].count,
                total_us=self._nodes[number].total_ns / _NS_PER_US,
                self_us=own[number] / _NS_PER_US,
            )
            for number in large
        )

    def _name(self, number: int, threads: Mapping[int, int]) -> str:
        if number in threads:
            process, thread = track = self._tables.tracks[threads[number]]
            return self._thread_names.get(track) or f"thread {thread} of process {process}"
        name = self._nodes[number].name
        return self._tables.names[name] if name >= 0 else _OTHERS
