"""What torch_npu leaves, as kinds of artifacts: a directory for each rank, and its table of kernels alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from profdeck.plugin import TraceError, file_size
from profdeck_traces import ArtifactKind, FileCheck, PendingWork, Progress, StepOnDevice

if TYPE_CHECKING:
    from profdeck_traces import RecorderTables
    from profdeck_traces.reading.trace import Trace

_KERNEL_DETAILS = "kernel_details*.csv"


class AscendDirectoryKind(ArtifactKind):
    """A directory ``*_ascend_pt``."""

    name: ClassVar[str] = "ascend_pt"
    suffix: ClassVar[str] = "_ascend_pt"
    grows: ClassVar[bool] = True
    """Its analysis adds to it."""

    def matches(self, path: Path) -> bool:
        """Tell it by its name, also where the path is ``.``."""
        return os.path.basename(os.path.abspath(path)).endswith(self.suffix) and os.path.isdir(path)  # noqa: PTH100, PTH112, PTH119

    def check(self, path: Path, on_progress: Progress | None = None) -> FileCheck:
        """Read what its analysis wrote."""
        from profdeck_npu.traces.check import check_directory

        return check_directory(path, on_progress)

    def size_to_read(self, path: Path) -> int:
        """Return the size of its timelines."""
        from profdeck_npu.traces.directory import size_to_read

        return size_to_read(path)

    def read(self, path: Path, *, devices_only: bool, **how: Any) -> Trace:
        """Read kernels from ``kernel_details.csv`` and all else from ``trace_view.json``."""
        from profdeck_npu.traces.reading import read_directory

        return read_directory(path, devices_only=devices_only, **how)

    def chrome_trace(self, path: Path) -> Path:
        """Return its ``trace_view.json``."""
        from profdeck_npu.traces.directory import chrome_trace

        return chrome_trace(path)

    def has_chrome_trace(self, path: Path) -> bool:
        """Tell whether it has more than a table of kernels."""
        from profdeck_npu.traces.directory import AscendDirectory

        directory = AscendDirectory(path)
        return directory.trace_view is not None or directory.kernel_details is None

    def rank(self, path: Path) -> int | None:
        """Return the rank in the name of ``profiler_info_<RANK>.json``."""
        from profdeck_npu.traces.directory import AscendDirectory

        return AscendDirectory(path).rank

    def tables(self, path: Path) -> RecorderTables:
        """Read its tables of steps and of communication."""
        from profdeck_npu.traces.reading import read_tables

        return read_tables(path)

    def steps_on_devices(self, path: Path) -> list[StepOnDevice]:
        """Return where the kernels of each step are, as far as its ``kernel_details.csv`` tells."""
        from profdeck_npu.traces.reading import steps_of_kernels

        try:
            return steps_of_kernels(path)
        except TraceError:  # its trace_view.json tells what there is to be told
            return []

    def pending(self, path: Path) -> PendingWork | None:
        """Return its analysis, if that is still to end."""
        from profdeck_npu.traces.analysis_state import read_state

        state = read_state(path)
        if state is None or state.state not in {"pending", "running"}:
            return None
        what = f"the analysis of {path.name} (process {state.pid} on {state.host})"
        here = state.host == socket.gethostname()
        return PendingWork(what=what, alive=state.under_way if here else None, pid=state.pid)


class KernelTableKind(ArtifactKind):
    """A ``kernel_details.csv`` by itself."""

    name: ClassVar[str] = "ascend_kernel_details"

    def matches(self, path: Path) -> bool:
        """Tell it by its name."""
        return path.match(_KERNEL_DETAILS)

    def check(self, path: Path, on_progress: Progress | None = None) -> FileCheck:
        """Read all of its rows."""
        from profdeck_traces.reading.reader import read_trace

        check = read_trace(path, devices_only=True, on_progress=on_progress).check
        return FileCheck(whole=check.whole, problem=check.problem, events=check.events)

    def size_to_read(self, path: Path) -> int:
        """Return its size."""
        return file_size(path)

    def read(self, path: Path, *, devices_only: bool, **how: Any) -> Trace:
        """Read its kernels."""
        from profdeck_npu.traces.reading import Kernels

        del devices_only  # it has nothing else
        return Kernels(path, how["is_step"], how["on_progress"], how["slice_events"]).alone()
