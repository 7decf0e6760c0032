"""Divides the time on the critical path by performance cause and place."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.contexts import counts_inside
from profdeck_traces.account.gain import Replay
from profdeck_traces.account.model import CauseTime
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.recording import RecordingPath
from profdeck_traces.account.row_kinds import SYNCS, RowKind
from profdeck_traces.account.walk import Path
from profdeck_traces.attribution.dtypes import torch_dtype
from profdeck_traces.attribution.frames import is_user_frame
from profdeck_traces.attribution.rows import Attribution, values_at
from profdeck_traces.reading.columns import PYTHON
from profdeck_traces.reading.events import Mask
from profdeck_traces.reading.intervals import Int, parents

DATA_LOADING, VALIDATION, OUTPUT, CHECKPOINT = "data-loading", "validation", "output", "checkpoint"
COMPILATION, GARBAGE_COLLECTION, ALLOCATION = "compilation", "garbage-collection", "allocation"
PROFILER, COMMUNICATION, WAITING = "profiler", "exposed-communication", "waiting"
FLOAT64, SINGLE_VALUES, LAYOUT, LOOP = "float64", "single-values", "layout-copies", "small-operators"
PAGEABLE, PYTHON_CODE, BETWEEN, SYNCHRONISATION = "pageable-copies", "python-code", "between", "synchronisation"

CAUSES = (
    DATA_LOADING, VALIDATION, OUTPUT, CHECKPOINT, COMPILATION, GARBAGE_COLLECTION, ALLOCATION, PROFILER, COMMUNICATION,
    WAITING, FLOAT64, SINGLE_VALUES, LAYOUT, LOOP, PAGEABLE, PYTHON_CODE, BETWEEN, SYNCHRONISATION,
)  # fmt: skip
"""Causes, in the order of their codes."""

_OF_KIND = {
    OwnerKind.DATA_LOADING: DATA_LOADING,
    OwnerKind.VALIDATION: VALIDATION,
    OwnerKind.OUTPUT: OUTPUT,
    OwnerKind.CHECKPOINT: CHECKPOINT,
    OwnerKind.COMPILATION: COMPILATION,
    OwnerKind.GARBAGE_COLLECTION: GARBAGE_COLLECTION,
    OwnerKind.ALLOCATION: ALLOCATION,
    OwnerKind.PROFILER: PROFILER,
    OwnerKind.COLLECTIVE: COMMUNICATION,
    OwnerKind.WAIT_FOR_THREAD: WAITING,
    OwnerKind.BETWEEN: BETWEEN,
}
"""Causes that are determined by the kind of owner."""
_BY_EVENT = (OwnerKind.OPERATOR, OwnerKind.PYTHON, OwnerKind.RUNTIME_CALL, OwnerKind.LAUNCH_LATENCY, OwnerKind.KERNEL,
             OwnerKind.COPY, OwnerKind.SYNCHRONISATION)  # fmt: skip
"""Kinds of owners whose cause depends on the event."""
_SINGLE_VALUE = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"})
_LAYOUT = frozenset({"aten::contiguous", "aten::clone", "aten::reshape", "aten::to"})
_PAGEABLE = re.compile("Pageable")
_TORCH_FRAME = re.compile(r"(?:.*/)?(?:torch|torch_npu|torch/\S+|profdeck\w*)/|<built-in|nn\.Module: ")
_OPTIMIZER = re.compile(r"Optimizer\.")
_MIN_LOOP, _MIN_LOOP_WITHOUT_FRAMES = 64, 512
_MIN_LOOP_SHARE = 0.2
_MAX_SMALL_NS = 100_000
_MIN_SHARE = 0.005
_MAX_GROUPS = 8
_MAX_STEPS = 1_000
_US = 1_000
_Rows = NDArray[np.int32]
_Codes = NDArray[np.uint8]


def causes_of(
    parts: Sequence[Path], recording: RecordingPath, names: Attribution, texts: Sequence[str], replay: Replay | None
) -> tuple[CauseTime, ...]:
    """Return the time of each cause and place on the path, longest first.

    Args:
        parts: The path of each step.
        recording: The critical path.
        names: Operators, modules and lines of the events.
        texts: Event names without addresses.
        replay: Replay for the gains, or ``None`` to omit them.
    """
    events, complete = names.events, names.events.complete
    head = _root_operators(names)
    label = _labels(names, recording.kinds, head)
    place = _places(names)
    code_of_kind = np.zeros(256, np.uint8)
    for kind, cause in _OF_KIND.items():
        code_of_kind[kind] = _code(cause)
    is_by_event = np.zeros(256, np.bool_)
    is_by_event[list(_BY_EVENT)] = True

    kind, row = np.concatenate([part.kind for part in parts]), np.concatenate([part.row for part in parts])
    time = np.concatenate([part.end - part.begin for part in parts])
    step = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    has_row = row >= 0
    code = np.where(is_by_event[kind] & has_row, label[np.maximum(row, 0)], code_of_kind[kind])
    where = np.where(has_row, place[np.maximum(row, 0)], -1)
    total_ns = int(time.sum())
    key = code.astype(np.int64) * (place.max(initial=-1) + 2) + where + 1
    keys, group = np.unique(key, return_inverse=True)
    times = np.bincount(group, weights=time, minlength=len(keys))
    found: list[CauseTime] = []
    for number in np.argsort(-times, kind="stable").tolist():
        members = np.flatnonzero(group == number)
        cause = CAUSES[int(code[members[0]]) - 1] if code[members[0]] else None
        if times[number] < _MIN_SHARE * total_ns:
            break
        if cause is None:
            continue
        rows, weights = row[members], time[members]
        heads = np.where(rows >= 0, values_at(head, rows), -1)
        main, calls = _main(heads, values_at(events.name, heads), weights)
        one = CauseTime(
            cause=cause,
            name=texts[main] if main >= 0 else None,
            calls=calls,
            line=_text(texts, values_at(events.name, values_at(names.frame, rows)), weights),
            module=_text(names.module_paths[1], values_at(names.module_paths[0], rows), weights),
            annotation=_text(texts, values_at(events.name, values_at(names.annotation, rows)), weights),
            time_us=int(weights.sum()) / _US,
            steps_us=_steps_us(step[members], weights, len(parts)),
        )
        if replay is not None and len(found) < _MAX_GROUPS:
            is_place = np.append(place, -1) == where[members[0]]
            if code_of_kind[kind[members[0]]]:
                gain = replay.gain_of([kind for kind, of_kind in _OF_KIND.items() if of_kind == cause], is_place)
            else:
                gain = replay.gain_of(_BY_EVENT, is_place & (np.append(label, 0) == _code(cause)))
            if gain is not None and cause != WAITING:
                one = attrs.evolve(one, gain_us=gain.saved_ns / _US, next_limit=gain.limit.label)
        found.append(one)
    if replay is not None:
        found += _synchronisations(parts, recording, names, texts, replay, complete)
    return tuple(sorted(found, key=lambda one: -one.time_us))


def _synchronisations(  # noqa: PLR0913, PLR0917 - one parameter per kind of input
    parts: Sequence[Path],
    recording: RecordingPath,
    names: Attribution,
    texts: Sequence[str],
    replay: Replay,
    complete: int,
) -> list[CauseTime]:
    """Return the synchronisations of each place, with the time that the steps would save without the waits."""
    events = names.events
    begin, end = int(parts[0].begin[0]), int(parts[-1].end[-1])
    is_sync = np.isin(recording.kinds, (*SYNCS, RowKind.COPY_CALL))
    is_sync &= (events.start_ns >= begin) & (events.end_ns <= end)
    rows = np.flatnonzero(is_sync)
    if not len(rows) or not len(recording.work.rows):
        return []
    place = _places(names)[rows]
    found = []
    for where in np.unique(place).tolist():
        members = rows[place == where]
        mask = np.zeros(complete + 1, np.bool_)
        mask[members] = True
        weights = events.duration_ns[members]
        if weights.sum() < _MIN_SHARE * (end - begin) or len(found) >= _MAX_GROUPS:
            continue
        gain = replay.gain_without_waiting(mask)
        if gain is None:
            return []
        main, calls = _main(members, events.name[members], weights)
        operator = _text(texts, values_at(events.name, values_at(names.operator, members)), weights)
        found.append(
            CauseTime(
                cause=SYNCHRONISATION,
                name=operator or texts[main],
                calls=calls,
                line=_text(texts, values_at(events.name, values_at(names.frame, members)), weights),
                module=None,
                annotation=_text(texts, values_at(events.name, values_at(names.annotation, members)), weights),
                time_us=int(weights.sum()) / _US,
                gain_us=gain.saved_ns / _US,
                next_limit=gain.limit.label,
            )
        )
    return found


def _code(cause: str) -> int:
    return CAUSES.index(cause) + 1


def _root_operators(names: Attribution) -> _Rows:
    """Return the outermost operator around each event, or the event itself outside operators."""
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
    """Return the place of each event as a name code: its user function, otherwise its annotation; -1 if unknown."""
    name = names.events.name
    frame = values_at(name, names.frame)
    return np.where(frame >= 0, frame, values_at(name, names.annotation))


def _labels(names: Attribution, kinds: _Codes, head: _Rows) -> _Codes:
    """Return the code of the cause of each event, or 0."""
    events = names.events
    label = np.zeros(events.complete, np.uint8)
    is_python = events.has_category({PYTHON})
    if names.has_frames:
        label[_python_code(names, is_python)] = _code(PYTHON_CODE)
    root_name = events.name[head]
    is_operator = names.operator >= 0
    for cause, roots in ((LAYOUT, _LAYOUT), (SINGLE_VALUES, _SINGLE_VALUE)):
        is_root = np.array([name in roots for name in events.names], np.bool_)
        label[is_operator & is_root[root_name]] = _code(cause)
    label[_loops(names, head, root_name, is_python)] = _code(LOOP)
    label[values_at(_is_float64(names).astype(np.int32), names.operator) > 0] = _code(FLOAT64)
    is_copy = kinds == RowKind.COPY
    label[events.with_name(is_copy, lambda name: _PAGEABLE.search(name) is not None)] = _code(PAGEABLE)
    return label


def _is_float64(names: Attribution) -> Mask:
    """Return a mask of the operators with a float64 tensor that is not a scalar."""
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
    return is_float64


def _has_float64(types: str, dims: str) -> bool:
    try:
        pairs = list(zip(json.loads(types), json.loads(dims), strict=False))
    except ValueError:  # shortened by the profiler
        return False
    return any(isinstance(of, str) and torch_dtype(of) == "float64" and bool(shape) for of, shape in pairs)


def _python_code(names: Attribution, is_python: Mask) -> Mask:
    """Return a mask of the frames that run Python code of the user, or of libraries other than torch.

    This is the own time of user functions, and of all functions that call no operator.
    """
    events = names.events
    rows = np.flatnonzero(is_python)
    is_user = events.with_name(is_python, is_user_frame)
    is_builtin = events.with_name(is_python, lambda name: name.startswith("<built-in"))
    is_work = ~is_python & ~events.has_category({"user_annotation"})
    is_pure = np.zeros(events.complete, np.bool_)
    is_pure[rows] = counts_inside(events, rows, is_work) == 0
    caller = values_at(events.parent, np.arange(events.complete))
    # Built-in functions belong to the caller, such as a sort of torch's or of the user's list.
    other = events.with_name(is_python, lambda name: _TORCH_FRAME.match(name) is None)
    by_user = is_builtin & (values_at(is_user.astype(np.int32), caller) > 0)
    by_other = is_builtin & (values_at((other & is_pure).astype(np.int32), caller) > 0)
    result: Mask = is_user | by_user | (other & is_pure) | by_other
    return result


def _loops(names: Attribution, head: _Rows, root_name: NDArray[np.int32], is_python: Mask) -> Mask:
    """Return a mask of the events in Python loops over small operators.

    A loop is a call of a user function in which the same operator is called at least 64 times. Without frames, it is an
    annotation with 512 calls. Optimizers are excluded, because their loops are torch's.
    """
    events = names.events
    rows = np.flatnonzero(names.is_operator)
    roots = rows[head[rows] == rows]
    is_loop = np.zeros(events.complete, np.bool_)
    around = names.frame if names.has_frames else names.annotation
    is_optimizer = events.with_name(np.ones(events.complete, np.bool_), lambda name: _OPTIMIZER.match(name) is not None)
    outside = values_at(is_optimizer.astype(np.int32), names.annotation[roots]) <= 0
    roots = roots[outside & (events.duration_ns[roots] < _MAX_SMALL_NS)]
    if not len(roots):
        return is_loop
    function = around[roots].astype(np.int64)
    key = (function + 1) * len(events.names) + events.name[roots]
    _, index, count = np.unique(key, return_inverse=True, return_counts=True)
    repeated = count[index] >= (_MIN_LOOP if names.has_frames else _MIN_LOOP_WITHOUT_FRAMES)
    if not repeated.any():
        return is_loop
    in_loop = np.zeros(events.complete, np.bool_)
    in_loop[roots[repeated]] = True
    is_loop |= in_loop[head]
    if names.has_frames:
        # In a function that mostly runs the loop, its own time and its other small operators belong to the loop.
        functions = np.unique(function[repeated])
        functions = functions[functions >= 0]
        looped_ns = np.bincount(function[repeated], weights=events.duration_ns[roots[repeated]], minlength=1)
        mostly = functions[looped_ns[functions] > _MIN_LOOP_SHARE * events.duration_ns[functions]]
        is_mostly = np.zeros(events.complete, np.bool_)
        is_mostly[mostly] = True
        is_loop |= values_at(is_mostly.astype(np.int32), around) > 0
    return is_loop


def _main(rows: NDArray[np.integer], codes: NDArray[np.integer], weights: Int) -> tuple[int, int]:
    """Return the name code with the most time, or -1, and the number of its calls."""
    used = codes >= 0
    if not used.any():
        return -1, 0
    values, index = np.unique(codes[used], return_inverse=True)
    main = int(values[np.bincount(index, weights=weights[used]).argmax()])
    return main, len(np.unique(rows[codes == main]))


def _text(texts: Sequence[str], codes: NDArray[np.integer], weights: Int) -> str | None:
    """Return the text with the most time; ``None`` if most time has no text."""
    values, index = np.unique(codes, return_inverse=True)
    main = int(values[np.bincount(index, weights=weights).argmax()]) if len(codes) else -1
    return texts[main] if main >= 0 else None


def _steps_us(step: Int, weights: Int, steps: int) -> tuple[float, ...]:
    if steps > _MAX_STEPS:
        return ()
    return tuple((np.bincount(step, weights=weights, minlength=steps) / _US).tolist())


def step_times(parts: Sequence[Path]) -> tuple[float, ...]:
    """Return the duration of each step in microseconds, or nothing for more than 1,000 steps."""
    return tuple(int((part.end - part.begin).sum()) / _US for part in parts) if len(parts) <= _MAX_STEPS else ()
