"""Ascend's ``kernel_details.csv`` as events: one row for each task that ran on a device.

Format: "kernel_details" in the CANN documentation of msprof. ``Start Time(us)`` may end in a tab, which keeps
spreadsheets from rounding it; ``Step Id`` and ``Device_id`` are not always there.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path

import attrs

from profdeck.errors import TraceError
from profdeck.traces.collector import Collector, Event
from profdeck.traces.columns import ANNOTATION, Columns, Tables
from profdeck.traces.integrity import TraceCheck, file_size

_NAME, _TYPE, _START, _DURATION = "Name", "Type", "Start Time(us)", "Duration(us)"
_NEEDED = (_NAME, _TYPE, _START, _DURATION)
_STREAM, _STEP, _DEVICE = "Stream ID", "Step Id", "Device_id"
_EVENTS_AT_ONCE = 4096
# csv's own limit of a field is set for the whole process; no line of a real file is near to this.
_MAX_LINE = 1 << 20


def is_kernel_details(path: Path) -> bool:
    """Tell such a file by its name."""
    return path.name.startswith("kernel_details") and path.suffix == ".csv"


@attrs.define
class _Step:
    start_us: Decimal
    end_us: Decimal


def read_kernel_details(
    path: Path, tables: Tables, sink: Callable[[Columns], None], on_read: Callable[[int], None] | None = None
) -> TraceCheck:
    """Read the rows as kernels, and the time of each step as an annotation.

    Rows of one type that differ in a counter only ("Cast66", "Cast67") get the type as their name.

    Args:
        path: The file.
        tables: For the columns; empty at first.
        sink: Takes the events in blocks.
        on_read: Called with the bytes read so far.

    Raises:
        TraceError: The file cannot be read, or it has not the columns of such a file.
    """
    size_bytes = file_size(path)
    collector = Collector(tables, sink)
    steps: dict[str, _Step] = {}
    events: list[Event] = []
    count, problem = 0, None
    try:
        with path.open("r", encoding="utf-8", errors="replace", newline="") as file:
            reader = csv.reader(_lines(file, on_read))
            header = [column.strip() for column in next(reader, [])]
            if missing := [column for column in _NEEDED if column not in header]:
                raise TraceError(f"{path} is not Ascend's kernel_details.csv: it has no column {', '.join(missing)}.")
            for row in reader:
                event = _event(dict(zip(header, row, strict=False))) if len(row) == len(header) else None
                if event is None:
                    problem = (
                        problem or f"Line {reader.line_num:,} is not a row of {len(header)} columns with its times."
                    )
                    continue
                count += 1
                events.append(event)
                _widen(steps, row[header.index(_STEP)] if _STEP in header else "", event)
                if len(events) >= _EVENTS_AT_ONCE:
                    collector.add(events)
                    events.clear()
    except (OSError, csv.Error) as error:
        raise TraceError(f"Cannot read {path}: {error}.") from error
    collector.add([*events, *_annotations(steps)])
    collector.finish({})
    if not count:
        problem = problem or "There are no rows."
    return TraceCheck(size_bytes=size_bytes, json_bytes=0, events=count, whole=problem is None, problem=problem)


def _lines(file: Iterator[str], on_read: Callable[[int], None] | None) -> Iterator[str]:
    read = 0
    for line in file:
        if len(line) > _MAX_LINE:
            raise csv.Error(f"a line has more than {_MAX_LINE:,} characters")
        read += len(line)
        if on_read is not None:
            on_read(read)
        yield line


def _event(row: dict[str, str]) -> Event | None:
    name, kind = row[_NAME].strip(), row[_TYPE].strip()
    try:
        start_us, duration_us = Decimal(row[_START].strip()), Decimal(row[_DURATION].strip())
    except InvalidOperation:
        return None
    if not (start_us.is_finite() and duration_us.is_finite()):
        return None
    counted = name.startswith(kind) and re.fullmatch(r"[_0-9]*", name[len(kind) :])
    return Event(
        ph="X",
        name=kind if counted else name,
        cat="kernel",
        pid=_id(row.get(_DEVICE, "0")),
        tid=_id(row.get(_STREAM, "0")),
        ts=start_us,
        dur=duration_us,
    )


def _id(text: str) -> int | str:
    text = text.strip()
    return int(text) if text.isdecimal() else text


def _widen(steps: dict[str, _Step], step: str, event: Event) -> None:
    if not step.strip().isdecimal() or event.ts is None or event.dur is None:
        return
    end_us = event.ts + event.dur
    known = steps.setdefault(step.strip(), _Step(event.ts, end_us))
    known.start_us, known.end_us = min(known.start_us, event.ts), max(known.end_us, end_us)


def _annotations(steps: dict[str, _Step]) -> list[Event]:
    return [
        Event(
            ph="X",
            name=f"ProfilerStep#{number}",
            cat=ANNOTATION,
            pid="steps",
            ts=step.start_us,
            dur=step.end_us - step.start_us,
        )
        for number, step in steps.items()
    ]
