"""Record file of a finish task: what the task runs, its progress and its result.

A finish task runs once after a capture has ended in all processes. See `profdeck.after_capture.finish`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
import msgspec

from profdeck.base.json_files import JsonKind
from profdeck.base.processes import ProcessId
from profdeck.config.model import FinishConfig
from profdeck_traces.base.credentials import contains_credentials
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.base.files import replace_file, write_new

SCHEMA = 1
MARGIN_S = 15.0
"""Time in seconds that a finish task may need in addition to its waits and its commands."""
_TAKE = re.compile(r"-(take\d+)(?=-|$)")


class FinishState(StrEnum):
    """State of a finish task."""

    WAITING = "waiting"
    """A participating process has not ended the capture yet."""
    RUNNING = "running"
    """The files are being checked, or the command or a listener is running."""
    DONE = "done"
    """The command and all listeners succeeded."""
    FAILED = "failed"
    """The command or a listener failed, or could not be started."""
    INTERRUPTED = "interrupted"
    """The process of the task was terminated before the task was done."""
    NOT_RUN = "not_run"
    """The config has a finish command, but no process ended the capture. For example, all processes were killed."""


@attrs.frozen(kw_only=True)
class CommandResult:
    """Result of running the finish command or notifying one listener."""

    name: str
    """``command``, or ``listener NAME``."""
    started_ns: int
    """Start time in Unix nanoseconds."""
    duration_s: float
    exit_code: int | None
    """Exit code. It is negative if a signal terminated the process, and None if the process could not be started."""
    output: str
    """The end of the combined stdout and stderr."""
    problem: str | None
    """Reason for the failure; None on success."""


@attrs.frozen(kw_only=True)
class FinishRecord:
    """Contents of a finish task's record file."""

    schema: int = SCHEMA
    capture: str
    """Name of the task, from `finish_id`: ``step2`` for all captures that begin at global step 2."""
    first_step: int
    command: str | None
    listeners: tuple[str, ...]
    """Names of the listeners that implement ``capture_finished``."""
    timeout_s: float
    wait_s: float
    listener_options: Mapping[str, Mapping[str, Any]] | None = None
    """Options of the listeners, as in the config."""
    by: ProcessId = attrs.field(factory=ProcessId)
    """The process that runs the task. Initially, this is the process that created the record."""
    claimed_ns: int = attrs.field(factory=time.time_ns)
    ended_ns: int | None = None
    state: FinishState = FinishState.WAITING
    status: str | None = None
    """``complete`` or ``partial``; None before the files are checked."""
    waits_for: tuple[str, ...] = ()
    """Participants that have not ended the capture. After the state ``waiting``, these are the missing participants."""
    parts: tuple[CommandResult, ...] = ()
    problem: str | None = None
    """Error that prevented the task from running or that ended the task early."""

    @property
    def has_credentials(self) -> bool:
        """True if the command or a listener option contains a credential.

        The record is then readable only by its owner.
        """
        return contains_credentials({"command": self.command, "options": self.listener_options})

    @property
    def has_ended(self) -> bool:
        """True if the task has ended, according to its record."""
        return self.state not in {FinishState.WAITING, FinishState.RUNNING}

    @property
    def max_duration_s(self) -> float:
        """Maximum time in seconds since the participants last made progress."""
        parts = len(self.listeners) + (self.command is not None)
        return self.wait_s + parts * self.timeout_s + MARGIN_S

    @property
    def failure_reason(self) -> str | None:
        """All problems, joined into one line; None if there are none."""
        problems = [self.problem] if self.problem else []
        for part in self.parts:
            if part.problem:
                last = part.output.strip().rpartition("\n")[2].strip()
                problems.append(f"the {part.name} {part.problem}" + (f" ({last[:200]})" if last else ""))
        return "; ".join(problems) or None

    def is_lost(self, path: Path) -> bool:
        """Return whether the task's process exited before the task had finished.

        A process on another host cannot be checked, so it is assumed to have exited if the record has not changed for
        `max_duration_s`.

        Args:
            path: the path of the record.
        """
        if self.has_ended:
            return False
        if (alive := self.by.alive) is not None:
            return not alive
        return time.time() - path.stat().st_mtime > self.max_duration_s


def new_record(
    first_step: int,
    name: str,
    config: FinishConfig,
    listeners: tuple[str, ...],
    options: Mapping[str, Mapping[str, Any]],
) -> FinishRecord:
    """Return the initial record for a new finish task.

    Args:
        first_step: the first global step of the captures.
        name: the name of the task, from `finish_id`.
        config: the finish command and its time limits.
        listeners: names of the listeners that implement ``capture_finished``.
        options: the options of each listener, by listener name.
    """
    return FinishRecord(
        capture=name,
        first_step=first_step,
        command=config.command,
        listeners=listeners,
        listener_options={name: value for name, value in options.items() if name in listeners} or None,
        timeout_s=config.timeout_s,
        wait_s=config.wait_s,
    )


def finish_id(first_step: int, capture: str) -> str:
    """Return the name of a capture's finish task.

    All roles and stages of a step share one task. If the step is repeated, it gets a new task, such as ``step2-take2``.
    """
    take = _TAKE.search(capture)
    return f"step{first_step}-{take[1]}" if take else f"step{first_step}"


def record_path(run: Path, first_step: int, name: str) -> Path:
    """Return the path of a finish task's record file."""
    return run / f"step_{first_step:06d}" / f"finish.{name}.json"


def input_path(record: Path) -> Path:
    """Return the path of the file that the finish command and the listeners read from stdin."""
    return record.with_suffix(".input.json")


_RECORD = JsonKind(FinishRecord)


def read_record(path: Path) -> FinishRecord:
    """Read a finish task's record.

    Raises:
        FileNotFoundError: the record does not exist.
        ProfdeckError: the record is unreadable, or was written by a later version of profdeck.
    """
    try:
        record = _RECORD.read(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ProfdeckError(f"{path}: the record of a finish task cannot be read: {error}.") from None
    if record.schema > SCHEMA:
        raise ProfdeckError(f"{path}: written by a later version of profdeck; update profdeck to read this file.")
    return record


def write_record(path: Path, record: FinishRecord) -> None:
    """Write a finish task's record, replacing the existing file.

    Raises:
        OSError: the record cannot be written.
    """
    replace_file(path, encode(record), durable=record.has_ended, private=record.has_credentials)


def create_record(path: Path, record: FinishRecord) -> None:
    """Create the record of a finish task.

    Raises:
        FileExistsError: the record already exists.
        OSError: the record cannot be written.
    """
    write_new(path, encode(record), private=record.has_credentials)


def encode(record: FinishRecord) -> bytes:
    """Encode a record as JSON."""
    return msgspec.json.format(msgspec.json.encode(attrs.asdict(record)), indent=1)
