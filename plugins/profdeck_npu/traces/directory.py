"""File layout of a directory ``*_ascend_pt``, which torch_npu writes for one rank.

Source: ``ProfPathCreator``, ``_ProfInterface`` and ``ProfilingParser`` in ``torch_npu/profiler``; the layout is the
same from 2.6 to 2.14::

    <worker>_<pid>_<time>_ascend_pt/
        profiler_info.json or profiler_info_<RANK>.json     written when the recording ends
        profiler_metadata.json  FRAMEWORK/  PROF_*/  logs/  raw data of the host and the devices
        ASCEND_PROFILER_OUTPUT/                             written by the analysis, possibly later on another host
            trace_view.json  kernel_details.csv  step_trace_time.csv  communication.json  ascend_pytorch_profiler*.db
"""

from __future__ import annotations

import fnmatch
import re
import stat
from collections.abc import Callable
from pathlib import Path

import attrs

from profdeck.plugin import TraceError, file_size
from profdeck_npu.traces.analysis_state import OUTPUT, AnalysisState, read_state

_INFO_NAME = re.compile(r"profiler_info(?:_(\d{1,9}))?\.json")


@attrs.frozen
class AscendDirectory:
    """Paths in one directory. Each property checks the file system again, because an analysis may be running.

    Properties are ``None`` if the file is missing, and raise a `TraceError` if the file system returns an error.
    """

    path: Path

    @property
    def output(self) -> Path | None:
        """Directory with the output of the analysis."""
        return self._existing(self.path / OUTPUT, stat.S_ISDIR)

    @property
    def output_names(self) -> list[str]:
        """Names of the files that the analysis wrote."""
        return self._names(self.path / OUTPUT)

    @property
    def trace_view(self) -> Path | None:
        """Chrome trace."""
        return self._output_file("trace_view.json")

    @property
    def kernel_details(self) -> Path | None:
        """Kernel table."""
        return self._output_file("kernel_details.csv")

    @property
    def step_trace_time(self) -> Path | None:
        """Step table."""
        return self._output_file("step_trace_time.csv")

    @property
    def communication(self) -> Path | None:
        """HCCL operations and their link usage."""
        return self._output_file("communication.json")

    @property
    def database(self) -> Path | None:
        """SQLite database, written if the recording exports ``db``."""
        names = fnmatch.filter(self.output_names, "ascend_pytorch_profiler*.db")
        return self._output_file(min(names)) if names else None

    @property
    def info(self) -> Path | None:
        """Configuration of the recording; see `profdeck_npu.traces.info`."""
        names = list(filter(_INFO_NAME.fullmatch, self._names(self.path)))
        return self._existing(self.path / min(names), stat.S_ISREG) if names else None

    @property
    def rank(self) -> int | None:
        """Rank in the file name ``profiler_info_<RANK>.json``."""
        info = self.info
        match = _INFO_NAME.fullmatch(info.name) if info else None
        return int(match[1]) if match and match[1] else None

    @property
    def timelines(self) -> tuple[Path, ...]:
        """The Chrome trace and the kernel table, if they exist."""
        return tuple(filter(None, (self.trace_view, self.kernel_details)))

    def read_error(self) -> TraceError | None:
        """Return an error if the directory has no timeline or is being analysed. Otherwise return ``None``.

        Raises:
            TraceError: The file system returned an error.
        """
        has_timeline = bool(self.timelines)
        try:
            state = read_state(self.path)
        except TraceError as error:
            return None if has_timeline else error
        if state is not None and state.is_active:
            return TraceError(f"{self.path} is being analysed by process {state.pid}. Wait until it has finished.")
        if has_timeline:
            return None
        if state is not None and state.state != "done":
            return TraceError(f"{self.path} has no timeline: {failure_message(state)}")
        database = self.database
        content = "raw data" if database is None else f"an unsupported database ({database.name})"
        return TraceError(
            f"{self.path} has no timeline, only {content}. Generate text files with torch_npu on a host with CANN: "
            f"torch_npu.profiler.profiler.analyse('{self.path}', max_process_number=1, export_type='text')."
        )

    def _output_file(self, name: str) -> Path | None:
        return self._existing(self.path / OUTPUT / name, stat.S_ISREG)

    @staticmethod
    def _existing(path: Path, is_kind: Callable[[int], bool]) -> Path | None:
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise TraceError(f"Cannot read {path}: {error.strerror or error}.") from error
        return path if is_kind(mode) else None

    @staticmethod
    def _names(directory: Path) -> list[str]:
        try:
            return [file.name for file in directory.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise TraceError(f"Cannot read {directory}: {error.strerror or error}.") from error


def chrome_trace(path: Path) -> Path:
    """Return the path of the Chrome trace in a torch_npu directory.

    Raises:
        TraceError: The directory has no Chrome trace or is being analysed.
    """
    directory = AscendDirectory(path)
    if error := directory.read_error():
        raise error
    trace = directory.trace_view
    if trace is None:
        raise TraceError(f"{path} has no Chrome trace (trace_view.json), only a kernel table.")
    return trace


def size_to_read(path: Path) -> int:
    """Return the total size of the timelines in a torch_npu directory, in bytes.

    Raises:
        TraceError: The file system returned an error.
    """
    return sum(map(file_size, AscendDirectory(path).timelines))


def failure_message(state: AnalysisState) -> str:
    """Describe an analysis that failed or was interrupted, with the command that repeats it."""
    if state.state == "failed":
        problems = "; ".join(problem.rstrip(".") for problem in state.problems)
        message = f"its analysis failed: {problems}" if problems else "its analysis failed"
    elif state.is_active is None:
        message = f"process {state.pid} on {state.host} has not finished its analysis, and its state is unknown"
    else:
        message = "its analysis ended without a result"
    return f"{message}; run: {state.remedy}" if state.remedy else f"{message}."
