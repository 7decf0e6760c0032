"""Artifact kinds for the output of torch_npu: a rank's directory, and a single kernel table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from profdeck.plugin import TraceError, file_size
from profdeck_traces import ArtifactKind, FileCheck, PendingWork, Progress, StepOnDevice

if TYPE_CHECKING:
    from profdeck_traces import RecorderTables
    from profdeck_traces.reading.trace import Trace

_KERNEL_TABLES = ("*kernel_details*.csv", "op_summary*.csv")


class AscendDirectoryKind(ArtifactKind):
    """A directory ``*_ascend_pt``, which torch_npu writes for one rank."""

    name: ClassVar[str] = "ascend_pt"
    suffix: ClassVar[str] = "_ascend_pt"
    grows: ClassVar[bool] = True
    """The analysis adds files to the directory."""

    def matches(self, path: Path) -> bool:
        """Return whether the path is a directory with this suffix. The name of ``.`` is resolved."""
        return os.path.basename(os.path.abspath(path)).endswith(self.suffix) and os.path.isdir(path)  # noqa: PTH100, PTH112, PTH119

    def check(self, path: Path, on_progress: Progress | None = None) -> FileCheck:
        """Read the output of the analysis."""
        from profdeck_npu.traces.check import check_directory

        return check_directory(path, on_progress)

    def size_to_read(self, path: Path) -> int:
        """Return the total size of the Chrome trace and the kernel table, in bytes."""
        from profdeck_npu.traces.directory import size_to_read

        return size_to_read(path)

    def read(self, path: Path, **how: Any) -> Trace:
        """Read kernels from ``kernel_details.csv`` and all other events from ``trace_view.json``."""
        from profdeck_npu.traces.reading import read_directory

        return read_directory(path, **how)

    def chrome_trace(self, path: Path) -> Path:
        """Return the path of ``trace_view.json``."""
        from profdeck_npu.traces.directory import chrome_trace

        return chrome_trace(path)

    def has_chrome_trace(self, path: Path) -> bool:
        """Return False if the directory has a kernel table but no Chrome trace."""
        from profdeck_npu.traces.directory import AscendDirectory

        directory = AscendDirectory(path)
        return directory.trace_view is not None or directory.kernel_details is None

    def rank(self, path: Path) -> int | None:
        """Return the rank from the file name ``profiler_info_<RANK>.json``, or ``None``."""
        from profdeck_npu.traces.directory import AscendDirectory

        return AscendDirectory(path).rank

    def tables(self, path: Path) -> RecorderTables:
        """Read the step table and the communication table."""
        from profdeck_npu.traces.reading import read_tables

        return read_tables(path)

    def steps_on_devices(self, path: Path) -> list[StepOnDevice]:
        """Return the time span of each step's kernels from ``kernel_details.csv``, or nothing if it is unreadable."""
        from profdeck_npu.traces.reading import kernel_step_spans

        try:
            return kernel_step_spans(path)
        except TraceError:  # callers then use the steps in trace_view.json
            return []

    def pending(self, path: Path) -> PendingWork | None:
        """Return the analysis of the directory if it is queued or running, or ``None``."""
        from profdeck_npu.traces.analysis_state import read_state

        state = read_state(path)
        if state is None or state.state not in {"pending", "running"}:
            return None
        description = f"the analysis of {path.name} (process {state.pid} on {state.host})"
        return PendingWork(what=description, alive=state.is_active, pid=state.pid)


class KernelTableKind(ArtifactKind):
    """A kernel table outside torch_npu's directory: ``kernel_details.csv``, or ``op_summary_*.csv`` from msprof."""

    name: ClassVar[str] = "ascend_kernel_details"

    def matches(self, path: Path) -> bool:
        """Return whether the path has the file name of a kernel table."""
        return any(map(path.match, _KERNEL_TABLES))

    def check(self, path: Path, on_progress: Progress | None = None) -> FileCheck:
        """Read all rows."""
        from profdeck_traces.reading.reader import read_trace

        check = read_trace(path, on_progress=on_progress).check
        return FileCheck(whole=check.whole, problem=check.problem, events=check.events)

    def size_to_read(self, path: Path) -> int:
        """Return the file size in bytes."""
        return file_size(path)

    def read(self, path: Path, **how: Any) -> Trace:
        """Read the kernels."""
        from profdeck_npu.traces.reading import read_kernels

        return read_kernels(path, how["on_progress"])
