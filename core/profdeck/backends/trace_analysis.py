"""Background analysis of a capture's traces. The results are stored next to the traces.

The analysis runs in a separate process, which uses only resources that the job leaves idle. At most one such process
per host is active, and at most 16 more wait for it. Each process has idle scheduling priority and limited memory.
If memory runs out, the kernel kills these processes first.
The job does not wait for the analysis or see its errors. If a trace has no result, commands analyse the trace
themselves.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from profdeck.base import threads
from profdeck.base.errors import LeaseError
from profdeck.base.leases import Lease, acquire_lease
from profdeck.base.memory import free_bytes
from profdeck.base.processes import start_detached
from profdeck.records.capture import CaptureRecord, Unit
from profdeck_traces.base.errors import ProfdeckError, describe_error
from profdeck_traces.inputs.artifact_kinds import TRACE

logger = logging.getLogger("profdeck")

LEASE = "trace analysis"
"""Name of the lease that is held during the analysis, so that only one process per host is active."""
QUEUE = tuple(f"{LEASE}, waiting {number}" for number in range(16))
"""Lease names for waiting processes, one each. Their number is limited because each process needs about 26 MiB."""
_LIMIT_S = 900
"""Maximum lifetime of the process in seconds, including the wait for the lease."""
_MEMORY_SHARE = 0.1
"""Maximum memory of the process, as a fraction of the free memory."""
_POLL_S = 0.5


def start_analysis(capture: CaptureRecord) -> None:
    """Start a background process that analyses the complete traces of a finished capture. Log errors."""
    traces = [str(artifact.path) for artifact in capture.artifacts if artifact.kind == TRACE and artifact.whole]
    if not traces:
        return
    is_cold = str(int(bool(capture.cold_first_step)))
    is_global = capture.unit is Unit.GLOBAL_STEP and capture.stage is None
    last_step = str(capture.current_step) if is_global else ""
    try:
        start_detached(__name__, is_cold, last_step, *traces, stderr=subprocess.DEVNULL)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: the interpreter is exiting
        logger.info("The traces of capture %s will not be analysed: %s", capture.id, describe_error(error))


def main() -> None:
    """Analyse the traces given on the command line.

    The first argument is 1 if the first step of the traces is cold, and 0 otherwise. The second argument is the last
    global step, or an empty string if there is none. The other arguments are paths.
    """
    threads.unblock_signals()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LIMIT_S)
    _yield_to_job()
    with contextlib.suppress(OSError):
        is_cold, last_step, *traces = sys.argv[1:]
        analyse(map(Path, traces), cold_first_step=is_cold == "1", last_step=int(last_step) if last_step else None)


def analyse(traces: Iterable[Path], *, cold_first_step: bool, last_step: int | None = None) -> None:
    """Wait for the lease, then analyse the traces. Skip traces that cannot be analysed.

    If the queue is full, for example because no CPU is idle, return immediately.

    Raises:
        OSError: the lease directory cannot be used.
    """
    waiting = _first_lease(QUEUE)
    if waiting is None:
        return
    try:
        while (lease := _first_lease([LEASE])) is None:
            time.sleep(_POLL_S)
    finally:
        waiting.release()
    try:
        from profdeck_traces import write_result  # imported late: neither the host nor a waiting process needs it

        for trace in traces:
            with contextlib.suppress(OSError, ProfdeckError, MemoryError):
                write_result(trace, cold_first_step=cold_first_step, last_step=last_step)
    finally:
        lease.release()


def _first_lease(names: Iterable[str]) -> Lease | None:
    """Acquire the first free lease, or return None if all are held."""
    for name in names:
        with contextlib.suppress(LeaseError):
            return acquire_lease([name], holder="the analysis of traces")
    return None


def _yield_to_job() -> None:
    """Restrict this process to idle CPU time and little memory, and make it the first that the kernel kills."""
    # With autogroups, Linux divides CPU time among sessions first, so the session needs low priority too.
    for file, value in (("autogroup", "19"), ("oom_score_adj", "1000")):
        with contextlib.suppress(OSError):
            Path("/proc/self", file).write_text(value, encoding="ascii")
    with contextlib.suppress(OSError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # an engine may have pinned this process to cores on which it busy-waits
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    if (free := free_bytes()) < math.inf:
        limit_bytes = int(_MEMORY_SHARE * free)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
