"""The process that finishes a capture: it waits until all have ended, reads the files back, and runs what is to be run.

`profdeck.after_run.start` starts it as ``python -m profdeck.after_run.worker RECORD``. A listener is notified by a
process of its own, ``python -m profdeck.after_run.worker listener NAME RECORD``: so it has a deadline as the command
has, and what it breaks is its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from profdeck.after_run.commands import notify_listener, run_part, termination
from profdeck.after_run.record import (
    SCHEMA,
    FinishState,
    RecordFile,
    input_path,
    read_record,
)
from profdeck.after_run.waiting import Participants, wait
from profdeck.base.processes import ProcessId
from profdeck.records.status import Status
from profdeck.verification.report_model import RankReport, RunReport, TargetReport, plain
from profdeck.verification.run_report import read_about, read_run
from profdeck_traces.base.errors import describe_error
from profdeck_traces.base.files import replace_file

# There is no event that reaches from one process to another by a shared file system.
_NICENESS = 10


def main() -> None:
    """Carry out what the arguments say."""
    if sys.argv[1] == "listener":
        name, options = sys.argv[2], read_record(Path(sys.argv[3])).listener_options or {}
        notify_listener(name, options.get(name, {}), json.load(sys.stdin.buffer))
        return
    # Who started this reads the pipe behind stderr: its end, and what keeps this from writing the record.
    news = os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  # as a descriptor
        os.dup2(nowhere.fileno(), 2)
    for number in (signal.SIGINT, signal.SIGQUIT):  # which a shell has its children in the background ignore
        signal.signal(number, signal.SIG_DFL)
    with suppress(OSError):
        os.nice(_NICENESS)  # the job goes on beside it
    try:
        carry_out(Path(sys.argv[1]))
    except Exception as error:  # noqa: BLE001  # there is nobody else to tell
        with suppress(OSError):
            os.write(news, describe_error(error).encode())


def carry_out(path: Path) -> None:
    """Finish the captures that a record is of, and write what came of it into the record.

    Raises:
        OSError: the record cannot be written.
        ProfdeckError: it cannot be read.
        SystemExit: a SIGTERM came; what ran has been ended.
    """
    desk = RecordFile(path, attrs.evolve(read_record(path), by=ProcessId()))
    desk.say()
    try:
        with termination.raised():
            _finish(desk)
    except BaseException as error:
        own = isinstance(error, Exception)
        desk.say(
            state=FinishState.FAILED if own else FinishState.INTERRUPTED,
            problem=describe_error(error) if own else "its process was terminated by SIGTERM",
            ended_ns=time.time_ns(),
        )
        if not own:
            raise


def _finish(desk: RecordFile) -> None:
    record, directory = desk.record, desk.path.parent
    others = Participants(directory, record.capture, tuple(read_about(directory.parent).get("roles", ())))
    missing = wait(others, desk)
    desk.say(state=FinishState.RUNNING, waits_for=missing)
    report = read_run(directory.parent, only=others.counts, within=directory.name)
    document = handed_over(record.capture, directory, report, missing)
    given = input_path(desk.path)
    replace_file(given, json.dumps(document, indent=1).encode(), durable=False)
    desk.say(status=document["status"])
    environment = {
        **os.environ,
        "PROFDECK_FINISH_MANIFEST": str(given),
        "PROFDECK_FINISH_DIRECTORY": str(directory),
        "PROFDECK_FINISH_CAPTURE": record.capture,
        "PROFDECK_FINISH_STATUS": document["status"],
    }
    parts = [("command", ["/bin/sh", "-c", record.command])] if record.command is not None else []
    this = [sys.executable, "-P", "-m", "profdeck.after_run.worker"]
    parts += [(f"listener {name}", [*this, "listener", name, str(desk.path)]) for name in record.listeners]
    for name, arguments in parts:
        part = run_part(name, arguments, given, environment, record.timeout_s)
        desk.say(parts=(*desk.record.parts, part))
    failed = any(part.problem for part in desk.record.parts)
    desk.say(state=FinishState.FAILED if failed else FinishState.DONE, ended_ns=time.time_ns())


def handed_over(name: str, directory: Path, report: RunReport, missing: Sequence[str]) -> dict[str, Any]:
    """Return what the command and the listeners get, as JSON data.

    Args:
        name: of the finish.
        directory: of the step.
        report: on the captures.
        missing: who has not ended them.
    """
    reports: list[RankReport | TargetReport] = [rank for capture in report.captures for rank in capture.ranks]
    reports += report.targets
    paths = {one.manifest for one in reports} | {artifact.path for one in reports for artifact in one.artifacts}
    complete = report.status is Status.COMPLETE and not report.problems and not missing
    return {
        "schema": SCHEMA,
        "capture": name,
        "status": "complete" if complete else "partial",
        "directory": str(directory),
        "missing": list(missing),
        "files": sorted(str(path) for path in paths if path is not None and path.exists()),
        "ls": plain(report),
    }


if __name__ == "__main__":
    main()
