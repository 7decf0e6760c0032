"""Ascend's ``step_trace_time.csv``: how torch_npu's analysis divides the time of each step on each device.

Format: ``TraceStepTimeParser`` in torch_npu (``torch_npu/profiler/analysis/prof_view/_trace_step_time_parser.py``),
with the same columns from 2.6 to 2.14, all times in microseconds::

    Device_id,Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free,Stage,Bubble,
    Communication(Not Overlapped and Exclude Receive),Preparing

``Device_id`` is -1 for a device without a number, ``Step`` empty for a recording without steps. ``Bubble`` is the sum
of the times of ``hcom_receive*``; ``Stage`` reaches from the first to the last of the times of the step, without it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import attrs

from profdeck.plugin import TraceError
from profdeck_traces import DeviceStepSummary
from profdeck_traces.reading.times import exact_nanoseconds

_DEVICE, _STEP, _COMPUTING, _PREPARING = "Device_id", "Step", "Computing", "Preparing"
_NEEDED = (_STEP, _COMPUTING)
_FIELDS = {
    _COMPUTING: "compute_us",
    "Communication": "communication_us",
    "Overlapped": "overlap_us",
    "Communication(Not Overlapped)": "exposed_communication_us",
    "Communication(Not Overlapped and Exclude Receive)": "exposed_without_receives_us",
    "Free": "idle_us",
    "Bubble": "pipeline_bubble_us",
    "Stage": "pipeline_stage_us",
    _PREPARING: "preparation_us",
}
_NS_PER_US = 1000
_MAX_ROWS = 100_000
_MAX_DIGITS = 18  # of a number of 64 bits
# csv's own limit of a field is set for the whole process; a row of such a file has 200 characters.
_MAX_LINE = 1 << 16


@attrs.frozen
class AscendStepTimes:
    """What a ``step_trace_time.csv`` says."""

    steps: tuple[DeviceStepSummary, ...]
    problem: str | None
    """What is wrong with the file, in one sentence; ``None`` if it is whole."""


def read_step_times(path: Path) -> AscendStepTimes:
    """Read a ``step_trace_time.csv``; of a damaged one, the rows that can be read.

    Columns are told by their names. Those that are missing leave ``None``, and so does a ``Preparing`` below 0, which
    torch_npu writes for a step without work on the device. After 100,000 rows no more are read.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    try:
        with path.open("r", encoding="utf-8", errors="replace", newline="") as file:
            steps, problem = _read(file)
    except OSError as error:
        raise TraceError(f"Cannot read {path}: {error.strerror or error}.") from error
    return AscendStepTimes(tuple(steps), problem and f"{path.name}: {problem}")


def _read(file: TextIO) -> tuple[list[DeviceStepSummary], str | None]:
    lines = _Lines(file)
    reader = csv.reader(lines)
    steps: list[DeviceStepSummary] = []
    problem: str | None = None
    try:
        header = [column.strip() for column in next(reader, [])]
        if missing := [column for column in _NEEDED if column not in header]:
            return [], f"It is no table of step times: it has no column {' and no column '.join(missing)}."
        for row in reader:
            if len(steps) >= _MAX_ROWS:
                return steps, f"It has more than {_MAX_ROWS:,} rows: the others were not read."
            step = _step(dict(zip(header, row, strict=True))) if len(row) == len(header) and lines.ended else None
            if step:
                steps.append(step)
            else:
                problem = problem or f"Line {reader.line_num:,} is not a row of {len(header)} columns with times."
    except csv.Error as error:
        return steps, f"Line {reader.line_num:,} is not a row of such a table: {error}."
    return steps, problem or (None if steps else "There are no rows.")


class _Lines:
    """Yields the lines of a file, endless ones in parts."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.ended = True
        """Whether the last one had an end: torch_npu ends them all, so that one without it was cut."""

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(_MAX_LINE):
            self.ended = line.endswith("\n")
            yield line


def _step(row: dict[str, str]) -> DeviceStepSummary | None:
    times: dict[str, float | None] = dict.fromkeys(_FIELDS.values())
    for column, field in _FIELDS.items():
        if text := row.get(column, "").strip():
            time_ns = exact_nanoseconds(text)
            if time_ns is None:
                return None
            times[field] = None if column == _PREPARING and time_ns < 0 else time_ns / _NS_PER_US
    return DeviceStepSummary(device=_number(row.get(_DEVICE, "")), step=_number(row[_STEP]), **times)


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None
