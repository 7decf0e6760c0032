"""What a job says of its captures when it ends: once, where they are and how to look at them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from pathlib import Path

import attrs

from profdeck.records.capture import CaptureRecord
from profdeck.records.status import Status
from profdeck_traces.base.text import plural
from profdeck_traces.inputs.artifact_kinds import TRACE, kind_named


@attrs.define
class _Counts:
    captures: int = 0
    poor: int = 0
    has_target: bool = False
    """True if an engine or server recorded: its processes list their traces in other manifests."""
    artifact_kinds: set[str] = attrs.field(factory=set)


_runs: dict[Path, _Counts] = {}
_pid = 0


def expect() -> None:
    """Speak when this process ends, after all that comes to be registered later."""
    atexit.unregister(_say)
    atexit.register(_say)


def count(run: Path, capture: CaptureRecord) -> None:
    """Count a capture of a run that has ended in this process, which speaks for the job."""
    global _pid  # noqa: PLW0603 - what is said at the exit belongs to the process
    if _pid != os.getpid():  # a child that was forked has not made the captures of its parent
        _pid = os.getpid()
        _runs.clear()
    counts = _runs.setdefault(run, _Counts())
    counts.captures += 1
    counts.poor += capture.status is not Status.COMPLETE
    counts.has_target |= capture.target is not None
    counts.artifact_kinds.update(artifact.kind for artifact in capture.artifacts)


def suppress_exit_message() -> None:
    """Suppress the message about captures that this process prints at exit."""
    _runs.clear()


def _say() -> None:
    if _pid != os.getpid() or not logging.getLogger("profdeck").isEnabledFor(logging.WARNING):
        return
    for path, counts in _runs.items():
        run = _shown(path)
        what = f"{plural(counts.captures, 'capture')} in {run}"
        command = "summary" if _has_trace(counts) else "ls"
        poor = f", {counts.poor} not complete" if counts.poor else ""
        if counts.poor and command != "ls":
            poor += f": profdeck ls {run} says why"
        with contextlib.suppress(OSError, ValueError):  # a stream that is closed
            sys.stderr.write(f"profdeck: {what}{poor}. Next: profdeck {command} {run}\n")
            sys.stderr.flush()


def _has_trace(counts: _Counts) -> bool:
    """Return whether `profdeck summary` can read an artifact of the run."""
    if counts.has_target or TRACE in counts.artifact_kinds:
        return True
    return any(kind_named(kind) is not None for kind in counts.artifact_kinds)


def _shown(path: Path) -> str:
    """Write a path as one would type it here."""
    with contextlib.suppress(OSError, ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
