"""The finish of a capture: a command and listeners, run once when it has ended in all processes that take part.

The first process in which a capture ends creates the record of its finish, which must not exist before. It starts
another process, `profdeck.finisher`, which waits for all others, reads the files back and runs what is to be run. So
it is done once, costs the job nothing, and outlives whoever is killed. In the directory of the step stand::

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
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import msgspec

from profdeck.capture import Capture, Status
from profdeck.config import FinishConfig
from profdeck.errors import ProfdeckError, describe
from profdeck.process import ProcessId
from profdeck.run import Recorder, replace, write_manifest, write_new

if TYPE_CHECKING:
    from profdeck.verify import RunReport

logger = logging.getLogger("profdeck")

SCHEMA = 1
MARGIN_S = 15.0
"""What a finish may take beside its waits and its parts, in seconds: to start, to read files back, to end a command."""

# The shell ends at once and leaves its child to init: no zombie in the job, and nobody who ends the children of a
# worker with it (Ray does) ends this one.
_STARTER = '"$@" &'
_START_S = 10.0
_POLL_S = 0.2
_PATIENCE_S = 5.0
_TAKE = re.compile(r"-(take\d+)(?=-|$)")


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
class Part:
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
    """What stands in the file of a finish."""

    schema: int = SCHEMA
    capture: str
    """The captures that it is of: ``step2`` for all of that global step."""
    first_step: int
    command: str | None
    listeners: tuple[str, ...]
    """The listeners that want to be told."""
    timeout_s: float
    wait_s: float
    by: ProcessId = attrs.field(factory=ProcessId)
    """The process that does it; at first the one that asked for it."""
    claimed_ns: int = attrs.field(factory=time.time_ns)
    ended_ns: int | None = None
    state: FinishState = FinishState.WAITING
    status: str | None = None
    """Whether what was handed over is ``complete`` or ``partial``; None before that is known."""
    waits_for: tuple[str, ...] = ()
    """Those that have not ended yet; from ``running`` on, those that it goes without."""
    parts: tuple[Part, ...] = ()
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


def read_record(path: Path) -> FinishRecord:
    """Read the record of a finish.

    Raises:
        FileNotFoundError: there is none.
        ProfdeckError: it cannot be read, or is of a later version.
    """
    try:
        record = msgspec.json.decode(path.read_bytes(), type=FinishRecord)
    except FileNotFoundError:
        raise
    except (OSError, msgspec.MsgspecError) as error:
        raise ProfdeckError(f"{path}: not a readable record of a finish: {error}.") from None
    if record.schema > SCHEMA:
        raise ProfdeckError(f"{path}: written by a later version; update profdeck to read it.")
    return record


def write_record(path: Path, record: FinishRecord) -> None:
    """Replace the record of a finish.

    Raises:
        OSError: it cannot be written.
    """
    replace(path, _encode(record), durable=record.over)


def _encode(record: FinishRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(attrs.asdict(record)), indent=1)


# For those who read a run.


def read_finishes(report: RunReport) -> Iterator[FinishReport]:
    """Yield what there is to say of the finishes of the captures in a report, by step.

    Raises:
        ProfdeckError: the report is not of a run directory any more.
    """
    from profdeck.verify import read_about

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


# For the processes of the job.

_unbegun: set[Finishes] = set()
_running: dict[Path, _Running] = {}


class Finishes:
    """Has the captures of one profiler finished, together with those of all others."""

    def __init__(self, run: Path, config: FinishConfig, listeners: tuple[str, ...]) -> None:
        """Args:
        run: the run directory.
        config: what is to be run, and for how long.
        listeners: by name, those that want to be told.
        """
        self._run = run
        self._config = config
        self._listeners = listeners
        self._last: dict[Path, tuple[Capture, Recorder]] = {}

    def add(self, capture: Capture, recorder: Recorder) -> None:
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
        write_new(path, _encode(record))
    except FileExistsError:
        _check_in_time(path)
        return
    except OSError as error:
        logger.warning("Nothing is run at the end of %s: %s", record.capture, describe(error))
        return
    try:
        news = _start(path)
    except (OSError, subprocess.SubprocessError) as error:
        _give_up(path, record, FinishState.FAILED, f"its process could not be started: {describe(error)}")
        return
    _running[path] = running = _Running(path, news, record.longest_s)
    running.watch()


def _start(path: Path) -> int:
    """Start the process of a finish; returns what can be read when it has ended."""
    news, telling = os.pipe()
    try:
        subprocess.run(
            ["/bin/sh", "-c", _STARTER, "sh", sys.executable, "-P", "-m", "profdeck.finisher", str(path)],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=telling,
            timeout=_START_S,
            start_new_session=True,
        )
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
        logger.warning("What came of a finish cannot be known: %s", describe(error))
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
