"""Classification of trace events for step accounts."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.reading.columns import (
    ANNOTATION,
    COPIES,
    DEVICE_WORK,
    OPERATOR,
    PROFILER_OVERHEAD,
    PYTHON,
    RUNTIMES,
    TASK_QUEUES,
)
from profdeck_traces.reading.event_names import (
    CallKind,
    call_kind,
    is_backend_collective,
    is_checkpoint,
    is_compilation,
    is_data_loading,
    is_external_wait,
    is_file_read,
    is_garbage_collection,
    is_garbage_collection_frame,
    is_loader,
    is_output_frame,
    is_subprocess_frame,
    is_validation,
    is_validation_frame,
    is_waiting_frame,
)
from profdeck_traces.reading.events import Events


class RowKind(IntEnum):
    """Event kind. The order matters: annotations, host calls and device work each form a contiguous range."""

    OTHER = 0
    ANNOTATION = 1
    LOADING_ANNOTATION = 2
    CHECKPOINT_ANNOTATION = 3
    COMPILATION_ANNOTATION = 4
    VALIDATION_ANNOTATION = 5
    GC_ANNOTATION = 6
    OPERATOR = 7
    LOADING_OPERATOR = 8
    ANOMALY_OPERATOR = 9
    FRAME = 10
    WAITING_FRAME = 11
    """A Python frame that is open only while its thread waits."""
    LOADING_FRAME = 12
    CHECKPOINT_FRAME = 13
    COMPILATION_FRAME = 14
    OUTPUT_FRAME = 15
    VALIDATION_FRAME = 16
    ANOMALY_FRAME = 17
    GC_FRAME = 18
    HOST_COLLECTIVE = 19
    OVERHEAD = 20
    CALL = 21
    LAUNCH = 22
    COPY_CALL = 23
    ALLOCATION = 24
    FREE = 25
    DEVICE_SYNC = 26
    STREAM_SYNC = 27
    EVENT_SYNC = 28
    KERNEL = 29
    COPY = 30
    COLLECTIVE = 31


LAST_ANNOTATION, LAST_CALL = RowKind.GC_ANNOTATION, RowKind.EVENT_SYNC
SYNCS = (RowKind.DEVICE_SYNC, RowKind.STREAM_SYNC, RowKind.EVENT_SYNC)

CONTEXTS = {
    OwnerKind.DATA_LOADING: (RowKind.LOADING_ANNOTATION, RowKind.LOADING_OPERATOR, RowKind.LOADING_FRAME),
    OwnerKind.VALIDATION: (RowKind.VALIDATION_ANNOTATION, RowKind.VALIDATION_FRAME),
    OwnerKind.OUTPUT: (RowKind.OUTPUT_FRAME,),
    OwnerKind.CHECKPOINT: (RowKind.CHECKPOINT_ANNOTATION, RowKind.CHECKPOINT_FRAME),
    OwnerKind.COMPILATION: (RowKind.COMPILATION_ANNOTATION, RowKind.COMPILATION_FRAME),
    OwnerKind.ANOMALY_DETECTION: (RowKind.ANOMALY_OPERATOR, RowKind.ANOMALY_FRAME),
    OwnerKind.GARBAGE_COLLECTION: (RowKind.GC_ANNOTATION, RowKind.GC_FRAME),
}
"""Owners of all time inside events of the given kinds. If such events are nested, the last matching entry wins."""

OWNERS = {
    RowKind.OPERATOR: OwnerKind.OPERATOR,
    RowKind.LOADING_OPERATOR: OwnerKind.OPERATOR,
    RowKind.ANOMALY_OPERATOR: OwnerKind.OPERATOR,
    **dict.fromkeys(map(RowKind, range(RowKind.FRAME, RowKind.HOST_COLLECTIVE)), OwnerKind.PYTHON),
    RowKind.WAITING_FRAME: OwnerKind.WAIT_FOR_THREAD,
    RowKind.HOST_COLLECTIVE: OwnerKind.COLLECTIVE,
    RowKind.OVERHEAD: OwnerKind.PROFILER,
    **dict.fromkeys((RowKind.CALL, RowKind.LAUNCH, RowKind.COPY_CALL), OwnerKind.RUNTIME_CALL),
    **dict.fromkeys((RowKind.ALLOCATION, RowKind.FREE), OwnerKind.ALLOCATION),
    **dict.fromkeys(SYNCS, OwnerKind.SYNCHRONISATION),
    RowKind.KERNEL: OwnerKind.KERNEL,
    RowKind.COPY: OwnerKind.COPY,
    RowKind.COLLECTIVE: OwnerKind.COLLECTIVE,
}
"""Owner of the time during which an event is the innermost one on its thread or stream."""

_CALLS = {
    CallKind.STREAM_SYNCHRONISATION: RowKind.STREAM_SYNC,
    CallKind.EVENT_SYNCHRONISATION: RowKind.EVENT_SYNC,
    CallKind.DEVICE_SYNCHRONISATION: RowKind.DEVICE_SYNC,
    CallKind.LAUNCH: RowKind.LAUNCH,
    CallKind.COPY: RowKind.COPY_CALL,
    CallKind.FREE: RowKind.FREE,
    CallKind.ALLOCATION: RowKind.ALLOCATION,
}


def row_kinds(
    events: Events, is_step: Callable[[str], bool], is_collective: Callable[[str], bool]
) -> NDArray[np.uint8]:
    """Return the `RowKind` of each complete event.

    Args:
        events: The trace.
        is_step: Returns whether a name is a step name. Operators with such a name are classified as annotations.
        is_collective: Returns whether a kernel name is the name of a collective.
    """
    classify: dict[str, Callable[[str], RowKind]] = {
        ANNOTATION: _annotation,
        OPERATOR: lambda name: RowKind.ANNOTATION if is_step(name) else _operator(name),
        PYTHON: _frame,
        # Category of events enabled by `record_python_gc_info`. Other torch versions record a frame instead.
        "python_gc": lambda _name: RowKind.GC_FRAME,
        PROFILER_OVERHEAD: lambda _name: RowKind.OVERHEAD,
        **dict.fromkeys(RUNTIMES | TASK_QUEUES, lambda name: _CALLS.get(call_kind(name), RowKind.CALL)),
        **dict.fromkeys(DEVICE_WORK, lambda name: RowKind.COLLECTIVE if is_collective(name) else RowKind.KERNEL),
        **dict.fromkeys(COPIES, lambda _name: RowKind.COPY),
    }
    kinds = np.zeros(events.complete, np.uint8)
    for code, category in enumerate(events.categories):
        if category not in classify:
            continue
        rows = np.flatnonzero(events.category == code)
        kind_of_name = np.zeros(len(events.names), np.uint8)
        names = np.flatnonzero(np.bincount(events.name[rows], minlength=len(events.names))).tolist()
        kind_of_name[names] = [classify[category](events.names[name]) for name in names]
        kinds[rows] = kind_of_name[events.name[rows]]
    # Reading a pipe of a child process waits for that process.
    is_read = events.with_name(kinds == RowKind.LOADING_FRAME, is_file_read)
    is_subprocess = events.with_name(kinds == RowKind.FRAME, is_subprocess_frame)
    kinds[is_read & (events.innermost(is_subprocess) >= 0)] = RowKind.WAITING_FRAME
    return kinds


_ANNOTATIONS = (
    (is_backend_collective, RowKind.HOST_COLLECTIVE),
    (is_data_loading, RowKind.LOADING_ANNOTATION),
    (is_compilation, RowKind.COMPILATION_ANNOTATION),
    (is_validation, RowKind.VALIDATION_ANNOTATION),
    (is_checkpoint, RowKind.CHECKPOINT_ANNOTATION),
    (is_garbage_collection, RowKind.GC_ANNOTATION),
)


def _annotation(name: str) -> RowKind:
    return next((kind for matches, kind in _ANNOTATIONS if matches(name)), RowKind.ANNOTATION)


def _operator(name: str) -> RowKind:
    # torch 1.8 records data loader iterations as operators. torch 2.13 also records torch.compile phases as operators.
    if is_compilation(name):
        return RowKind.COMPILATION_ANNOTATION
    return RowKind.LOADING_OPERATOR if is_loader(name) else RowKind.OPERATOR


_FRAMES = (
    (is_garbage_collection_frame, RowKind.GC_FRAME),
    (is_loader, RowKind.LOADING_FRAME),
    (is_file_read, RowKind.LOADING_FRAME),
    (is_checkpoint, RowKind.CHECKPOINT_FRAME),
    (is_compilation, RowKind.COMPILATION_FRAME),
    (is_output_frame, RowKind.OUTPUT_FRAME),
    (is_validation_frame, RowKind.VALIDATION_FRAME),
    (is_waiting_frame, RowKind.WAITING_FRAME),
    (is_external_wait, RowKind.WAITING_FRAME),
)


def _frame(name: str) -> RowKind:
    return next((kind for matches, kind in _FRAMES if matches(name)), RowKind.FRAME)
