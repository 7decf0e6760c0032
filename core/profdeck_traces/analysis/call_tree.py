"""The tree of calls of a trace with stacks: Python functions, and the operators and annotations inside of them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.detail_model import FunctionTime, StackFrame
from profdeck_traces.reading.columns import Tables
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int, groups, nesting, nesting_order
from profdeck_traces.reading.time_slices import Slice

PYTHON = "python_function"
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
    """Adds up calls by the place that they were called from, slice by slice. Empty where no stacks were recorded."""

    def __init__(
        self, tables: Tables, is_other_call: NDArray[np.bool_], thread_names: Mapping[tuple[Id, Id], str]
    ) -> None:
        """Take where they are.

        Args:
            tables: Those of the trace.
            is_other_call: Of each name, whether it is an operator or an annotation; marks of steps would give each step
                a tree of its own.
            thread_names: By process and thread.
        """
        self._tables = tables
        self._thread_names = thread_names
        self._is_python = tables.names_of_categories(frozenset({PYTHON}))
        self._is_call = self._is_python | is_other_call
        self._has_stacks = bool(self._is_python.any())
        self._nodes: list[_Node] = []
        self._ids: dict[tuple[int, int], int] = {}
        self._threads: dict[int, int] = {}
        """The node of each track."""

    def add(self, part: Slice) -> None:
        """Take a slice."""
        if not self._has_stacks:
            return
        calls = np.flatnonzero(self._is_call[part.columns.name])
        tracks = part.columns.track[calls]
        for of_track in groups(tracks):
            self._add_track(part, calls[of_track])

    def _add_track(self, part: Slice, calls: Int) -> None:
        columns = part.columns
        calls = calls[part.whole_end_ns[calls] > part.order_ns[calls]]  # empty ones would blur what is inside of what
        if not len(calls):
            return
        track = columns.track[calls]
        calls = calls[nesting_order(track, part.order_ns[calls], part.whole_end_ns[calls])]
        whole = part.order_ns[calls], part.whole_end_ns[calls]
        thread = self._thread(int(track[0]))
        nested = nesting(*whole)
        if nested is None:
            self._add_overlapping(part, calls, thread)
            return
        duration = columns.end_ns[calls] - columns.start_ns[calls]
        own = duration.copy()
        inner = np.flatnonzero(nested.parent >= 0)
        np.subtract.at(own, nested.parent[inner], duration[inner])
        node, above = np.empty((2, len(calls)), dtype=np.int64)
        for level in nested.levels:
            above[level] = np.where(nested.parent[level] >= 0, node[nested.parent[level]], thread)
            keys = np.stack([above[level], columns.name[calls[level]]])
            places, which = np.unique(keys, axis=1, return_inverse=True)
            ids = [self._node(int(parent), int(name)) for parent, name in places.T]
            node[level] = np.array(ids)[which.ravel()]
        found, which = np.unique(node, return_inverse=True)
        sums = np.zeros((3, len(found)), dtype=np.int64)
        # Other calls inside of each other are one.
        for row, values in enumerate((part.first[calls], np.where(node == above, 0, duration), own)):
            np.add.at(sums[row], which, values)
        for number, (count, total_ns, self_ns) in zip(found.tolist(), sums.T.tolist(), strict=True):
            one = self._nodes[number]
            one.count += count
            one.total_ns += total_ns
            one.self_ns += self_ns
        self._nodes[thread].total_ns += int(duration[nested.parent < 0].sum())

    def _add_overlapping(self, part: Slice, calls: Int, thread: int) -> None:
        """Take calls that do not nest: at each instant, each is inside of those that are open and started before."""
        columns = part.columns
        starts, ends = columns.start_ns[calls].tolist(), columns.end_ns[calls].tolist()
        names, first = columns.name[calls].tolist(), part.first[calls].tolist()
        changes = sorted(
            [*((end, 0, at) for at, end in enumerate(ends)), *((begin, 1, at) for at, begin in enumerate(starts))]
        )
        open_calls: list[int] = []
        path: list[int] = [thread]
        since = 0
        for time_ns, begins, at in changes:
            if len(path) > 1 and time_ns > since:
                self._nodes[path[-1]].self_ns += time_ns - since
                for node in dict.fromkeys(path):
                    self._nodes[node].total_ns += time_ns - since
            since = time_ns
            if begins:
                open_calls.append(at)
                path.append(self._node(path[-1], names[at]))
                self._nodes[path[-1]].count += first[at]
                continue
            place = open_calls.index(at)
            del open_calls[place], path[place + 1 :]
            for other in open_calls[place:]:
                path.append(self._node(path[-1], names[other]))

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
