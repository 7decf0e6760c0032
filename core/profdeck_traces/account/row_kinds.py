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
    is_data_loading,
    is_garbage_collection_frame,
    is_loader,
    is_waiting_frame,
)
from profdeck_traces.reading.events import Events


class RowKind(IntEnum):
    """Event kind. The order matters: annotations, host calls and device work each form a contiguous range."""

    OTHER = 0
    ANNOTATION = 1
    LOADING_ANNOTATION = 2
    CHECKPOINT_ANNOTATION = 3
    OPERATOR = 4
    LOADING_OPERATOR = 5
    FRAME = 6
    WAITING_FRAME = 7
    """A Python frame that is open only while its thread waits."""
    LOADING_FRAME = 8
    CHECKPOINT_FRAME = 9
    GC_FRAME = 10
    HOST_COLLECTIVE = 11
    OVERHEAD = 12
    CALL = 13
    LAUNCH = 14
    COPY_CALL = 15
    ALLOCATION = 16
    FREE = 17
    DEVICE_SYNC = 18
    STREAM_SYNC = 19
    EVENT_SYNC = 20
    KERNEL = 21
    COPY = 22
    COLLECTIVE = 23


LAST_ANNOTATION, LAST_CALL = RowKind.CHECKPOINT_ANNOTATION, RowKind.EVENT_SYNC
LOADING = (RowKind.LOADING_ANNOTATION, RowKind.LOADING_OPERATOR, RowKind.LOADING_FRAME)
CHECKPOINTS = (RowKind.CHECKPOINT_ANNOTATION, RowKind.CHECKPOINT_FRAME)
SYNCS = (RowKind.DEVICE_SYNC, RowKind.STREAM_SYNC, RowKind.EVENT_SYNC)

OWNERS = {
    RowKind.OPERATOR: OwnerKind.OPERATOR,
    RowKind.LOADING_OPERATOR: OwnerKind.OPERATOR,
    **dict.fromkeys(
        (RowKind.FRAME, RowKind.LOADING_FRAME, RowKind.CHECKPOINT_FRAME, RowKind.GC_FRAME), OwnerKind.PYTHON
    ),
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
    return kinds


def _annotation(name: str) -> RowKind:
    if is_backend_collective(name):
        return RowKind.HOST_COLLECTIVE
    if is_data_loading(name):
        return RowKind.LOADING_ANNOTATION
    return RowKind.CHECKPOINT_ANNOTATION if is_checkpoint(name) else RowKind.ANNOTATION


def _operator(name: str) -> RowKind:
    # torch 1.8 records data loader iterations as operators.
    return RowKind.LOADING_OPERATOR if is_loader(name) else RowKind.OPERATOR


def _frame(name: str) -> RowKind:
    if is_garbage_collection_frame(name):
        return RowKind.GC_FRAME
    if is_loader(name):
        return RowKind.LOADING_FRAME
    if is_checkpoint(name):
        return RowKind.CHECKPOINT_FRAME
    return RowKind.WAITING_FRAME if is_waiting_frame(name) else RowKind.FRAME
