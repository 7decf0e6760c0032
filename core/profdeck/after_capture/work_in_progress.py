"""Finds work in progress in a run: recordings, analyses and finish tasks.

The commands `prune`, `upload`, `ls` and `finish` use this module.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

from profdeck.after_capture.finish_record import FinishRecord, FinishState, finish_id, read_record, record_path
from profdeck.records.status import Status
from profdeck.verification.report_model import RunReport
from profdeck.verification.run_report import read_about, recorded_config
from profdeck_traces.base.errors import ProfdeckError, TraceError, describe_error
from profdeck_traces.inputs.artifact_kinds import kind_of

_POLL_S = 0.2


@attrs.frozen(kw_only=True)
class FinishReport:
    """State of one finish task."""

    capture: str
    state: FinishState
    status: str | None = None
    problem: str | None = None
    waits_for: tuple[str, ...] = ()
    by: str | None = None
    """The process that runs or ran the task."""
    record: Path | None = None
    """The path of the task's record."""


def is_finish_record(file: Path) -> bool:
    """Return whether a file's name is that of a finish task's record."""
    return file.name.startswith("finish.") and file.name.endswith(".json") and not file.name.endswith(".input.json")


def describe_running_finish(file: Path) -> str | None:
    """Return why a finish task might still be using the captured files, or None if the task has ended.

    Args:
        file: the path of the task's record. If it is unreadable, the task is assumed to be running.
    """
    try:
        record = read_record(file)
        in_use = not record.has_ended and not record.is_lost(file)
    except (OSError, ProfdeckError) as error:
        return describe_error(error)
    return f"its finish is {record.state}" if in_use else None


def describe_running_analysis(file: Path) -> str | None:
    """Return why an artifact might still be in use by an analysis, or None if it is not in use.

    An artifact is assumed to be in use if its state cannot be read or its process cannot be checked.
    """
    kind = kind_of(file)
    try:
        work = None if kind is None else kind.pending(file)
    except TraceError as error:
        return str(error)
    return f"{file.name} is being analysed" if work is not None and work.alive is not False else None


def finish_ids(report: RunReport) -> list[tuple[int, str]]:
    """Return the first step and name of each of a run's finish tasks, sorted by step."""
    return sorted({(first_step, finish_id(first_step, capture)) for first_step, capture, _ in _parts(report)})


def recording_steps(report: RunReport) -> set[int]:
    """Return the first steps of all captures that are still being recorded."""
    return {first_step for first_step, _, status in _parts(report) if status is Status.RECORDING}


def read_finishes(report: RunReport) -> Iterator[FinishReport]:
    """Yield the states of a run's finish tasks, sorted by step.

    Raises:
        ProfdeckError: the report's path is no longer a run directory.
    """
    recording = recording_steps(report)
    config = recorded_config(read_about(report.path)).get("finish")
    for first_step, name in finish_ids(report):
        path = record_path(report.path, first_step, name)
        try:
            yield finish_report(path, read_record(path))
        except FileNotFoundError:
            has_command = isinstance(config, dict) and bool(config.get("command"))  # run.json may be damaged
            if has_command and first_step not in recording:
                yield FinishReport(capture=name, state=FinishState.NOT_RUN)
        except ProfdeckError as error:
            yield FinishReport(capture=name, state=FinishState.FAILED, problem=str(error), record=path)


def finish_report(path: Path, record: FinishRecord) -> FinishReport:
    """Return a finish task's state, which is ``interrupted`` if its process exited early.

    Raises:
        FileNotFoundError: the record has been deleted.
    """
    return FinishReport(
        capture=record.capture,
        state=FinishState.INTERRUPTED if record.is_lost(path) else record.state,
        status=record.status,
        problem=record.failure_reason,
        waits_for=record.waits_for,
        by=str(record.by),
        record=path,
    )


def await_finishes(report: RunReport) -> None:
    """Wait for a run's finish tasks to end, but no longer than each task's maximum duration."""
    started_s = time.monotonic()
    for first_step, name in finish_ids(report):
        path = record_path(report.path, first_step, name)
        with contextlib.suppress(FileNotFoundError, ProfdeckError):
            while not (record := read_record(path)).has_ended:
                if record.is_lost(path) or time.monotonic() - started_s > record.max_duration_s:
                    break
                time.sleep(_POLL_S)  # poll, because the process may be on another host


def _parts(report: RunReport) -> Iterator[tuple[int, str, Status]]:
    yield from ((part.first_step, part.id, part.status) for part in report.captures)
    yield from ((part.first_step, part.id, part.status) for part in report.targets)
