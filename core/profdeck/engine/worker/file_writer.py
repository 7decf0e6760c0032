"""Writes the files of captures beside the engine, one after the other."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from profdeck.backends.recording import Recording
from profdeck.base.operations import run_without_waiting
from profdeck_traces.base.errors import describe_error

logger = logging.getLogger("profdeck")

SERVE_S = 0.1
"""How long the engine serves between the stop of a recording and the writing of its file: torch holds the interpreter's
lock in each of them, and running requests would wait for both at once.
"""


class FileWriter:
    """A thread that writes the files of recordings that have stopped."""

    def __init__(self) -> None:
        """Start no thread before there is something to write."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="profdeck", initializer=_leave_the_cores)
        self._futures: list[Future[None]] = []
        self._written = 0

    @property
    def idle(self) -> bool:
        """Whether everything is written."""
        # Futures are not asked: they lock, and a signal's handler in this very thread waits for them.
        return self._written == len(self._futures)

    def write(self, recording: Recording) -> None:
        """Write the files of a recording, in its turn."""
        write = functools.partial(self._write, recording)
        try:
            self._futures.append(self._executor.submit(_after_serving, write))
        except RuntimeError:  # the interpreter is ending, and starts no threads any more
            write()
            self._written -= 1  # it had no future

    def close(self) -> None:
        """Take nothing more; what is being written goes on."""
        self._executor.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until everything is written."""
        wait(self._futures)

    def _write(self, recording: Recording) -> None:
        try:
            run_without_waiting(recording.write())
        except Exception as error:  # noqa: BLE001  # nobody asks the future
            logger.warning(
                "The manifest %s cannot be written: %s", recording.capture.manifest_path, describe_error(error)
            )
            recording.capture.problems.append(describe_error(error))
        finally:
            self._written += 1


def _after_serving(write: Callable[[], None]) -> None:
    time.sleep(SERVE_S)
    write()


def _leave_the_cores() -> None:
    """Let this thread run anywhere: engines bind themselves to cores, on which they spin."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
