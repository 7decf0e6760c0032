"""Integrity check of a torch_npu directory.

torch_npu's analysis ignores its own errors and always reports success, so the check reads the output files. The format
of the raw data is internal to torch_npu. The check can therefore only find out whether raw data exists.
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
from profdeck_npu.traces.directory import AscendDirectory, failure_message
from profdeck_npu.traces.info import CPU, NPU, Info, read_info
from profdeck_npu.traces.kernel_details import KernelDetails, read_kernel_details
from profdeck_npu.traces.step_times import read_step_times
from profdeck_traces import FileCheck, Meter, Progress
from profdeck_traces.reading.reader import read_trace

RAW_ONLY = "raw data only, not analysed"
"""Note for a directory without a finished or requested analysis."""

_STEP = re.compile(r"ProfilerStep#([0-9]{1,18})")


def check_directory(path: Path, on_progress: Progress | None = None) -> FileCheck:
    """Read all output files of a directory's analysis, and return whether the directory is intact.

    Args:
        path: A torch_npu directory.
        on_progress: Called from the reading thread with the number of bytes read and the total number of bytes.

    Raises:
        TraceError: The directory cannot be read.
    """
    directory = AscendDirectory(path)
    check = _DirectoryCheck()
    state = _read_state(directory, check)
    if state is not None and state.is_active:
        check.problems.append(f"its analysis is in progress (process {state.pid})")
    elif state is not None and state.state == "done":
        check.require_files(state.expected, directory)
        check.read_files(_readable_files(directory), on_progress)
        check.compare_steps()
    else:
        check.problems += [failure_message(state)] if state is not None else []
        if directory.output is None:
            check.require_raw_data(directory)
        else:
            check.require_default_output(directory)
            check.read_files(_readable_files(directory), on_progress)
            check.compare_steps()
    return FileCheck(
        events=check.events,
        whole=not check.problems,
        problem=" ".join(check.problems) or None,
        notes=tuple(check.notes),
    )


def check_output(directory: Path, expected: Sequence[str], on_progress: Progress | None = None) -> str | None:
    """Return a message about missing or corrupt output files, or ``None`` if all expected files are intact.

    Args:
        directory: A torch_npu directory.
        expected: Patterns of the expected files, relative to the output of the analysis.
        on_progress: Called from the reading thread with the number of bytes read and the total number of bytes.

    Raises:
        TraceError: The directory cannot be read.
    """
    check = _DirectoryCheck()
    paths = AscendDirectory(directory)
    check.require_files(expected, paths)
    files = [
        file for file in _readable_files(paths) if any(fnmatch.fnmatch(file.name, pattern) for pattern in expected)
    ]
    check.read_files(files, on_progress)
    return " ".join(check.problems) or None


def _read_state(directory: AscendDirectory, check: _DirectoryCheck) -> AnalysisState | None:
    try:
        return read_state(directory.path)
    except TraceError as error:
        check.problems.append(str(error))
        return None


def _readable_files(directory: AscendDirectory) -> list[Path]:
    """Return the existing output files that `_DirectoryCheck` can read."""
    files = (
        directory.trace_view,
        directory.kernel_details,
        directory.communication,
        directory.step_trace_time,
        directory.database,
    )
    return [file for file in files if file is not None]


class _DirectoryCheck:
    """Collects the problems of one directory."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.events: int | None = None
        self._host_steps: set[int] = set()
        self._kernels: KernelDetails | None = None
        self._readers: dict[str, Callable[[Path, Progress], str | None]] = {
            "trace_view.json": self._read_trace,
            "kernel_details.csv": self._read_kernels,
            "communication.json": lambda file, on_progress: read_communication(file, on_progress).problem,
            "step_trace_time.csv": lambda file, _: read_step_times(file).problem,
        }

    def require_raw_data(self, directory: AscendDirectory) -> None:
        """Check that the raw data of all recorded activities exists."""
        _, activities = self._configuration(directory)
        if directory.info is None:
            self.problems.append("profiler_info.json is missing: the recording did not finish.")
        if CPU in activities and not os.path.isdir(directory.path / "FRAMEWORK"):  # noqa: PTH112 - never raises
            self.problems.append("FRAMEWORK is missing, but the host was recorded.")
        if NPU in activities and not any(directory.path.glob("PROF_*/device_*")):
            self.problems.append("PROF_*/device_* is missing, but the device was recorded.")
        if not self.problems:
            self.notes.append(RAW_ONLY)

    def require_default_output(self, directory: AscendDirectory) -> None:
        """Check for the files that every successful analysis writes. Used if no state lists the expected files."""
        if directory.trace_view is None and directory.database is None:
            self.problems.append(f"{OUTPUT} has neither trace_view.json nor a database: the analysis failed.")
        elif directory.trace_view is None:
            self.notes.append("only a database, which profdeck does not read")
        elif directory.kernel_details is None:
            info, activities = self._configuration(directory)
            if NPU in activities and info.may_have_kernels:
                self.problems.append("kernel_details.csv is missing, but the device was recorded.")

    def require_files(self, expected: Sequence[str], directory: AscendDirectory) -> None:
        """Check that the output has a file for each pattern."""
        names = directory.output_names
        missing = [pattern for pattern in expected if not fnmatch.filter(names, pattern)]
        self.problems += [f"{OUTPUT}/{pattern} is missing, but the analysis has finished." for pattern in missing]

    def read_files(self, files: Sequence[Path], on_progress: Progress | None) -> None:
        """Read output files completely, and add their problems."""
        meter = Meter(sum(map(file_size, files)), on_progress)
        for file in files:
            read = self._readers.get(file.name, _read_database)
            try:
                self.problems += filter(None, [read(file, meter.within)])
            except TraceError as error:
                self.problems.append(str(error))
            meter.passed(file_size(file))

    def compare_steps(self) -> None:
        """Report host steps without kernels before the first step with kernels: their device data is lost."""
        steps = () if self._kernels is None else self._kernels.steps
        if self._kernels is None or not steps:
            return
        first = min(step.step for step in steps)
        start_ns = min(step.start_ns for step in steps if step.step == first)
        lost = sorted(step for step in self._host_steps if step < first)
        # Earlier kernels without a step show that device data exists. They may belong to these steps.
        outside_ns = self._kernels.first_outside_ns
        if lost and (outside_ns is None or outside_ns >= start_ns):
            step_range = f"step {lost[0]}" if len(lost) == 1 else f"steps {lost[0]} to {lost[-1]}"
            self.problems.append(f"No kernels in {step_range}: device data at the start of the window is lost.")

    def _read_trace(self, file: Path, on_progress: Progress) -> str | None:
        trace = read_trace(file, on_progress=on_progress)
        steps = filter(None, map(_STEP.fullmatch, trace.tables.names))
        self.events, self._host_steps = trace.check.events, {int(step[1]) for step in steps}
        return trace.check.problem and f"{file.name}: {trace.check.problem}"

    def _read_kernels(self, file: Path, on_progress: Progress) -> str | None:
        self._kernels = read_kernel_details(file, on_progress)
        problem = self._kernels.check.problem
        return problem and f"{file.name}: {problem}"

    def _configuration(self, directory: AscendDirectory) -> tuple[Info, frozenset[str]]:
        """Return the configuration of the recording, and its activities. An unreadable file is a problem."""
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
        # With immutable=1, SQLite creates no temporary files next to the database.
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            results = [row[0] for row in database.execute("PRAGMA quick_check(1)")]
            table_count = database.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
    except sqlite3.Error as error:
        return f"{file.name} is not an intact SQLite database: {error}."
    if results != ["ok"]:
        return f"{file.name} is not an intact SQLite database: {results[0]}."
    return None if table_count else f"{file.name}: The database has no tables."
