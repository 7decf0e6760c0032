"""Reader for Ascend's ``step_trace_time.csv``: time breakdown of each step on each device by torch_npu's analysis.

Format: ``TraceStepTimeParser`` in torch_npu (``torch_npu/profiler/analysis/prof_view/_trace_step_time_parser.py``). The
columns are the same from 2.6 to 2.14. All times are in microseconds::

    Device_id,Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free,Stage,Bubble,
    Communication(Not Overlapped and Exclude Receive),Preparing

``Device_id`` is -1 for a device without a number. ``Step`` is empty for a recording without steps. ``Bubble`` is the
total time of ``hcom_receive*``. ``Stage`` is the time from the first to the last activity of the step, minus
``Bubble``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import attrs

from profdeck.plugin import TraceError
from profdeck_npu.traces.kernel_details import parse_time_ns
from profdeck_traces import DeviceStepSummary

_DEVICE, _STEP, _COMPUTING, _PREPARING = "Device_id", "Step", "Computing", "Preparing"
_REQUIRED = (_STEP, _COMPUTING)
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
_MAX_DIGITS = 18  # fits into 64 bits
# The field limit of the csv module is process-wide. A real row has about 200 characters.
_MAX_LINE = 1 << 16


@attrs.frozen
class AscendStepTimes:
    """Contents of a ``step_trace_time.csv``."""

    steps: tuple[DeviceStepSummary, ...]
    problem: str | None
    """First problem in the file, as a sentence; ``None`` if the file is intact."""


def read_step_times(path: Path) -> AscendStepTimes:
    """Read a ``step_trace_time.csv``. Invalid rows are skipped.

    Values of missing columns are ``None``. A negative ``Preparing`` is also ``None``: torch_npu writes it for steps
    without device activity. At most 100,000 rows are read.

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
        spellings = {column.casefold(): column for column in (_DEVICE, _STEP, *_FIELDS)}
        header = [spellings.get(column.strip().casefold(), column.strip()) for column in next(reader, [])]
        if missing := [column for column in _REQUIRED if column not in header]:
            return [], f"The file is not a table of step times: missing columns {', '.join(missing)}."
        for row in reader:
            if len(steps) >= _MAX_ROWS:
                return steps, f"The file has more than {_MAX_ROWS:,} rows; the remaining rows were not read."
            is_row = len(row) == len(header) and lines.is_complete
            step = _parse_step(dict(zip(header, row, strict=True))) if is_row else None
            if step:
                steps.append(step)
            else:
                problem = problem or f"Line {reader.line_num:,} does not have {len(header)} columns with valid times."
    except csv.Error as error:
        return steps, f"Line {reader.line_num:,} is not a row of step times: {error}."
    return steps, problem or (None if steps else "The file has no rows.")


class _Lines:
    """Yields the lines of a file. Very long lines are split."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.is_complete = True
        """False if the last line has no line break: it was split, or the file is truncated."""

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(_MAX_LINE):
            self.is_complete = line.endswith("\n")
            yield line


def _parse_step(row: dict[str, str]) -> DeviceStepSummary | None:
    times: dict[str, float | None] = dict.fromkeys(_FIELDS.values())
    for column, field in _FIELDS.items():
        if text := row.get(column, "").strip():
            time_ns = parse_time_ns(text)
            if time_ns is None:
                return None
            times[field] = None if column == _PREPARING and time_ns < 0 else time_ns / _NS_PER_US
    return DeviceStepSummary(device=_parse_number(row.get(_DEVICE, "")), step=_parse_number(row[_STEP]), **times)


def _parse_number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None
