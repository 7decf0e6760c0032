"""Reads one trace, whichever kind it is, into a timeline of columns."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import attrs
import numpy as np

from profdeck.base.errors import TraceError
from profdeck.base.files import size_of
from profdeck.base.progress import Meter, Progress
from profdeck.traces.ascend.directory import AscendDirectory, is_ascend_directory, size_to_read
from profdeck.traces.ascend.kernel_details import read_kernel_details, steps_as_annotations, steps_on_devices
from profdeck.traces.reading.all_events import AllEvents
from profdeck.traces.reading.column_builder import ColumnBuilder
from profdeck.traces.reading.columns import (
    ANNOTATION,
    DEVICE_ANNOTATION,
    DEVICE_CATEGORIES,
    DEVICE_PROCESSES,
    OPERATOR,
    Columns,
    Tables,
    concatenated,
)
from profdeck.traces.reading.device_events import DeviceEvents
from profdeck.traces.reading.event_args import StatedCollectives
from profdeck.traces.reading.identifiers import Id
from profdeck.traces.reading.integrity import MAX_JSON_BYTES, TraceCheck, check_trace
from profdeck.traces.reading.time_slices import Slice, TimeSlices
from profdeck.traces.sources import is_kernel_details

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
    timeline: TimeSlices
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
    kernel_types: dict[str, str] = attrs.field(factory=dict)
    """The type of the operator that a kernel carries out, by the name of the kernel, as far as Ascend tells it."""
    cores: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    """By the kind of core, as far as Ascend tells it: how many kernels, and the sum of their times in nanoseconds."""

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
        return concatenated(self.tables, [piece.whole(piece.first) for piece in self.slices()])

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
    """Read a Chrome trace, plain or gzip, or what Ascend's profiler wrote, in one pass and bounded memory.

    Of a damaged file, what is readable is read, and the check says where that ends.

    Of a directory ``*_ascend_pt`` of torch_npu the kernels come from ``kernel_details.csv``, all else from
    ``trace_view.json`` without the lanes of its process ``Ascend Hardware``: these show the same kernels, and between
    them waits and ranges of mstx. If one of the two files is not there, the other is read alone.

    Times are exact to the nanosecond, also where the file has them as strings or as numbers of more digits than a
    float holds.

    Args:
        path: A Chrome trace, a ``kernel_details.csv``, or a directory of both.
        devices_only: Search the lanes of devices and annotations instead of parsing everything: three times as fast.
            Damage to the JSON outside of them is not noticed, damage to the gzip stream is. Of a directory, the kernels
            and the marks of steps are kept; its JSON is parsed all the same.
        is_step: Whether a name is that of a step, asked once for each name of operators: Ascend's profiler marks steps
            by operators.
        on_progress: Called with the bytes of the file read so far and its size, from the reading thread.
        max_json_bytes: Give up after so many uncompressed bytes, against files that inflate without end.

    Raises:
        TraceError: The file cannot be opened or read, or nothing has analysed the directory.
        OSError: There is no room for temporary files.
    """
    how = _How(is_step=is_step, on_progress=on_progress, max_json_bytes=max_json_bytes)
    if is_ascend_directory(path):
        return _read_directory(path, devices_only=devices_only, **how)
    if is_kernel_details(path):
        return _Kernels(path, is_step, on_progress).alone()
    read = functools.partial(_read, path, **how)
    if devices_only:
        trace = read(DeviceEvents, _LANES)
        # Where a cut went wrong, the file is damaged or the process tells what is a device, the parser knows.
        if trace.check.whole and DEVICE_PROCESSES.isdisjoint(trace.process_names.values()):
            return trace
    return read(AllEvents, _LANES if devices_only else None)


class _How(TypedDict):
    """The arguments of `read_trace` that are the same for all kinds of files."""

    is_step: Callable[[str], bool]
    on_progress: Progress | None
    max_json_bytes: int


def _read(  # noqa: PLR0913 - the arguments of `read_trace`, and how to read
    path: Path,
    kind: type[AllEvents],
    categories: frozenset[str] | None,
    *,
    tables: Tables | None = None,
    is_step: Callable[[str], bool],
    on_progress: Progress | None,
    max_json_bytes: int,
) -> Trace:
    store = _Store(is_step, categories, tables)
    handler = kind(_KEYS, store.tables, store.add)
    check = check_trace(path, handler, on_progress=on_progress, max_json_bytes=max_json_bytes)
    handler.finish()
    return Trace(
        path=path,
        check=check,
        devices_only=categories is not None,
        searched=handler.searched,
        tables=store.tables,
        timeline=store.timeline,
        marks=store.marks.columns(),
        members=handler.members,
        process_names=handler.process_names,
        thread_names=handler.thread_names,
        copied=handler.copies.told(),
        collectives=handler.collectives,
    )


def _read_directory(
    path: Path,
    *,
    devices_only: bool,
    is_step: Callable[[str], bool],
    on_progress: Progress | None,
    max_json_bytes: int,
) -> Trace:
    """Read a directory of torch_npu; see `read_trace`."""
    directory = AscendDirectory(path)
    if error := directory.unreadable():
        raise error
    table, view = directory.kernel_details, directory.trace_view
    meter = Meter(size_to_read(path), on_progress)
    problems: list[str] = []
    kernels: _Kernels | None = None
    trace: Trace | None = None
    if table is not None:
        kernels = _attempt(functools.partial(_Kernels, table, is_step, meter.within), problems)
        meter.passed(size_of(table))
        if kernels is not None and kernels.check.problem:
            problems.append(f"{table.name}: {kernels.check.problem}")
    if view is not None:
        how = _How(is_step=is_step, on_progress=meter.within, max_json_bytes=max_json_bytes)
        if kernels is not None and kernels.check.events:
            read = functools.partial(_read, view, AllEvents, _MARKS if devices_only else None, **how)
            trace = _attempt(functools.partial(kernels.with_host, read), problems)
        else:
            trace = _attempt(functools.partial(read_trace, view, devices_only=devices_only, **how), problems)
        if trace is not None and trace.check.problem:
            problems.append(f"{view.name}: {trace.check.problem}")
    if trace is None and kernels is not None:
        trace = kernels.alone()
    if trace is None:
        raise TraceError(" ".join(problems))
    check = attrs.evolve(
        trace.check,
        size_bytes=size_to_read(path),
        whole=trace.check.whole and not problems,
        problem=" ".join(problems) or None,
    )
    rank = directory.rank
    members = trace.members if rank is None else {"distributedInfo": {"rank": rank}, **trace.members}
    return attrs.evolve(trace, path=path, check=check, members=members)


_T = TypeVar("_T")


def _attempt(read: Callable[[], _T], problems: list[str]) -> _T | None:
    try:
        return read()
    except TraceError as error:
        problems.append(str(error))
        return None


class _Kernels:
    """The kernels of a ``kernel_details.csv``."""

    def __init__(self, path: Path, is_step: Callable[[str], bool], on_progress: Progress | None) -> None:
        self._path = path
        self._store = _Store(is_step, None)
        self._collector = ColumnBuilder(self._store.tables, self._store.add)
        self._details = read_kernel_details(path, self._collector, on_progress)

    @property
    def check(self) -> TraceCheck:
        return self._details.check

    def alone(self) -> Trace:
        """Return the trace that they are without anything else."""
        self._collector.add_spans(steps_as_annotations(self._details.steps))
        self._collector.finish({})
        return Trace(
            path=self._path,
            check=self.check,
            devices_only=True,
            searched=False,
            tables=self._store.tables,
            timeline=self._store.timeline,
            marks=self._store.marks.columns(),
            kernel_types=self._details.types,
            cores=self._details.cores,
        )

    def with_host(self, read: Callable[..., Trace]) -> Trace:
        """Return the trace of these kernels and of all but the device lanes of a Chrome trace.

        Args:
            read: Reads that; takes ``tables``.
        """
        tables = self._store.tables
        # First, so that a host of very many names leaves them theirs.
        self._collector.add_spans(steps_on_devices(self._details.steps))
        host = read(tables=tables)
        if not _has_steps(tables):
            self._collector.add_spans(steps_as_annotations(self._details.steps))
        self._collector.finish({})
        left_out = tables.names_of_categories(DEVICE_PROCESSES)
        for block in host.timeline.blocks():
            self._store.timeline.add(block[~left_out[block.name]])
        return attrs.evolve(
            host,
            timeline=self._store.timeline,
            marks=concatenated(tables, [host.marks, self._store.marks.columns()]),
            kernel_types=self._details.types,
            cores=self._details.cores,
        )


def _has_steps(tables: Tables) -> bool:
    """Tell whether the host marked steps."""
    of_host = tables.names_of_categories(frozenset({OPERATOR, ANNOTATION}))
    return any(name.startswith("ProfilerStep#") for name in itertools.compress(tables.names, of_host))


class _Store:
    """Takes the events of a file, or those of some categories, and marks of any."""

    def __init__(
        self, is_step: Callable[[str], bool], categories: frozenset[str] | None, tables: Tables | None = None
    ) -> None:
        self.tables = Tables() if tables is None else tables
        self.timeline = TimeSlices(self.tables)
        self.marks = _Marks(self.tables, is_step)
        self._categories = categories

    def add(self, block: Columns) -> None:
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
