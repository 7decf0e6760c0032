"""State file of an analysis, which profdeck writes to the directory of a recording.

torch_npu's analysis converts raw data to timelines and tables. Its output does not show whether an analysis is queued,
running or has failed, so profdeck records this in the state file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs
import msgspec

from profdeck.plugin import JsonKind, TraceError, is_running, replace_file

STATE_FILE = "profdeck_analysis.json"
OUTPUT = "ASCEND_PROFILER_OUTPUT"
"""Subdirectory for the output of the analysis, relative to the directory."""


@attrs.frozen(kw_only=True)
class AnalysisState:
    """State of a directory's analysis. Times are in Unix nanoseconds."""

    state: Literal["pending", "running", "done", "failed"]
    host: str
    """Host of the process that runs the analysis."""
    pid: int
    """Process that runs the analysis."""
    process_started: str | None
    """Start time of that process, as returned by `profdeck.base.processes.process_started`."""
    pid_namespace: str | None = None
    """PID namespace of that process. ``None`` in files written by earlier versions."""
    started_ns: int
    """Time of the request in the state ``pending``, else the start time of the analysis."""
    ended_ns: int | None = None
    problems: tuple[str, ...] = ()
    """Reason why the analysis failed."""
    remedy: str = ""
    """Command that analyses the directory."""
    expected: tuple[str, ...] = ()
    """Patterns of the files that a finished analysis must have written, relative to `OUTPUT`."""

    @property
    def is_active(self) -> bool | None:
        """True if the analysis is queued or running and its process is alive.

        ``None`` if the process cannot be checked, because it is on another host or in another PID namespace.
        """
        is_pending = self.state in {"pending", "running"}
        return is_pending and is_running(self.host, self.pid, self.process_started, self.pid_namespace)


_STATE = JsonKind(AnalysisState)


def read_state(directory: Path) -> AnalysisState | None:
    """Read the state of a directory's analysis. Return ``None`` if the directory has no state file.

    Raises:
        TraceError: The file cannot be read or was not written by `write_state`.
    """
    path = directory / STATE_FILE
    try:
        return _STATE.read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TraceError(f"Cannot read the analysis state in {path}: {error}.") from error


def write_state(directory: Path, state: AnalysisState) -> None:
    """Write the state file of a directory atomically.

    Raises:
        OSError: The file cannot be written.
    """
    content = msgspec.json.format(msgspec.json.encode(attrs.asdict(state)), indent=1)
    replace_file(directory / STATE_FILE, content, durable=False)
