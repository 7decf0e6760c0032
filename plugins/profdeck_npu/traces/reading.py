"""Reads a torch_npu directory, or a single kernel table, into columns."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import attrs
import numpy as np

from profdeck.plugin import TraceError, file_size
from profdeck_npu.traces.communication import read_communication
from profdeck_npu.traces.directory import AscendDirectory, size_to_read
from profdeck_npu.traces.kernel_details import (
    KernelDetails,
    read_kernel_details,
    steps_as_annotations,
    steps_on_devices,
)
from profdeck_npu.traces.step_times import read_step_times
from profdeck_traces import Meter, Progress, RecorderTables, StepOnDevice
from profdeck_traces.reading.columns import (
    ANNOTATION,
    DEVICE_PROCESSES,
    OPERATOR,
    Columns,
    Tables,
    by_start,
    columns_of,
    combined,
    concatenated,
)
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.reading.trace import Trace

_MAX_CONCURRENT = 16
"""Maximum number of device events with the same start that are compared with a kernel."""


def read_directory(
    path: Path, *, is_step: Callable[[str], bool], on_progress: Progress | None, max_json_bytes: int
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
    details: KernelDetails | None = None
    trace: Trace | None = None
    if table is not None:
        details = _attempt(functools.partial(read_kernel_details, table, meter.within), problems)
        meter.passed(file_size(table))
        if details is not None and details.check.problem:
            problems.append(f"{table.name}: {details.check.problem}")
    if trace_view is not None:
        read_host = functools.partial(
            read_trace, trace_view, is_step=is_step, on_progress=meter.within, max_json_bytes=max_json_bytes
        )
        trace = _attempt(read_host, problems)
        if trace is not None and trace.check.problem:
            problems.append(f"{trace_view.name}: {trace.check.problem}")
    if details is not None and (trace is None or details.check.events):
        trace = _without_host(path, details) if trace is None else _with_host(trace, details)
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


def read_kernels(path: Path, on_progress: Progress | None) -> Trace:
    """Read a single kernel table.

    Raises:
        TraceError: the table cannot be read.
    """
    return _without_host(path, read_kernel_details(path, on_progress))


_T = TypeVar("_T")


def _attempt(read: Callable[[], _T], problems: list[str]) -> _T | None:
    try:
        return read()
    except TraceError as error:
        problems.append(str(error))
        return None


def _without_host(path: Path, details: KernelDetails) -> Trace:
    """Return a trace that contains the kernels, and step annotations derived from them."""
    kernels, annotations = combined([details.kernels, columns_of(steps_as_annotations(details.steps))])
    return Trace(
        path=path,
        check=details.check,
        events=by_start(concatenated(kernels.tables, [kernels, annotations])),
        annotations=annotations,
        kernel_types=details.types,
        cores=details.cores,
        has_host=False,
    )


def _with_host(host: Trace, details: KernelDetails) -> Trace:
    """Return a trace that contains the kernels, and all events of a Chrome trace except those on device lanes."""
    steps = steps_on_devices(details.steps)
    if not _has_steps(host.tables):
        steps += steps_as_annotations(details.steps)
    is_device = host.tables.names_of_categories(DEVICE_PROCESSES)
    of_device = is_device[host.events.name]
    of_host = host.events[~of_device]
    table = attrs.evolve(details.kernels, row=_rows_of_kernels(details.kernels, host.events[of_device]))
    kernels, events, annotations, of_steps = combined([table, of_host, host.annotations, columns_of(steps)])
    return attrs.evolve(
        host,
        events=by_start(concatenated(kernels.tables, [kernels, of_steps, events])),
        annotations=concatenated(kernels.tables, [annotations, of_steps]),
        kernel_types=details.types,
        cores=details.cores,
    )


def _rows_of_kernels(kernels: Columns, device_events: Columns) -> Int:
    """Return the trace row of each kernel: that of the device event with the same start and name, or -1.

    Args:
        kernels: Kernels of the table. Counters have been removed from their names; see `read_kernel_details`.
        device_events: Device events of the trace, sorted by start.
    """
    rows = np.full(len(kernels), -1, dtype=np.int64)
    first = np.searchsorted(device_events.start_ns, kernels.start_ns)
    for offset in range(_MAX_CONCURRENT):
        index = np.flatnonzero((rows < 0) & (first + offset < len(device_events)))
        index = index[device_events.start_ns[first[index] + offset] == kernels.start_ns[index]]
        pairs = zip(kernels.name[index].tolist(), device_events.name[first[index] + offset].tolist(), strict=True)
        names, device_names = kernels.tables.names, device_events.tables.names
        matches = np.array([device_names[other].startswith(names[name]) for name, other in pairs], dtype=np.bool_)
        rows[index[matches]] = device_events.row[first[index[matches]] + offset]
    return rows


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
    kernels = read_kernel_details(table)
    return [StepOnDevice(step.step, step.device, step.start_ns, step.end_ns) for step in kernels.steps]
