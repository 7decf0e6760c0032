"""Message at interpreter exit that lists the job's captures and the command to inspect them.

Only one process of a job prints the message.
"""

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
from profdeck_traces.base.text import plural, printable, shell_path, short_path
from profdeck_traces.inputs.artifact_kinds import TRACE, kind_named


@attrs.define
class _Counts:
    captures: int = 0
    incomplete: int = 0
    has_target: bool = False
    """True if an engine made a capture. Its traces are listed in the manifests of the engine's processes."""
    artifact_kinds: set[str] = attrs.field(factory=set)


_runs: dict[Path, _Counts] = {}
"""Captures of this process, by run directory."""
_pid = 0
"""ID of the process that made the captures."""


def register() -> None:
    """Print the message at interpreter exit. Exit handlers that are registered later run before it."""
    atexit.unregister(_print_summary)
    atexit.register(_print_summary)


def count_capture(run: Path, capture: CaptureRecord) -> None:
    """Count a capture that has ended in this process."""
    global _pid  # noqa: PLW0603 - there is one exit message per process
    if _pid != os.getpid():  # a forked child must not count the captures of its parent
        _pid = os.getpid()
        _runs.clear()
    counts = _runs.setdefault(run, _Counts())
    counts.captures += 1
    counts.incomplete += capture.status is not Status.COMPLETE
    counts.has_target |= capture.target is not None
    counts.artifact_kinds.update(artifact.kind for artifact in capture.artifacts)


def suppress_exit_message() -> None:
    """Suppress the message about captures that this process prints at exit."""
    _runs.clear()


def _print_summary() -> None:
    if _pid != os.getpid() or not logging.getLogger("profdeck").isEnabledFor(logging.WARNING):
        return
    for path, counts in _runs.items():
        run = shell_path(path)
        captures = f"{plural(counts.captures, 'capture')} in {printable(short_path(path))}"
        command = "summary" if _has_trace(counts) else "ls"
        incomplete = f", {counts.incomplete} not complete" if counts.incomplete else ""
        if counts.incomplete and command != "ls":
            incomplete += f" (for the reasons, run profdeck ls {run})"
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            sys.stderr.write(f"profdeck: {captures}{incomplete}. Next: profdeck {command} {run}\n")
            sys.stderr.flush()


def _has_trace(counts: _Counts) -> bool:
    """Return whether `profdeck summary` can read an artifact of the run."""
    if counts.has_target or TRACE in counts.artifact_kinds:
        return True
    return any(kind_named(kind) is not None for kind in counts.artifact_kinds)
