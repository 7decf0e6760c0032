"""Starts finish tasks from within a job's processes.

When a capture ends in a process, the process tries to create the record file of the finish task. Only one process
succeeds. It starts the task, `profdeck.after_capture.finish`, as a child process in a new session. The task therefore
runs once, does not block the job, and continues if its parent or the launcher is killed.

All roles, replicas and stages of a global step share one finish task. If a job repeats the step, the new captures get
a separate finish task, such as ``step2-take2``.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import attrs

from profdeck.after_capture.finish_record import (
    FinishRecord,
    FinishState,
    create_record,
    finish_id,
    new_record,
    read_record,
    record_path,
    write_record,
)
from profdeck.config.model import FinishConfig
from profdeck.records.capture import CaptureRecord
from profdeck.records.manifest import ManifestWriter, write_manifest
from profdeck_traces.base.errors import ProfdeckError, describe_error

logger = logging.getLogger("profdeck")

_MESSAGE_DELAY_S = 5.0

_pending: set[Finishes] = set()
_children: dict[Path, _Child] = {}


class Finishes:
    """Starts the finish tasks for one profiler's captures."""

    def __init__(
        self, run: Path, config: FinishConfig, listeners: tuple[str, ...], options: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Args:
        run: the run directory.
        config: the finish command and its time limits.
        listeners: names of the listeners that implement ``capture_finished``.
        options: the options of each listener, by listener name.
        """
        self._run = run
        self._arguments = config, listeners, options
        self._ended: dict[Path, tuple[CaptureRecord, ManifestWriter]] = {}

    def add(self, capture: CaptureRecord, recorder: ManifestWriter) -> None:
        """Register a capture after it has ended in this process and its manifest has been written."""
        name = finish_id(capture.first_step, capture.id)
        self._ended[record_path(self._run, capture.first_step, name)] = capture, recorder
        _pending.add(self)

    def start(self) -> None:
        """Start the finish tasks of all registered captures, unless another process has already started them.

        Errors are logged or written to the record, but never raised.
        """
        ended, self._ended = self._ended, {}
        _pending.discard(self)
        for path, (capture, recorder) in ended.items():
            if recorder.more_follow:
                with contextlib.suppress(OSError):  # the finish task then waits for wait_s
                    write_manifest(capture, attrs.evolve(recorder, more_follow=False))
            name = finish_id(capture.first_step, capture.id)
            _start(path, new_record(capture.first_step, name, *self._arguments))


def await_own_finishes() -> None:
    """Wait for the finish tasks that this process started, but no longer than each task's maximum duration."""
    started_s = time.monotonic()
    for child in list(_children.values()):
        child.wait(child.limit_s - (time.monotonic() - started_s))


@attrs.frozen
class _Child:
    """A child process that runs a finish task."""

    path: Path
    """The path of the task's record file."""
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    """File with the stderr of the process."""
    limit_s: float

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process, and log the result of its finish task. Return False on timeout."""
        try:
            self.process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return False
        if _children.pop(self.path, None) is not None:
            with self.errors:
                self.errors.seek(0)
                error = self.errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            self._log(error)
        return True

    def _log(self, error: str) -> None:
        try:
            record = read_record(self.path)
        except (FileNotFoundError, ProfdeckError) as reason:
            logger.warning("The outcome of a finish task is unknown: %s", describe_error(reason))
            return
        if record.state is FinishState.DONE:
            logger.info("Finish task for %s: done.", record.capture)
        elif record.has_ended:
            _warn(self.path, record)
        elif record.by.alive is not None and record.by.pid in {
            self.process.pid,
            os.getpid(),
        }:  # otherwise, `profdeck finish` has claimed the task
            state = FinishState.FAILED if error else FinishState.INTERRUPTED
            problem = f"its process failed: {error}" if error else "its process was terminated"
            _warn(self.path, attrs.evolve(record, state=state, problem=problem), write=True)


def _start(path: Path, record: FinishRecord) -> None:
    for child in list(_children.values()):
        child.wait(0.0)  # reaps the child and logs its result
    try:
        create_record(path, record)
    except FileExistsError:
        with contextlib.suppress(FileNotFoundError, ProfdeckError):
            if read_record(path).state is not FinishState.WAITING:
                text = "The finish task for %s continued without this process after wait_s=%g seconds: %s"
                logger.warning(text, record.capture, record.wait_s, path)
        return
    except OSError as error:
        logger.warning("The finish task for %s cannot be started: %s", record.capture, describe_error(error))
        return
    command = [sys.executable, "-P", "-m", "profdeck.after_capture.finish", str(path)]
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # not a pipe: the child may outlive this process
    try:
        # In a new session, the child does not receive signals sent to the launcher's process group.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
    except OSError as error:
        errors.close()
        problem = f"its process could not be started: {describe_error(error)}"
        _warn(path, attrs.evolve(record, state=FinishState.FAILED, problem=problem), write=True)
        return
    _children[path] = _Child(path, process, errors, record.max_duration_s)


def _warn(path: Path, record: FinishRecord, *, write: bool = False) -> None:
    logger.warning("Finish task for %s: %s: %s. See %s", record.capture, record.state, record.failure_reason, path)
    if write:
        with contextlib.suppress(OSError):
            write_record(path, attrs.evolve(record, ended_ns=time.time_ns()))


def _at_exit() -> None:
    """Start the registered finish tasks, and wait for all tasks started by this process.

    Without the wait, a container might exit together with this process and kill the tasks.
    """
    for finishes in list(_pending):
        finishes.start()
    try:
        for child in list(_children.values()):
            if not child.wait(_MESSAGE_DELAY_S):
                logger.warning(
                    "Waiting up to %.0f seconds for the finish task of a capture. Press Ctrl-C to exit now; the task "
                    "continues.",
                    child.limit_s,
                )
                await_own_finishes()
    except KeyboardInterrupt:
        logger.warning("The finish task continues without this process.")


# Exit handlers run in reverse order of registration. The handler that ends captures is registered later, when a capture
# starts, so it runs first.
atexit.register(_at_exit)
# A forked child must not start its parent's finish tasks or wait for them.
os.register_at_fork(after_in_child=_pending.clear)
os.register_at_fork(after_in_child=_children.clear)
