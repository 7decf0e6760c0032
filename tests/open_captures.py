"""Helpers for tests of captures that are still open or whose files are still being written."""

from __future__ import annotations

from processes import until
from profdeck import Profiler
from profdeck.base import shutdown
from profdeck.engine.worker.recorder import EngineRecorder
from profdeck.records.request import Reply, RequestState


def count_open() -> int:
    """Return the number of open captures, which the exit handler would end."""
    return len(shutdown._open)


def end_process(reason: str) -> bool:
    """End all open captures, like the exit handler. Return False if a capture is busy and will end later."""
    return shutdown._finish_all(reason)


def wait_for_files(recorder: EngineRecorder) -> Reply:
    """Wait until a recorder has written its files. Return its reply."""
    until(lambda: recorder.reply().state is not RequestState.WRITING, every_s=0.001)
    return recorder.reply()


def calls_of(profiler: Profiler) -> list[str]:
    """Return the hook calls that a profiler's `tally` backend received. The profiler must have one role."""
    (role,) = profiler._roles
    return list(role.backend.calls)  # type: ignore[attr-defined]  # defined by `tally`
