"""The record of a finish: what was run when a capture had ended everywhere, and how that came out."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from profdeck.base.json_files import JsonKind
from profdeck.base.processes import ProcessId
from profdeck.records.status import Status
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.base.files import replace_file

if TYPE_CHECKING:
    from profdeck.verification.report_model import RunReport

if TYPE_CHECKING:
    from profdeck.verification.report_model import RunReport

SCHEMA = 1


class FinishState(StrEnum):
    """How far a finish is."""

    WAITING = "waiting"
    """A process that takes part has not ended the capture yet."""
    RUNNING = "running"
    """The files are being read back, or the command or a listener runs."""
    DONE = "done"
    """The command and all listeners have done what they do."""
    FAILED = "failed"
    """The command or a listener failed, or could not be run."""
    INTERRUPTED = "interrupted"
    """Its process was ended before it was done. It is not run again."""
    NOT_RUN = "not_run"
    """The config has a command, and no host came to the end of the capture: it was killed, or there was none."""


@attrs.frozen(kw_only=True)
class CommandResult:
    """One thing that was run. Times are Unix nanoseconds."""

    name: str
    """``command``, or ``listener`` and its name."""
    started_ns: int
    duration_s: float
    exit_code: int | None
    """Minus the signal that ended it; None if it could not be started."""
    output: str
    """The end of what it wrote to stdout and stderr."""
    problem: str | None
    """Why it failed; None if it did not."""


@attrs.frozen(kw_only=True)
class FinishRecord:
    """The content of the file of a finish."""

    schema: int = SCHEMA
    capture: str
    """The captures that it is of: ``step2`` for all of that global step."""
    first_step: int
    command: str | None
    listeners: tuple[str, ...]
    """The listeners that want to be told."""
    timeout_s: float
    wait_s: float
    listener_options: Mapping[str, Mapping[str, Any]] | None = None
    """Options of these listeners, as in the config."""
    by: ProcessId = attrs.field(factory=ProcessId)
    """The process that does it; at first the one that asked for it."""
    claimed_ns: int = attrs.field(factory=time.time_ns)
    ended_ns: int | None = None
    state: FinishState = FinishState.WAITING
    status: str | None = None
    """Whether what was handed over is ``complete`` or ``partial``; None before that is known."""
    waits_for: tuple[str, ...] = ()
    """Those that have not ended yet; from ``running`` on, those that it goes without."""
    parts: tuple[CommandResult, ...] = ()
    problem: str | None = None
    """What kept it from running anything, or ended it."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come, as far as it says itself."""
        return self.state not in {FinishState.WAITING, FinishState.RUNNING}

    @property
    def longest_s(self) -> float:
        """How long it may take at most, when nobody who is waited for is known to be recording."""
        parts = len(self.listeners) + (self.command is not None)
        return self.wait_s + parts * self.timeout_s + MARGIN_S

    @property
    def why(self) -> str | None:
        """Say in one line what went wrong."""
        told = [self.problem] if self.problem else []
        for part in self.parts:
            if part.problem:
                last = part.output.strip().rpartition("\n")[2].strip()
                told.append(f"the {part.name} {part.problem}" + (f" ({last[:200]})" if last else ""))
        return "; ".join(told) or None


@attrs.frozen(kw_only=True)
class FinishReport:
    """What is to be said of the finish of some captures of a run."""

    capture: str
    state: FinishState
    status: str | None = None
    problem: str | None = None
    waits_for: tuple[str, ...] = ()
    by: str | None = None
    """The process that does it, or did."""
    record: Path | None = None
    """The file with all of it."""


def finish_id(first_step: int, capture: str) -> str:
    """Name the finish of a capture: the same for all roles and stages of a step, another one when it is repeated."""
    take = _TAKE.search(capture)
    return f"step{first_step}-{take[1]}" if take else f"step{first_step}"


def record_path(run: Path, first_step: int, name: str) -> Path:
    """Name the file of a finish."""
    return run / f"step_{first_step:06d}" / f"finish.{name}.json"


def input_path(record: Path) -> Path:
    """Name the file with what is handed over."""
    return record.with_suffix(".input.json")


_RECORD = JsonKind(FinishRecord)


def read_record(path: Path) -> FinishRecord:
    """Read the record of a finish.

    Raises:
        FileNotFoundError: there is none.
        ProfdeckError: it cannot be read, or is of a later version.
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
        OSError: it cannot be written.
    """
    replace_file(path, encode(record), durable=record.over)


def encode(record: FinishRecord) -> bytes:
    """Return the record as the JSON of its file."""
    return msgspec.json.format(msgspec.json.encode(attrs.asdict(record)), indent=1)


# For those who read a run.


def read_finishes(report: RunReport) -> Iterator[FinishReport]:
    """Yield what there is to say of the finishes of the captures in a report, by step.

    Raises:
        ProfdeckError: the report is not of a run directory any more.
    """
    from profdeck.verification.run_report import read_about

    recording = {first_step for first_step, _, status in _parts(report) if status is Status.RECORDING}
    config = read_about(report.path).get("config", {}).get("finish") or {}
    for first_step, name in _finish_ids(report):
        path = record_path(report.path, first_step, name)
        try:
            record = read_record(path)
        except FileNotFoundError:
            if config.get("command") and first_step not in recording:
                yield FinishReport(capture=name, state=FinishState.NOT_RUN)
        except ProfdeckError as error:
            yield FinishReport(capture=name, state=FinishState.FAILED, problem=str(error), record=path)
        else:
            dead = not record.over and record.by.alive is False
            yield FinishReport(
                capture=name,
                state=FinishState.INTERRUPTED if dead else record.state,
                status=record.status,
                problem=record.why,
                waits_for=record.waits_for,
                by=str(record.by),
                record=path,
            )


@attrs.define
class RecordFile:
    """The record, as far as it is."""

    path: Path
    record: FinishRecord

    def say(self, **changes: Any) -> None:
        """Change the record, in memory and on disk."""
        self.record = attrs.evolve(self.record, **changes)
        write_record(self.path, self.record)


MARGIN_S = 15.0
"""What a finish may take beside its waits and its parts, in seconds: to start, to read files back, to end a command."""
_POLL_S = 0.2
_TAKE = re.compile(r"-(take\d+)(?=-|$)")


def await_finishes(report: RunReport) -> None:
    """Wait until the finishes of the captures in a report are over, whichever process does them.

    Those are waited for that have begun, and no longer than they may take.
    """
    began_s = time.monotonic()
    for first_step, name in _finish_ids(report):
        with contextlib.suppress(FileNotFoundError, ProfdeckError):
            while not (record := read_record(record_path(report.path, first_step, name))).over:
                if record.by.alive is False or time.monotonic() - began_s > record.longest_s:
                    break
                time.sleep(_POLL_S)  # it may be the process of another host


def _finish_ids(report: RunReport) -> list[tuple[int, str]]:
    """Return first step and name of each finish that the captures in a report have, by step."""
    return sorted({(first_step, finish_id(first_step, capture)) for first_step, capture, _ in _parts(report)})


def _parts(report: RunReport) -> Iterator[tuple[int, str, Status]]:
    yield from ((part.first_step, part.id, part.status) for part in report.captures)
    yield from ((part.first_step, part.id, part.status) for part in report.targets)
