"""How far the analysis of a raw directory is: a small file in it, by the analysing process, for readers.

torch_npu writes raw data, from which its analysis makes the files that people read; without that file nobody could
tell a directory that is not to be analysed from one whose analysis is still to come, or died.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs
import msgspec

from profdeck.plugin import JsonKind, TraceError, is_running, replace_file

STATE_FILE = "profdeck_analysis.json"
OUTPUT = "ASCEND_PROFILER_OUTPUT"
"""Where torch_npu puts what its analysis makes of the raw data beside it."""


@attrs.frozen(kw_only=True)
class AnalysisState:
    """Who analyses a directory, since when, and what came of it. Times are Unix nanoseconds."""

    state: Literal["pending", "running", "done", "failed"]
    host: str
    """The host of the process that is to do it, or did."""
    pid: int
    process_started: str | None
    """When that process started, see `profdeck.base.processes.process_started`."""
    started_ns: int
    """When it was asked for (pending), or else began."""
    ended_ns: int | None = None
    problems: tuple[str, ...] = ()
    """Reason why the analysis failed."""
    remedy: str = ""
    """The command that analyses the directory."""
    expected: tuple[str, ...] = ()
    """Patterns of the files that must be there when it is done, relative to `OUTPUT`."""

    @property
    def under_way(self) -> bool:
        """Whether a process that still runs is to do it; of another host that cannot be known, and no is said."""
        return self.state in {"pending", "running"} and is_running(self.host, self.pid, self.process_started)


_STATE = JsonKind(AnalysisState)


def read_state(directory: Path) -> AnalysisState | None:
    """Return how far the analysis of a directory is; None if nobody asked for one.

    Raises:
        TraceError: The file cannot be read or is not what `write_state` writes.
    """
    path = directory / STATE_FILE
    try:
        return _STATE.read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read as the state of an analysis: {error}.") from error


def write_state(directory: Path, state: AnalysisState) -> None:
    """Replace the state of a directory; a reader sees the old one or the new one.

    Raises:
        OSError: It cannot be written.
    """
    content = msgspec.json.format(msgspec.json.encode(attrs.asdict(state)), indent=1)
    replace_file(directory / STATE_FILE, content, durable=False)
