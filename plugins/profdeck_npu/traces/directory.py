"""The directory that torch_npu leaves for one rank, ``*_ascend_pt``, and what is where in it.

Layout (``ProfPathCreator``, ``_ProfInterface`` and ``ProfilingParser`` in ``torch_npu/profiler``, the same from 2.6 to
2.14)::

    <worker>_<pid>_<time>_ascend_pt/
        profiler_info.json or profiler_info_<RANK>.json     written when the recording ends
        profiler_metadata.json  FRAMEWORK/  PROF_*/  logs/  raw data, of the host and of the devices
        ASCEND_PROFILER_OUTPUT/                             by the analysis, which may run later and elsewhere
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

_INFO = re.compile(r"profiler_info(?:_(\d{1,9}))?\.json")


@attrs.frozen
class AscendDirectory:
    """One such directory. What is asked for is looked up each time: an analysis may be under way."""

    path: Path

    @property
    def output(self) -> Path | None:
        """What the analysis wrote; ``None`` if there is none.

        Raises:
            TraceError: This cannot be told, as in all that follows.
        """
        return self._there(self.path / OUTPUT, stat.S_ISDIR)

    @property
    def written(self) -> list[str]:
        """The names of what the analysis wrote."""
        return self._names(self.path / OUTPUT)

    @property
    def trace_view(self) -> Path | None:
        """The Chrome trace."""
        return self._file("trace_view.json")

    @property
    def kernel_details(self) -> Path | None:
        """The table of kernels."""
        return self._file("kernel_details.csv")

    @property
    def step_trace_time(self) -> Path | None:
        """The table of steps."""
        return self._file("step_trace_time.csv")

    @property
    def communication(self) -> Path | None:
        """What HCCL ran, and over which links."""
        return self._file("communication.json")

    @property
    def database(self) -> Path | None:
        """All of it in SQLite, if that was asked for."""
        found = fnmatch.filter(self.written, "ascend_pytorch_profiler*.db")
        return self._file(min(found)) if found else None

    @property
    def info(self) -> Path | None:
        """What torch_npu says of the recording, at its end."""
        found = list(filter(_INFO.fullmatch, self._names(self.path)))
        return self._there(self.path / min(found), stat.S_ISREG) if found else None

    @property
    def rank(self) -> int | None:
        """The rank, by the name of ``profiler_info_<RANK>.json``."""
        info = self.info
        found = _INFO.fullmatch(info.name) if info else None
        return int(found[1]) if found and found[1] else None

    @property
    def timelines(self) -> tuple[Path, ...]:
        """What a reader of the directory reads."""
        return tuple(filter(None, (self.trace_view, self.kernel_details)))

    def unreadable(self) -> TraceError | None:
        """Return why the directory cannot be read as a trace, with what to do; ``None`` if it can.

        Raises:
            TraceError: This cannot be told.
        """
        readable = bool(self.timelines)
        try:
            state = read_state(self.path)
        except TraceError as error:
            return None if readable else error
        if state is not None and state.under_way:
            return TraceError(f"{self.path} is being analysed by process {state.pid}: wait until that has ended.")
        if readable:
            return None
        if state is not None and state.state != "done":
            return TraceError(f"{self.path} has no timeline to be read: {unfinished(state)}")
        database = self.database
        what = "has raw data only" if database is None else f"has a database only ({database.name}), which is not read"
        return TraceError(
            f"{self.path} {what}. Let torch_npu make its text files, on a host with CANN: "
            f"torch_npu.profiler.profiler.analyse('{self.path}', max_process_number=1, export_type='text')."
        )

    def _file(self, name: str) -> Path | None:
        return self._there(self.path / OUTPUT / name, stat.S_ISREG)

    @staticmethod
    def _there(path: Path, is_kind: Callable[[int], bool]) -> Path | None:
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
    """Return the Chrome trace in such a directory.

    Raises:
        TraceError: There is none.
    """
    directory = AscendDirectory(path)
    if error := directory.unreadable():
        raise error
    trace = directory.trace_view
    if trace is None:
        raise TraceError(f"{path} has no trace_view.json: it is a table of kernels only.")
    return trace


def size_to_read(path: Path) -> int:
    """Return how many bytes a reader of such a directory reads.

    Raises:
        TraceError: This cannot be told.
    """
    return sum(map(file_size, AscendDirectory(path).timelines))


def unfinished(state: AnalysisState) -> str:
    """Say how an analysis ended that left no result, and what to do."""
    if state.state == "failed":
        said = "; ".join(problem.rstrip(".") for problem in state.problems)
        how = f"its analysis failed: {said}" if said else "its analysis failed"
    else:
        how = "its analysis ended without a result"
    return f"{how}; run: {state.remedy}" if state.remedy else f"{how}."
