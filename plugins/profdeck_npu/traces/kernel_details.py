"""Reader for Ascend's ``kernel_details.csv``, which has one row for each task that ran on a device.

torch_npu renames columns of ``op_summary_*.csv``, which CANN's msprof writes. If the host annotated steps, torch_npu
adds ``Step Id`` as the first column. Sources: ``KernelViewParser`` and ``CsvHeaders`` in
``torch_npu/profiler/analysis``, the same from 2.6 to 2.14, and
``analysis/csrc/application/summary/op_summary_assembler.cpp`` in Ascend/msprof.

At level 0, the file has the columns in ``_REQUIRED``, ``Device_id`` and a few others. Higher levels keep all columns of
msprof. Older CANN releases have no ``Device_id``, and name ``Block Num`` ``Block Dim``. A tab follows each start time
to prevent spreadsheets from rounding it.
"""

from __future__ import annotations

import csv
import functools
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from profdeck.plugin import TraceError
from profdeck_traces import Progress
from profdeck_traces.reading.columns import (
    ANNOTATION,
    DEVICE_ANNOTATION,
    MAX_NAME_LENGTH,
    Columns,
    CompleteEvent,
    columns_of,
)
from profdeck_traces.reading.fallback import read_time
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.integrity import TraceCheck, file_size
from profdeck_traces.reading.walking import NO_TIME

_NAME, _TYPE, _START, _DURATION = "Name", "Type", "Start Time(us)", "Duration(us)"
_REQUIRED = (_NAME, _TYPE, _START, _DURATION)
_STREAM, _STEP, _DEVICE, _CORE = "Stream ID", "Step Id", "Device_id", "Accelerator Core"
_UNKNOWN = ("", "N/A")


def _simplified(column: str) -> str:
    return re.sub(r"[ _\ufeff]", "", column.strip().casefold())


_SPELLINGS = {_simplified(column): column for column in (*_REQUIRED, _STREAM, _STEP, _DEVICE, _CORE)} | {
    "opname": _NAME,
    "optype": _TYPE,
    "taskstarttime(us)": _START,
    "taskduration(us)": _DURATION,
    "tasktype": _CORE,
}
"""Columns by simplified name, because case, spaces and underscores differ between releases. Includes msprof's names."""
_HCCL = ("HCCL", "COMMUNICATION")  # values of Accelerator Core for HCCL, in older and newer CANN
# The field limit of the csv module is process-wide. Lines of real files are much shorter.
_MAX_LINE = 1 << 20
# These limits bound the memory. They exceed the numbers in real captures.
_MAX_STEPS, _MAX_TYPES, _MAX_CORES = 100_000, 10_000, 100
_MAX_DIGITS = 18  # fits into 64 bits
_CACHE_SIZE, _MAX_CACHED_LENGTH = 4096, 4 * MAX_NAME_LENGTH
# End of an HCCL call's name: the last digits of the process group's ID, and counters.
_match_call = re.compile(r"_(\d{1,18})(?:_\d+)+").fullmatch
_match_counter = re.compile(r"[_0-9]*").fullmatch


@attrs.frozen
class StepKernels:
    """Time span of the kernels of one step on one device."""

    step: int
    """``Step Id``."""
    device: Id
    start_ns: int
    """Start of the first kernel."""
    end_ns: int
    """End of the last kernel."""


@attrs.frozen(kw_only=True)
class KernelDetails:
    """Contents of a ``kernel_details.csv`` file."""

    kernels: Columns
    """Kernels in file order."""
    check: TraceCheck
    """Its event count is the number of kernels."""
    steps: tuple[StepKernels, ...]
    """In file order; empty if the file has no ``Step Id``."""
    first_outside_ns: int | None
    """Start time of the first kernel that belongs to no step; ``None`` if all kernels belong to a step."""
    types: dict[str, str]
    """``Type`` of each kernel, keyed by its name; at most 10,000 items."""
    cores: dict[str, tuple[int, int]]
    """Number of rows and their total duration in nanoseconds, keyed by ``Accelerator Core``."""


def read_kernel_details(path: Path, on_progress: Progress | None = None) -> KernelDetails:
    """Read a kernel table.

    If a kernel's name consists of its type, or the start of its type, followed by a counter ("Cast66", "Cast67"), the
    name is replaced by the type. A kernel's process is its device, and its thread is its stream. HCCL kernels have no
    stream; their thread is the process group.

    Args:
        path: The file.
        on_progress: Called with the number of bytes read and the size of the file.

    Raises:
        TraceError: The file cannot be read, lacks a required column, or has no readable row.
    """
    size_bytes = file_size(path)
    on_read = None if on_progress is None else lambda read: on_progress(read, size_bytes)
    try:
        with path.open("r", encoding="utf-8", errors="replace", newline="") as file:
            lines = _Lines(file, on_read)
            rows = csv.reader(lines)
            table = _Table.from_header(next(rows, []), path)
            reader = _RowReader(rows, table)
            kernels = columns_of(reader)
    except OSError as error:
        raise TraceError(f"Cannot read {path}: {error.strerror or error}.") from error
    except csv.Error as error:
        raise TraceError(f"Cannot read {path}: {error}.") from error
    problem = reader.problem
    if problem is None and not table.kernel_count:
        problem = "The file has no rows."
    if problem is None and not lines.is_complete:
        problem = "The last line has no line break: the file is truncated."
    check = TraceCheck(
        size_bytes=size_bytes, json_bytes=0, events=table.kernel_count, whole=problem is None, problem=problem
    )
    return KernelDetails(
        kernels=kernels,
        check=check,
        steps=tuple(StepKernels(step, device, start, end) for (step, device), (start, end) in table.steps.items()),
        first_outside_ns=table.first_outside_ns,
        types=table.types,
        cores={core: (rows, total_ns) for core, (rows, total_ns) in table.cores.items()},
    )


def steps_as_annotations(steps: Iterable[StepKernels]) -> list[CompleteEvent]:
    """Return one annotation per step, from the first to the last kernel on any device. Used without host events."""
    spans: dict[int, tuple[int, int]] = {}
    for step in steps:
        start_ns, end_ns = spans.get(step.step, (step.start_ns, step.end_ns))
        spans[step.step] = min(start_ns, step.start_ns), max(end_ns, step.end_ns)
    return [
        CompleteEvent(f"ProfilerStep#{step}", ANNOTATION, "steps", None, start_ns, end_ns - start_ns)
        for step, (start_ns, end_ns) in spans.items()
    ]


def steps_on_devices(steps: Iterable[StepKernels]) -> list[CompleteEvent]:
    """Return one device annotation for each step and device, like the GPU annotations that Kineto writes."""
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
    """Yields the lines of a file, and limits their length."""

    def __init__(self, file: Iterator[str], on_read: Callable[[int], None] | None) -> None:
        self._file = file
        self._on_read = on_read
        self.is_complete = True
        """True if the last line ends with a line break."""

    def __iter__(self) -> Iterator[str]:
        read_length = 0
        for line in self._file:
            if len(line) > _MAX_LINE:
                raise csv.Error(f"a line has more than {_MAX_LINE:,} characters")
            read_length += len(line)
            if self._on_read is not None:
                self._on_read(read_length)
            self.is_complete = line.endswith("\n")
            yield line


class _RowReader:
    """Yields the kernels in all readable rows.

    Raises:
        csv.Error: No row can be read.
    """

    def __init__(self, rows: Any, table: _Table) -> None:
        self._rows = rows
        self._table = table
        self.problem: str | None = None
        """Message about the first unreadable row."""

    def __iter__(self) -> Iterator[CompleteEvent]:
        rows, table = self._rows, self._table
        try:
            for row in rows:
                kernel = table.add_row(row)
                if kernel is not None:
                    yield kernel
                elif self.problem is None:
                    self.problem = f"Line {rows.line_num:,} does not have {table.columns} columns with valid times."
        except csv.Error as error:
            if not table.kernel_count:
                raise
            self.problem = self.problem or f"The file cannot be read after line {rows.line_num:,}: {error}."


class _Table:
    """Converts rows to kernels, and sums their other columns."""

    def __init__(self, header: Sequence[str]) -> None:
        self.columns = len(header)
        self.kernel_count = 0
        self.steps: dict[tuple[int, Id], list[int]] = {}
        """Start of the first and end of the last kernel, keyed by step and device."""
        self.first_outside_ns: int | None = None
        self.types: dict[str, str] = {}
        self.cores: dict[str, list[int]] = {}
        """Number of rows and their total duration."""
        self._start, self._duration, name, kind = map(header.index, (_START, _DURATION, _NAME, _TYPE))
        # The index of a missing column is that of an empty cell, which `add_row` appends to the row.
        core, stream, device, self._step = (
            header.index(column) if column in header else len(header) for column in (_CORE, _STREAM, _DEVICE, _STEP)
        )
        self._kernel_cells = operator.itemgetter(name, kind, core, device, stream)

    @classmethod
    def from_header(cls, header: Sequence[str], path: Path) -> _Table:
        """Create a table from the column names in the first line.

        Raises:
            TraceError: A required column is missing.
        """
        columns = [_SPELLINGS.get(_simplified(column), column) for column in header]
        if missing := [column for column in _REQUIRED if column not in columns]:
            raise TraceError(f"{path} is not Ascend's kernel_details.csv: missing columns {', '.join(missing)}.")
        return cls(columns)

    def add_row(self, row: list[str]) -> CompleteEvent | None:
        """Convert a row to a kernel and add it to the sums. Return ``None`` for an invalid row. Changes the list."""
        if len(row) != self.columns:
            return None
        start_ns, duration_ns = parse_time_ns(row[self._start]), parse_time_ns(row[self._duration])
        if start_ns is None or duration_ns is None:
            return None
        duration_ns = max(0, duration_ns)
        row.append("")
        cells = self._kernel_cells(row)
        if sum(map(len, cells)) > _MAX_CACHED_LENGTH:
            cells = tuple(cell[: MAX_NAME_LENGTH + 1] for cell in cells)
        name, kind, core, device, stream = _parse_kernel(*cells)
        self.kernel_count += 1
        self._add_step(row[self._step], device, start_ns, start_ns + duration_ns)
        if name not in self.types and kind and len(self.types) < _MAX_TYPES:
            self.types[name] = kind
        if core in self.cores or (core and len(self.cores) < _MAX_CORES):
            core_sums = self.cores.setdefault(core, [0, 0])
            core_sums[0] += 1
            core_sums[1] += duration_ns
        return CompleteEvent(name, "kernel", device, stream, start_ns, duration_ns)

    def _add_step(self, text: str, device: Id, start_ns: int, end_ns: int) -> None:
        step = _parse_id(text.strip() or "none")
        if not isinstance(step, int):
            if self.first_outside_ns is None or start_ns < self.first_outside_ns:
                self.first_outside_ns = start_ns
            return
        span = self.steps.get((step, device))
        if span is not None:
            span[0], span[1] = min(span[0], start_ns), max(span[1], end_ns)
        elif len(self.steps) < _MAX_STEPS:
            self.steps[step, device] = [start_ns, end_ns]


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _parse_kernel(name: str, kind: str, core: str, device: str, stream: str) -> tuple[str, str, str, Id, Id]:
    """Return the normalised name, type, core, device and stream. An unknown type or core is an empty string."""
    name, kind, core, device, stream = (cell.strip() for cell in (name, kind, core, device, stream))
    if core in _HCCL and stream in _UNKNOWN and (call := _match_call(name.removeprefix(kind))):
        stream = f"group {call[1]}"
    shared_prefix = os.path.commonprefix([name, kind])  # noqa: RUF071 - works on any strings
    if shared_prefix and _match_counter(name.removeprefix(shared_prefix)):
        name = kind
    has_type = kind not in _UNKNOWN and len(name) <= MAX_NAME_LENGTH
    return name, kind if has_type else "", "" if core in _UNKNOWN else core, _parse_id(device), _parse_id(stream)


def parse_time_ns(time_us: str) -> int | None:
    """Convert a number of microseconds to nanoseconds. Return ``None`` if the text is not a number."""
    time_ns = read_time(time_us.strip().encode(), NO_TIME)
    return None if time_ns == NO_TIME else time_ns


def _parse_id(text: str) -> Id:
    if not text:
        return 0
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else text
