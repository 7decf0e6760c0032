"""Time windows of a trace, defined by times, steps or engine iterations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import attrs
import numpy as np

from profdeck_traces.analysis.formatting import ranges
from profdeck_traces.analysis.step_names import GLOBAL_STEP, ITERATION, StepNames
from profdeck_traces.analysis.steps import StepWindows, TraceSteps, find_steps
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.progress import Progress
from profdeck_traces.inputs.artifact_kinds import chrome_trace, kind_of
from profdeck_traces.reading.columns import (
    DEVICE_ANNOTATION,
    Columns,
    CompleteEvent,
    columns_of,
    combined,
    concatenated,
)
from profdeck_traces.reading.integrity import TraceCheck
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.reading.trace import Trace
from profdeck_traces.writing.selection import Selection, TimeWindow

_STEP = re.compile(r"ProfilerStep#([0-9]{1,18})")
_NS_PER_S = 1e9


@attrs.frozen
class Extent:
    """Time range and categories of a trace."""

    begin_ns: int | None
    """Start of the earliest complete event, on the ``ts`` clock; ``None`` if there are no complete events."""
    duration_s: float
    """Time from the start of the earliest complete event to the end of the latest."""
    categories: tuple[str, ...]
    """Categories of all events, sorted."""
    check: TraceCheck

    @classmethod
    def of(cls, trace: Trace) -> Extent:
        """Return the extent of a trace that has already been read."""
        events = trace.events
        begin_ns = int(events.start_ns[0]) if len(events) else None
        duration_ns = 0 if begin_ns is None else int(events.end_ns.max()) - begin_ns
        raw = trace.raw
        codes = [] if raw is None else np.unique(raw.all["category"]).tolist()
        categories = tuple(sorted(filter(None, (raw.categories[code] for code in codes)))) if raw else ()
        return cls(begin_ns, duration_ns / _NS_PER_S, categories, trace.check)


def read_extent(path: Path, *, on_progress: Progress | None = None) -> Extent:
    """Read the time range and categories of a trace.

    Args:
        path: A Chrome trace, plain or compressed, or an artifact that contains one.
        on_progress: Called from the reading thread with the number of bytes read so far and the file size.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    return Extent.of(_read(path, on_progress))


def time_window(
    path: Path, begin_ns: int | None, end_ns: int | None, *, on_progress: Progress | None = None
) -> Selection:
    """Find the window between two times that count from the earliest complete event of a trace.

    Args:
        path: As for `read_extent`.
        begin_ns: ``None``: no bound.
        end_ns: ``None``: no bound.
        on_progress: As for `read_extent`.

    Raises:
        TraceError: The file cannot be read, or has no complete event.
    """
    extent = read_extent(path, on_progress=on_progress)
    origin_ns = extent.begin_ns
    if origin_ns is None:
        problem = f" {extent.check.problem}" if extent.check.problem else ""
        raise TraceError(f"{path} has no complete event from which time could be counted.{problem}")
    return Selection(
        begin_ns=None if begin_ns is None else origin_ns + begin_ns,
        end_ns=None if end_ns is None else origin_ns + end_ns,
    )


def step_window(path: Path, steps: range, *, on_progress: Progress | None = None) -> Selection:
    """Find the window of steps from their ``ProfilerStep#N`` annotations.

    The window extends from the start of the first step to the end of the last, on the host and on the devices. Work
    that a step launched is included even if it runs later. The device span that Kineto writes for an annotation
    covers only the kernels for which that annotation was the innermost one at launch. A step therefore includes the
    kernels of all annotations that start in it; ``External id`` identifies them. In torch_npu directories,
    ``kernel_details.csv`` contains the kernels of a step.

    Args:
        path: As for `read_extent`.
        steps: A nonempty range of consecutive step numbers.
        on_progress: As for `read_extent`.

    Raises:
        TraceError: The file cannot be read, or one of the steps is missing from it.
    """
    trace = _read(path, on_progress)
    found = _steps(path, trace, StepNames(()))
    number_of = {row: found.marks[name].step for row, name in enumerate(found.name.tolist())}
    numbers = {number for number in number_of.values() if number is not None}
    if not numbers:  # the host has no step annotations
        return _window_on_devices(path, steps, trace)
    if sum(step in steps for step in numbers) < steps.stop - steps.start:
        raise _not_there(path, "step", steps, numbers, trace.check)
    return _window(found, GLOBAL_STEP, [row for row, number in number_of.items() if number in steps])


def iteration_window(
    path: Path, iterations: range, names: StepNames, *, on_progress: Progress | None = None
) -> Selection:
    """Find the window of engine iterations, as `step_window` does for steps.

    Iterations are host annotations whose names match `names`, numbered from 0 by start time. If such an annotation is
    nested in another iteration annotation on the same thread, both belong to the same iteration.

    Args:
        path: As for `read_extent`.
        iterations: A nonempty range of consecutive iteration numbers.
        names: Patterns for the names of iterations.
        on_progress: As for `read_extent`.

    Raises:
        TraceError: The file cannot be read, or one of the iterations is missing from it.
    """
    trace = _read(path, on_progress)
    found = _steps(path, trace, names)
    rows = [row for row, name in enumerate(found.name.tolist()) if found.marks[name].kind == ITERATION]
    if iterations.stop > len(rows):
        raise _not_there(path, "iteration", iterations, range(len(rows)), trace.check)
    return _window(found, ITERATION, rows[iterations.start : iterations.stop])


def _read(path: Path, on_progress: Progress | None) -> Trace:
    # In Ascend traces, steps are marked by operators.
    return read_trace(
        chrome_trace(path), is_step=lambda name: _STEP.fullmatch(name) is not None, on_progress=on_progress
    )


def _steps(path: Path, trace: Trace, names: StepNames) -> TraceSteps:
    """Find the steps in the same way as trace summaries do."""
    annotations = _with_steps_on_devices(path, trace)
    return find_steps(annotations, names, trace.arg("External id", annotations.row))


def _with_steps_on_devices(path: Path, trace: Trace) -> Columns:
    """Return the annotations, including device steps from files other than the Chrome trace."""
    kind = kind_of(path)
    steps = [
        CompleteEvent(
            f"ProfilerStep#{step.step}", DEVICE_ANNOTATION, step.device, "", step.start_ns, step.end_ns - step.start_ns
        )
        for step in (kind.steps_on_devices(path) if kind else ())
    ]
    parts = combined([trace.annotations, columns_of(steps)])
    return concatenated(parts[0].tables, parts)


def _window(found: TraceSteps, kind: str, rows: list[int]) -> Selection:
    """Return from the start of the first step to the end of the last, and of the work that was launched in them."""
    work = found.work[kind]
    mine = np.isin(work.step, rows)
    begin_ns = int(min([*found.start_ns[rows], *work.start_ns[mine]]))
    end_ns = int(max([*found.end_ns[rows], *(work.end_ns[mine] if work.end_ns is not None else ())]))
    return Selection(
        begin_ns=begin_ns,
        end_ns=max(end_ns, begin_ns + 1),
        host=_at_least_1_ns(int(found.start_ns[rows].min()), int(found.end_ns[rows].max())),
        work=_work_of(found.device[kind], rows),
    )


def _work_of(device: StepWindows, rows: list[int]) -> TimeWindow:
    """Return when the work of steps starts: what starts later is of the next step."""
    chosen = np.flatnonzero(np.isin(device.step, rows))
    if not len(chosen):
        return TimeWindow(0, 0)
    following = int(chosen[-1]) + 1
    end_ns = int(device.start_ns[following]) if following < len(device.step) else None
    if device.end_ns is not None:
        last_ns = int(device.end_ns[chosen].max()) + 1
        end_ns = last_ns if end_ns is None else min(end_ns, last_ns)
    return TimeWindow(int(device.start_ns[chosen[0]]), end_ns)


def _at_least_1_ns(begin_ns: int, end_ns: int) -> TimeWindow:
    return TimeWindow(begin_ns, max(end_ns, begin_ns + 1))


def _window_on_devices(path: Path, steps: range, trace: Trace) -> Selection:
    """Find the window from device annotations, for traces whose host has no step annotations."""
    annotations = _with_steps_on_devices(path, trace)
    matches = map(_STEP.fullmatch, annotations.tables.names)
    number_of_name = np.array([int(match[1]) if match else -1 for match in matches], dtype=np.int64)
    numbers = number_of_name[annotations.name]
    recorded = {number for number in numbers.tolist() if number >= 0}
    if sum(step in steps for step in recorded) < steps.stop - steps.start:
        raise _not_there(path, "step", steps, recorded, trace.check)
    selected = annotations[(numbers >= steps.start) & (numbers < steps.stop)]
    begin_ns, end_ns = int(selected.start_ns.min()), int(selected.end_ns.max())
    return Selection(begin_ns=begin_ns, end_ns=max(end_ns, begin_ns + 1))


def _not_there(path: Path, what: str, wanted: range, there: Iterable[int], check: TraceCheck) -> TraceError:
    recorded = ranges([*there])
    has = f"it has {recorded}" if recorded else f"no {what} is marked in it"
    # The range can have too many steps to list.
    first, last = wanted.start, wanted.stop - 1
    missing = f"{what} {first}" if first == last else f"{what}s {first}..{last}"
    damage = "" if check.whole else f" It is damaged: {check.problem}"
    return TraceError(f"{path} does not have the {missing}: {has}.{damage}")
