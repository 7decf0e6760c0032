"""Events in patterns that span several calls: loops, small kernels, graph breaks and repeated forward passes."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.row_kinds import LAST_CALL, RowKind
from profdeck_traces.attribution.frames import is_user_frame, module_class
from profdeck_traces.attribution.rows import Attribution, values_at
from profdeck_traces.reading.columns import PYTHON
from profdeck_traces.reading.events import Mask
from profdeck_traces.reading.intervals import Int

_Rows = NDArray[np.int32]
_Codes = NDArray[np.uint8]
_OPTIMIZER = re.compile(r"Optimizer\.")
_MIN_LOOP, _MIN_LOOP_WITHOUT_FRAMES = 64, 512
_MIN_LOOP_SHARE = 0.2
_MAX_SMALL_NS = 100_000
MAX_SMALL_KERNEL_US = 10
_US = 1_000
_COMPILED = re.compile(r"Torch-Compiled Region\b")
# Frames that run the code of a compiled function: its wrapper, and the code after a graph break.
_DYNAMO_FRAME = re.compile(r"torch/_dynamo/eval_frame\.py\(\d+\): _fn|.*: torch_dynamo_resume_in_")
_MIN_REGIONS = 4
_MAX_RATIO = 1.5
_CHECKPOINT = re.compile(r"torch/utils/checkpoint\.py")


def is_compiled_region(name: str) -> bool:
    """Return whether an event is a call of code that torch.compile generated."""
    return _COMPILED.match(name) is not None


def loops(names: Attribution, kinds: _Codes, head: _Rows, functions: _Rows) -> Mask:
    """Return a mask of the events in Python loops over small operators.

    A loop is a call of a user function that calls the same operator at least 64 times. Without frames, a loop is an
    annotation or step with at least 512 such calls. Optimizers are excluded, because their loops are part of torch.
    `functions` is the result of `looping_functions`.
    """
    events = names.events
    rows = np.flatnonzero(names.is_operator)
    roots = rows[head[rows] == rows]
    is_loop = np.zeros(events.complete, np.bool_)
    is_optimizer = events.with_name(~names.is_operator, lambda name: _OPTIMIZER.match(name) is not None)
    in_optimizer = values_at(is_optimizer.astype(np.int32), names.annotation[roots]) > 0
    roots = roots[~in_optimizer]
    if not len(roots):
        return is_loop
    function = (functions if names.has_frames else names.annotation)[roots].astype(np.int64)
    if names.has_frames:
        roots, function = roots[function >= 0], function[function >= 0]
    if not names.has_frames:
        steps = np.sort(events.start_ns[(kinds == RowKind.ANNOTATION) & (names.annotation < 0)])
        function = np.where(function >= 0, function, events.complete + steps.searchsorted(events.start_ns[roots]))
    _, index, count = np.unique(
        function * len(events.names) + events.name[roots], return_inverse=True, return_counts=True
    )
    # Most calls must be short. A mean would be distorted by the few calls in which the thread was preempted.
    small = np.bincount(index, weights=events.duration_ns[roots] < _MAX_SMALL_NS)
    count = np.where(2 * small > count, count, 0)[index]
    least = _MIN_LOOP if names.has_frames else _MIN_LOOP_WITHOUT_FRAMES
    looping = np.unique(function[count >= least])
    is_loop[roots[(count >= _MIN_LOOP) & np.isin(function, looping)]] = True
    is_loop = is_loop[head]
    if names.has_frames:
        # If the loop takes a large share of a function, its self time and its other operators belong to the loop.
        is_used = count >= _MIN_LOOP
        looped_ns = np.zeros(events.complete)
        np.add.at(looped_ns, function[is_used], events.duration_ns[roots[is_used]])
        mostly = np.zeros(events.complete, np.bool_)
        mostly[looping[looped_ns[looping] > _MIN_LOOP_SHARE * events.duration_ns[looping]]] = True
        is_loop |= values_at(mostly.astype(np.int32), functions) > 0
    return is_loop


def small_kernels(names: Attribution, kinds: _Codes) -> Mask:
    """Return a mask of the kernels of less than 10 us, and of the operators that launch only such kernels.

    The mask excludes kernels of graphs, because a graph is launched as a whole.
    """
    events = names.events
    is_small = np.zeros(events.complete, np.bool_)
    kernels = np.flatnonzero((kinds == RowKind.KERNEL) & (names.launch >= 0))
    if not len(kernels):
        return is_small
    launch = names.launch[kernels]
    is_single = np.bincount(launch, minlength=events.complete)[launch] == 1
    small = is_single & (events.duration_ns[kernels] < MAX_SMALL_KERNEL_US * _US)
    is_small[kernels[small]] = True
    operators = np.zeros(events.complete + 1, np.bool_)
    operators[names.operator[kernels[small]]] = True
    operators[names.operator[kernels[~small]]] = False
    operators[-1] = False
    result: Mask = is_small | (operators[names.operator] & (kinds < RowKind.KERNEL))
    return result


def _steps(names: Attribution, kinds: _Codes) -> tuple[int, Int]:
    """Return the track of the steps, and their start times. The track is -1 if there are no steps."""
    events = names.events
    steps = np.flatnonzero((kinds == RowKind.ANNOTATION) & (names.annotation < 0))
    main = int(np.bincount(events.track[steps]).argmax()) if len(steps) else -1
    return main, np.sort(events.start_ns[steps[events.track[steps] == main]])


def callers(names: Attribution, kinds: _Codes) -> _Rows:
    """Return, for each call of a user function, the row of the calling user function in the same step, or -1.

    A function that an ``nn.Module`` calls has no caller. The value is -1 for other events.
    """
    events = names.events
    is_python = events.has_category({PYTHON})
    is_user = events.with_name(is_python, is_user_frame)
    is_module = events.with_name(is_python, lambda name: module_class(name) is not None)
    outer = np.flatnonzero((kinds == RowKind.ANNOTATION) & (names.annotation < 0))
    while len(outer := np.unique(events.parent[outer])) and outer[-1] >= 0:
        outer = outer[outer >= 0]
        is_user[outer] = False
    caller = values_at(events.innermost(is_user | is_module), events.parent)
    caller[~is_user | (values_at(is_user.astype(np.int32), caller) <= 0)] = -1
    return caller


def main_callers(names: Attribution, caller: _Rows) -> dict[int, int]:
    """Return the caller of each user function as name codes: of several callers, the one with the most time.

    Args:
        names: Owners of all events in the trace.
        caller: The result of `callers`.
    """
    events = names.events
    rows = np.flatnonzero(caller >= 0)
    count = np.int64(len(events.names))
    pairs, pair = np.unique(events.name[rows] * count + events.name[caller[rows]], return_inverse=True)
    order = np.argsort(np.bincount(pair, weights=events.duration_ns[rows]), kind="stable") if len(pairs) else pair
    found = (divmod(of_pair, len(events.names)) for of_pair in pairs[order].tolist())
    return {name: of_name for name, of_name in found if name != of_name}


def looping_functions(names: Attribution, caller: _Rows) -> _Rows:
    """Return the row of each event's user function, or of its caller if that calls the function at least 64 times."""
    events = names.events
    rows = np.flatnonzero(caller >= 0)
    keys = caller[rows] * np.int64(len(events.names)) + events.name[rows]
    _, index, count = np.unique(keys, return_inverse=True, return_counts=True)
    function = np.arange(events.complete, dtype=np.int32)
    is_repeated = count[index] >= _MIN_LOOP
    function[rows[is_repeated]] = caller[rows[is_repeated]]
    return values_at(function, names.frame)


def between_compiled_regions(names: Attribution, kinds: _Codes) -> Mask:
    """Return a mask of the host events that a compiled function runs outside of its compiled regions.

    The mask covers only steps with at least four regions. It requires Python frames.
    """
    events = names.events
    is_host = (kinds >= RowKind.OPERATOR) & (kinds <= LAST_CALL)
    is_region = events.with_name((kinds > RowKind.OTHER) & (kinds <= LAST_CALL), is_compiled_region)
    main, starts = _steps(names, kinds)
    if not is_region.any() or main < 0:
        return np.zeros(events.complete, np.bool_)
    regions = np.bincount(starts.searchsorted(events.start_ns[is_region], side="right"), minlength=len(starts) + 1)
    is_dynamo = events.with_name(events.has_category({PYTHON}), lambda name: _DYNAMO_FRAME.match(name) is not None)
    inner = events.innermost(is_dynamo | is_region)
    result: Mask = is_host & (values_at(is_dynamo.astype(np.int32), inner) > 0)
    rows = np.flatnonzero(result)
    result[rows] = regions[starts.searchsorted(events.start_ns[rows], side="right")] >= _MIN_REGIONS
    return result


def repeated_forward(names: Attribution, kinds: _Codes) -> Mask:
    """Return a mask of the events in forward passes that repeat another one and whose result has no backward pass.

    A forward pass is a call of the outermost ``nn.Module``. Another call of the same instance in the same step and
    stage runs the same operators on the same shapes, and has a backward pass. Without shapes, both calls must take
    about the same time on the CPU.

    Calls without gradients count only inside a stage, because some algorithms need them, such as to compute old log
    probabilities. Activation checkpointing also repeats forward passes, and is excluded.
    """
    events = names.events
    found = np.zeros(events.complete, np.bool_)
    main, starts = _steps(names, kinds)
    is_on_cpu = not (kinds >= RowKind.KERNEL).any()
    has_shapes = len(events.args["Input Dims"]) > 0
    if main < 0 or not names.has_frames or not names.is_backward.any() or not (has_shapes or is_on_cpu):
        return found
    is_python = events.has_category({PYTHON})
    is_module = events.with_name(is_python, lambda name: module_class(name) is not None)
    is_checkpoint = events.with_name(is_python, lambda name: _CHECKPOINT.match(name) is not None)
    above = values_at(events.innermost(is_module | is_checkpoint), events.parent)
    calls = np.flatnonzero(is_module & (above < 0) & (events.track == main))
    is_used = np.zeros(events.complete, np.bool_)
    is_used[names.forward[names.forward >= 0]] = True
    has_graph = names.is_operator & (events.arg("Sequence number") >= 0)
    bounds = events.track.searchsorted([main, main + 1])
    ends = bounds[0] + events.start_ns[slice(*bounds)].searchsorted(events.end_ns[calls])
    end_of = dict(zip(calls.tolist(), ends.tolist(), strict=True))
    stage = values_at(names.annotation, calls).tolist()
    step = starts.searchsorted(events.start_ns[calls], side="right").tolist()
    groups: dict[tuple[int, int, int, bytes], list[int]] = {}
    for call, *key in zip(calls.tolist(), step, events.name[calls].tolist(), stage, strict=True):
        rows = np.arange(call, end_of[call])
        rows = rows[names.is_operator[rows]]
        operators = np.stack([events.name[rows], events.arg("Input Dims", rows)]).tobytes()
        groups.setdefault((*key, operators), []).append(call)
    repeats: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for (_, name, of_stage, _), same in groups.items():
        used = [call for call in same if is_used[call : end_of[call]].any()]
        unused = [call for call in same if of_stage >= 0 or has_graph[call : end_of[call]].any()]
        unused = [call for call in unused if call not in used] if used else []
        if unused:
            of_module = repeats.setdefault((name, events.name[of_stage] if of_stage >= 0 else -1), ([], []))
            of_module[0].extend(used)
            of_module[1].extend(unused)
    for used, unused in repeats.values():
        ratio = events.duration_ns[unused].min() / max(1, events.duration_ns[used].min())
        found[unused] = has_shapes or 1 / _MAX_RATIO < ratio < _MAX_RATIO
    return names.innermost(found) >= 0
