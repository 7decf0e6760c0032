"""Helpers for tests with captures that are still open or still writing their files."""

from __future__ import annotations

from processes import until
from profdeck import Profiler
from profdeck.base import shutdown
from profdeck.engine.worker.recorder import EngineRecorder
from profdeck.records.request import Reply, RequestState


def count_open() -> int:
    """Return the number of captures that are still open."""
    return len(shutdown._open)


def end_process(reason: str) -> bool:
    """End all open captures as the exit handler does. Return False if a busy capture will end later."""
    return shutdown._end_all(reason)


def wait_for_files(recorder: EngineRecorder) -> Reply:
    """Wait until a recorder has written its files, then return its reply."""
    until(lambda: recorder.reply().state is not RequestState.WRITING, every_s=0.001)
    return recorder.reply()


def calls_of(profiler: Profiler) -> list[str]:
    """Return the hook calls received by the `tally` backend of a profiler with one role."""
    (role,) = profiler._roles
    return list(role.backend.calls)  # type: ignore[attr-defined]  # defined by `tally`
