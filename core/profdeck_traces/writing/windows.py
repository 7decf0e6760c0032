"""Where in a trace a time, some steps or some iterations are."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from profdeck_traces.analysis.step_names import GLOBAL_STEP, ITERATION, StepNames
from profdeck_traces.analysis.steps import StepWindows, TraceSteps, find_steps
from profdeck_traces.base.byte_search import stringzilla
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.progress import Progress
from profdeck_traces.inputs.artifact_kinds import chrome_trace, kind_of
from profdeck_traces.reading.column_builder import ColumnBuilder, CompleteEvent
from profdeck_traces.reading.columns import ANNOTATION, DEVICE_ANNOTATION, Columns, Tables, concatenated
from profdeck_traces.reading.integrity import CountingHandler, TraceCheck, check_trace
from profdeck_traces.writing.event_text import (
    COMPLETE,
    FLOAT_ERROR,
    UNDECODABLE,
    DurationPairs,
    EventBatch,
    decode_named,
    members_of_event,
    microseconds,
    nanoseconds,
    span_of,
    spans_of,
    split_events,
    split_loosely,
)
from profdeck_traces.writing.selection import Selection, TimeWindow

_STEP = re.compile(r"ProfilerStep#([0-9]{1,18})")
_MARK_NEEDLES = (b'user_annotation"', b'"ProfilerStep#')


@attrs.frozen
class Extent:
    """What there is to select from in a trace."""

    begin_ns: int | None
    """The start of the earliest complete event, on the clock of the ``ts``, rounded down; ``None`` without any."""
    duration_s: float
    """From there to the end of the latest one; approximate."""
    categories: tuple[str, ...]
    """Of all events, sorted."""
    check: TraceCheck


def read_extent(path: Path, *, on_progress: Progress | None = None) -> Extent:
    """Read the steps, the iterations and the time range of a trace, for selecting a window.

    Args:
        path: A Chrome trace, plain or gzip, or an artifact that contains one.
        on_progress: Called from the reading thread with the number of bytes read so far and the file size.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    handler = _ExtentHandler()
    check = check_trace(chrome_trace(path), handler, on_progress=on_progress)
    begin = handler.earliest
    return Extent(
        begin_ns=None if begin is None else nanoseconds(begin, ROUND_FLOOR),
        duration_s=0.0 if begin is None else (handler.latest_us - float(begin)) / 1e6,
        categories=tuple(sorted(handler.categories)),
        check=check,
    )


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
    """Find the window of steps, by their ``ProfilerStep#N`` annotations.

    It reaches from the start of the first to the end of the last, on the host and on the devices: what a step launched
    is in it, though it runs later. Kineto shows on a device where the kernels lie that were launched in an annotation,
    the innermost one; so a step's are those of all annotations that began in it, which the ``External id`` tells. In a
    directory of torch_npu, ``kernel_details.csv`` tells the kernels of a step.

    Args:
        path: As for `read_extent`.
        steps: Not empty, and without gaps.
        on_progress: As for `read_extent`.

    Raises:
        TraceError: The file cannot be read, or one of the steps is not in it.
    """
    marks, check = _marks(path, on_progress)
    found = _steps(marks, StepNames(()))
    number_of = {row: found.marks[name].step for row, name in enumerate(found.name.tolist())}
    there = {number for number in number_of.values() if number is not None}
    if not there:  # a trace of devices alone
        return _window_of_marks(path, steps, marks, check)
    if sum(step in steps for step in there) < steps.stop - steps.start:
        raise _not_there(path, "step", steps, there, check)
    return _window(found, GLOBAL_STEP, [row for row, number in number_of.items() if number in steps])


def iteration_window(
    path: Path, iterations: range, names: StepNames, *, on_progress: Progress | None = None
) -> Selection:
    """Find the window of iterations of an engine; as in `step_window`.

    They are the annotations of the host that are named as iterations, counted from 0 in the order of their starts; one
    inside another on the same thread is the same iteration.

    Args:
        path: As for `read_extent`.
        iterations: Not empty, and without gaps.
        names: What iterations are called.
        on_progress: As for `read_extent`.

    Raises:
        TraceError: The file cannot be read, or one of the iterations is not in it.
    """
    marks, check = _marks(path, on_progress)
    found = _steps(marks, names)
    rows = [row for row, name in enumerate(found.name.tolist()) if found.marks[name].kind == ITERATION]
    if iterations.stop > len(rows):
        raise _not_there(path, "iteration", iterations, range(len(rows)), check)
    return _window(found, ITERATION, rows[iterations.start : iterations.stop])


def _marks(path: Path, on_progress: Progress | None) -> tuple[list[_Mark], TraceCheck]:
    handler = _MarkHandler()
    check = check_trace(chrome_trace(path), handler, on_progress=on_progress)
    return handler.marks + _steps_on_devices(path), check


def _steps(marks: list[_Mark], names: StepNames) -> TraceSteps:
    """Find the steps among marks, as summaries do; times are rounded outwards to nanoseconds."""
    tables, blocks = Tables(), list[Columns]()
    builder = ColumnBuilder(tables, blocks.append)
    starts = [nanoseconds(mark.start, ROUND_FLOOR) for mark in marks]
    stops = [nanoseconds(mark.stop, ROUND_CEILING) for mark in marks]
    builder.add_spans(
        [
            CompleteEvent(mark.name, mark.category, *mark.track, start, stop - start)
            for mark, start, stop in zip(marks, starts, stops, strict=True)
        ]
    )
    builder.finish({})
    ids = [mark.external_id if isinstance(mark.external_id, int) else -1 for mark in marks]
    return find_steps(concatenated(tables, blocks), names, np.array(ids, dtype=np.int64))


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


def _window_of_marks(path: Path, steps: range, marks: list[_Mark], check: TraceCheck) -> Selection:
    """Do the same by the marks on devices, where the host has none."""
    step_of = {mark: int(found[1]) for mark in marks if (found := _STEP.fullmatch(mark.name))}
    if sum(step in steps for step in set(step_of.values())) < steps.stop - steps.start:
        raise _not_there(path, "step", steps, set(step_of.values()), check)
    chosen = [mark for mark, step in step_of.items() if step in steps]
    begin_ns = nanoseconds(min(mark.start for mark in chosen), ROUND_FLOOR)
    end_ns = nanoseconds(max(mark.stop for mark in chosen), ROUND_CEILING)
    return Selection(begin_ns=begin_ns, end_ns=max(end_ns, begin_ns + 1))


@attrs.frozen(eq=False)
class _Mark:
    """A complete event that marks a part of the trace."""

    name: str
    category: str
    track: tuple[str, str]
    external_id: Any
    """The same for an annotation and what shows it on devices."""
    start: Decimal
    stop: Decimal


class _MarkHandler(CountingHandler):
    """Collects annotations, of host and devices, and steps."""

    wants_text = True

    def __init__(self) -> None:
        self.marks: list[_Mark] = []

    def batch(self, text: memoryview) -> int | None:
        """Process a JSON array of events. See :meth:`profdeck_traces.reading.handler.TraceHandler.batch`."""
        if not any(stringzilla.find(text, needle) >= 0 for needle in _MARK_NEEDLES):
            return super().batch(text)
        try:
            events = decode_named(text)
        except UNDECODABLE:
            count = super().batch(text)
            for event in (split_loosely(bytes(text)) or ()) if count is not None else ():
                self._take(event[1])
            return count
        marked = [index for index, event in enumerate(events) if _may_mark(event.name, event.cat)]
        if marked:
            texts = split_events(bytes(text))
            for index in marked:
                self._take(members_of_event(texts[index]))
        return len(events)

    def event(self, text: bytes) -> None:
        """Take one event."""
        if any(needle in text for needle in _MARK_NEEDLES):
            for event in split_loosely(b"[%b]" % text) or ():
                self._take(event[1])

    def _take(self, members: dict[str, Any]) -> None:
        name, category = str(members.get("name")), str(members.get("cat"))
        span = span_of(members)
        if span is None or members.get("ph") != COMPLETE or not _may_mark(name, category):
            return
        args = members.get("args")
        mark = _Mark(
            name=sys.intern(name),
            category=sys.intern(category),
            track=(sys.intern(str(members.get("pid"))), sys.intern(str(members.get("tid")))),
            external_id=args.get("External id") if isinstance(args, dict) else None,
            start=span[0],
            stop=span[1],
        )
        self.marks.append(mark)


def _steps_on_devices(path: Path) -> list[_Mark]:
    """Return where the work of each step is, as far as something other than the Chrome trace tells it."""
    kind = kind_of(path)
    return [
        _Mark(
            name=f"ProfilerStep#{step.step}",
            category=DEVICE_ANNOTATION,
            track=(str(step.device), ""),
            external_id=None,
            start=microseconds(step.start_ns),
            stop=microseconds(step.end_ns),
        )
        for step in (kind.steps_on_devices(path) if kind else ())
    ]


def _may_mark(name: str, category: str | None) -> bool:
    # Ascend marks its steps as operators.
    return category in {ANNOTATION, DEVICE_ANNOTATION} or name.startswith("ProfilerStep#")


def _not_there(path: Path, what: str, wanted: range, there: Iterable[int], check: TraceCheck) -> TraceError:
    runs: list[tuple[int, int]] = []
    for number in sorted(there):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    has = f"it has {', '.join(itertools.starmap(_run, runs))}" if runs else f"no {what} is marked in it"
    plural = "s" if wanted.stop - wanted.start > 1 else ""
    damage = "" if check.whole else f" It is damaged: {check.problem}"
    return TraceError(f"{path} does not have the {what}{plural} {_run(wanted.start, wanted.stop - 1)}: {has}.{damage}")


def _run(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"


class _ExtentHandler(CountingHandler):
    """Finds the first and last times, and the categories."""

    wants_text = True

    def __init__(self) -> None:
        self.earliest: Decimal | None = None
        self.latest_us = -math.inf
        self.categories: set[str] = set()

    def batch(self, text: memoryview) -> int | None:
        """Process a JSON array of events. See :meth:`profdeck_traces.reading.handler.TraceHandler.batch`."""
        batch = EventBatch.of(text)
        if batch is None:
            return None
        self._take(batch)
        return batch.with_phase

    def event(self, text: bytes) -> None:
        """Take one event."""
        batch = EventBatch.of(b"[%b]" % text)
        if batch is not None:
            self._take(batch)

    def _take(self, batch: EventBatch) -> None:
        self.categories.update(event.cat for event in batch.events if event.cat)
        complete = batch.of_phase(COMPLETE)
        if not complete.any():
            return
        start, stop, size = spans_of(batch, DurationPairs())
        self.latest_us = float(np.fmax.reduce(stop[complete], initial=self.latest_us))
        error = size * FLOAT_ERROR
        least = np.fmin.reduce((start + error)[complete], initial=math.inf)
        bound = least if self.earliest is None else min(least, float(self.earliest))
        for index in np.flatnonzero(complete & ~(start - error > bound)).tolist():
            span = batch.span(index)
            if span is not None and (self.earliest is None or span[0] < self.earliest):
                self.earliest = span[0]
