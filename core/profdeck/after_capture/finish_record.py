"""Record of a finish: the command and listeners that run once after a capture has ended in all processes."""

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
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.base.files import replace_file

SCHEMA = 1
MARGIN_S = 15.0
"""Time that a finish may take in addition to its waits and its commands, in seconds."""
_TAKE = re.compile(r"-(take\d+)(?=-|$)")


class FinishState(StrEnum):
    """Progress of a finish."""

    WAITING = "waiting"
    """A participating process has not ended the capture yet."""
    RUNNING = "running"
    """The files are being checked, or the command or a listener is running."""
    DONE = "done"
    """The command and all listeners succeeded."""
    FAILED = "failed"
    """The command or a listener failed, or could not be started."""
    INTERRUPTED = "interrupted"
    """Its process was ended before it was done."""
    NOT_RUN = "not_run"
    """The config has a command, but no process ended the capture: all were killed, or there was none."""


@attrs.frozen(kw_only=True)
class CommandResult:
    """Result of the command or of one listener. Times are Unix nanoseconds."""

    name: str
    """``command``, or ``listener`` and its name."""
    started_ns: int
    duration_s: float
    exit_code: int | None
    """The negative signal number if a signal ended it; None if it could not be started."""
    output: str
    """The end of its stdout and stderr."""
    problem: str | None
    """Reason for the failure; None if it succeeded."""


@attrs.frozen(kw_only=True)
class FinishRecord:
    """Contents of the file of a finish."""

    schema: int = SCHEMA
    capture: str
    """The captures that are finished: ``step2`` for all captures of that global step."""
    first_step: int
    command: str | None
    listeners: tuple[str, ...]
    """The listeners with the hook ``capture_finished``."""
    timeout_s: float
    wait_s: float
    listener_options: Mapping[str, Mapping[str, Any]] | None = None
    """Options of these listeners, as in the config."""
    by: ProcessId = attrs.field(factory=ProcessId)
    """The process that runs the finish. At first, the process that created the record."""
    claimed_ns: int = attrs.field(factory=time.time_ns)
    ended_ns: int | None = None
    state: FinishState = FinishState.WAITING
    status: str | None = None
    """``complete`` or ``partial``; None before the files were checked."""
    waits_for: tuple[str, ...] = ()
    """Participants that have not ended. In later states, the participants that are missing."""
    parts: tuple[CommandResult, ...] = ()
    problem: str | None = None
    """Reason why nothing was run, or why the finish ended early."""

    @property
    def over(self) -> bool:
        """True if the finish has ended, according to its record."""
        return self.state not in {FinishState.WAITING, FinishState.RUNNING}

    @property
    def longest_s(self) -> float:
        """Maximum duration if no participant is known to be recording, in seconds."""
        parts = len(self.listeners) + (self.command is not None)
        return self.wait_s + parts * self.timeout_s + MARGIN_S

    @property
    def why(self) -> str | None:
        """All problems in one line."""
        problems = [self.problem] if self.problem else []
        for part in self.parts:
            if part.problem:
                last = part.output.strip().rpartition("\n")[2].strip()
                problems.append(f"the {part.name} {part.problem}" + (f" ({last[:200]})" if last else ""))
        return "; ".join(problems) or None

    def is_lost(self, path: Path) -> bool:
        """Return whether the process of a finish has ended before the finish was over.

        A process on another host cannot be checked. It is assumed to have ended if the record has not changed for
        `longest_s`.

        Args:
            path: the path of the record.
        """
        if self.over:
            return False
        if (alive := self.by.alive) is not None:
            return not alive
        return time.time() - path.stat().st_mtime > self.longest_s


def new_record(
    first_step: int,
    name: str,
    config: FinishConfig,
    listeners: tuple[str, ...],
    options: Mapping[str, Mapping[str, Any]],
) -> FinishRecord:
    """Return the first record of a finish.

    Args:
        first_step: the first global step of the captures.
        name: the name of the finish, from `finish_id`.
        config: the command and the time limits.
        listeners: names of the listeners with the hook ``capture_finished``.
        options: the options of listeners, by name.
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
    """Return the name of a capture's finish. All roles and stages of a step share it; a repeated step has another."""
    take = _TAKE.search(capture)
    return f"step{first_step}-{take[1]}" if take else f"step{first_step}"


def record_path(run: Path, first_step: int, name: str) -> Path:
    """Return the path of the record of a finish."""
    return run / f"step_{first_step:06d}" / f"finish.{name}.json"


def input_path(record: Path) -> Path:
    """Return the path of the document that the command and the listeners receive."""
    return record.with_suffix(".input.json")


_RECORD = JsonKind(FinishRecord)


def read_record(path: Path) -> FinishRecord:
    """Read the record of a finish.

    Raises:
        FileNotFoundError: the record does not exist.
        ProfdeckError: the record is unreadable, or a later version wrote it.
    """
    try:
        record = _RECORD.read(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ProfdeckError(f"{path}: not a readable record of a finish: {error}.") from None
    if record.schema > SCHEMA:
        raise ProfdeckError(f"{path}: written by a later version; update profdeck to read it.")
    return record


def write_record(path: Path, record: FinishRecord) -> None:
    """Replace the record of a finish.

    Raises:
        OSError: the record cannot be written.
    """
    replace_file(path, encode(record), durable=record.over)


def encode(record: FinishRecord) -> bytes:
    """Return the record as JSON."""
    return msgspec.json.format(msgspec.json.encode(attrs.asdict(record)), indent=1)
