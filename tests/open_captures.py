"""Captures that the handlers of the process's end would finish, and recorders that still write."""

from __future__ import annotations

from processes import until
from profdeck import Profiler
from profdeck.base import shutdown
from profdeck.engine.worker.recorder import EngineRecorder
from profdeck.records.request import Reply, RequestState


def count_open() -> int:
    """Return the number of captures that the end of this process would finish."""
    return len(shutdown._open)


def end_process(reason: str) -> bool:
    """Finish all open captures, as at the end of the process. Return False if one of them is busy."""
    return shutdown._finish_all(reason)


def wait_for_files(recorder: EngineRecorder) -> Reply:
    """Wait until a recorder has written its files."""
    until(lambda: recorder.reply().state is not RequestState.WRITING, every_s=0.001)
    return recorder.reply()


def calls_of(profiler: Profiler) -> list[str]:
    """Return the hook calls that the backend `tally` of a profiler's only role received."""
    (role,) = profiler._roles
    return list(role.backend.calls)  # type: ignore[attr-defined]  # defined by `tally`
