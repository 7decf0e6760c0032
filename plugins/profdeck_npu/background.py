"""Detached process that analyses captures: ``python -m profdeck_npu.background SECONDS DIRECTORY...``.

`request` starts this process, which keeps running after the job has ended.
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from profdeck.plugin import describe_error, start_detached
from profdeck_npu.analysis import (
    AnalysisInProgressError,
    analyse,
    default_processes,
    expected_files,
    fail,
    is_analysed,
    new_state,
    open_log,
)
from profdeck_npu.traces.analysis_state import write_state

_NICENESS = 10

_log = logging.getLogger(__name__)


def request(directories: Sequence[Path], timeout_s: float) -> None:
    """Start a detached process that analyses the directories of a rank. This takes a few milliseconds.

    Afterwards, the state of each directory is ``pending``, or ``failed`` if the process could not be started.

    Args:
        directories: directories that torch_npu wrote.
        timeout_s: time limit for each directory.
    """
    if not directories:
        return
    directories = [directory.absolute() for directory in directories]
    try:
        _start(directories, timeout_s)
    except Exception as error:  # noqa: BLE001  # the job must continue
        _log.warning("The analysis of %s cannot be started: %s", directories[0], describe_error(error))
        for directory in directories:
            fail(directory, f"it could not be started: {describe_error(error)}")


def _start(directories: Sequence[Path], timeout_s: float) -> None:
    reading, writing = os.pipe()
    with (
        os.fdopen(reading, "rb") as stdin,
        os.fdopen(writing, "wb", buffering=0) as start_signal,
        open_log(directories[0]) as log,
    ):
        pid = start_detached(__name__, str(timeout_s), *map(str, directories), stdin=stdin, stderr=log)
        for directory in directories:
            write_state(directory, new_state(directory, "pending", pid, expected_files(directory)))
        start_signal.write(b"\n")  # sent after the states are written, because the process replaces them


def main() -> None:
    """Analyse the directories from the command line, one after the other."""
    sys.stdin.readline()  # wait until the job has written the pending states
    timeout_s, *directories = sys.argv[1:]
    with suppress(OSError):
        os.nice(_NICENESS)  # the job continues to run on the same cores
    with suppress(OSError):
        _acquire_slot()
    for directory in map(Path, directories):
        with suppress(AnalysisInProgressError):
            if not is_analysed(directory):  # another host may have analysed the directory in the meantime
                analyse(directory, timeout_s=float(timeout_s))


def _acquire_slot() -> None:
    """Wait for one of the `default_processes` slots of this host, and hold it until this process exits."""
    slots = range(default_processes())
    for slot in slots:
        with suppress(BlockingIOError):
            return _lock_slot(slot, fcntl.LOCK_NB)
    return _lock_slot(random.choice(slots), 0)  # noqa: S311  # not a secret


def _lock_slot(slot: int, flags: int) -> None:
    path = Path(tempfile.gettempdir(), f"profdeck-analysis-{os.getuid()}-{slot}.lock")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except BlockingIOError:
        os.close(descriptor)
        raise


if __name__ == "__main__":
    main()
