"""Write traces into one slim file of Perfetto's own format, which opens where the whole of them would not."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from profdeck_traces.account.owned_path import RankWaits
from profdeck_traces.analysis.critical_path import critical_path
from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import append_file, new_file
from profdeck_traces.base.parallel import map_traces, without_errors
from profdeck_traces.base.progress import Progress
from profdeck_traces.inputs.artifact_kinds import size_to_read
from profdeck_traces.reading.columns import (
    ANNOTATION,
    DEVICE_ANNOTATION,
    DEVICE_WORK,
    Columns,
)
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.reading.trace import Trace
from profdeck_traces.writing.deflate import gzip_deflater
from profdeck_traces.writing.perfetto import PerfettoSource, encode_source
from profdeck_traces.writing.perfetto_path import encode_path
from profdeck_traces.writing.selection import WORK_CATEGORIES, Selection

LANES = DEVICE_WORK | {ANNOTATION, DEVICE_ANNOTATION}
"""What a slim trace has if nothing else is asked for: the work of devices, and annotations."""
WITH_OPERATORS = LANES | {"cpu_op", "cuda_driver", "cuda_runtime", "CANN", "Python"}
"""The same with operators and the calls of the device's runtime; the last two are processes of Ascend's traces."""


@attrs.frozen(kw_only=True)
class SlimSource:
    """One trace of the new file."""

    path: Path
    label: str
    """The name of its uppermost track."""
    sort_index: int
    """Where it stands among the others."""
    shift_ns: int = 0
    """Added to its times, for clocks that are apart."""
    selection: Selection = attrs.field(factory=lambda: Selection(categories=LANES))
    """Which of its complete events are in."""
    with_path: bool = False
    """True to add the critical path as a track, limited to the selection's window for host events."""
    waits: RankWaits | None = None
    """Waits for other ranks, written as slices on that track."""


@attrs.frozen(kw_only=True)
class Written:
    """Contents of a new trace file."""

    events: int
    device_events: int | None = None
    """Number of device events; ``None`` for a JSON trace."""
    size_bytes: int
    problems: Sequence[str]
    """Problems with damaged sources. Their readable events are in the file."""
    unread: int = 0
    """Number of damaged sources that have no readable event."""
    without_path: Sequence[str] = ()
    """Reasons why requested critical paths are missing. Each reason is listed once."""


def write_slim(
    sources: Sequence[SlimSource],
    destination: Path,
    *,
    gzip: bool = True,
    processes: int = 1,
    on_progress: Progress | None = None,
) -> Written:
    """Write the names, categories and times of complete events as slices of one Perfetto trace, without args.

    Args:
        sources: The traces.
        destination: The new file, in an existing directory. It appears only when it is complete and on disk (fsync).
        gzip: Compress the file, with one gzip member for each source.
        processes: Number of sources to read in parallel.
        on_progress: Called with the number of source bytes read so far and the total.

    Raises:
        FileExistsError: ``destination`` exists. It is not changed.
        TraceError: No event is selected, an event cannot be encoded, or a worker process was killed.
        OSError: The new file cannot be written.
    """
    with (
        new_file(destination) as file,
        tempfile.TemporaryDirectory(prefix=".profdeck-", dir=destination.parent) as directory,
    ):
        tasks = [_Task(source, index, Path(directory, str(index)), gzip) for index, source in enumerate(sources)]
        sizes = [size_to_read(source.path) for source in sources]
        written = without_errors(map_traces(_write_part, tasks, sizes, processes=processes, on_progress=on_progress))
        problems = tuple(
            f"{source.label} ({source.path}): {part.problem}"
            for source, part in zip(sources, written, strict=True)
            if part.problem
        )
        if not any(part.slices for part in written):
            raise TraceError(" ".join(["No complete event is selected, so there is nothing to write.", *problems]))
        for task in tasks:
            append_file(file, task.part)
        size_bytes = file.tell()
    slices, of_devices = (
        sum(counts) for counts in zip(*((part.slices, part.device_slices) for part in written), strict=True)
    )
    unread = sum(part.events == 0 and part.problem is not None for part in written)
    without_path = tuple(dict.fromkeys(part.path_problem for part in written if part.path_problem))
    return Written(
        events=slices,
        device_events=of_devices,
        size_bytes=size_bytes,
        problems=problems,
        unread=unread,
        without_path=without_path,
    )


@attrs.frozen
class _Task:
    source: SlimSource
    index: int
    part: Path
    gzip: bool

    def __str__(self) -> str:
        return str(self.source.path)


@attrs.frozen
class _Part:
    events: int
    """Number of readable events."""
    slices: int
    device_slices: int
    problem: str | None
    path_problem: str | None = None
    """Reason why the critical path is missing."""


def _write_part(task: _Task, on_progress: Progress | None) -> _Part:
    source = task.source
    try:
        trace = read_trace(source.path, is_step=StepNames.load().is_step, on_progress=on_progress)
    except TraceError as error:
        task.part.touch()
        return _Part(0, 0, 0, str(error))
    about = PerfettoSource(
        label=source.label,
        index=task.index,
        sort_index=source.sort_index,
        shift_ns=trace.base_ns + source.shift_ns,
        process_names=trace.process_names,
        thread_names=trace.thread_names,
    )
    events = _selected(trace, source.selection)
    is_device = trace.tables.names_of_categories(DEVICE_WORK)
    deflater = gzip_deflater()
    with task.part.open("xb") as out:
        try:
            for data in encode_source(about, events):
                out.write(deflater.compress(data) if task.gzip else data)
        except ValueError as error:
            raise TraceError(f"{source.path}: {error}: no viewer can show that.") from error
        path_problem = None
        if source.with_path and len(events):
            try:
                path = critical_path(trace, source.waits).overlapping(*source.selection.host_bounds)
                for data in encode_path(about, path):
                    out.write(deflater.compress(data) if task.gzip else data)
            except TraceError as error:
                path_problem = str(error)
        if task.gzip:
            out.write(deflater.flush())
    slices, of_devices = len(events), int(is_device[events.name].sum())
    return _Part(trace.check.events, slices, of_devices, trace.check.problem, path_problem)


def _selected(trace: Trace, selection: Selection) -> Columns:
    """Return the selected complete events."""
    categories, tables, events = selection.categories, trace.tables, trace.events
    selected = np.ones(len(events), dtype=np.bool_)
    if categories is not None:
        selected = tables.names_of_categories(categories)[events.name]
    all_else, host, work = selection.windows
    # Events without a category use their process name as the category.
    is_work = tables.names_of_categories(WORK_CATEGORIES)[events.name]
    is_else = tables.names_of_categories(frozenset({"", *trace.process_names.values()}))[events.name]
    stop_ns = np.where(is_work, events.start_ns, events.end_ns) if selection.work else events.end_ns
    for window, in_window in ((all_else, is_else), (host, ~is_else & ~is_work), (work, is_work)):
        inside = np.ones(len(events), dtype=np.bool_)
        if window.begin_ns is not None:
            inside &= (stop_ns > window.begin_ns) | (events.start_ns >= window.begin_ns)
        if window.end_ns is not None:
            inside &= events.start_ns < window.end_ns
        selected &= inside | ~in_window
    return events[np.flatnonzero(selected)]
