"""Operators for graph kernels, read from traces recorded while the graphs were captured.

A graph launch runs all kernels of a graph, but records no host events for the operators inside. During the
capture, a launch call runs no device work, but adds a node to the graph. If both traces have the same
sequence of nodes, the operators, modules and frames around the captured calls are those of the kernels.

On AMD devices, launch calls have the arg ``kernel`` with the kernel's name. CUDA launch calls have no such arg, so
their sequence cannot be compared, and the operators remain unknown.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence, Set as AbstractSet
from pathlib import Path

import attrs
import numpy as np

from profdeck_traces.attribution.launches import launch_rows
from profdeck_traces.attribution.rows import Attribution, CapturedCalls, Rows, values_at
from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading.columns import COPIES, DEVICE_WORK, OPERATOR, PYTHON, RUNTIMES, shortened
from profdeck_traces.reading.event_names import CallKind, call_kind
from profdeck_traces.reading.events import ARGS, TEXT, Events, read_events
from profdeck_traces.reading.intervals import Int

_GRAPH_LAUNCH, _BEGIN, _END = (re.compile(rf"(?:cuda|cu|hip){name}") for name in (
    "GraphLaunch", "StreamBeginCapture", "StreamEndCapture",
))  # fmt: skip
_INPUTS = ("Input Dims", "Input type", "Concrete Inputs")
_NODE_ARGS = tuple(ARGS)

_Nodes = tuple[str, ...]
"""Kernel name, or category of a copy or fill, of each node of a graph."""


@attrs.frozen(eq=False)
class GraphOperators:
    """A trace's events, together with the operators inside its graphs."""

    events: Events
    """Events of the trace, followed by the events recorded during graph captures, on separate tracks."""
    calls: CapturedCalls
    note: str
    """Note that describes for which graph launches the operators are known."""


@attrs.frozen(eq=False)
class _Capture:
    """Capture of one graph. `events` contains the captured calls, and the operators and frames around them."""

    nodes: _Nodes
    events: Events
    calls: Int
    """Row of each node's call in `events`."""
    owners: tuple[tuple[str | None, ...], ...]
    """Operator, module path and frame of each node."""
    inputs: tuple[tuple[str | None, ...], ...]
    """Input shapes, data types and values for each node's operator."""


def graph_operators(
    events: Events, paths: Sequence[Path], is_step: Callable[[str], bool], *, is_required: bool
) -> GraphOperators | None:
    """Match graph launches with graph captures. Return ``None`` if no graph launch in the trace has device work.

    A launch matches a capture if both contain the same kernels, copies and fills in the same order. If several captures
    match, for example because of different batch sizes, their operators are used only if all captures agree. The same
    applies to input shapes.

    Args:
        events: Events of the trace.
        paths: Traces that contain graph captures.
        is_step: Returns whether the name of an annotation or operator denotes a step.
        is_required: If True, raise an error for a trace that can't be used. If False, describe it in the note.

    Raises:
        TraceError: A required trace is corrupt, contains no graph capture, or its launches have no kernel names.
    """
    launched = _launched_nodes(events)
    if not launched:
        return None
    matches: dict[_Nodes, _Capture | None] = {}
    problems: list[str] = []
    for path in paths:
        try:
            for capture in _captures(path, launched, is_step):
                before = matches.setdefault(capture.nodes, capture)
                if before is not None:
                    matches[capture.nodes] = _common(before, capture)
        except TraceError as error:
            if is_required:
                raise
            problems.append(str(error))
    known = {nodes: capture for nodes, capture in matches.items() if capture is not None}
    extended = events.followed_by([capture.events for capture in known.values()], _INPUTS)
    work, calls, first = [np.empty(0, np.int64)], [np.empty(0, np.int64)], events.complete
    for nodes, capture in known.items():
        for rows in launched[nodes]:
            work.append(rows)
            calls.append(first + capture.calls)
        first += capture.events.complete
    captured = CapturedCalls(events.complete, np.concatenate(work), np.concatenate(calls))
    counts = {nodes: len(launches) for nodes, launches in launched.items()}
    return GraphOperators(extended, captured, " ".join([_note(counts, matches.keys(), known.keys()), *problems]))


def _note(counts: dict[_Nodes, int], matches: AbstractSet[_Nodes], known: AbstractSet[_Nodes]) -> str:
    total, matched = sum(counts.values()), sum(counts[nodes] for nodes in known)
    ambiguous = sum(counts[nodes] for nodes in matches - known)
    text = f"Operators inside graphs are known for {matched:,} of {total:,} graph launches."
    if missing := total - matched - ambiguous:
        text += f" The kernels of {missing:,} launches match no graph capture."
    if ambiguous:
        text += f" The kernels of {ambiguous:,} launches match graph captures with different operators."
    return text


def _launched_nodes(events: Events) -> dict[_Nodes, list[Int]]:
    """Return the rows of the device events of each graph launch, grouped by their nodes.

    Events are sorted by graph node, or by start time if nodes have no ids.
    """
    is_launch = events.with_name(events.has_category(RUNTIMES), functools.partial(_matches, _GRAPH_LAUNCH))
    launch = launch_rows(events)
    work = np.flatnonzero(values_at(is_launch.astype(np.int32), launch) > 0)
    node = events.arg("graph node id", work)
    order = np.lexsort((events.start_ns[work], node, launch[work]))
    work = work[order]
    labels = events.name[work].astype(np.int64)
    is_copy = events.has_category(COPIES)[work]
    labels[is_copy] = -1 - events.category[work][is_copy].astype(np.int64)
    launched: dict[bytes, list[Int]] = {}
    bounds = np.flatnonzero(np.diff(launch[work], prepend=-1, append=-1))
    for first, end in itertools.pairwise(bounds.tolist()):
        launched.setdefault(labels[first:end].tobytes(), []).append(work[first:end])
    return {
        tuple(
            events.names[code] if code >= 0 else events.categories[-1 - code]
            for code in np.frombuffer(nodes, np.int64).tolist()
        ): launches
        for nodes, launches in launched.items()
    }


def _captures(path: Path, launched: dict[_Nodes, list[Int]], is_step: Callable[[str], bool]) -> Iterator[_Capture]:
    """Yield a trace's graph captures whose nodes match those of a graph launch.

    Raises:
        TraceError: The trace is corrupt, contains no graph capture, or its launches have no kernel names.
    """
    events = read_events(path, args=ARGS | {"kernel": TEXT})
    if events.check.problem is not None:
        raise TraceError(
            f"{path} is not a complete Chrome trace: {events.check.problem.removesuffix('.')}. Replace or remove it."
        )
    captured = [calls for begin, end in _capture_bounds(events) if len(calls := _captured_calls(events, begin, end))]
    if not captured:
        raise TraceError(
            f"{path} contains no graph capture (launch calls between cudaStreamBeginCapture or hipStreamBeginCapture "
            "and the end of the capture). Record a trace while the engine captures its graphs."
        )
    named = [(calls, nodes) for calls in captured if (nodes := _nodes(events, calls)) is not None]
    if not named:
        raise TraceError(
            f"{path}: the captured launch calls have no kernel names (arg kernel, which only AMD devices record), so "
            "they cannot be matched with the kernels of a graph launch."
        )
    for calls, nodes in named:
        if nodes in launched:
            yield _capture(events, calls, nodes, is_step)


def _capture_bounds(events: Events) -> Iterator[tuple[int, int]]:
    """Yield the rows of the calls that start and end each capture. Captures without an end are skipped."""
    is_call = events.has_category(RUNTIMES)
    begins, ends = (
        np.flatnonzero(events.with_name(is_call, functools.partial(_matches, pattern))) for pattern in (_BEGIN, _END)
    )
    for begin, limit in itertools.pairwise([*begins.tolist(), events.complete]):
        index = int(ends.searchsorted(begin))
        if index < len(ends) and ends[index] < limit and events.track[ends[index]] == events.track[begin]:
            yield begin, int(ends[index])


def _matches(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.match(name) is not None


def _captured_calls(events: Events, begin: int, end: int) -> Int:
    """Return the rows of the calls that add nodes to a graph: launches and copies that ran no device work."""
    calls = begin + 1 + np.flatnonzero(events.has_category(RUNTIMES)[begin + 1 : end])
    kinds = {code: call_kind(events.names[code]) for code in np.unique(events.name[calls]).tolist()}
    adds_node = [kinds[code] in {CallKind.LAUNCH, CallKind.COPY} for code in events.name[calls].tolist()]
    calls = calls[np.array(adds_node, np.bool_)]
    work = np.flatnonzero(events.has_category(DEVICE_WORK))
    return calls[~np.isin(events.arg("correlation", calls), events.arg("correlation", work))]


def _nodes(events: Events, calls: Int) -> _Nodes | None:
    """Return the nodes that calls add to a graph, or ``None`` if a launch has no kernel name."""
    nodes = []
    for row, code in zip(calls.tolist(), events.arg("kernel", calls).tolist(), strict=True):
        name = events.names[events.name[row]]
        if call_kind(name) is CallKind.COPY:
            nodes.append("gpu_memset" if "memset" in name.lower() else "gpu_memcpy")
        elif code >= 0 and isinstance(kernel := json.loads(events.texts["kernel"][code]), str):
            nodes.append(shortened(kernel))
        else:
            return None
    return tuple(nodes)


def _capture(events: Events, calls: Int, nodes: _Nodes, is_step: Callable[[str], bool]) -> _Capture:
    """Return a capture that contains only its calls and the operators and Python frames around them."""
    is_owner = events.has_category({OPERATOR, PYTHON})
    is_kept = np.zeros(events.complete, np.bool_)
    around = calls
    while len(around):
        is_kept[around] = True
        around = np.unique(events.parent[around])
        around = around[around >= 0]
    is_call = np.zeros(events.complete, np.bool_)
    is_call[calls] = True
    rows = np.flatnonzero(is_kept & (is_owner | is_call))
    kept = events.selected(rows, _NODE_ARGS)
    calls = rows.searchsorted(calls)
    names = Attribution(kept, is_step)
    module, paths = names.module_paths
    operator = names.operator[calls]
    columns = [_names(kept, operator), [paths[code] if code >= 0 else None for code in module[calls].tolist()]]
    columns.append(_names(kept, names.frame[calls]))
    inputs = []
    for key in _INPUTS:
        codes = np.where(operator >= 0, kept.arg(key, operator), -1).tolist()
        inputs.append([kept.texts[key][code] if code >= 0 else None for code in codes])
    return _Capture(nodes, kept, calls, tuple(zip(*columns, strict=True)), tuple(zip(*inputs, strict=True)))


def _names(events: Events, rows: Rows) -> list[str | None]:
    return [events.names[events.name[row]] if row >= 0 else None for row in rows.tolist()]


def _common(one: _Capture, other: _Capture) -> _Capture | None:
    """Return the attributes shared by two captures with the same nodes, or ``None`` if their operators differ."""
    if one.owners != other.owners:
        return None
    if one.inputs == other.inputs:
        return one
    events = one.events.selected(np.arange(one.events.complete), [key for key in _NODE_ARGS if key not in _INPUTS])
    return attrs.evolve(one, events=events, inputs=())
