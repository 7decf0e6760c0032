"""Whether a directory of torch_npu is whole, established by reading what its analysis wrote.

torch_npu's analysis passes over its own errors and says that it is done whatever came of it: only its files tell. Of
raw data nobody but the analysis can tell more than that they are there.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from profdeck.plugin import TraceError, file_size
from profdeck_npu.traces.analysis_state import OUTPUT, AnalysisState, read_state
from profdeck_npu.traces.communication import read_communication
from profdeck_npu.traces.directory import AscendDirectory, unfinished
from profdeck_npu.traces.info import CPU, NPU, Info, read_info
from profdeck_npu.traces.kernel_details import KernelDetails, read_kernel_details
from profdeck_npu.traces.step_times import read_step_times
from profdeck_traces import FileCheck, Meter, Progress
from profdeck_traces.reading.column_builder import ColumnBuilder
from profdeck_traces.reading.columns import Tables
from profdeck_traces.reading.integrity import CountingHandler, check_trace

RAW_ONLY = "raw data only, not analysed"
"""The note on a directory that nobody has analysed, or asked to."""

_STEP_NEEDLE = b'"ProfilerStep#'
_STEP = re.compile(rb'"ProfilerStep#([0-9]{1,18})"')
_MAX_STEPS = 100_000


def check_directory(path: Path, on_progress: Progress | None = None) -> FileCheck:
    """Read what the analysis of a directory wrote, and say whether the directory is whole.

    Args:
        path: A directory of torch_npu.
        on_progress: Called with the bytes read so far and in all, from the reading thread.

    Raises:
        TraceError: It cannot be read.
    """
    directory = AscendDirectory(path)
    found = _Found()
    state = _state(directory, found)
    if state is not None and state.under_way:
        found.problems.append(f"its analysis is under way (process {state.pid})")
    elif state is not None and state.state == "done":
        found.look_for(state.expected, directory)
        found.read(_files(directory), on_progress)
        found.compare_steps()
    else:
        found.problems += [unfinished(state)] if state is not None else []
        if directory.output is None:
            found.look_for_raw(directory)
        else:
            found.look_for_output(directory)
            found.read(_files(directory), on_progress)
            found.compare_steps()
    return FileCheck(
        events=found.events,
        whole=not found.problems,
        problem=" ".join(found.problems) or None,
        notes=tuple(found.notes),
    )


def check_output(directory: Path, expected: Sequence[str], on_progress: Progress | None = None) -> str | None:
    """Say what is missing or damaged of the files that an analysis had to leave.

    Args:
        directory: What torch_npu recorded.
        expected: Patterns of these files, relative to the output of the analysis.
        on_progress: Called with the bytes read so far and in all, from the reading thread.

    Returns:
        ``None`` if all are there and whole.

    Raises:
        TraceError: The directory cannot be read.
    """
    found = _Found()
    place = AscendDirectory(directory)
    found.look_for(expected, place)
    wanted = [file for file in _files(place) if any(fnmatch.fnmatch(file.name, pattern) for pattern in expected)]
    found.read(wanted, on_progress)
    return " ".join(found.problems) or None


def _state(directory: AscendDirectory, found: _Found) -> AnalysisState | None:
    try:
        return read_state(directory.path)
    except TraceError as error:
        found.problems.append(str(error))
        return None


def _files(directory: AscendDirectory) -> list[Path]:
    """Return what can be read of the output."""
    files = (
        directory.trace_view,
        directory.kernel_details,
        directory.communication,
        directory.step_trace_time,
        directory.database,
    )
    return [file for file in files if file is not None]


class _Found:
    """Collects what is found in a directory."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.events: int | None = None
        self._steps: set[int] = set()
        self._kernels: KernelDetails | None = None
        self._readers: dict[str, Callable[[Path, Progress], str | None]] = {
            "trace_view.json": self._read_trace,
            "kernel_details.csv": self._read_kernels,
            "communication.json": lambda file, on_progress: read_communication(file, on_progress).problem,
            "step_trace_time.csv": lambda file, _: read_step_times(file).problem,
        }

    def look_for_raw(self, directory: AscendDirectory) -> None:
        """Look for what was to be recorded."""
        _, activities = self._recorded(directory)
        if directory.info is None:
            self.problems.append("profiler_info.json is missing: the recording did not come to its end.")
        if CPU in activities and not os.path.isdir(directory.path / "FRAMEWORK"):  # noqa: PTH112 - never raises
            self.problems.append("FRAMEWORK is missing, though the host was recorded.")
        if NPU in activities and not any(directory.path.glob("PROF_*/device_*")):
            self.problems.append("PROF_*/device_* is missing, though the device was recorded.")
        if not self.problems:
            self.notes.append(RAW_ONLY)

    def look_for_output(self, directory: AscendDirectory) -> None:
        """Look for what any analysis leaves, where nobody says what is to be expected."""
        if directory.trace_view is None and directory.database is None:
            self.problems.append(f"{OUTPUT} has neither trace_view.json nor a database: the analysis failed.")
        elif directory.trace_view is None:
            self.notes.append("a database only, which profdeck does not read")
        elif directory.kernel_details is None:
            info, activities = self._recorded(directory)
            if NPU in activities and info.may_have_kernels:
                self.problems.append("kernel_details.csv is missing, though the device was recorded.")

    def look_for(self, expected: Sequence[str], directory: AscendDirectory) -> None:
        """Look for what an analysis has to leave."""
        written = directory.written
        absent = [pattern for pattern in expected if not fnmatch.filter(written, pattern)]
        self.problems += [f"{OUTPUT}/{pattern} is missing, though the analysis is done." for pattern in absent]

    def read(self, files: Sequence[Path], on_progress: Progress | None) -> None:
        """Read files of the output to their ends."""
        meter = Meter(sum(map(file_size, files)), on_progress)
        for file in files:
            read = self._readers.get(file.name, _read_database)
            try:
                self.problems += filter(None, [read(file, meter.within)])
            except TraceError as error:
                self.problems.append(str(error))
            meter.passed(file_size(file))

    def compare_steps(self) -> None:
        """Look for steps at the beginning of the window that have no kernels, though later ones have."""
        steps = () if self._kernels is None else self._kernels.steps
        if self._kernels is None or not steps:
            return
        first = min(step.step for step in steps)
        start_ns = min(step.start_ns for step in steps if step.step == first)
        lost = sorted(step for step in self._steps if step < first)
        # Kernels in front of these are not lost: nobody knows of which step they are.
        outside_ns = self._kernels.first_outside_ns
        if lost and (outside_ns is None or outside_ns >= start_ns):
            which = f"step {lost[0]}" if len(lost) == 1 else f"the steps {lost[0]} to {lost[-1]}"
            self.problems.append(f"There is no kernel of {which}: device data at the head of the window are lost.")

    def _read_trace(self, file: Path, on_progress: Progress) -> str | None:
        handler = _StepHandler()
        check = check_trace(file, handler, on_progress=on_progress)
        self.events, self._steps = check.events, handler.steps
        return check.problem and f"{file.name}: {check.problem}"

    def _read_kernels(self, file: Path, on_progress: Progress) -> str | None:
        self._kernels = read_kernel_details(file, ColumnBuilder(Tables(), lambda _: None), on_progress)
        problem = self._kernels.check.problem
        return problem and f"{file.name}: {problem}"

    def _recorded(self, directory: AscendDirectory) -> tuple[Info, frozenset[str]]:
        """Return what was to be recorded, and what was to be observed."""
        file = directory.info
        try:
            info = read_info(file)
        except TraceError as error:
            self.problems.append(str(error))
            info = Info()
        return info, info.activities or frozenset()


def _read_database(file: Path, _: Progress) -> str | None:
    import sqlite3

    if not file_size(file):
        return f"{file.name}: The file is empty."
    try:
        # Immutable: SQLite then leaves no file of its own beside it.
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            found = [row[0] for row in database.execute("PRAGMA quick_check(1)")]
            tables = database.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
    except sqlite3.Error as error:
        return f"{file.name} is no whole database of SQLite: {error}."
    if found != ["ok"]:
        return f"{file.name} is no whole database of SQLite: {found[0]}."
    return None if tables else f"{file.name}: There are no tables in it."


class _StepHandler(CountingHandler):
    """Counts events, and finds the numbers of the steps that the host marked."""

    wants_text = True

    def __init__(self) -> None:
        super().__init__()
        self.steps: set[int] = set()

    def batch(self, text: memoryview) -> int | None:
        """Process a JSON array of events. See :meth:`profdeck_traces.reading.handler.TraceHandler.batch`."""
        count = super().batch(text)
        if count is not None:
            self._find(text)
        return count

    def event(self, text: bytes) -> None:
        """Take one event."""
        self._find(text)

    def _find(self, text: memoryview | bytes) -> None:
        if len(self.steps) < _MAX_STEPS and _STEP_NEEDLE in bytes(text):
            self.steps.update(int(found[1]) for found in _STEP.finditer(text))
