"""Offline analysis of a raw recording by torch_npu, in a child process with a time limit.

torch_npu's ``analyse`` only logs its errors and exits with 0 even if it failed. It also changes the multiprocessing
start method and cannot run in a daemon process. profdeck therefore runs it in a child process and checks the output
files to determine whether it succeeded. The child process first removes the files of an earlier analysis, but keeps
the raw data.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

import attrs

from profdeck import ProfdeckError
from profdeck.plugin import CaptureError, TraceError, describe_error, pid_namespace, process_started
from profdeck_npu.analyser import CANNOT_START
from profdeck_npu.options import Export
from profdeck_npu.traces.analysis_state import OUTPUT, STATE_FILE, AnalysisState, read_state, write_state
from profdeck_npu.traces.directory import AscendDirectory
from profdeck_npu.traces.info import NPU, Info, read_info

TIMEOUT_S = 1800.0

_POLL_S = 0.1
_KILL_GRACE_S = 5.0

LOG = "logs/profdeck_analysis.log"
"""Log file of the analysis, relative to the directory."""
# torch_npu's worker process prints this line when it has finished (2.6 to 2.14); newer releases create this file. If
# the worker dies, the line and the file are missing, but the worker's parent still exits with 0.
_COMPLETED, _COMPLETED_FILE = b"All profiling data parsed", "analyse.done"
# Error numbers from file systems that do not support locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}

_NO_MSPROF = (
    "torch_npu reads device data with CANN's program msprof, which is not on the PATH; source CANN's set_env.sh first, "
    "such as /usr/local/Ascend/ascend-toolkit/set_env.sh (no NPU is required)"
)

_log = logging.getLogger(__name__)


class AnalysisInProgressError(CaptureError):
    """Another process is analysing the directory."""


def default_processes() -> int:
    """Return the maximum number of parallel analyses on this host: half of the cores, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def remedy(directory: Path) -> str:
    """Return the command that analyses a directory."""
    return f"profdeck npu analyse {shlex.quote(str(directory))}"


def expected_files(directory: Path, export: Sequence[str] = ()) -> tuple[str, ...]:
    """Return patterns of the files that an analysis must write, relative to `OUTPUT`.

    Args:
        directory: a directory that torch_npu wrote.
        export: formats to write. If empty, write the formats that the recording was configured for.
    """
    info = _read_info(directory)
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
    """Return whether the expected files exist. If profdeck has not checked the files before, also read them."""
    state = _readable_state(directory)
    if state is None:
        return (directory / OUTPUT).is_dir() and _output_problem(directory, expected_files(directory, export)) is None
    patterns = expected_files(directory, export) if export else state.expected
    return state.state == "done" and all(any((directory / OUTPUT).glob(pattern)) for pattern in patterns)


def analyse(
    directory: Path,
    *,
    export: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    cancelled: threading.Event | None = None,
) -> AnalysisState:
    """Analyse a directory, replace the result of an earlier analysis, and write the directory's state.

    Returns after all processes of the analysis have ended. If torch_npu cannot be loaded, an earlier result and its
    state are kept.

    Args:
        directory: a directory that torch_npu wrote, ``*_ascend_pt``.
        export: formats to write. If empty, write the formats that the recording was configured for.
        timeout_s: time limit in seconds. When it passes, the analysis is killed and fails.
        cancelled: an event. When it is set, the analysis is killed and fails.

    Returns:
        The state ``done``, or ``failed`` with the problem.

    Raises:
        AnalysisInProgressError: another process is analysing the directory.
    """
    directory = directory.absolute()
    state = new_state(directory, "running", os.getpid(), expected_files(directory, export))
    command = [sys.executable, "-P", "-m", "profdeck_npu.analyser", str(directory), ",".join(export)]
    run = partial(_run, command, timeout_s=timeout_s, cancelled=cancelled or threading.Event())
    try:
        with _lock(directory) as log:
            return _analyse(directory, state, partial(run, log))
    except OSError as error:
        advice = "; copy it to a writable location, and analyse the copy" if error.errno in _NOT_ALLOWED else ""
        return fail(directory, f"it cannot be analysed: {describe_error(error)}{advice}", state)


def fail(directory: Path, problem: str, state: AnalysisState | None = None) -> AnalysisState:
    """Write and return the state ``failed`` for a directory. If the state cannot be written, log a warning."""
    state = state or _readable_state(directory) or new_state(directory, "failed", os.getpid(), ())
    state = attrs.evolve(state, state="failed", ended_ns=time.time_ns(), problems=(problem,))
    try:
        write_state(directory, state)
    except OSError as error:
        _log.warning("Cannot save the analysis state of %s: %s", directory, error)
    return state


def _analyse(directory: Path, state: AnalysisState, run: Callable[[], int | str]) -> AnalysisState:
    previous = _readable_state(directory)
    write_state(directory, state)
    problem, has_started = _start_problem(directory), False
    if problem is None:
        result = run()
        has_started = result != CANNOT_START
        problem = result if isinstance(result, str) else _result_problem(directory, state.expected, result)
    finished = attrs.evolve(
        state,
        state="failed" if problem else "done",
        ended_ns=time.time_ns(),
        problems=(problem,) if problem else (),
    )
    has_result = previous.state == "done" if previous else (directory / OUTPUT).is_dir()
    if has_started or not has_result:
        write_state(directory, finished)
    elif previous:
        write_state(directory, previous)
    else:  # the earlier result was not written by profdeck
        (directory / STATE_FILE).unlink()
    return finished


def _run(command: Sequence[str], log: BinaryIO, *, timeout_s: float, cancelled: threading.Event) -> int | str:
    """Run a child process, then kill the remainder of its process group.

    Returns:
        The exit code, or a message if the child was killed at its time limit or because of ``cancelled``.
    """
    deadline_s = time.monotonic() + timeout_s
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        # Not `child.wait`: the ID of the process group can be reused as soon as the child is reaped.
        while (exit_status := os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if time.monotonic() > deadline_s or cancelled.wait(_POLL_S):
                break
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        _wait_for_group(child.pid)
    if exit_status is not None:
        return child.returncode
    return "it was interrupted" if cancelled.is_set() else f"it was killed at its time limit of {timeout_s:g} s"


def _wait_for_group(group: int) -> None:
    """Wait until a killed process group is empty. The wait is limited: some containers never reap orphans."""
    deadline_s = time.monotonic() + _KILL_GRACE_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline_s:
            os.killpg(group, 0)
            time.sleep(_POLL_S)


def _start_problem(directory: Path) -> str | None:
    """Return the reason why the analysis cannot start, or ``None``."""
    has_device_data = any(directory.glob("PROF_*"))
    if not has_device_data and not (directory / "FRAMEWORK").is_dir():
        return "there is no raw data: the directory has neither FRAMEWORK nor PROF_*"
    if has_device_data and shutil.which("msprof") is None:
        return _NO_MSPROF
    return None


def _result_problem(directory: Path, patterns: Sequence[str], returncode: int) -> str | None:
    """Return the reason why a finished analysis failed, or ``None`` if its output is complete."""
    output = (directory / LOG).read_bytes()
    if returncode < 0:
        reason = " (often: out of memory)" if returncode == -signal.SIGKILL else ""
        return f"its process was killed by signal {-returncode}{reason}"
    if returncode:
        lines = output.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), f"it exited with {returncode}")
    if _COMPLETED in output or (directory / OUTPUT / _COMPLETED_FILE).exists():
        problem = _output_problem(directory, patterns)
    else:
        problem = "torch_npu's process died before it finished (often: out of memory)"
    return problem and f"{problem.rstrip('.')} (see {LOG})"


def _output_problem(directory: Path, patterns: Sequence[str]) -> str | None:
    """Return a message about expected files that are missing or corrupt, or ``None``."""
    from profdeck_npu.traces.check import check_output  # not needed in the job, which only requests analyses

    try:
        return check_output(directory, patterns)
    except TraceError as error:
        return str(error)


def open_log(directory: Path) -> BinaryIO:
    """Open the log of a directory's analysis for appending."""
    log = directory / LOG
    log.parent.mkdir(exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(log, flags, 0o666), "ab", buffering=0)


@contextmanager
def _lock(directory: Path) -> Generator[BinaryIO, None, None]:
    """Lock a directory, truncate its log file and return the open file.

    The log file is the lock. All processes of an analysis inherit it as their output, so the lock is held until the
    last process has ended.

    Raises:
        AnalysisInProgressError: another process holds the lock.
        OSError: the directory cannot be written to.
    """
    with open_log(directory) as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AnalysisInProgressError(in_progress_message(_readable_state(directory))) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        log.truncate(0)
        yield log


def in_progress_message(state: AnalysisState | None) -> str:
    """Return the error message for a directory that another process is analysing or has queued."""
    process = f"process {state.pid} on {state.host}" if state else "another process"
    return f"it is being analysed by {process}: wait until it has finished, or stop it"


def _readable_state(directory: Path) -> AnalysisState | None:
    try:
        return read_state(directory)
    except ProfdeckError:  # the analysis will replace the state file
        return None


def new_state(
    directory: Path, state: Literal["pending", "running", "failed"], pid: int, patterns: tuple[str, ...]
) -> AnalysisState:
    """Return a state for an analysis that a process on this host starts now."""
    return AnalysisState(
        state=state,
        host=socket.gethostname(),
        pid=pid,
        process_started=process_started(pid),
        pid_namespace=pid_namespace(),
        started_ns=time.time_ns(),
        remedy=remedy(directory),
        expected=patterns,
    )


def _read_info(directory: Path) -> Info:
    """Return torch_npu's information about the recording, or an empty object if it cannot be read."""
    try:
        return read_info(AscendDirectory(directory).info)
    except TraceError:
        return Info()
