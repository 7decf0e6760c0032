"""The offline analysis of what torch_npu recorded, in a child process with a deadline.

torch_npu's ``analyse`` swallows its errors, exits with 0 and says that it is done, whatever happened; it changes how
its process starts others, and it refuses to run in a daemon. So it has a process for itself, and what counts are the
files that it leaves. What an earlier analysis left is removed first, and the raw data stay.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

import attrs
import msgspec

from profdeck import Capture, ProfdeckError
from profdeck.plugin import CaptureError, TraceError, describe_error, process_started, start_detached
from profdeck_npu.options import Export, NpuOptions
from profdeck_npu.process_group import Cancellation, Ended, run_group
from profdeck_npu.traces.analysis_state import OUTPUT, STATE_FILE, AnalysisState, read_state, write_state
from profdeck_npu.traces.directory import AscendDirectory
from profdeck_npu.traces.info import NPU, Info, read_info

TIMEOUT_S = 1800.0

_LOGS = "logs"
_LOG = "profdeck_analysis.log"
_SUPERVISOR_LOG = "profdeck_supervisor.log"

# "[2026-01-31 12:00:00] [ERROR] [4711] profiler.py: text" on stdout, "[...] [ERROR] [module:12] text" in logs/.
_COMPLAINT = re.compile(r"\[ERROR\] \[[^\]]*\] (?:profiler\.py: )?(?P<text>.*)")
_OTHER_LINE = re.compile(r".*\[(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\] \[")
_MAX_COMPLAINTS = 10
_MAX_LOG_BYTES = 16 << 20
# The process that does the work prints the one (all releases from 2.6 to 2.14) and leaves the other (newer ones) at its
# end, even if all failed. Without both it died, which its parent passes over.
_THROUGH, _THROUGH_FILE = b"All profiling data parsed", "analyse.done"
# File systems that cannot lock say so in these ways.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}


_NO_MSPROF = (
    "the program msprof, by which torch_npu reads device data, is not on the PATH; it is part of CANN, so source its "
    "set_env.sh first, as /usr/local/Ascend/ascend-toolkit/set_env.sh (an NPU is not needed)"
)

_log = logging.getLogger(__name__)


class AnalysisUnderWayError(CaptureError):
    """Another process analyses the directory."""


@attrs.frozen(kw_only=True)
class Order:
    """What a supervisor is asked for."""

    capture: str
    """The directory of the capture, with the manifests of its ranks."""
    directories: tuple[str, ...]
    timeout_s: float


def default_processes() -> int:
    """Return how many directories are analysed at once on this host: half of the cores, but one at least."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def remedy(directory: Path) -> str:
    """Return the command that analyses a directory."""
    return f"profdeck npu analyse {shlex.quote(str(directory))}"


def expected(directory: Path, export: Sequence[str] = ()) -> tuple[str, ...]:
    """Return patterns of the files that an analysis has to leave, relative to its output.

    Args:
        directory: What torch_npu recorded; its own notes in it say what was recorded.
        export: What is to be written; if empty, what the recording was configured for.
    """
    info = _info(directory)
    exports = export or info.exports or (Export.TEXT,)
    has_device = any(directory.glob("PROF_*/device_*")) if info.activities is None else NPU in info.activities
    patterns = []
    if Export.TEXT in exports:
        patterns.append("trace_view.json")
        if has_device and info.may_have_kernels:
            patterns.append("kernel_details.csv")
    if Export.DB in exports:
        patterns.append("ascend_pytorch_profiler*.db")
    return tuple(patterns)


def is_analysed(directory: Path, export: Sequence[str] = ()) -> bool:
    """Tell whether the files that are to be expected are there: whole ones, unless an analysis of ours proved that."""
    state = _readable_state(directory)
    if state is None:
        return (directory / OUTPUT).is_dir() and _damage(directory, expected(directory, export)) is None
    patterns = expected(directory, export) if export else state.expected
    return state.state == "done" and all(any((directory / OUTPUT).glob(pattern)) for pattern in patterns)


def analyse(
    directory: Path,
    *,
    export: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    cancellation: Cancellation | None = None,
) -> AnalysisState:
    """Analyse what torch_npu recorded, whatever an earlier analysis left, and write the state of the directory.

    Returns when all processes of it have ended. If the analysis could not even begin, a result that was there before
    stays, and with it the state that it had.

    Args:
        directory: The directory that torch_npu made, ``*_ascend_pt``.
        export: What is to be written; if empty, what the recording was configured for.
        timeout_s: After so many seconds the analysis is ended and has failed.
        cancellation: Ends it from another thread; it has failed then.

    Returns:
        ``done``, or ``failed`` with the problems.

    Raises:
        AnalysisUnderWayError: Another process analyses it.
        BaseException: What a signal handler raised, such as KeyboardInterrupt; the state is ``failed`` then.
    """
    directory = directory.absolute()
    state = _new_state(directory, "running", os.getpid(), expected(directory, export))
    command = [sys.executable, "-P", "-m", "profdeck_npu.analyser", str(directory), ",".join(export)]

    def run(log: BinaryIO) -> Ended:
        return run_group(command, output=log, timeout_s=timeout_s, cancellation=cancellation)

    try:
        with _only_one(directory) as log:
            return _analyse(directory, state, log, run)
    except OSError as error:
        advice = "; copy it to where you may write, and analyse the copy" if error.errno in _NOT_ALLOWED else ""
        return fail(directory, f"it cannot be analysed: {describe_error(error)}{advice}", state)


def fail(directory: Path, problem: str, state: AnalysisState | None = None) -> AnalysisState:
    """Write that the analysis of a directory failed, if it can be written, and return that."""
    state = state or _readable_state(directory) or _new_state(directory, "failed", os.getpid(), ())
    state = attrs.evolve(state, state="failed", ended_ns=time.time_ns(), problems=(problem,))
    try:
        write_state(directory, state)
    except OSError as error:
        _log.warning("The state of the analysis of %s cannot be written: %s", directory, error)
    return state


def request(directories: Sequence[Path], capture: Capture, options: NpuOptions) -> None:
    """Have directories of this rank analysed when all ranks of a capture on this host have stopped.

    A supervisor of its own session does it, which outlives this process and is no child of it. Their states are
    ``pending`` when this returns, after some milliseconds. Never raises: what goes wrong makes them ``failed``.

    Args:
        directories: What torch_npu recorded, in the capture's directory.
        capture: The capture; its directory has the manifests of its ranks.
        options: Its deadline.
    """
    if not directories:
        return
    directories = [directory.absolute() for directory in directories]
    order = Order(
        capture=str(capture.directory.absolute()),
        directories=tuple(map(str, directories)),
        timeout_s=options.analyse_timeout_s,
    )
    try:
        _start_supervisor(directories, order)
    except Exception as error:  # noqa: BLE001  # nothing may come of it in the job
        _log.warning("The analysis of %s cannot be started: %s", directories[0], describe_error(error))
        for directory in directories:
            with suppress(Exception):
                fail(directory, f"it could not be started: {describe_error(error)}")


def _start_supervisor(directories: Sequence[Path], order: Order) -> None:
    (directories[0] / _LOGS).mkdir(exist_ok=True)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as theirs, os.fdopen(writing, "wb") as ours:
        with (directories[0] / _LOGS / _SUPERVISOR_LOG).open("ab") as log:
            pid = start_detached("profdeck_npu.supervisor", stdin=theirs, stderr=log)
        theirs.close()
        for directory in directories:
            write_state(directory, _new_state(directory, "pending", pid, expected(directory)))
        # The supervisor has waited for this. Should we die before, it ends without an order, and the states tell.
        ours.write(msgspec.json.encode(attrs.asdict(order)))


def _analyse(directory: Path, state: AnalysisState, log: BinaryIO, run: Callable[[BinaryIO], Ended]) -> AnalysisState:
    before = _readable_state(directory)
    write_state(directory, state)
    logs = {*directory.glob(f"{_LOGS}/*")}
    begun, complaints = False, list[str]()
    problems = _obstacles(directory)
    try:
        if not problems:
            ended = run(log)
            begun = ended.begun
            problems = _problems(directory, state, ended)
    except BaseException as error:
        fail(directory, describe_error(error) if isinstance(error, Exception) else "it was interrupted", state)
        raise
    if begun:
        new = {*directory.glob(f"{_LOGS}/*")} - logs
        complaints = _complaints([directory / _LOGS / _LOG, *sorted(new)])
    done = attrs.evolve(
        state,
        state="failed" if problems else "done",
        ended_ns=time.time_ns(),
        problems=tuple(dict.fromkeys([*problems, *complaints])),
    )
    if begun or (before and before.state != "done") or _damage(directory, state.expected):
        write_state(directory, done)
    elif before:  # the result of an earlier analysis is there, untouched
        write_state(directory, before)
    else:  # as above, of one that was not ours
        (directory / STATE_FILE).unlink()
    return done


def _obstacles(directory: Path) -> list[str]:
    """Say why an analysis need not begin."""
    device_data = next(directory.glob("PROF_*"), None)
    if device_data is None and not (directory / "FRAMEWORK").is_dir():
        return ["there are no raw data: neither FRAMEWORK nor PROF_* is in it"]
    if device_data is not None and shutil.which("msprof") is None:
        return [_NO_MSPROF]
    return []


def _problems(directory: Path, state: AnalysisState, ended: Ended) -> list[str]:
    """Judge an analysis by what it left."""
    log = directory / _LOGS / _LOG
    if ended.because == "timeout":
        return [f"it was ended at its deadline, after {(time.time_ns() - state.started_ns) / 1e9:.0f} s"]
    if ended.because == "cancelled":
        return ["it was interrupted"]
    if ended.returncode < 0:
        why = ", as the system does when the memory runs out" if ended.returncode == -signal.SIGKILL else ""
        return [f"its process was ended by signal {-ended.returncode}{why}"]
    if not ended.begun:
        return [f"it could not begin: {_last_words(log)}"]
    problems = []
    if not (directory / OUTPUT / _THROUGH_FILE).exists() and _THROUGH not in _read(log):
        problems.append("torch_npu ended before it was through, as when the memory runs out")
    if problem := _damage(directory, state.expected):
        problems.append(problem)
    return problems


def _damage(directory: Path, patterns: Sequence[str]) -> str | None:
    """Say what is missing or damaged of the files that an analysis has to leave; None if all are whole."""
    from profdeck_npu.traces.check import check_output  # not for the job, which only asks for analyses

    try:
        return check_output(directory, patterns)
    except TraceError as error:
        return str(error)


def _complaints(logs: Iterable[Path]) -> list[str]:
    """Collect the errors in logs, each with the exception that follows it, once and up to a number of them."""
    found: dict[str, None] = {}
    for log in logs:
        lines = _read(log).decode(errors="replace").splitlines()
        starts = [number for number, line in enumerate(lines) if _OTHER_LINE.match(line)]
        for start, end in itertools.pairwise([*starts, len(lines)]):
            if match := _COMPLAINT.search(lines[start]):
                exception = lines[end - 1].strip() if end - start > 1 and "Traceback" in lines[start + 1] else ""
                found[" ".join(filter(None, [match["text"].strip(), exception]))] = None
    more = len(found) - _MAX_COMPLAINTS
    return [*list(found)[:_MAX_COMPLAINTS], *([f"and {more} more errors in {_LOGS}/"] if more > 0 else [])]


def _last_words(log: Path) -> str:
    """Return the last line of a log."""
    lines = _read(log).decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"


def _read(log: Path) -> bytes:
    try:
        with log.open("rb") as file:
            return file.read(_MAX_LOG_BYTES)
    except OSError:
        return b""


@contextmanager
def _only_one(directory: Path) -> Generator[BinaryIO, None, None]:
    """Hold a directory; provide the new log of its analysis.

    The log is the lock: the processes of an analysis inherit it as their output, so that a directory is held until
    the last of them has ended, whatever became of us.

    Raises:
        AnalysisUnderWayError: Another process holds it.
        OSError: It cannot be written to.
    """
    logs = directory / _LOGS
    logs.mkdir(exist_ok=True)
    with (logs / _LOG).open("ab", buffering=0) as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AnalysisUnderWayError(under_way(_readable_state(directory))) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        log.truncate(0)
        yield log


def under_way(state: AnalysisState | None) -> str:
    """Say that another process analyses a directory, or is about to, by its state."""
    process = f"process {state.pid} on {state.host}" if state else "another process"
    return f"it is being analysed by {process}: let that end first, or end it"


def _readable_state(directory: Path) -> AnalysisState | None:
    try:
        return read_state(directory)
    except ProfdeckError:  # what an analysis is about to replace
        return None


def _new_state(
    directory: Path, state: Literal["pending", "running", "failed"], pid: int, patterns: tuple[str, ...]
) -> AnalysisState:
    return AnalysisState(
        state=state,
        host=socket.gethostname(),
        pid=pid,
        process_started=process_started(pid),
        started_ns=time.time_ns(),
        remedy=remedy(directory),
        expected=patterns,
    )


def _info(directory: Path) -> Info:
    """Return what torch_npu noted of the recording; nothing if that cannot be read."""
    try:
        return read_info(AscendDirectory(directory).info)
    except TraceError:
        return Info()
