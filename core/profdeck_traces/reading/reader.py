"""Reads a trace of any supported kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from profdeck_traces.base.progress import Progress
from profdeck_traces.inputs.artifact_kinds import kind_of
from profdeck_traces.reading.events import read_events
from profdeck_traces.reading.integrity import MAX_JSON_BYTES
from profdeck_traces.reading.trace import Trace, trace_of


def read_trace(
    path: Path,
    *,
    is_step: Callable[[str], bool] = lambda _name: False,
    on_progress: Progress | None = None,
    max_json_bytes: int = MAX_JSON_BYTES,
) -> Trace:
    """Read a Chrome trace, plain or compressed, or an artifact of another kind.

    If a trace is corrupt, its readable events are returned, and ``check`` describes the problem. Times are exact to the
    nanosecond.

    Args:
        path: A Chrome trace, or an artifact that a plugin can read; see `profdeck_traces.inputs.artifact_kinds`.
        is_step: Returns whether a name denotes a step. Called once for each operator name.
        on_progress: Called from the reading thread with the number of bytes read so far and the file size.
        max_json_bytes: Stop reading after this number of uncompressed bytes.

    Raises:
        TraceError: The file cannot be opened or read, or has not been analysed yet.
    """
    if (kind := kind_of(path)) is not None:
        trace: Trace = kind.read(path, is_step=is_step, on_progress=on_progress, max_json_bytes=max_json_bytes)
        return trace
    return trace_of(read_events(path, on_progress=on_progress, max_json_bytes=max_json_bytes), is_step)
