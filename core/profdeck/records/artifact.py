"""A file or directory that a capture produced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs


@attrs.frozen
class ClockAnchor:
    """One instant on two clocks, from which ranks and hosts can be aligned.

    The instant is the begin of a marker event that the recorder wrote while ``time.time_ns`` was read before
    and after it.
    """

    unix_ns: int
    """The Unix time of the instant in nanoseconds, half-way between both readings."""
    uncertainty_ns: int
    """Half the distance of both readings in nanoseconds."""
    trace_us: str
    """The marker's ``ts`` exactly as in the trace, in microseconds on the trace's own clock."""


@attrs.frozen(kw_only=True)
class Artifact:
    """A file or directory that a capture produced."""

    path: Path
    kind: str = "trace"
    """``trace`` for what the trace reader understands; else the recorder's word, such as ``memory_snapshot``."""
    size_bytes: int = 0
    whole: bool = True
    """Whether the content was checked and found to end where it should."""
    events: int | None = None
    """Trace events in the file; None for artifacts that have none."""
    problem: str | None = None
    iterations: tuple[int, int] | None = None
    """First and last mini-batch or engine iteration (both included) in this file; None for global steps."""
    sha256: str | None = None
    """Of the file, in hexadecimal digits; None where it was not worked out while it was written."""
    base_time_ns: int | None = None
    """Kineto's ``baseTimeNanoseconds``: what the trace's own clock counts from."""
    anchors: tuple[ClockAnchor, ...] = ()


Writer = Callable[[], Artifact]
"""Writes what has been recorded and returns the artifact. Slow, and may be called from any thread, once. Never raises:
what goes wrong is the artifact's problem."""

Output = Artifact | Writer
"""An artifact, or a function that writes an artifact and returns it."""
