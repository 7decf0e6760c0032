"""Ascend's ``kernel_details.csv`` as events: one row for each task that ran on a device.

Format: torch_npu renames columns of the ``op_summary_*.csv`` that CANN's msprof writes, and puts ``Step Id`` in front
where the host marked steps (``KernelViewParser`` and ``CsvHeaders`` in ``torch_npu/profiler/analysis``; so from 2.6 to
2.14). At level 0 it keeps those of ``_NEEDED``, ``Device_id`` and a few others, at higher levels all that there are
(``analysis/csrc/application/summary/op_summary_assembler.cpp`` in Ascend/msprof). Older CANN has no ``Device_id`` and
calls ``Block Num`` ``Block Dim``. A tab behind the start keeps spreadsheets from rounding it.
"""

from __future__ import annotations

import csv
import functools
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from profdeck.plugin import TraceError
from profdeck_traces import Progress
from profdeck_traces.reading.column_builder import MAX_NAME_LENGTH, ColumnBuilder, CompleteEvent
from profdeck_traces.reading.columns import ANNOTATION, DEVICE_ANNOTATION
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.integrity import TraceCheck, file_size
from profdeck_traces.reading.times import exact_nanoseconds

_NAME, _TYPE, _START, _DURATION = "Name", "Type", "Start Time(us)", "Duration(us)"
_NEEDED = (_NAME, _TYPE, _START, _DURATION)
_STREAM, _STEP, _DEVICE, _CORE = "Stream ID", "Step Id", "Device_id", "Accelerator Core"
_UNKNOWN = ("", "N/A")
_HCCL = ("HCCL", "COMMUNICATION")  # the core of what HCCL runs, in older and newer CANN
_KERNELS_AT_ONCE = 4096
# csv's own limit of a field is set for the whole process; no line of a real file is near to this.
_MAX_LINE = 1 << 20
# More than any capture has: what is kept for each must not fill the memory.
_MAX_STEPS, _MAX_TYPES, _MAX_CORES = 100_000, 10_000, 100
_MAX_DIGITS = 18  # of a number of 64 bits
_MAX_KNOWN, _MAX_WHAT = 4096, 4 * MAX_NAME_LENGTH
# A call of HCCL: the last digits of the number of its process group, and counters.
_match_call = re.compile(r"_(\d{1,18})(?:_\d+)+").fullmatch
_match_counter = re.compile(r"[_0-9]*").fullmatch


@attrs.frozen
class StepKernels:
    """The kernels of one step on one device, by ``Step Id``."""

    step: int
    device: Id
    start_ns: int
    """When the first of them started."""
    end_ns: int
    """When the last of them ended."""


@attrs.frozen(kw_only=True)
class KernelDetails:
    """What a ``kernel_details.csv`` says besides its kernels."""

    check: TraceCheck
    """Its events are the rows."""
    steps: tuple[StepKernels, ...]
    """In the order of the file; empty if it has no ``Step Id``."""
    first_outside_ns: int | None
    """When the first kernel started that belongs to no step; ``None`` if there is none."""
    types: dict[str, str]
    """The ``Type`` of kernels by their names, of up to 10,000."""
    cores: dict[str, tuple[int, int]]
    """By ``Accelerator Core``: how many rows, and the sum of their durations in nanoseconds."""


def read_kernel_details(path: Path, collector: ColumnBuilder, on_progress: Progress | None = None) -> KernelDetails:
    """Read the rows as kernels.

    Rows whose names are their type, or the beginning of it, and a counter ("Cast66", "Cast67") get the type as their
    name. The process of a kernel is its device, the thread its stream. What HCCL runs has none: its process group
    stands for it.

    Args:
        path: The file.
        collector: Takes the kernels.
        on_progress: Called with the bytes read so far and the size of the file.

    Raises:
        TraceError: The file cannot be read, it has not the columns of such a file, or nothing in it can be read.
    """
    size_bytes = file_size(path)
    on_read = None if on_progress is None else lambda read: on_progress(read, size_bytes)
    try:
        with path.open("r", encoding="utf-8", errors="replace", newline="") as file:
            lines = _Lines(file, on_read)
            table, problem = _read(lines, path, collector)
    except OSError as error:
        raise TraceError(f"Cannot read {path}: {error.strerror or error}.") from error
    except csv.Error as error:
        raise TraceError(f"Cannot read {path}: {error}.") from error
    if problem is None and not table.kernels:
        problem = "There are no rows."
    if problem is None and not lines.ended:
        problem = "Its last line has no end: the file has been cut off."
    check = TraceCheck(
        size_bytes=size_bytes, json_bytes=0, events=table.kernels, whole=problem is None, problem=problem
    )
    return KernelDetails(
        check=check,
        steps=tuple(StepKernels(step, device, start, end) for (step, device), (start, end) in table.steps.items()),
        first_outside_ns=table.first_outside_ns,
        types=table.types,
        cores={core: (rows, total_ns) for core, (rows, total_ns) in table.cores.items()},
    )


def steps_as_annotations(steps: Iterable[StepKernels]) -> list[CompleteEvent]:
    """Return an annotation for each step, from its first kernel to its last on any device: all that names steps
    where the host was not recorded.
    """
    spans: dict[int, tuple[int, int]] = {}
    for step in steps:
        start_ns, end_ns = spans.get(step.step, (step.start_ns, step.end_ns))
        spans[step.step] = min(start_ns, step.start_ns), max(end_ns, step.end_ns)
    return [
        CompleteEvent(f"ProfilerStep#{step}", ANNOTATION, "steps", None, start_ns, end_ns - start_ns)
        for step, (start_ns, end_ns) in spans.items()
    ]


def steps_on_devices(steps: Iterable[StepKernels]) -> list[CompleteEvent]:
    """Return where the kernels of each step of the host are, as Kineto shows next to the kernels what launched them."""
    return [
        CompleteEvent(
            f"ProfilerStep#{step.step}",
            DEVICE_ANNOTATION,
            step.device,
            "steps",
            step.start_ns,
            step.end_ns - step.start_ns,
        )
        for step in steps
    ]


class _Lines:
    """The lines of a file, of bounded length."""

    def __init__(self, file: Iterator[str], on_read: Callable[[int], None] | None) -> None:
        self._file = file
        self._on_read = on_read
        self.ended = True
        """Whether the last line that was read has an end."""

    def __iter__(self) -> Iterator[str]:
        read = 0
        for line in self._file:
            if len(line) > _MAX_LINE:
                raise csv.Error(f"a line has more than {_MAX_LINE:,} characters")
            read += len(line)
            if self._on_read is not None:
                self._on_read(read)
            self.ended = line.endswith("\n")
            yield line


def _read(lines: _Lines, path: Path, collector: ColumnBuilder) -> tuple[_Table, str | None]:
    """Read all rows as far as they can be read; also return what is wrong with the first that cannot.

    Raises:
        TraceError: It is another table.
        csv.Error: No row can be read.
    """
    rows = csv.reader(lines)
    table = _Table.of(next(rows, []), path)
    problem = None
    kernels: list[CompleteEvent] = []
    try:
        for row in rows:
            kernel = table.take(row)
            if kernel is None:
                problem = problem or f"Line {rows.line_num:,} is not a row of {table.columns} columns with its times."
                continue
            kernels.append(kernel)
            if len(kernels) >= _KERNELS_AT_ONCE:
                collector.add_spans(kernels)
                kernels.clear()
    except csv.Error as error:
        if not table.kernels:
            raise
        problem = problem or f"It cannot be read behind line {rows.line_num:,}: {error}."
    collector.add_spans(kernels)
    return table, problem


class _Table:
    """Turns rows into kernels, and sums up what else they say.

    Args:
        header: The names of the columns.
    """

    def __init__(self, header: Sequence[str]) -> None:
        self.columns = len(header)
        self.kernels = 0
        self.steps: dict[tuple[int, Id], list[int]] = {}
        """When the first kernel started and the last ended, by step and device."""
        self.first_outside_ns: int | None = None
        self.types: dict[str, str] = {}
        self.cores: dict[str, list[int]] = {}
        """How many rows, and the sum of their durations."""
        self._start, self._duration, name, kind = map(header.index, (_START, _DURATION, _NAME, _TYPE))
        # A column that is not there is that of an empty cell behind the row.
        core, stream, device, self._step = (
            header.index(column) if column in header else len(header) for column in (_CORE, _STREAM, _DEVICE, _STEP)
        )
        self._what = operator.itemgetter(name, kind, core, device, stream)

    @classmethod
    def of(cls, header: Sequence[str], path: Path) -> _Table:
        """Take the first line.

        Raises:
            TraceError: It has not the columns of such a file.
        """
        columns = [column.strip() for column in header]
        if missing := [column for column in _NEEDED if column not in columns]:
            raise TraceError(f"{path} is not Ascend's kernel_details.csv: it has no column {', '.join(missing)}.")
        return cls(columns)

    def take(self, row: list[str]) -> CompleteEvent | None:
        """Take a row; ``None`` if it is none of a kernel."""
        if len(row) != self.columns:
            return None
        start_ns, duration_ns = _nanoseconds(row[self._start]), _nanoseconds(row[self._duration])
        if start_ns is None or duration_ns is None:
            return None
        duration_ns = max(0, duration_ns)
        row.append("")
        what = self._what(row)
        if sum(map(len, what)) > _MAX_WHAT:
            what = tuple(cell[: MAX_NAME_LENGTH + 1] for cell in what)
        name, kind, core, device, stream = _kernel(*what)
        self.kernels += 1
        self._add_step(row[self._step], device, start_ns, start_ns + duration_ns)
        if name not in self.types and kind and len(self.types) < _MAX_TYPES:
            self.types[name] = kind
        if core in self.cores or (core and len(self.cores) < _MAX_CORES):
            of_core = self.cores.setdefault(core, [0, 0])
            of_core[0] += 1
            of_core[1] += duration_ns
        return CompleteEvent(name, "kernel", device, stream, start_ns, duration_ns)

    def _add_step(self, text: str, device: Id, start_ns: int, end_ns: int) -> None:
        step = _id(text.strip() or "none")
        if not isinstance(step, int):
            if self.first_outside_ns is None or start_ns < self.first_outside_ns:
                self.first_outside_ns = start_ns
            return
        span = self.steps.get((step, device))
        if span is not None:
            span[0], span[1] = min(span[0], start_ns), max(span[1], end_ns)
        elif len(self.steps) < _MAX_STEPS:
            self.steps[step, device] = [start_ns, end_ns]


@functools.lru_cache(maxsize=_MAX_KNOWN)
def _kernel(name: str, kind: str, core: str, device: str, stream: str) -> tuple[str, str, str, Id, Id]:
    """Return name, type and core of a kernel, the last two empty where they are not known, its device and stream."""
    name, kind, core, device, stream = (cell.strip() for cell in (name, kind, core, device, stream))
    if core in _HCCL and stream in _UNKNOWN and (call := _match_call(name.removeprefix(kind))):
        stream = f"group {call[1]}"
    shared = os.path.commonprefix([name, kind])  # noqa: RUF071 - of any texts
    if shared and _match_counter(name.removeprefix(shared)):
        name = kind
    known = kind not in _UNKNOWN and len(name) <= MAX_NAME_LENGTH
    return name, kind if known else "", "" if core in _UNKNOWN else core, _id(device), _id(stream)


def _nanoseconds(time_us: str) -> int | None:
    time_us = time_us.strip()
    return exact_nanoseconds(time_us) if time_us else None


def _id(text: str) -> Id:
    if not text:
        return 0
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else text
