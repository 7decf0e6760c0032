"""Classification of functions by the events inside them: the profiler's own work, file reads and output."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.row_kinds import CONTEXTS, LAST_ANNOTATION, LAST_CALL, RowKind
from profdeck_traces.attribution.frames import is_user_frame, module_class
from profdeck_traces.reading.columns import OPERATOR, PYTHON
from profdeck_traces.reading.event_names import (
    is_checkpoint_load,
    is_dataset_frame,
    is_external_wait,
    is_file_read,
    is_profiler_frame,
    is_socket_call,
    is_stack_formatting,
    is_state_load,
)
from profdeck_traces.reading.events import Events, Mask
from profdeck_traces.reading.intervals import Int, parents

_COMPUTES = re.compile(r"Backward|aten::(?:\w*mm|bmm|convolution|\w*attention\w*)$|Optimizer\.step")
_EVALUATION = "autograd::engine::evaluate_function: "
_NAN_CHECK = frozenset({"aten::isnan", "aten::_is_any_true", "aten::item"})
"""Operators that anomaly detection uses to check gradients."""


def mark_profiler_frames(events: Events, kinds: NDArray[np.uint8]) -> None:
    """Mark the profiler's frames as overhead.

    If a frame runs no job code, the frames inside it are removed, so that its entire time is overhead. Job code means
    operators, runtime calls, modules and user functions. Garbage collections are kept.

    Args:
        events: The trace.
        kinds: `RowKind` of each row; changed in place.
    """
    is_python = events.has_category({PYTHON}) & (kinds != RowKind.OTHER)
    frames = np.flatnonzero(events.with_name(is_python, is_profiler_frame))
    if not len(frames):
        return
    runs_job = ~is_python & (kinds > LAST_ANNOTATION) & (kinds <= LAST_CALL) & (kinds != RowKind.GC_FRAME)
    runs_job |= events.with_name(is_python, lambda name: is_user_frame(name) or module_class(name) is not None)
    is_own = np.zeros(events.complete, np.bool_)
    is_own[frames[counts_inside(events, frames, runs_job) == 0]] = True
    inside = parents(events.track, events.start_ns, events.start_ns + events.duration_ns * is_own) >= 0
    kinds[frames] = RowKind.OVERHEAD
    kinds[inside & is_python & (kinds != RowKind.GC_FRAME)] = RowKind.OTHER


def mark_checkpoint_loads(events: Events, kinds: NDArray[np.uint8]) -> None:
    """Label functions that load a checkpoint.

    Files that a data loader or a data set reads contain data. Functions that load such files keep their kind. If the
    job saves no checkpoint, a ``load_state_dict`` that directly follows in the same function is also labelled: a job
    that keeps the loaded model in memory does not need it.

    Args:
        events: The trace.
        kinds: `RowKind` of each row; changed in place.
    """
    is_python = events.has_category({PYTHON}) & (kinds != RowKind.OTHER)
    is_load = events.with_name(is_python, is_checkpoint_load)
    loads_data = np.isin(kinds, CONTEXTS[OwnerKind.DATA_LOADING]) & ~events.with_name(is_python, is_file_read)
    loads_data |= events.with_name(is_python, is_dataset_frame)
    is_load &= events.innermost(loads_data) < 0
    saves = (kinds == RowKind.CHECKPOINT_FRAME).any()
    kinds[is_load] = RowKind.CHECKPOINT_FRAME
    if is_load.any() and not saves:
        calls = np.flatnonzero(is_python)
        calls = calls[np.argsort(events.parent[calls], kind="stable")]
        follows = (events.parent[calls[1:]] == events.parent[calls[:-1]]) & is_load[calls[:-1]]
        kinds[calls[1:][follows & events.with_name(is_python, is_state_load)[calls[1:]]]] = RowKind.CHECKPOINT_FRAME
    _mark_files_inside(events, kinds, RowKind.CHECKPOINT_FRAME)


def mark_anomaly_detection(events: Events, kinds: NDArray[np.uint8]) -> None:
    """Label the stack formatting and NaN checks of autograd's anomaly detection.

    Only anomaly detection formats the stack directly in an operator, or calls ``aten::_is_any_true`` directly in the
    evaluation of a backward function.

    Args:
        events: The trace.
        kinds: `RowKind` of each row; changed in place.
    """
    is_python = events.has_category({PYTHON}) & (kinds != RowKind.OTHER)
    is_operator = kinds == RowKind.OPERATOR
    is_evaluation = events.with_name(is_operator, lambda name: name.startswith(_EVALUATION))
    kinds[_called_by(events, events.with_name(is_python, is_stack_formatting), is_operator)] = RowKind.ANOMALY_FRAME
    in_evaluation = _called_by(events, is_operator, is_evaluation)
    if events.with_name(in_evaluation, lambda name: name == "aten::_is_any_true").any():
        kinds[events.with_name(in_evaluation, _NAN_CHECK.__contains__)] = RowKind.ANOMALY_OPERATOR
    _mark_files_inside(events, kinds, RowKind.ANOMALY_FRAME)


def _called_by(events: Events, selected: Mask, callers: Mask) -> Mask:
    """Return a mask of the selected events whose parent is one of the callers."""
    rows = np.flatnonzero(selected)
    parent = events.parent[rows]
    result = np.zeros(events.complete, np.bool_)
    result[rows[(parent >= 0) & callers[parent]]] = True
    return result


def _mark_files_inside(events: Events, kinds: NDArray[np.uint8], kind: RowKind) -> None:
    """Label reads and writes inside the given events as frames, because the caller does not access these files."""
    if (kinds == kind).any():
        inside = events.innermost(kinds == kind) >= 0
        kinds[inside & np.isin(kinds, (RowKind.LOADING_FRAME, RowKind.OUTPUT_FRAME))] = RowKind.FRAME


def mark_file_functions(events: Events, kinds: NDArray[np.uint8]) -> None:
    """Assign the kind of a file read or output to the user function that contains it.

    The time of such a function includes parsing or formatting. If it both reads and writes, the kind with more time
    counts. A function keeps its kind if it also runs modules, matrix products or the backward pass, uses a socket,
    waits for a process, or contains annotations.

    Args:
        events: The trace.
        kinds: `RowKind` of each row; changed in place.
    """
    is_file = np.isin(kinds, (RowKind.LOADING_FRAME, RowKind.OUTPUT_FRAME))
    rows = np.flatnonzero(is_file)
    if not len(rows):
        return
    is_python = events.has_category({PYTHON})
    is_socket = events.with_name(is_python, is_socket_call)
    if is_socket.any():
        # If a call to the built-in ``read`` contains a socket call, it receives a server reply and is not a file read.
        replies = rows[(counts_inside(events, rows, is_socket) > 0) & (kinds[rows] == RowKind.LOADING_FRAME)]
        replies = replies[is_builtin(events, replies)]
        kinds[replies] = RowKind.FRAME
        rows = np.setdiff1d(rows, replies)
    is_user = events.with_name(is_python, is_user_frame)
    around = events.innermost(is_user)[rows]
    functions, function = np.unique(around, return_inverse=True)
    is_read = kinds[rows] == RowKind.LOADING_FRAME
    read_ns, written_ns = (
        np.bincount(function, weights=events.duration_ns[rows] * of_kind) for of_kind in (is_read, ~is_read)
    )
    kind = np.where(read_ns > written_ns, RowKind.LOADING_FRAME, RowKind.OUTPUT_FRAME)[functions >= 0]
    functions = functions[functions >= 0].astype(np.int64)
    computes = events.with_name(is_python, lambda name: module_class(name) is not None)
    computes |= events.with_name(~is_python, lambda name: _COMPUTES.search(name) is not None)
    is_wait = events.with_name(is_python, is_external_wait)
    keeps = counts_inside(events, functions, computes | is_socket | is_wait) > 0
    is_step = kinds == RowKind.ANNOTATION
    keeps |= counts_inside(events, functions, is_step & ~events.has_category({OPERATOR})) > 0
    kinds[functions[~keeps]] = kind[~keeps]


def is_builtin(events: Events, rows: Int) -> Mask:
    """Return whether each event is a call to a built-in function."""
    return np.array([events.names[code].startswith("<built-in") for code in events.name[rows].tolist()], np.bool_)


def counts_inside(events: Events, rows: NDArray[np.integer[Any]], selected: Mask) -> Int:
    """Count the selected events that start inside each of the given events, on the same track."""
    before = np.append(0, np.cumsum(selected))
    ends = np.empty(len(rows), np.int64)
    tracks = events.track[rows]
    for track in np.unique(tracks).tolist():
        first, last = np.searchsorted(events.track, [track, track + 1])
        on_track = tracks == track
        ends[on_track] = first + np.searchsorted(events.start_ns[first:last], events.end_ns[rows[on_track]])
    counts: Int = before[np.maximum(ends, rows + 1)] - before[rows + 1]
    return counts
