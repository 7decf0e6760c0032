"""Reads one Chrome trace, plain or gzip, into columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, TypedDict

import attrs
import numpy as np

from profdeck_traces.base.progress import Progress
from profdeck_traces.reading.all_events import AllEvents
from profdeck_traces.reading.columns import (
    DEVICE_CATEGORIES,
    MARKS,
    OPERATOR,
    Columns,
    Tables,
    concatenated,
)
from profdeck_traces.reading.event_fields import Stated
from profdeck_traces.reading.integrity import TraceCheck, check_trace
from profdeck_traces.reading.time_slices import SLICE_EVENTS, TimeSlices
from profdeck_traces.reading.trace import Trace

# What a category is called that only the name of the process will tell is "" so far.
DEVICE_LANES = DEVICE_CATEGORIES | MARKS | {""}
# More annotations than any capture that somebody looks at has: 24 MB of them.
MAX_MARKS = 1_000_000
# Written by Kineto at the head and the end of the file (libkineto/src/output_json.cpp).
KEYS = frozenset({"distributedInfo", "deviceProperties", "baseTimeNanoseconds"})


class ReadingArguments(TypedDict):
    """The arguments of `read_trace` that are the same for all kinds of files."""

    is_step: Callable[[str], bool]
    on_progress: Progress | None
    max_json_bytes: int
    slice_events: int


def read_chrome(  # noqa: PLR0913 - the arguments of `read_trace`, and how to read
    path: Path,
    kind: type[AllEvents],
    categories: frozenset[str] | None,
    *,
    tables: Tables | None = None,
    is_step: Callable[[str], bool],
    on_progress: Progress | None,
    max_json_bytes: int,
    slice_events: int = SLICE_EVENTS,
) -> Trace:
    """Read a Chrome trace with the handler class `kind`. Read all categories if `categories` is None.

    `profdeck_traces.reading.reader.read_trace` describes the other arguments.
    """
    store = EventStore(is_step, categories, tables, slice_events)
    handler = kind(KEYS, store.tables, store.add)
    check = check_trace(path, handler, on_progress=on_progress, max_json_bytes=max_json_bytes)
    handler.finish()
    return trace_of(
        path,
        check,
        handler.stated,
        tables=store.tables,
        timeline=store.timeline,
        marks=store.marks.columns(),
        devices_only=categories is not None,
    )


def trace_of(  # noqa: PLR0913 - all that was read
    path: Path,
    check: TraceCheck,
    stated: Stated,
    *,
    tables: Tables,
    timeline: TimeSlices,
    marks: Columns,
    devices_only: bool,
) -> Trace:
    """Return what was read as a trace.

    Args:
        path: The file.
        check: What reading it to its end established.
        stated: What it says besides its complete events.
        tables: For all columns.
        timeline: The complete events.
        marks: Those that may mark steps, in the order of the file.
        devices_only: Whether the events are those of devices and annotations only.
    """
    if stated.undecodable:
        which = "An event" if stated.undecodable == 1 else f"{stated.undecodable:,} events"
        lost = f"{which} cannot be decoded: nested too deeply, or with a number too large. It is in no other number."
        check = attrs.evolve(check, whole=False, problem=" ".join(filter(None, [check.problem, lost])))
    return Trace(
        path=path,
        check=check,
        devices_only=devices_only,
        searched=stated.searched,
        tables=tables,
        timeline=timeline,
        marks=marks,
        members=stated.members,
        process_names=stated.process_names,
        thread_names=stated.thread_names,
        copied=stated.copies.told,
        collectives=stated.collectives,
        memory=stated.memory,
        shapes=stated.shapes,
        annotations=stated.annotations,
    )


class EventStore:
    """Takes the events of a file, or those of some categories, and marks of any."""

    def __init__(
        self,
        is_step: Callable[[str], bool],
        categories: frozenset[str] | None,
        tables: Tables | None = None,
        slice_events: int = SLICE_EVENTS,
        file: IO[bytes] | None = None,
    ) -> None:
        self.tables = Tables() if tables is None else tables
        self.timeline = TimeSlices(self.tables, slice_events, file)
        self.marks = _Marks(self.tables, is_step)
        self._categories = categories

    def add(self, block: Columns) -> None:
        """Take a block of events."""
        self.marks.add(block)
        if self._categories is not None:
            block = block[self.tables.names_of_categories(self._categories)[block.name]]
        self.timeline.add(block)


class _Marks:
    """Keeps what may mark a step; of too much, what comes first in the file."""

    def __init__(self, tables: Tables, is_step: Callable[[str], bool]) -> None:
        self._tables = tables
        self._is_step = is_step
        self._is_mark = np.empty(0, dtype=np.bool_)
        self._kept: list[Columns] = []
        self._count = 0

    def add(self, block: Columns) -> None:
        known = len(self._is_mark)
        if known < len(self._tables.names):
            self._is_mark = np.append(self._is_mark, list(map(self._marks, range(known, len(self._tables.names)))))
        kept = block[self._is_mark[block.name]]
        if len(kept) and self._count < MAX_MARKS:
            self._kept.append(kept[: MAX_MARKS - self._count])
            self._count += len(kept)

    def columns(self) -> Columns:
        return concatenated(self._tables, self._kept)

    def take(self) -> Columns:
        """Return those that came since."""
        found = self.columns()
        self._kept = []
        return found

    def _marks(self, code: int) -> bool:
        category = self._tables.categories[self._tables.name_category[code]]
        return category in MARKS or (category == OPERATOR and self._is_step(self._tables.names[code]))
