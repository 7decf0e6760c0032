"""The finish of a capture: a command and listeners, run once when it has ended in all processes that take part.

The first process in which a capture ends creates the record of its finish, which must not exist before. It starts
another process, `profdeck.after_run.worker`, which waits for all others, reads the files back and runs what is to be
run. So it is done once, costs the job nothing, and outlives processes that are killed. The directory of the step has::

    finish.step2.json           who does it, how far it is and what came of it
    finish.step2.input.json     what was handed to the command and the listeners

All captures of one global step have one finish: those of all roles, replicas and stages. A job that repeats the step
makes another one, ``step2-take2``.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from profdeck.after_run.record import (
    FinishRecord,
    FinishState,
    encode,
    finish_id,
    read_record,
    record_path,
    write_record,
)
from profdeck.base.processes import start_detached
from profdeck.config.model import FinishConfig
from profdeck.records.capture import CaptureRecord
from profdeck.records.manifest import ManifestWriter, write_manifest
from profdeck_traces.base.errors import ProfdeckError, describe_error
from profdeck_traces.base.files import write_new

logger = logging.getLogger("profdeck")

_PATIENCE_S = 5.0


# For the processes of the job.

_unbegun: set[Finishes] = set()
_running: dict[Path, _Running] = {}


class Finishes:
    """Has the captures of one profiler finished, together with those of all others."""

    def __init__(
        self, run: Path, config: FinishConfig, listeners: tuple[str, ...], options: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Args:
        run: the run directory.
        config: the command, and how long it may take.
        listeners: names of the listeners with the hook ``capture_finished``.
        options: the options of listeners, by name.
        """
        self._options = {name: value for name, value in options.items() if name in listeners} or None
        self._run = run
        self._config = config
        self._listeners = listeners
        self._last: dict[Path, tuple[CaptureRecord, ManifestWriter]] = {}

    def add(self, capture: CaptureRecord, recorder: ManifestWriter) -> None:
        """Remember that a capture has ended here, well or badly; its manifest is written."""
        name = finish_id(capture.first_step, capture.id)
        self._last[record_path(self._run, capture.first_step, name)] = capture, recorder
        _unbegun.add(self)

    def begin(self) -> None:
        """Have all that is remembered finished, unless another process has that done. Never raises."""
        last, self._last = self._last, {}
        _unbegun.discard(self)
        for path, (capture, recorder) in last.items():
            if recorder.more_follow:
                with contextlib.suppress(OSError):  # the others wait in vain, for a while
                    write_manifest(capture, attrs.evolve(recorder, more_follow=False))
            record = FinishRecord(
                capture=finish_id(capture.first_step, capture.id),
                first_step=capture.first_step,
                command=self._config.command,
                listeners=self._listeners,
                listener_options=self._options,
                timeout_s=self._config.timeout_s,
                wait_s=self._config.wait_s,
            )
            _begin(path, record)


def await_own() -> None:
    """Wait until the finishes that this process has asked for are over, but no longer than they may take."""
    began_s = time.monotonic()
    for running in list(_running.values()):
        running.wait(running.limit_s - (time.monotonic() - began_s))


def _begin(path: Path, record: FinishRecord) -> None:
    try:
        write_new(path, encode(record))
    except FileExistsError:
        _check_in_time(path)
        return
    except OSError as error:
        logger.warning("The finish of %s is not run: %s", record.capture, describe_error(error))
        return
    try:
        news = _start(path)
    except (OSError, subprocess.SubprocessError) as error:
        _give_up(path, record, FinishState.FAILED, f"its process could not be started: {describe_error(error)}")
        return
    _running[path] = running = _Running(path, news, record.longest_s)
    running.watch()


def _start(path: Path) -> int:
    """Start the process of a finish; returns what can be read when it has ended."""
    news, telling = os.pipe()
    try:
        start_detached("profdeck.after_run.worker", str(path), stderr=telling)
    except BaseException:
        os.close(news)
        raise
    finally:
        os.close(telling)
    return news


def _check_in_time(path: Path) -> None:
    """Say so if a finish has not waited for this process."""
    with contextlib.suppress(FileNotFoundError, ProfdeckError):
        record = read_record(path)
        if record.state is not FinishState.WAITING:
            logger.warning(
                "The finish of %s went without this process, as it waits for wait_s=%g seconds: %s",
                record.capture,
                record.wait_s,
                path,
            )


def _give_up(path: Path, record: FinishRecord, state: FinishState, problem: str) -> None:
    logger.warning("Finish of %s: %s: %s. See %s", record.capture, state, problem, path)
    with contextlib.suppress(OSError):
        write_record(path, attrs.evolve(record, state=state, problem=problem, ended_ns=time.time_ns()))


class _Running:
    """A finish whose process was started by this one. The pipe between them closes when it ends."""

    def __init__(self, path: Path, news: int, limit_s: float) -> None:
        self.limit_s = limit_s
        self._path = path
        self._news = news
        self._thread: threading.Thread | None = threading.Thread(target=self._follow, name="profdeck", daemon=True)

    def watch(self) -> None:
        """Log what comes of it, as soon as that is known."""
        assert self._thread is not None  # noqa: S101  # it is begun once
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending, and starts no threads any more
            self._thread = None

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is over; False if it is not after so many seconds."""
        if self._thread is not None:
            self._thread.join(max(timeout_s, 0.0))
            return not self._thread.is_alive()
        poll = select.poll()
        poll.register(self._news, select.POLLIN)
        if not poll.poll(max(timeout_s, 0.0) * 1000):
            return False
        self._follow()
        return True

    def _follow(self) -> None:
        with os.fdopen(self._news, "rb") as news:
            said = news.read().decode(errors="replace").strip()
        try:
            _log(self._path, said)
        finally:
            _running.pop(self._path, None)


def _log(path: Path, said: str) -> None:
    """Say what came of a finish whose process has ended.

    Args:
        path: of the record.
        said: what its process could tell nobody else.
    """
    try:
        record = read_record(path)
    except (FileNotFoundError, ProfdeckError) as error:
        logger.warning("The outcome of a finish is unknown: %s", describe_error(error))
        return
    if not record.over and said:
        last = said.rpartition("\n")[2]
        _give_up(path, record, FinishState.FAILED, f"its process could not go on: {last}")
    elif not record.over:
        _give_up(path, record, FinishState.INTERRUPTED, "its process was ended")
    elif record.state is FinishState.DONE:
        logger.info("Finish of %s: done.", record.capture)
    else:
        logger.warning("Finish of %s: %s: %s. See %s", record.capture, record.state, record.why, path)


def _at_exit() -> None:
    """Stay until what this process has asked for is over: a container may end with it."""
    for finishes in list(_unbegun):
        finishes.begin()
    began_s = time.monotonic()
    try:
        for running in list(_running.values()):
            if not running.wait(_PATIENCE_S):
                logger.warning(
                    "This process stays for up to %.0f seconds, until a finish is over. Ctrl-C ends it at once, and "
                    "the finish goes on.",
                    running.limit_s,
                )
                running.wait(running.limit_s - (time.monotonic() - began_s))
    except KeyboardInterrupt:
        logger.warning("A finish goes on without this process.")


def _forget() -> None:
    """What a forked child inherits belongs to its parent."""
    _unbegun.clear()
    _running.clear()


# Called after that of captures, which is registered when one begins.
atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forget)
