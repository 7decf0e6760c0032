"""Runs the finish task of a capture.

The task waits until all participating processes have ended the capture, and checks their files. Then it runs the finish
command, which is ``finish.command`` in the config, and notifies the listeners.

A process of the job starts the task as a child process: ``python -m profdeck.after_capture.finish RECORD``. The command
`profdeck finish` runs it in its own process instead. Each listener is notified in a separate process, ``... finish
listener NAME RECORD``, which has a time limit and cannot affect the other listeners.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

from profdeck.after_capture.finish_record import (
    SCHEMA,
    CommandResult,
    FinishRecord,
    FinishState,
    create_record,
    input_path,
    read_record,
    record_path,
    write_record,
)
from profdeck.after_capture.participants import Participants, wait
from profdeck.after_capture.work_in_progress import FinishReport, finish_ids, finish_report, recording_steps
from profdeck.backends.plugin_manager import plugin_manager
from profdeck.backends.plugins import load_listener
from profdeck.base.processes import ProcessId
from profdeck.records.status import Status
from profdeck.verification.report_model import RankReport, RunReport, TargetReport, plain
from profdeck.verification.run_report import read_about, read_run, recorded_roles
from profdeck_traces.base.credentials import MASK, redact
from profdeck_traces.base.errors import ProfdeckError, describe_error
from profdeck_traces.base.files import lock_directory, replace_file

OUTPUT_BYTES = 16 << 10
"""Maximum size of a stored output. If the output of a command is longer, only its end is stored."""
_NO_CREDENTIALS = (
    f"run.json contains only {MASK} in place of the credentials for the finish command and listeners. Pass credentials "
    "in environment variables."
)
_NICENESS = 10
_TERM_GRACE_S = 5.0


def main() -> None:
    """Run a finish task or notify a listener, depending on the command-line arguments."""
    if sys.argv[1] == "listener":
        name, options = sys.argv[2], read_record(Path(sys.argv[3])).listener_options or {}
        notify_listener(name, options.get(name, {}), json.load(sys.stdin.buffer))
        return
    with suppress(OSError):
        os.nice(_NICENESS)  # the job continues meanwhile
    run_finish(Path(sys.argv[1]))


def finish_run(report: RunReport, template: FinishRecord | None, *, again: bool) -> Iterator[tuple[FinishReport, bool]]:
    """Run finish tasks that were never started or were interrupted.

    Args:
        report: the captures of the run.
        template: the command and listeners for tasks without a record; None if the config of the run has neither.
        again: whether to repeat tasks that are done or failed.

    Yields:
        The state of each finish task, and whether this call ran it.
    """
    recording = recording_steps(report)
    for first_step, name in finish_ids(report):
        path = record_path(report.path, first_step, name)
        new = template and attrs.evolve(template, capture=name, first_step=first_step, claimed_ns=time.time_ns())
        try:
            if not path.exists() and (new is None or first_step in recording):
                continue
            if new and not path.exists() and MASK in f"{new.command} {new.listener_options}":
                yield FinishReport(capture=name, state=FinishState.NOT_RUN, problem=_NO_CREDENTIALS), False
                continue
            is_claimed = _claim(path, new, again=again)
            yield finish_report(path, run_finish(path) if is_claimed else read_record(path)), is_claimed
        except (OSError, ProfdeckError) as error:
            yield (
                FinishReport(capture=name, state=FinishState.FAILED, problem=describe_error(error), record=path),
                False,
            )


def _claim(path: Path, new: FinishRecord | None, *, again: bool) -> bool:
    """Claim a finish task for this process.

    Return False if another process is running the task, or if the task is done or failed and `again` is False.
    """
    with lock_directory(path.parent):  # another call of `profdeck finish` could claim it too
        try:
            record = read_record(path)
        except FileNotFoundError:
            if new is None:
                raise
            create_record(path, new)
            return True
        if record.is_lost(path) or record.state is FinishState.INTERRUPTED or (again and record.has_ended):
            new = attrs.evolve(record, by=ProcessId(), state=FinishState.WAITING, parts=(), problem=None, ended_ns=None)
            write_record(path, new)
            return True
        return False


def run_finish(path: Path) -> FinishRecord:
    """Run a finish task, and write its progress and result to its record file.

    Args:
        path: the path of the record file.

    Returns:
        The final record.

    Raises:
        OSError: the record cannot be written.
        ProfdeckError: the record cannot be read.
        SystemExit: the process received SIGTERM. The running command was terminated.
        KeyboardInterrupt: the process received SIGINT. The running command was terminated.
    """
    finish = _Finish(path, attrs.evolve(read_record(path), by=ProcessId()))
    finish.update()
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        finish.run()
    except Exception as error:  # noqa: BLE001  # errors can only be reported in the record
        finish.update(state=FinishState.FAILED, problem=describe_error(error), ended_ns=time.time_ns())
    except BaseException as error:
        name = "SIGTERM" if isinstance(error, SystemExit) else "SIGINT"
        problem = f"its process was terminated by {name}"
        finish.update(state=FinishState.INTERRUPTED, problem=problem, ended_ns=time.time_ns())
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    return finish.record


def _exit(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second SIGTERM must not interrupt the termination of the command
    raise SystemExit(128 + number)


@attrs.define
class _Finish:
    """A running finish task."""

    path: Path
    record: FinishRecord

    def update(self, **changes: Any) -> None:
        """Update fields of the record, and write it to its file."""
        self.record = attrs.evolve(self.record, **changes)
        write_record(self.path, self.record)

    def run(self) -> None:
        """Wait for the participating processes, check their files, run the finish command and notify the listeners."""
        record, directory = self.record, self.path.parent
        roles = tuple(recorded_roles(read_about(directory.parent)))
        participants = Participants(directory, record.capture, roles)
        missing = wait(participants, record.wait_s, self._wait_for)
        self.update(state=FinishState.RUNNING, waits_for=missing)
        report = read_run(directory.parent, only=participants.includes, within=directory.name)
        document = document_of(record.capture, directory, report, missing)
        stdin = input_path(self.path)
        replace_file(stdin, json.dumps(document, indent=1).encode(), durable=False)
        self.update(status=document["status"])
        environment = {
            **os.environ,
            "PROFDECK_FINISH_MANIFEST": str(stdin),
            "PROFDECK_FINISH_DIRECTORY": str(directory),
            "PROFDECK_FINISH_CAPTURE": record.capture,
            "PROFDECK_FINISH_STATUS": document["status"],
        }
        commands = [("command", ["/bin/sh", "-c", record.command])] if record.command is not None else []
        module = [sys.executable, "-P", "-m", "profdeck.after_capture.finish"]
        commands += [(f"listener {name}", [*module, "listener", name, str(self.path)]) for name in record.listeners]
        for name, arguments in commands:
            result = run_command(name, arguments, stdin, environment, record.timeout_s)
            self.update(parts=(*self.record.parts, result))
        is_failed = any(part.problem for part in self.record.parts)
        self.update(state=FinishState.FAILED if is_failed else FinishState.DONE, ended_ns=time.time_ns())

    def _wait_for(self, names: tuple[str, ...]) -> None:
        if names != self.record.waits_for:
            self.update(waits_for=names)
        else:
            os.utime(self.path)  # shows other hosts that this process is running


def document_of(name: str, directory: Path, report: RunReport, missing: Sequence[str]) -> dict[str, Any]:
    """Return the JSON data that the finish command and the listeners read from stdin.

    Args:
        name: the name of the finish task.
        directory: the step directory.
        report: the report on the captures of the task.
        missing: names of the participants that have not ended the captures.
    """
    reports: list[RankReport | TargetReport] = [rank for capture in report.captures for rank in capture.ranks]
    reports += report.targets
    paths = {part.manifest for part in reports} | {artifact.path for part in reports for artifact in part.artifacts}
    is_complete = report.status is Status.COMPLETE and not report.problems and not missing
    return {
        "schema": SCHEMA,
        "capture": name,
        "status": "complete" if is_complete else "partial",
        "directory": str(directory),
        "missing": list(missing),
        "files": sorted(str(path) for path in paths if path is not None and path.exists()),
        "ls": plain(report),
    }


def run_command(
    name: str, arguments: Sequence[str], stdin: Path, environment: Mapping[str, str], timeout_s: float
) -> CommandResult:
    """Run a command in a new process group, which is terminated when the time limit passes.

    Args:
        name: the name to store in the result.
        arguments: the command line.
        stdin: the file to use as the command's stdin.
        environment: the command's environment variables.
        timeout_s: the time limit in seconds.

    Raises:
        BaseException: a signal handler raised this exception. The process group has been terminated.
    """
    started_ns, started_s = time.time_ns(), time.monotonic()
    exit_code: int | None = None
    with stdin.open("rb") as document, tempfile.TemporaryFile() as output:
        fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)  # commands may truncate the file: echo error > /dev/stderr
        try:
            exit_code, is_late = _run(arguments, timeout_s, document.fileno(), output.fileno(), environment)
            limit = f"exceeded timeout_s={timeout_s:g} seconds and was terminated"
            problem = limit if is_late else _problem(exit_code)
        except (OSError, ValueError) as error:
            problem = f"cannot be started: {describe_error(error)}"
        output.seek(max(output.seek(0, os.SEEK_END) - OUTPUT_BYTES, 0))
        text = redact(output.read(OUTPUT_BYTES).decode(errors="replace"))
    return CommandResult(
        name=name,
        started_ns=started_ns,
        duration_s=round(time.monotonic() - started_s, 3),
        exit_code=exit_code,
        output=text,
        problem=problem,
    )


def _run(
    arguments: Sequence[str], timeout_s: float, stdin: int, output: int, environment: Mapping[str, str]
) -> tuple[int, bool]:
    """Run a command. Return its exit code and whether it exceeded the time limit."""
    received = list[int]()
    # Defer signals until Popen returns, because an exception inside Popen would leave the new process running.
    deferred = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in deferred}
    try:
        process = subprocess.Popen(
            arguments, stdin=stdin, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if received:
                signal.raise_signal(received[0])
            return process.wait(timeout_s), False
        except subprocess.TimeoutExpired:
            return _end_group(process), True
        except BaseException:
            _end_group(process)
            raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end_group(process: subprocess.Popen[bytes]) -> int:
    """Terminate a command's process group, then kill its remaining processes. Return the command's exit code."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_GRACE_S)
    return process.wait()


def _problem(exit_code: int) -> str | None:
    if exit_code >= 0:
        return f"failed with exit status {exit_code}" if exit_code else None
    names = {int(number): number.name for number in signal.Signals}
    return f"was terminated by {names.get(-exit_code, f'signal {-exit_code}')}"


def notify_listener(name: str, options: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Call a listener's ``capture_finished`` hook.

    Raises:
        PluginError: the listener cannot be loaded.
        Exception: the listener raised an exception.
    """
    manager = plugin_manager()
    manager.add_object(name, load_listener(name, options))
    for result in manager.hook.capture_finished(manifest=manifest, plugin_name=name):
        if inspect.isawaitable(result):
            asyncio.run(_await(result))


async def _await(result: Awaitable[object]) -> None:
    await result


if __name__ == "__main__":
    main()
