"""Time on the critical path, divided by performance cause and place."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.contexts import counts_inside
from profdeck_traces.account.gain import Gain, Replay
from profdeck_traces.account.host_threads import INITIAL_NS, State
from profdeck_traces.account.model import CauseTime
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.row_kinds import CONTEXTS, LAST_CALL, SYNCS, RowKind
from profdeck_traces.account.step_patterns import (
    between_compiled_regions,
    callers,
    callers_of_models,
    looping_functions,
    loops,
    main_callers,
    models,
    outermost,
    repeated_forward,
    small_batches,
    small_kernels,
    step_rows,
)
from profdeck_traces.account.walk import Path
from profdeck_traces.account.windows import PathWindow
from profdeck_traces.attribution.dtypes import torch_dtype
from profdeck_traces.attribution.event_work import CountedCalls
from profdeck_traces.attribution.frames import is_user_frame
from profdeck_traces.attribution.rows import Attribution, values_at
from profdeck_traces.reading.columns import ANNOTATION, PROFILER_OVERHEAD, PYTHON
from profdeck_traces.reading.event_names import (
    is_checkpoint,
    is_checkpoint_load,
    is_event_loop_wait,
    is_external_wait,
    is_pageable_copy,
    is_profiler_frame,
    is_state_load,
    is_unpickling,
    is_validation_frame,
    is_worker_request,
    is_worker_wait,
)
from profdeck_traces.reading.events import Mask
from profdeck_traces.reading.intervals import Int, parents

DATA_LOADING, VALIDATION, OUTPUT, CHECKPOINT = "data-loading", "validation", "output", "checkpoint"
COMPILATION, GARBAGE_COLLECTION, ALLOCATION = "compilation", "garbage-collection", "allocation"
PROFILER, COMMUNICATION, WAITING = "profiler", "exposed-communication", "waiting"
FLOAT64, SINGLE_VALUES, LAYOUT, LOOP = "float64", "single-values", "layout-copies", "small-operators"
PYTHON_CODE, BETWEEN, SYNCHRONISATION = "python-code", "between", "synchronisation"
OTHER_THREAD, PAGEABLE, SMALL = "other-thread", "pageable-copies", "small-kernels"
GRAPH_BREAKS, REPEATED, CONTENTION = "graph-breaks", "repeated-forward", "gil-contention"
NEW_BUFFERS, DEEP_COPY, EXPOSED_COPIES = "new-buffers", "deep-copies", "exposed-copies"
INITIALISATION, UNPICKLING, OPEN_FUNCTION = "initialisation", "unpickling", "open-function"
ANOMALY_DETECTION, CHECKPOINT_LOAD, SMALL_BATCHES = "anomaly-detection", "checkpoint-load", "small-batches"

CAUSES = (
    DATA_LOADING, VALIDATION, OUTPUT, CHECKPOINT, COMPILATION, GARBAGE_COLLECTION, ALLOCATION, PROFILER, COMMUNICATION,
    WAITING, FLOAT64, SINGLE_VALUES, LAYOUT, LOOP, PYTHON_CODE, BETWEEN, SYNCHRONISATION, OTHER_THREAD,
    PAGEABLE, SMALL, GRAPH_BREAKS, REPEATED, CONTENTION, NEW_BUFFERS, DEEP_COPY, EXPOSED_COPIES,
    INITIALISATION, UNPICKLING, OPEN_FUNCTION, SMALL_BATCHES, ANOMALY_DETECTION,
)  # fmt: skip
"""Causes in the order of their codes."""

_OF_KIND = {
    OwnerKind.DATA_LOADING: DATA_LOADING,
    OwnerKind.VALIDATION: VALIDATION,
    OwnerKind.OUTPUT: OUTPUT,
    OwnerKind.CHECKPOINT: CHECKPOINT,
    OwnerKind.COMPILATION: COMPILATION,
    OwnerKind.GARBAGE_COLLECTION: GARBAGE_COLLECTION,
    OwnerKind.PROFILER: PROFILER,
    OwnerKind.COLLECTIVE: COMMUNICATION,
    OwnerKind.WAIT_FOR_THREAD: WAITING,
    OwnerKind.BETWEEN: BETWEEN,
    OwnerKind.ANOMALY_DETECTION: ANOMALY_DETECTION,
}
"""Causes that are determined by the kind of owner alone."""
_BY_EVENT = (OwnerKind.OPERATOR, OwnerKind.PYTHON, OwnerKind.RUNTIME_CALL, OwnerKind.ALLOCATION,
             OwnerKind.LAUNCH_LATENCY, OwnerKind.DEVICE_GAP, OwnerKind.KERNEL, OwnerKind.COPY,
             OwnerKind.SYNCHRONISATION)  # fmt: skip
"""Kinds of owners whose cause depends on the event. A device gap belongs to the event after it."""
_IN_COLLECTIVE = (*_BY_EVENT, OwnerKind.COLLECTIVE, OwnerKind.WAIT_FOR_THREAD)
"""Owner kinds of the time that host collectives take."""
_HOST_KINDS = [kind for kind in OwnerKind if kind.side == "host" and kind != OwnerKind.PROFILER]
_SINGLE_VALUE = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"})
_LAYOUT = frozenset({"aten::contiguous", "aten::clone", "aten::reshape", "aten::to"})
_FILLED = frozenset(
    f"aten::{prefix}{name}{suffix}"
    for name in ("zeros", "ones", "full")
    for prefix, suffix in (("", ""), ("", "_like"), ("new_", ""))
)
"""Operators that allocate a tensor and fill it with one value."""
_CONVERSION = re.compile(r"aten::(?:to|_to_copy|(?:log_)?softmax|sum|mean|prod|cumsum|cumprod|\w+_like|new_\w+)$")
"""Operators that only compute in float64 if their input or their result has this type."""
_TENSOR_LIST = "TensorList"
"""Input type of a list of tensors, whose data types are not recorded."""
_DEEP_COPY = re.compile(r"(?:^|/)copy\.py\(\d+\): deepcopy$")
_LAYOUT_KERNEL = re.compile(r"nchwtonhwc|nhwctonchw|nchw2nhwc|nhwc2nchw", re.IGNORECASE)
"""Kernels with which convolutions copy tensors to the layout they require."""
_HOST_COPY = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost")
_LOADING = re.compile(r"Module Loading|Function Loading")
"""Overhead records that describe the driver's work, not the profiler's."""
_DOUBLE = re.compile(r"dgemm|d884gemm|d16816gemm")
_TORCH_FRAME = re.compile(r"(?:.*/)?(?:torch|torch_npu|torch/\S+)/|<built-in|nn\.Module: ")
_ISSUES_COLLECTIVE = re.compile(
    r"c10d::|(?:.*/)?torch/distributed/(?:distributed_c10d|c10d_logger|_functional_collectives)\.py"
    r"|<built-in method wait of (?:pybind|PyCapsule|torch\._C\._distributed)"
)
"""Operators and functions that start a collective, wait for it, or convert Python objects for it."""
_COLLECTIVE_FUNCTION = re.compile(r"(?:.*/)?torch/distributed/(?:distributed_c10d|_functional_collectives)\.py")
_MIN_INITIAL_NS, _MAX_INITIAL_BUSY = 50_000_000, 0.1
_MIN_SHARE, _MIN_PLACE_SHARE, _MAX_MERGED_SHARE = 0.005, 0.1, 0.65
_MAX_GROUPS = 8
_MAX_AWAITED = 32
_MAX_MESSAGE_NS = 1_000_000
"""If a message from a DataLoader worker takes longer than this, the worker is busy."""
MAX_STEPS = 1_000
_BATCH = 1 << 16
"""Number of rows that are added together."""
_US = 1_000
_Rows = NDArray[np.int32]
_Codes = NDArray[np.uint8]


def _code(cause: str) -> int:
    return CAUSES.index(cause) + 1


_OF_WAITS = (_code(WAITING), _code(OTHER_THREAD))
_LOOPS = frozenset({_code(LOOP), _code(SMALL_BATCHES)})
_NO_GAIN = frozenset({_code(WAITING), _code(OPEN_FUNCTION)})
_HAS_PLACE = np.ones(len(CAUSES) + 1, np.bool_)
_HAS_PLACE[[
    _code(cause)
    for cause in (
        DATA_LOADING, VALIDATION, OUTPUT, CHECKPOINT, COMPILATION, GARBAGE_COLLECTION, ALLOCATION, PROFILER,
        COMMUNICATION, FLOAT64, SMALL, INITIALISATION, UNPICKLING, ANOMALY_DETECTION,
    )
]] = False  # fmt: skip
"""False for causes whose cure does not depend on the place. Their time is summed over all places."""
_IS_BY_EVENT = np.zeros(256, np.bool_)
_IS_BY_EVENT[list(_BY_EVENT)] = True
_CODE_OF_KIND = np.zeros(256, np.uint8)
_CODE_OF_KIND[list(_OF_KIND)] = [_code(cause) for cause in _OF_KIND.values()]
_OF_CODE = {_code(cause): [kind] for kind, cause in _OF_KIND.items()}
_WITH_WAITS = (_code(OUTPUT), _code(CHECKPOINT), _code(ANOMALY_DETECTION))
"""Codes of causes whose time includes waits for the device. For example, printing a tensor waits for its values."""


class PathCauses:
    """Causes of the time on the critical path, summed over the windows of a trace."""

    def __init__(
        self, names: Attribution, kinds: _Codes, texts: Sequence[str], calls: CountedCalls | None = None
    ) -> None:
        """Classify the events.

        Args:
            names: Operators, modules and lines of the events.
            kinds: `RowKind` of each event.
            texts: Event names without memory addresses.
            calls: Operator calls whose work is known.
        """
        self._names, self._texts = names, texts
        self._head = _root_operators(names)
        caller = callers(names, kinds)
        functions = looping_functions(names, caller)
        model = models(names)
        self._label = np.append(_labels(names, kinds, self._head, functions, model), np.uint8(0))
        self._frame, self._annotation, self._collective = _callers_of_collectives(names, kinds)
        self._in_collective = _in_collective(names, kinds)
        if self._in_collective is not None:
            self._label[self._in_collective] = _code(COMMUNICATION)
        self._place = np.append(_places(names), np.int32(-1))
        self._resumed = _resumed(names)
        in_loop = np.flatnonzero((self._label[:-1] == _code(LOOP)) & (functions >= 0))
        self._place[in_loop] = names.events.name[functions[in_loop]]
        in_model = np.flatnonzero(np.isin(self._label[:-1], (_code(REPEATED), _code(SMALL_BATCHES))))
        of_model = callers_of_models(names, model[in_model])
        self._place[in_model[of_model >= 0]] = names.events.name[of_model[of_model >= 0]]
        is_validation = names.events.with_name(names.events.has_category({PYTHON}), is_validation_frame)
        if is_validation.any():
            validation = outermost(names, is_validation)
            self._frame = np.where(validation >= 0, validation, self._frame)
        self._callers = main_callers(names, caller)
        received, unpickling = _received_batches(names)
        self._is_received, self._is_unpickling = np.append(received, False), np.append(unpickling, False)
        self._is_sync = np.isin(kinds, (*SYNCS, RowKind.COPY_CALL)) if (kinds >= RowKind.KERNEL).any() else None
        self._syncs = np.zeros(0, np.int32) if self._is_sync is None else np.flatnonzero(self._is_sync).astype(np.int32)
        self._syncs = self._syncs[np.argsort(names.events.start_ns[self._syncs], kind="stable")]
        self._sync_code = _sync_codes(names, kinds, self._syncs)
        self._is_wait = np.zeros(names.events.complete + 1, np.bool_)
        self._is_wait[self._syncs] = True
        self._sync_start = names.events.start_ns[self._syncs]
        self._sync_end = self._sync_start + names.events.duration_ns[self._syncs]
        self._latest_end = np.maximum.accumulate(self._sync_end)
        is_own = (kinds == RowKind.OVERHEAD) & names.events.has_category({PROFILER_OVERHEAD})
        is_own &= ~names.events.with_name(is_own, lambda name: _LOADING.search(name) is not None)
        is_host = (kinds >= RowKind.OPERATOR) & (kinds <= LAST_CALL) & ~is_own & (kinds != RowKind.OVERHEAD)
        is_own &= ~np.isin(names.events.track, np.unique(names.events.track[is_host]))
        self._overhead_rows = np.flatnonzero(is_own).astype(np.int32)
        self._counted_until: int | None = None
        self._groups: dict[_Key, _Group] = {}
        self._merged: dict[_Key, _Group] | None = None
        self._step_ns: list[int] = []
        self._step_flops: list[float] = []
        self._flops = None if calls is None or not len(calls.row) else _cumulative_flops(names, calls)

    def add(self, window: PathWindow) -> None:
        """Add the critical path of a window."""
        recording = window.recording
        batch = [*self._other_threads(window), *self._overheads(window), *self._open_functions(window)]
        count = 0
        host_ends = recording.borders.host_ends.tolist()
        for index, ((begin, end, path), is_used) in enumerate(
            zip(recording.parts(), window.is_used.tolist(), strict=True)
        ):
            if is_used and len(path):
                of_step = self._path_rows(path, window), self._synchronisations(begin, end)
                self._counted_until = end
                batch += of_step
                count += sum(len(rows.row) for rows in of_step)
                self._step_ns.append(end - begin)
                if self._flops is not None:
                    starts, flops = self._flops
                    # Use the host's times: it runs a step's operators before the step's device work ends.
                    first, last = starts.searchsorted(host_ends[index : index + 2])
                    self._step_flops.append(float(flops[last] - flops[first]))
                if count >= _BATCH:
                    self._add_rows(batch)
                    batch, count = [], 0
        self._add_rows(batch)

    def add_gains(self, replay: Replay, window: PathWindow) -> None:
        """Add the gains in a window to the largest groups."""
        rows = slice(None) if window.rows is None else np.append(window.rows, -1)
        place, label = self._place[rows], self._label[rows]
        for key in self._largest():
            group = self._places[key]
            is_place = np.isin(place, group.places) if _HAS_PLACE[key.cause] else np.ones(len(place), np.bool_)
            if key.cause == _code(SYNCHRONISATION):
                if self._is_sync is not None:
                    is_sync = is_place & np.append(self._is_sync, False)[rows]
                    # Removing the wait also removes operators that only read the value.
                    is_read = is_place & (label == _code(SINGLE_VALUES))
                    replay.add_gain_without_waits(group.gain, is_sync, _BY_EVENT, is_read)
            elif key.cause == _code(COMMUNICATION) and self._in_collective is not None:
                replay.add_gain_of(group.gain, _IN_COLLECTIVE, self._in_collective[rows])
            elif key.cause in _WITH_WAITS and (self._sync_code == key.cause).any():
                is_wait = np.zeros(len(self._label), np.bool_)
                is_wait[self._syncs[self._sync_code == key.cause]] = True
                replay.add_gain_without_waits(group.gain, is_wait[rows], _OF_CODE[key.cause], is_place)
            elif key.cause in {_code(CONTENTION), _code(OPEN_FUNCTION)} or (
                key.cause == _code(PROFILER) and len(self._overhead_rows)
            ):
                group.gain.is_known = False
            elif key.cause == _code(UNPICKLING):
                is_unpickling = self._is_unpickling[rows]
                replay.add_gain_of(group.gain, [OwnerKind.DATA_LOADING], is_unpickling)
            elif _OF_CODE.get(key.cause):
                replay.add_gain_of(group.gain, _OF_CODE[key.cause], is_place)
            else:
                replay.add_gain_of(group.gain, _BY_EVENT, is_place & (label == key.cause))

    def times(self, *, has_gains: bool) -> tuple[CauseTime, ...]:
        """Return the time of each cause and place, longest first."""
        with_gain = set(self._largest()) if has_gains else set()
        return tuple(self._cause_time(key, has_gain=key in with_gain) for key in self._significant())

    @property
    def steps_us(self) -> tuple[float, ...]:
        """Duration of each step. Empty if there are more than 1,000 steps."""
        return tuple(step / _US for step in self._step_ns) if len(self._step_ns) <= MAX_STEPS else ()

    @property
    def steps_flops(self) -> tuple[float, ...]:
        """FLOPs of the counted operators in each step. Empty if there are more than 1,000 steps."""
        return tuple(self._step_flops) if len(self._step_flops) <= MAX_STEPS else ()

    def _path_rows(self, path: Path, window: PathWindow) -> _StepRows:
        """Return the rows on the path of the next step that have a cause."""
        kind, row = path.kind, window.rows_of_trace(path.row)
        code = np.where(_IS_BY_EVENT[kind], self._label[row], _CODE_OF_KIND[kind])
        # By the time a batch is being received, the worker has finished loading it.
        is_received = (kind == OwnerKind.DATA_LOADING) & self._is_received[row]
        code[is_received] = np.where(self._is_unpickling[row[is_received]], _code(UNPICKLING), 0)
        code[(kind == OwnerKind.PROFILER) & (row < 0)] = 0  # switches between steps exist only in recordings
        if self._in_collective is not None:
            code[(kind == OwnerKind.WAIT_FOR_THREAD) & self._in_collective[row]] = _code(COMMUNICATION)
        code[self._is_wait[row] & np.isin(code, _WITH_WAITS)] = 0  # `_synchronisations` adds these
        members = np.flatnonzero(code)
        row, time = row[members], (path.end - path.begin)[members]
        threads, source = window.recording.threads, row.copy()
        on_other = np.flatnonzero(np.isin(code[members], _OF_WAITS) & (row >= 0))
        on_other = on_other[self._names.events.track[row[on_other]] != threads.main]
        if len(on_other) and threads.main in threads.first:
            first, last = threads.first[threads.main], threads.last[threads.main]
            segment = threads.begin[first : last + 1].searchsorted(path.end[members][on_other]) - 1
            source[on_other] = window.rows_of_trace(threads.row)[first + np.maximum(segment, 0)]
        waits = np.flatnonzero((code[members] == _code(WAITING)) & (source >= 0))
        source[waits] = self._resumed[source[waits]]
        return _StepRows(len(self._step_ns), code[members], row, time, source)

    def _synchronisations(self, begin: int, end: int) -> _StepRows:
        """Return the synchronisations that start in the next step, each with its cause.

        If the previous step isn't counted, also include its synchronisations that end after `begin`. Their time is
        counted from `begin`.
        """
        first, last = self._sync_start.searchsorted((begin, end)).tolist()
        members = np.arange(first, last)
        if self._counted_until != begin:
            earlier = np.arange(self._latest_end.searchsorted(begin, side="right"), first)
            members = np.append(earlier[self._sync_end[earlier] > begin], members)
        code = self._sync_code[members]
        time = self._sync_end[members] - np.maximum(self._sync_start[members], begin)
        return _StepRows(len(self._step_ns), code, self._syncs[members], time, self._syncs[members])

    def _other_threads(self, window: PathWindow) -> list[_StepRows]:
        """Return the Python functions that other threads run while the main thread also runs Python code.

        Each time is the function's overlap with the main thread's Python code on the critical path. Built-in functions
        are excluded, because they can release the GIL. Functions that were already running when the recording started
        are excluded, because they may be blocked.
        """
        recording, threads, events = window.recording, window.recording.threads, self._names.events
        tracks = np.unique(threads.other_runs.track).tolist()
        path = recording.path
        path_row = window.rows_of_trace(path.row)
        is_main = (path_row < 0) | (events.track[np.maximum(path_row, 0)] == threads.main)
        own = np.flatnonzero(np.isin(path.kind, (OwnerKind.PYTHON, OwnerKind.BETWEEN)) & is_main)
        if not tracks or not len(own):
            return []
        parts = zip(recording.parts(), window.is_used.tolist(), strict=True)
        used = [index for index, ((_, _, part), is_used) in enumerate(parts) if is_used and len(part)]
        segment = np.concatenate([np.arange(threads.first[track], threads.last[track]) for track in tracks])
        segment = segment[threads.state[segment] == State.FRAME]
        row = window.rows_of_trace(threads.row[segment])
        names, name = np.unique(events.name[row], return_inverse=True)
        is_python = ~np.array([events.names[code].startswith("<built-in") for code in names.tolist()], np.bool_)[name]
        is_python &= events.start_ns[row] >= int(events.start_ns.min()) + INITIAL_NS
        segment, row = segment[is_python], row[is_python]
        overlap = _overlap(np.stack([threads.begin[segment], threads.begin[segment + 1]]), *_path_time(path, own))
        step = recording.borders.times.searchsorted(threads.begin[segment], side="right") - 1
        code = np.full(len(row), _code(CONTENTION), np.uint8)
        rows = []
        for number, index in enumerate(used, len(self._step_ns)):
            of_step = np.flatnonzero((step == index) & (overlap > 0))
            rows.append(_StepRows(number, code[of_step], row[of_step], overlap[of_step], row[of_step]))
        return rows

    def _overheads(self, window: PathWindow) -> list[_StepRows]:
        """Return the profiler's work that Kineto doesn't record on a thread, such as requesting a buffer.

        This work delays the host call that runs at the same time. Only its overlap with host time on the path counts.
        """
        path, rows = window.recording.path, self._overhead_rows
        own = np.flatnonzero(np.isin(path.kind, _HOST_KINDS))
        if not len(rows) or not len(own):
            return []
        path_time = _path_time(path, own)
        rows = rows[self._names.events.start_ns[rows].argsort(kind="stable")]
        starts, ends = self._names.events.start_ns[rows], np.maximum.accumulate(self._names.events.end_ns[rows])
        starts = np.maximum(starts, np.append(starts[:1], ends[:-1]))  # records can overlap
        found = []
        number = len(self._step_ns)
        for (begin, end, part), is_used in zip(window.recording.parts(), window.is_used.tolist(), strict=True):
            if is_used and len(part):
                overlap = _overlap(np.clip(np.stack([starts, ends]), begin, end), *path_time)
                of_step = np.flatnonzero(overlap > 0)
                code = np.full(len(of_step), _code(PROFILER), np.uint8)
                found.append(_StepRows(number, code, rows[of_step], overlap[of_step], rows[of_step]))
                number += 1
        return found

    def _open_functions(self, window: PathWindow) -> list[_StepRows]:
        """Return the user functions that run on other threads for the entire recording and make no recorded call.

        Such a function either runs Python code or is blocked in a call that started before the recording.
        """
        recording, threads, events = window.recording, window.recording.threads, self._names.events
        tracks = [track for track in threads.first if track != threads.main]
        segment = np.concatenate(
            [np.zeros(0, np.int64)] + [np.arange(threads.first[t], threads.last[t]) for t in tracks]
        )
        segment = segment[(threads.state[segment] == State.WAITS) & (threads.row[segment] >= 0)]
        row = window.rows_of_trace(threads.row[segment])
        is_open = (self._names.frame[row] == row) & (events.start_ns[row] < int(events.start_ns.min()) + INITIAL_NS)
        segment, row = segment[is_open], row[is_open]
        rows = []
        number = len(self._step_ns)
        for (begin, end, part), is_used in zip(recording.parts(), window.is_used.tolist(), strict=True):
            if is_used and len(part):
                covers = (threads.begin[segment] <= begin) & (threads.begin[segment + 1] >= end)
                time = np.full(int(covers.sum()), end - begin, np.int64)
                code = np.full(len(time), _code(OPEN_FUNCTION), np.uint8)
                rows.append(_StepRows(number, code, row[covers], time, row[covers]))
                number += 1
        return rows

    def _add_rows(self, batch: Sequence[_StepRows]) -> None:
        """Add the time of the rows of some steps to their groups."""
        if not batch:
            return
        step = np.repeat([rows.step for rows in batch], [len(rows.row) for rows in batch])
        code, row, time, source = (np.concatenate(parts) for parts in list(zip(*batch, strict=True))[1:])
        at = np.where(code == _code(WAITING), source, row)
        place = np.where(_HAS_PLACE[code], self._place[at], -1)
        keys, index = np.unique(code * np.int64(len(self._texts) + 1) + place + 1, return_inverse=True)
        order = np.argsort(index, kind="stable")
        bounds = np.searchsorted(index[order], np.arange(len(keys) + 1)).tolist()
        for number, key in enumerate(keys.tolist()):
            members = order[bounds[number] : bounds[number + 1]]
            cause, of_place = divmod(key, len(self._texts) + 1)
            group = self._groups.setdefault(_Key(cause, of_place - 1), _Group(places=[of_place - 1]))
            columns = self._columns(row[members], at[members], source[members], cause)
            group.add(step[members], columns, time[members])

    def _columns(self, row: _Rows, at: _Rows, source: _Rows, cause: int) -> list[NDArray[np.integer]]:
        """Return the operator (row and name), module, annotation and frame of each event.

        Args:
            row: Row of each event.
            at: Row whose user function is returned.
            source: Row of the main thread whose annotation is returned.
            cause: Position in `CAUSES`, starting at 1.
        """
        names, name = self._names, self._names.events.name
        is_inner = cause in {_code(SYNCHRONISATION), _code(FLOAT64)}
        head = values_at(names.operator if is_inner else self._head, row)
        head = np.where(head >= 0, head, row)
        if cause == _code(WAITING) and len(names.events.track):
            # Report the other thread's function, not the built-in function that it calls.
            is_other = (row >= 0) & (source >= 0) & (names.events.track[row] != names.events.track[source])
            frame = values_at(names.frame, row)
            head = np.where(is_other & (frame >= 0), frame, head)
        if cause == _code(COMMUNICATION) and self._collective is not None:
            call = values_at(self._collective, row)
            head = np.where(call >= 0, call, head)
        of_head = values_at(name, head)
        if cause in _LOOPS:
            of_head[~names.is_operator[head]] = -1
        module = values_at(names.module_paths[0], row)
        return [
            head,
            of_head,
            module,
            values_at(name, values_at(self._annotation, source)),
            values_at(name, values_at(self._frame, at)),
        ]

    def _significant(self) -> list[_Key]:
        least_ns = _MIN_SHARE * sum(self._step_ns)
        keys = [key for key, group in self._places.items() if group.time_ns >= least_ns]
        return sorted(keys, key=lambda key: (-self._places[key].time_ns, key))

    @property
    def _places(self) -> dict[_Key, _Group]:
        """The groups, with functions that take less than 10 % of the time merged into their common caller."""
        if self._merged is None:
            self._merged = dict(self._groups)
            while _merge_into_callers(self._merged, self._callers, _MIN_PLACE_SHARE * sum(self._step_ns)):
                pass
        return self._merged

    def _largest(self) -> list[_Key]:
        return [key for key in self._significant() if key.cause not in _NO_GAIN][:_MAX_GROUPS]

    def _cause_time(self, key: _Key, *, has_gain: bool) -> CauseTime:
        group, texts = self._places[key], self._texts
        name = group.most_called() if key.cause in _LOOPS else group.main(0)
        cause = CAUSES[key.cause - 1]
        called = {texts[of]: of for of in group.calls if of >= 0} if cause == CHECKPOINT else {}
        if loads := [of for text, of in called.items() if is_checkpoint_load(text)]:
            name = loads[0]
            # Only the calls of the entire group show whether the steps also save checkpoints.
            if not any(map(is_checkpoint, called)):
                cause = CHECKPOINT_LOAD
                name = next((of for text, of in called.items() if is_state_load(text)), name)
        has_gain &= group.gain.is_known
        gain_ns = min(group.gain.saved_ns, group.time_ns, sum(self._step_ns))
        frame = key.place if key.place >= 0 and is_user_frame(texts[key.place]) else group.main(3)
        return CauseTime(
            cause=cause,
            name=None if name is None else texts[name],
            calls=group.calls[name] if name is not None else 0,
            module=None if (module := group.main(1)) is None else self._names.module_paths[1][module],
            annotation=None if (annotation := group.main(2)) is None else texts[annotation],
            line=None if frame is None else texts[frame],
            time_us=group.time_ns / _US,
            gain_us=gain_ns / _US if has_gain else None,
            next_limit=group.gain.limit.label if has_gain else None,
            steps_us=tuple(group.steps.get(step, 0) / _US for step in range(len(self._step_ns)))
            if len(self._step_ns) <= MAX_STEPS
            else (),
        )


class _StepRows(NamedTuple):
    """Rows of one step, and the cause and time of each."""

    step: int
    code: _Codes
    row: _Rows
    time: Int
    source: _Rows
    """The row itself. For a wait, the main thread's waiting call, or the coroutine that runs after the wait."""


class _Key(NamedTuple):
    cause: int
    """Position in `CAUSES`, starting at 1."""
    place: int
    """Name code of the user function or annotation; -1 if unknown or if the cause is not divided by place."""


@attrs.define(eq=False)
class _Group:
    """Sums for one cause and place."""

    places: list[int]
    """Name code of each place."""
    time_ns: int = 0
    steps: dict[int, int] = attrs.field(factory=dict)
    """Time in nanoseconds, by step index."""
    calls: Counter[int] = attrs.field(factory=Counter)
    """Number of calls, by name code."""
    columns: tuple[Counter[int], ...] = attrs.field(factory=lambda: tuple(Counter() for _ in range(4)))
    """Time by code, with one counter each for names, modules, annotations and frames."""
    gain: Gain = attrs.field(factory=Gain)

    def add(self, step: Int, columns: Sequence[NDArray[np.integer]], time: Int) -> None:
        """Add rows, sorted by step, of steps that have not been added."""
        self.time_ns += int(time.sum())
        first = np.flatnonzero(np.diff(step, prepend=-1))
        self.steps.update(zip(step[first].tolist(), np.add.reduceat(time, first).tolist(), strict=True))
        _, first = np.unique((step << 32) + columns[0], return_index=True)
        names, counts = np.unique(columns[1][first], return_counts=True)
        self.calls.update(dict(zip(names.tolist(), counts.tolist(), strict=True)))
        for counter, column in zip(self.columns, columns[1:], strict=True):
            codes, first, index = np.unique(column, return_index=True, return_inverse=True)
            times = np.bincount(index, weights=time)
            order = np.lexsort((codes, step[first]))  # of codes with the same time, the first one counts
            counter.update(dict(zip(codes[order].tolist(), times[order].tolist(), strict=True)))

    def merged(self, other: _Group) -> _Group:
        """Return the sum of both groups. The gain is not included."""
        return _Group(
            places=[*self.places, *other.places],
            time_ns=self.time_ns + other.time_ns,
            steps={step: self.steps.get(step, 0) + other.steps.get(step, 0) for step in {**self.steps, **other.steps}},
            calls=self.calls + other.calls,
            columns=tuple(of + more for of, more in zip(self.columns, other.columns, strict=True)),
        )

    def most_called(self) -> int | None:
        """Return the code of the most frequently called name, or ``None`` if there are no names."""
        return max((name for name in self.calls if name >= 0), key=lambda name: (self.calls[name], -name), default=None)

    def main(self, column: int) -> int | None:
        """Return the code with the most time in a column, or ``None`` if even more time has no code."""
        code, _ = self.columns[column].most_common(1)[0]
        return code if code >= 0 else None


def _merge_into_callers(groups: dict[_Key, _Group], callers: Mapping[int, int], limit_ns: float) -> bool:
    """Merge functions that take less than `limit_ns` into their callers. Return whether anything changed.

    A caller is skipped if it, or one of these functions, takes more than 65 % of their combined time.
    """
    functions: dict[_Key, list[_Key]] = {}
    for key, group in groups.items():
        is_small = bool(_HAS_PLACE[key.cause]) and group.time_ns < limit_ns
        if is_small and (caller := callers.get(key.place)) is not None:
            functions.setdefault(_Key(key.cause, caller), []).append(key)
    is_changed = False
    for parent, parts in functions.items():
        keys = [*parts, *([parent] if parent in groups else [])]
        times = [groups[key].time_ns for key in keys if key in groups]
        if len(times) == len(keys) and max(times) <= _MAX_MERGED_SHARE * sum(times):
            groups[parent] = functools.reduce(_Group.merged, [groups.pop(key) for key in keys])
            is_changed = True
    return is_changed


def _path_time(path: Path, segments: Int) -> tuple[Int, Int]:
    """Return the start and end times of path segments, and the total segment time before each of these times."""
    borders = np.stack([path.begin[segments], path.end[segments]], axis=1).ravel()
    return borders, np.cumsum(np.diff(borders, prepend=borders[0]) * (np.arange(len(borders)) % 2))


def _overlap(spans: Int, borders: Int, before: Int) -> Int:
    """Return how much each span overlaps with the segments from `_path_time`.

    Row 0 of `spans` holds the start times, row 1 the end times.
    """
    overlap: Int = np.diff(np.interp(spans, borders, before), axis=0)[0].astype(np.int64)
    return overlap


def _sync_codes(names: Attribution, kinds: _Codes, syncs: _Rows) -> _Codes:
    """Return the cause code of each synchronisation. Waits inside output or checkpoint code get that code's cause."""
    codes = np.full(len(syncs), _code(SYNCHRONISATION), np.uint8)
    for code in _WITH_WAITS:
        (kind,) = _OF_CODE[code]
        codes[names.events.innermost(np.isin(kinds, CONTEXTS[kind]))[syncs] >= 0] = code
    return codes


def _cumulative_flops(names: Attribution, calls: CountedCalls) -> tuple[Int, NDArray[np.float64]]:
    """Return the sorted start times of the calls, and the cumulative FLOPs before each call and after the last one."""
    starts = names.events.start_ns[calls.row]
    order = np.argsort(starts, kind="stable")
    return starts[order], np.append(0.0, np.cumsum(calls.flops()[order]))


def _root_operators(names: Attribution) -> _Rows:
    """Return the row of each event's outermost operator, or of the event itself if it is outside operators."""
    events = names.events
    rows = np.flatnonzero(names.is_operator)
    above = parents(events.track[rows], events.start_ns[rows], events.end_ns[rows])
    root = np.where(above >= 0, above, np.arange(len(rows), dtype=np.int32))
    while len(root) and (root[root] != root).any():
        root = root[root]
    of_operator = np.arange(events.complete, dtype=np.int32)
    of_operator[rows] = rows[root]
    operator = names.operator
    return np.where(operator >= 0, values_at(of_operator, operator), np.arange(events.complete, dtype=np.int32))


def _places(names: Attribution) -> _Rows:
    """Return the name code of each event's user function, or of its annotation if it has none, or -1."""
    name = names.events.name
    frame = values_at(name, names.frame)
    return np.where(frame >= 0, frame, values_at(name, names.annotation))


def _in_collective(names: Attribution, kinds: _Codes) -> Mask | None:
    """Return a mask of the collectives that ran on the host, and of the events that start or await them.

    The last element represents time without an event. Return ``None`` if the trace has no such collectives.
    """
    is_collective = kinds == RowKind.HOST_COLLECTIVE
    if not is_collective.any() or (kinds >= RowKind.KERNEL).any():
        return None
    events = names.events
    issues = events.with_name(kinds > RowKind.OTHER, lambda name: _ISSUES_COLLECTIVE.match(name) is not None)
    return np.append(is_collective | issues | (events.innermost(issues) >= 0), False)


def _callers_of_collectives(names: Attribution, kinds: _Codes) -> tuple[_Rows, _Rows, _Rows | None]:
    """Return each event's user function, annotation and torch.distributed call.

    Backend threads run the collectives on the host. Each is attributed to the function that the main thread was
    running when it started. If no collective ran on the host, the calls are ``None``.
    """
    frame, annotation, events = names.frame, names.annotation, names.events
    rows = np.flatnonzero(kinds == RowKind.HOST_COLLECTIVE)
    steps = events.track[step_rows(names, kinds)]
    if not len(rows) or not len(steps):
        return frame, annotation, None
    on_main = np.flatnonzero(events.track == np.bincount(steps).argmax())
    start_ns = events.start_ns[rows]
    # Rows of a track are sorted by start time, and outer events precede inner events.
    caller = events.start_ns[on_main].searchsorted(start_ns, side="right") - 1
    caller = np.where(caller >= 0, on_main[caller], -1)
    while (is_over := (caller >= 0) & (events.end_ns[caller] <= start_ns)).any():
        caller[is_over] = events.parent[caller[is_over]]
    is_python = events.has_category({PYTHON})
    is_annotation = events.has_category({ANNOTATION})
    is_annotation[step_rows(names, kinds)] = False
    is_user = events.with_name(is_python, is_user_frame)
    call = outermost(names, events.with_name(is_python, lambda name: _COLLECTIVE_FUNCTION.match(name) is not None))

    def with_callers(of_event: _Rows, of_caller: _Rows) -> _Rows:
        changed = of_event.copy()
        changed[rows] = np.where(caller >= 0, of_caller, of_event[rows])
        return changed

    return (
        with_callers(frame, np.where(is_user[caller], caller, values_at(frame, caller))),
        with_callers(annotation, np.where(is_annotation[caller], caller, values_at(annotation, caller))),
        with_callers(call, values_at(call, caller)),
    )


def _resumed(names: Attribution) -> _Rows:
    """Return the row of each event. For an event loop's wait, return the row of the coroutine that runs next.

    If this coroutine directly awaits other user coroutines, return the innermost one.
    """
    events = names.events
    rows = np.arange(events.complete, dtype=np.int32)
    is_python = events.has_category({PYTHON})
    waits = np.flatnonzero(events.with_name(is_python, is_event_loop_wait))
    if not len(waits):
        return rows
    is_user = events.with_name(is_python, is_user_frame)
    users = np.flatnonzero(is_user)
    following = users.searchsorted(waits)
    waits, following = waits[following < len(users)], following[following < len(users)]
    resumed = users[following]
    caller = names.frame[waits]
    end_ns = np.where(caller >= 0, events.end_ns[caller], np.iinfo(np.int64).max)
    in_loop = (events.track[resumed] == events.track[waits]) & (events.start_ns[resumed] < end_ns)
    waits, resumed = waits[in_loop], resumed[in_loop]
    for _ in range(_MAX_AWAITED):
        inner = np.minimum(resumed + 1, events.complete - 1)
        is_inner = is_user[inner] & (events.parent[inner] == resumed)
        if not is_inner.any():
            break
        resumed = np.where(is_inner, inner, resumed)
    rows[waits] = resumed
    return rows


def _labels(names: Attribution, kinds: _Codes, head: _Rows, functions: _Rows, model: _Rows) -> _Codes:
    """Return the cause code of each event, or 0 if it has no cause."""
    events = names.events
    label = np.zeros(events.complete, np.uint8)
    is_python = events.has_category({PYTHON})
    if names.has_frames:
        is_code = _python_code(names, is_python)
        label[is_code] = _code(PYTHON_CODE)
        steps = events.track[step_rows(names, kinds)]
        if len(steps):
            # The path only reaches another thread if the thread that runs the steps waits for it.
            label[is_code & (events.track != np.bincount(steps).argmax())] = _code(OTHER_THREAD)
    root_name = events.name[head]
    label[between_compiled_regions(names, kinds) & ((label == 0) | (label == _code(PYTHON_CODE)))] = _code(GRAPH_BREAKS)
    is_operator = names.operator >= 0
    for cause, roots in ((LAYOUT, _LAYOUT), (SINGLE_VALUES, _SINGLE_VALUE), (NEW_BUFFERS, _FILLED)):
        is_root = np.array([name in roots for name in events.names], np.bool_)
        label[is_operator & is_root[root_name]] = _code(cause)
    # Transfers between the host and a device are not layout copies.
    transfers = np.zeros(events.complete, np.bool_)
    transfers[head[kinds == RowKind.COPY_CALL]] = True
    label[transfers[head] & (label == _code(LAYOUT))] = 0
    is_device = kinds >= RowKind.KERNEL
    is_host_copy = events.with_name(kinds == RowKind.COPY, lambda name: _HOST_COPY.search(name) is not None)
    label[is_host_copy & (label == 0)] = _code(EXPOSED_COPIES)
    label[events.with_name(is_host_copy, is_pageable_copy) & (label == _code(EXPOSED_COPIES))] = _code(PAGEABLE)
    label[events.with_name(is_device, lambda name: _LAYOUT_KERNEL.search(name) is not None)] = _code(LAYOUT)
    if names.has_frames or not is_device.any():
        # A graph is launched by a single call, so a loop over its operators takes no time on the host.
        label[loops(names, kinds, head, functions) & (head < names.first_captured)] = _code(LOOP)
        is_small = small_batches(names, kinds, head, model) & (head < names.first_captured)
        label[is_small & np.isin(label, (0, _code(PYTHON_CODE)))] = _code(SMALL_BATCHES)
    is_copy = events.with_name(is_python, lambda name: _DEEP_COPY.search(name) is not None)
    label[(events.innermost(is_copy) >= 0) & ~is_device] = _code(DEEP_COPY)
    # Calls that free memory can wait for the device. This wait is included.
    label[np.isin(kinds, (RowKind.ALLOCATION, RowKind.FREE))] = _code(ALLOCATION)
    label[_initialisations(names, kinds)] = _code(INITIALISATION)
    label[small_kernels(names, kinds) & (label == 0)] = _code(SMALL)
    label[events.with_name(is_device, lambda name: _DOUBLE.search(name) is not None)] = _code(FLOAT64)
    in_float64 = values_at(_is_float64(names).astype(np.int32), names.operator) > 0
    # The data type does not affect how long the host takes to launch the work.
    label[in_float64 & (is_device | ~is_device.any())] = _code(FLOAT64)
    label[repeated_forward(names, kinds)] = _code(REPEATED)
    return label


def _initialisations(names: Attribution, kinds: _Codes) -> Mask:
    """Return a mask of the runtime calls in which the driver creates a context or loads code.

    These calls take at least 50 ms while the device is almost idle, so they can't be waiting for it.
    """
    events = names.events
    calls = (kinds >= RowKind.CALL) & (kinds <= LAST_CALL) & ~np.isin(kinds, SYNCS)
    rows = np.flatnonzero(calls & (events.duration_ns >= _MIN_INITIAL_NS))
    found = np.zeros(events.complete, np.bool_)
    if len(rows):
        work = np.flatnonzero(kinds >= RowKind.KERNEL)
        for row in rows.tolist():
            begin, end = int(events.start_ns[row]), int(events.end_ns[row])
            busy_ns = np.minimum(events.end_ns[work], end) - np.maximum(events.start_ns[work], begin)
            found[row] = busy_ns[busy_ns > 0].sum() < _MAX_INITIAL_BUSY * (end - begin)
    return found


def _received_batches(names: Attribution) -> tuple[Mask, Mask]:
    """Return two masks: events in which a DataLoader receives a batch from a worker, and events that unpickle it.

    The main process first waits for the batch and then unpickles it. To map shared memory, it exchanges messages with
    the worker. If it waits long for a message, the worker is busy, so the wait counts as loading.
    """
    events = names.events
    is_python = events.has_category({PYTHON})
    is_get = events.with_name(is_python, is_worker_wait)
    is_loads = events.with_name(is_python, is_unpickling)
    is_loads &= events.innermost(is_get) >= 0
    is_request = events.with_name(is_python, is_worker_request)
    is_wait = events.with_name(is_python, is_external_wait) & (events.duration_ns[: events.complete] > _MAX_MESSAGE_NS)
    return (events.innermost(is_loads | is_request) >= 0) & ~is_wait, is_loads


def _is_float64(names: Attribution) -> Mask:
    """Return a mask of the operators that have a non-scalar float64 tensor as input.

    An operator of ATen can compute in float64 without a float64 tensor of the job, such as to sample from a
    distribution. Operators inside it only count if it also has a float64 input, or returns a float64 tensor.
    """
    events = names.events
    rows = np.flatnonzero(names.is_operator)
    types, dims = events.arg("Input type", rows), events.arg("Input Dims", rows)
    with_type = np.array(["double" in text for text in events.texts["Input type"]], np.bool_)
    is_float64 = np.zeros(events.complete, np.bool_)
    if not with_type.any():
        return is_float64
    candidates = np.flatnonzero((types >= 0) & (dims >= 0) & with_type[types])
    pairs, index = np.unique(np.stack([types[candidates], dims[candidates]]), axis=1, return_inverse=True)
    matches = np.array(
        [_has_float64(events.texts["Input type"][of], events.texts["Input Dims"][shape]) for of, shape in pairs.T], bool
    )
    is_float64[rows[candidates[matches[index.ravel()]]]] = True
    is_aten = events.with_name(
        names.is_operator, lambda name: name.startswith("aten::") and _CONVERSION.match(name) is None
    )
    members = np.flatnonzero(is_float64)
    outer = outermost(names, is_aten)[members]
    members, outer = members[outer >= 0], outer[outer >= 0]
    codes, index = np.unique(events.arg("Input type", outer), return_inverse=True)
    texts = [events.texts["Input type"][code] if code >= 0 else "" for code in codes.tolist()]
    is_float64[members[np.array([_has_only_other_types(text) for text in texts], np.bool_)[index]]] = False
    return is_float64


def _has_float64(types: str, dims: str) -> bool:
    try:
        pairs = list(zip(json.loads(types), json.loads(dims), strict=False))
    except ValueError:  # truncated by the profiler
        return False
    return any(isinstance(of, str) and torch_dtype(of) == "float64" and bool(shape) for of, shape in pairs)


def _has_only_other_types(types: str) -> bool:
    """Return whether the inputs of an operator include tensors, but no float64 tensor."""
    try:
        inputs = json.loads(types) or ()
    except ValueError:  # missing, or truncated by the profiler
        return False
    dtypes = {torch_dtype(of) for of in inputs if isinstance(of, str)} - {None}
    return bool(dtypes) and "float64" not in dtypes and _TENSOR_LIST not in inputs


def _python_code(names: Attribution, is_python: Mask) -> Mask:
    """Return a mask of the frames that run Python code of the user or of libraries other than torch.

    The mask covers user functions, functions outside torch that run no operators, and the built-in functions that
    either of them calls. If an operator calls such a function, only user functions count.
    """
    events = names.events
    rows = np.flatnonzero(is_python)
    is_user = events.with_name(is_python, is_user_frame)
    is_builtin = events.with_name(is_python, lambda name: name.startswith("<built-in"))
    is_work = ~is_python & ~events.has_category({"user_annotation"})
    is_pure = np.zeros(events.complete, np.bool_)
    is_pure[rows] = counts_inside(events, rows, is_work) == 0
    caller = values_at(events.parent, np.arange(events.complete))
    # A built-in function belongs to its caller. For example, torch or user code can call sort.
    other = events.with_name(is_python, lambda name: _TORCH_FRAME.match(name) is None)
    by_user = is_builtin & (values_at(is_user.astype(np.int32), caller) > 0)
    by_other = is_builtin & (values_at((other & is_pure).astype(np.int32), caller) > 0)
    # profdeck calls functions of the user, such as stages, and functions of libraries, such as `open`.
    is_profiler = events.with_name(is_python, is_profiler_frame)
    called_from = events.innermost(is_user | is_profiler | names.is_operator)
    by_native = values_at((is_profiler | names.is_operator).astype(np.int32), called_from) > 0
    result: Mask = (is_user | by_user | (other & is_pure) | by_other) & ~by_native
    return result
