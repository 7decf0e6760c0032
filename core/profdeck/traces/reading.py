"""Reads one trace file, whichever kind it is, into a timeline of columns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from profdeck.progress import Progress
from profdeck.traces.ascend import is_kernel_details, read_kernel_details
from profdeck.traces.columns import (
    ANNOTATION,
    DEVICE_ANNOTATION,
    DEVICE_CATEGORIES,
    DEVICE_PROCESSES,
    OPERATOR,
    Columns,
    Tables,
    concatenated,
)
from profdeck.traces.event_args import StatedCollectives
from profdeck.traces.handler import ColumnsHandler
from profdeck.traces.integrity import MAX_JSON_BYTES, TraceCheck, TraceChecker, feed_chunks, file_size
from profdeck.traces.lanes import LanesHandler
from profdeck.traces.model import Id
from profdeck.traces.stream import read_ahead
from profdeck.traces.timeline import Slice, Timeline

if TYPE_CHECKING:
    import pyarrow as pa

_MARKS = frozenset({ANNOTATION, DEVICE_ANNOTATION})
# What a category is called that only the name of the process will tell is "" so far.
_LANES = DEVICE_CATEGORIES | _MARKS | {""}
# More annotations than any capture that somebody looks at has: 24 MB of them.
_MAX_MARKS = 1_000_000
_MAX_BASE_NS = 2**62  # leaves as much for the times that count from it
# Written by Kineto at the head and the end of the file (libkineto/src/output_json.cpp).
_KEYS = frozenset({"distributedInfo", "deviceProperties", "baseTimeNanoseconds"})


@attrs.frozen
class Trace:
    """The complete events of one trace, and what the file says of itself."""

    path: Path
    check: TraceCheck
    """Of a trace of which only the lanes were searched, ``events`` counts nothing."""
    devices_only: bool
    """Whether the events are those of devices and annotations only."""
    searched: bool
    """Whether these were searched for: only what was found is proved to be JSON then."""
    tables: Tables
    timeline: Timeline
    marks: Columns
    """Annotations, of hosts and devices, and the operators that mark steps, in the order of the file."""
    members: dict[str, Any] = attrs.field(factory=dict)
    """``distributedInfo``, ``deviceProperties`` and ``baseTimeNanoseconds``, as far as they are there."""
    process_names: dict[Id, str] = attrs.field(factory=dict)
    thread_names: dict[tuple[Id, Id], str] = attrs.field(factory=dict)
    copied: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    """By the name of copies and fills: how many said what they moved, and how many bytes in all."""
    collectives: StatedCollectives = attrs.field(factory=StatedCollectives)
    """What kernels of collectives say of themselves."""

    @property
    def rank(self) -> int | None:
        """The rank, by ``distributedInfo``."""
        return _integer(self.members.get("distributedInfo"), "rank")

    @property
    def world_size(self) -> int | None:
        """The number of ranks, by ``distributedInfo``."""
        return _integer(self.members.get("distributedInfo"), "world_size")

    @property
    def base_ns(self) -> int:
        """What the times count from, in Unix nanoseconds: ``baseTimeNanoseconds``, or 0."""
        base = self.members.get("baseTimeNanoseconds")
        return base if isinstance(base, int) and abs(base) < _MAX_BASE_NS else 0

    @property
    def device_names(self) -> dict[Id, str]:
        """The names of the devices, by ``deviceProperties``."""
        properties = self.members.get("deviceProperties")
        return {
            device["id"]: str(device.get("name"))
            for device in (properties if isinstance(properties, list) else [])
            if isinstance(device, dict) and isinstance(device.get("id"), int)
        }

    def slices(self) -> Iterator[Slice]:
        """Yield the events in slices of time."""
        return self.timeline.slices()

    def columns(self) -> Columns:
        """Return all events in the order of time, in memory."""
        parts = [
            attrs.evolve(piece.columns, start_ns=piece.order_ns, end_ns=piece.whole_end_ns)[piece.first]
            for piece in self.slices()
        ]
        return concatenated(self.tables, parts)

    def to_arrow(self) -> pa.Table:
        """Return all events as a table: ``name``, ``category``, ``pid``, ``tid``, ``start_ns``, ``end_ns``.

        Raises:
            ImportError: pyarrow is not installed.
        """
        import pyarrow as pa

        columns = self.columns()

        def text(codes: Any, values: list[str]) -> pa.DictionaryArray:
            return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(values, pa.string()))

        pids, tids = ([str(track[part]) for track in columns.tracks] for part in (0, 1))
        return pa.table(
            {
                "name": text(columns.name, columns.names),
                "category": text(columns.category, columns.categories),
                "pid": text(columns.track, pids),
                "tid": text(columns.track, tids),
                "start_ns": columns.start_ns,
                "end_ns": columns.end_ns,
            }
        )


def read_trace(
    path: Path,
    *,
    devices_only: bool = False,
    is_step: Callable[[str], bool] = lambda _name: False,
    on_progress: Progress | None = None,
    max_json_bytes: int = MAX_JSON_BYTES,
) -> Trace:
    """Read a Chrome trace, plain or gzip, or Ascend's ``kernel_details.csv``, in one pass and bounded memory.

    Of a damaged file, what is readable is read, and the check says where that ends.

    Times are exact to the nanosecond, also where the file has them as strings or as numbers of more digits than a
    float holds.

    Args:
        path: The file.
        devices_only: Search the lanes of devices and annotations instead of parsing everything: three times as fast.
            Damage to the JSON outside of them is not noticed, damage to the gzip stream is.
        is_step: Whether a name is that of a step, asked once for each name of operators: Ascend's profiler marks steps
            by operators.
        on_progress: Called with the bytes of the file read so far and its size, from the reading thread.
        max_json_bytes: Give up after so many uncompressed bytes, against files that inflate without end.

    Raises:
        TraceError: The file cannot be opened or read.
        OSError: There is no room for temporary files.
    """
    read = functools.partial(_read, path, is_step=is_step, on_progress=on_progress, max_json_bytes=max_json_bytes)
    if devices_only:
        trace = read(LanesHandler, _LANES)
        # Where a cut went wrong, the file is damaged or the process tells what is a device, the parser knows.
        if trace.check.whole and DEVICE_PROCESSES.isdisjoint(trace.process_names.values()):
            return trace
    return read(ColumnsHandler, _LANES if devices_only else None)


def _read(  # noqa: PLR0913 - the arguments of `read_trace`, and how to read
    path: Path,
    kind: type[ColumnsHandler],
    categories: frozenset[str] | None,
    *,
    is_step: Callable[[str], bool],
    on_progress: Progress | None,
    max_json_bytes: int,
) -> Trace:
    size_bytes = file_size(path)
    on_read = None if on_progress is None else lambda read: on_progress(read, size_bytes)
    tables = Tables()
    timeline = Timeline(tables)
    marks = _Marks(tables, is_step)

    def sink(block: Columns) -> None:
        wanted = block if categories is None else block[tables.names_of_categories(categories)[block.name]]
        timeline.add(wanted)
        marks.add(wanted)

    if is_kernel_details(path):
        check = read_kernel_details(path, tables, sink, on_read)
        return Trace(
            path=path,
            check=check,
            devices_only=True,
            searched=False,
            tables=tables,
            timeline=timeline,
            marks=marks.columns(),
        )
    handler = kind(_KEYS, tables, sink)
    checker = TraceChecker(handler)
    damage = feed_chunks(checker.feed, read_ahead(path, on_read=on_read), max_json_bytes)
    check = checker.finish(size_bytes, damage=damage)
    handler.finish()
    return Trace(
        path=path,
        check=check,
        devices_only=categories is not None,
        searched=handler.searched,
        tables=tables,
        timeline=timeline,
        marks=marks.columns(),
        members=handler.members,
        process_names=handler.process_names,
        thread_names=handler.thread_names,
        copied=handler.copies.told(),
        collectives=handler.collectives,
    )


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
        if len(kept) and self._count < _MAX_MARKS:
            self._kept.append(kept[: _MAX_MARKS - self._count])
            self._count += len(kept)

    def columns(self) -> Columns:
        return concatenated(self._tables, self._kept)

    def _marks(self, code: int) -> bool:
        category = self._tables.categories[self._tables.name_category[code]]
        return category in _MARKS or (category == OPERATOR and self._is_step(self._tables.names[code]))


def _integer(members: Any, key: str) -> int | None:
    value = members.get(key) if isinstance(members, dict) else None
    return value if isinstance(value, int) else None
