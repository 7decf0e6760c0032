"""Files and directories that a capture produced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs


@attrs.frozen
class ClockAnchor:
    """The same instant on the Unix clock and on the trace's clock, for aligning traces.

    The instant is the start of a marker event. The recorder reads ``time.time_ns`` before and after it writes the
    event.
    """

    unix_ns: int
    """Midpoint of both readings, as Unix time in nanoseconds."""
    uncertainty_ns: int
    """Half of the difference between both readings, in nanoseconds."""
    trace_us: str
    """The marker's ``ts`` exactly as in the trace, in microseconds on the trace's own clock."""


@attrs.frozen(kw_only=True)
class Artifact:
    """A file or directory that a capture produced."""

    path: Path
    kind: str = "trace"
    """``trace`` for files in a format of the trace reader, otherwise a name such as ``memory_snapshot``."""
    size_bytes: int = 0
    whole: bool = True
    """True if the content was checked and is not truncated."""
    events: int | None = None
    """Number of trace events; None if the artifact does not contain events."""
    problem: str | None = None
    iterations: tuple[int, int] | None = None
    """First and last mini-batch or engine iteration, both included; None for global steps."""
    sha256: str | None = None
    """SHA-256 digest of the file in hexadecimal; None if it was not computed during the write."""
    base_time_ns: int | None = None
    """Kineto's ``baseTimeNanoseconds``: the zero point of the trace's own clock, in Unix nanoseconds."""
    anchors: tuple[ClockAnchor, ...] = ()


Writer = Callable[[], Artifact]
"""Function that writes the recorded data and returns the artifact.

It is called once, from any thread, and may be slow. It stores errors in `Artifact.problem`. If it raises an exception,
the exception becomes a problem of the capture, and the artifact is lost.
"""

Output = Artifact | Writer
"""An artifact, or a function that writes an artifact and returns it."""
