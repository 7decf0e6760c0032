"""Reads a torch_npu directory, or a single kernel table, into columns."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import attrs

from profdeck.plugin import TraceError, file_size
from profdeck_npu.traces.communication import read_communication
from profdeck_npu.traces.directory import AscendDirectory, size_to_read
from profdeck_npu.traces.kernel_details import read_kernel_details, steps_as_annotations, steps_on_devices
from profdeck_npu.traces.step_times import read_step_times
from profdeck_traces import Meter, Progress, RecorderTables, StepOnDevice
from profdeck_traces.reading.all_events import AllEvents
from profdeck_traces.reading.chrome import EventStore, ReadingArguments, read_chrome
from profdeck_traces.reading.column_builder import ColumnBuilder
from profdeck_traces.reading.columns import ANNOTATION, DEVICE_PROCESSES, MARKS, OPERATOR, Tables, concatenated
from profdeck_traces.reading.integrity import TraceCheck
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.reading.trace import Trace


def read_directory(  # noqa: PLR0913 - the arguments of `read_trace`
    path: Path,
    *,
    devices_only: bool,
    is_step: Callable[[str], bool],
    on_progress: Progress | None,
    max_json_bytes: int,
    slice_events: int,
) -> Trace:
    """Read a trace directory written by torch_npu.

    `profdeck_traces.reading.reader.read_trace` describes the arguments.

    Kernels are read from ``kernel_details.csv``, and all other events from ``trace_view.json``. In the latter, the
    lanes of process ``Ascend Hardware`` are skipped, because they contain the same kernels, plus waits and mstx ranges.
    If one of the two files is missing, only the other file is read.

    Raises:
        TraceError: the directory cannot be read or has not been analysed.
    """
    directory = AscendDirectory(path)
    if error := directory.read_error():
        raise error
    table, trace_view = directory.kernel_details, directory.trace_view
    meter = Meter(size_to_read(path), on_progress)
    problems: list[str] = []
    kernels: Kernels | None = None
    trace: Trace | None = None
    if table is not None:
        kernels = _attempt(functools.partial(Kernels, table, is_step, meter.within, slice_events), problems)
        meter.passed(file_size(table))
        if kernels is not None and kernels.check.problem:
            problems.append(f"{table.name}: {kernels.check.problem}")
    if trace_view is not None:
        arguments = ReadingArguments(
            is_step=is_step, on_progress=meter.within, max_json_bytes=max_json_bytes, slice_events=slice_events
        )
        if kernels is not None and kernels.check.events:
            read_host = functools.partial(
                read_chrome, trace_view, AllEvents, MARKS if devices_only else None, **arguments
            )
            trace = _attempt(functools.partial(kernels.with_host, read_host), problems)
        else:
            read_all = functools.partial(read_trace, trace_view, devices_only=devices_only, **arguments)
            trace = _attempt(read_all, problems)
        if trace is not None and trace.check.problem:
            problems.append(f"{trace_view.name}: {trace.check.problem}")
    if trace is None and kernels is not None:
        trace = kernels.without_host()
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


class Kernels:
    """Kernels of a ``kernel_details.csv``, read at construction."""

    def __init__(
        self, path: Path, is_step: Callable[[str], bool], on_progress: Progress | None, slice_events: int
    ) -> None:
        self._path = path
        self._store = EventStore(is_step, None, slice_events=slice_events)
        self._collector = ColumnBuilder(self._store.tables, self._store.add)
        self._details = read_kernel_details(path, self._collector, on_progress)

    @property
    def check(self) -> TraceCheck:
        """Result of checking the complete table."""
        return self._details.check

    def without_host(self) -> Trace:
        """Return a trace with the kernels and with step annotations."""
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
        """Return a trace with the kernels and with the events of a Chrome trace, except its device lanes.

        Args:
            read: Reads the Chrome trace. Called with the keyword argument ``tables``.
        """
        tables = self._store.tables
        # Add step names before reading the host: the number of names is limited, and the host may use them up.
        self._collector.add_spans(steps_on_devices(self._details.steps))
        host = read(tables=tables)
        if not _has_steps(tables):
            self._collector.add_spans(steps_as_annotations(self._details.steps))
        self._collector.finish({})
        is_device_name = tables.names_of_categories(DEVICE_PROCESSES)
        for block in host.timeline.blocks():
            self._store.timeline.add(block[~is_device_name[block.name]])
        return attrs.evolve(
            host,
            timeline=self._store.timeline,
            marks=concatenated(tables, [host.marks, self._store.marks.columns()]),
            kernel_types=self._details.types,
            cores=self._details.cores,
        )


def _has_steps(tables: Tables) -> bool:
    """Return whether the host annotated steps."""
    is_host_name = tables.names_of_categories(frozenset({OPERATOR, ANNOTATION}))
    return any(name.startswith("ProfilerStep#") for name in itertools.compress(tables.names, is_host_name))


def read_tables(path: Path) -> RecorderTables:
    """Read the step table and the communication table. Errors are added to the problems of the result."""
    directory = AscendDirectory(path)
    tables, problems = RecorderTables(), []
    try:
        if file := directory.step_trace_time:
            steps = read_step_times(file)
            problems.append(steps.problem)
            tables = attrs.evolve(tables, device_steps=steps.steps)
        if file := directory.communication:
            calls = read_communication(file)
            problems.append(calls.problem)
            tables = attrs.evolve(tables, communication=calls.operations, groups=calls.groups)
    except TraceError as error:
        problems.append(str(error))
    return attrs.evolve(tables, problems=tuple(filter(None, problems)))


def kernel_step_spans(path: Path) -> list[StepOnDevice]:
    """Return the time span of each step's kernels on each device. Without a kernel table, return an empty list.

    Raises:
        TraceError: the table cannot be read.
    """
    table = AscendDirectory(path).kernel_details
    if table is None:
        return []
    kernels = read_kernel_details(table, ColumnBuilder(Tables(), lambda _: None))
    return [StepOnDevice(step.step, step.device, step.start_ns, step.end_ns) for step in kernels.steps]
