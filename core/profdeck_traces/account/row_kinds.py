"""Classification of a trace's events for the account."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.reading.columns import ANNOTATION, DEVICE_CATEGORIES, DEVICE_PROCESSES, OPERATOR, RUNTIMES
from profdeck_traces.reading.events import Events


class RowKind(IntEnum):
    """Kind of an event. The order groups annotations, calls of the host, and device work."""

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
"""Owner of the time of an event that is the innermost of its thread or stream."""

_LOADING = re.compile(
    r"^enumerate\(DataLoader\)|utils/data/dataloader\.py\(\d+\): __next__|data_loading|dataloader.*next", re.IGNORECASE
)
_CHECKPOINT = re.compile(
    r"torch/serialization\.py\(\d+\): save|distributed/checkpoint|checkpoint.*save|save_checkpoint", re.IGNORECASE
)
# `run_backward` waits for the threads of autograd.
_WAITING_FRAME = re.compile(
    r"run_backward of|built-in method (acquire|__enter__) of .*[lL]ock"
    r"|built-in (function|method) (sleep|poll|select|wait)\b"
    r"|method '(acquire|recv|recv_into|poll|wait)'|selectors\.py|connection\.py.*(wait|_poll|poll|recv)"
    r"|threading\.py\(\d+\): (wait|join)|queue\.py\(\d+\): get|SemLock"
)
_HOST_COLLECTIVE = re.compile(r"^(gloo|nccl|mpi|ucc|xccl|hccl):")
_GC_FRAME = "Python GC"
# CUDA, HIP, Level Zero and AscendCL share these words. The first match decides.
_CALLS = (
    (RowKind.STREAM_SYNC, re.compile(r"(Stream|CommandQueue|CommandList)\w*Synchronize|SynchronizeStream")),
    (RowKind.EVENT_SYNC, re.compile(r"(Event|Fence)\w*Synchronize|SynchronizeEvent")),
    (RowKind.DEVICE_SYNC, re.compile(r"Synchronize")),
    (RowKind.LAUNCH, re.compile(r"[Ll]aunch")),
    (RowKind.COPY_CALL, re.compile(r"[Mm]emcpy|[Mm]emset|MemoryCopy|MemoryFill")),
    (RowKind.FREE, re.compile(r"Free")),
    (RowKind.ALLOCATION, re.compile(r"[Mm]alloc|Host(Alloc|Register|Unregister)|Mem(Alloc|Create|Release|Map|Unmap)")),
)
_RUNTIME_CATEGORIES = RUNTIMES | {"enqueue", "dequeue"}


def row_kinds(
    events: Events, is_step: Callable[[str], bool], is_collective: Callable[[str], bool]
) -> NDArray[np.uint8]:
    """Return the `RowKind` of each complete event.

    Args:
        events: The trace.
        is_step: Return whether a name is the name of a step. Such operators are annotations.
        is_collective: Return whether the name of a kernel is the name of a collective.
    """
    classify: dict[str, Callable[[str], RowKind]] = {
        ANNOTATION: _annotation,
        OPERATOR: lambda name: RowKind.ANNOTATION if is_step(name) else _operator(name),
        "python_function": _frame,
        # The collector's own category (`record_python_gc_info`) exists besides the frame of other versions of torch.
        "python_gc": lambda _name: RowKind.GC_FRAME,
        "overhead": lambda _name: RowKind.OVERHEAD,
        **dict.fromkeys(_RUNTIME_CATEGORIES, _call),
        **dict.fromkeys(
            DEVICE_CATEGORIES | DEVICE_PROCESSES,
            lambda name: RowKind.COLLECTIVE if is_collective(name) else RowKind.KERNEL,
        ),
        "gpu_memcpy": lambda _name: RowKind.COPY,
        "gpu_memset": lambda _name: RowKind.COPY,
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
    if _HOST_COLLECTIVE.match(name):
        return RowKind.HOST_COLLECTIVE
    if _LOADING.search(name):
        return RowKind.LOADING_ANNOTATION
    return RowKind.CHECKPOINT_ANNOTATION if _CHECKPOINT.search(name) else RowKind.ANNOTATION


def _operator(name: str) -> RowKind:
    return RowKind.LOADING_OPERATOR if name.startswith("enumerate(DataLoader)") else RowKind.OPERATOR


def _frame(name: str) -> RowKind:
    if name.startswith(_GC_FRAME):
        return RowKind.GC_FRAME
    if _LOADING.search(name):
        return RowKind.LOADING_FRAME
    if _CHECKPOINT.search(name):
        return RowKind.CHECKPOINT_FRAME
    return RowKind.WAITING_FRAME if _WAITING_FRAME.search(name) else RowKind.FRAME


def _call(name: str) -> RowKind:
    return next((kind for kind, pattern in _CALLS if pattern.search(name)), RowKind.CALL)
