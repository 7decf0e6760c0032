"""Writes the files of captures one after the other, in a background thread."""

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
"""Pause between the stop of a recording and the writing of its file, in seconds. Torch holds the GIL during both
operations. The pause lets the engine process requests in between.
"""


class FileWriter:
    """Queue of stopped recordings whose files are written by one thread. The first recording starts the thread."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="profdeck", initializer=_reset_affinity)
        self._futures: list[Future[None]] = []
        self._written_count = 0

    @property
    def idle(self) -> bool:
        """True if all files are written."""
        # Do not query the futures: their lock would deadlock a signal handler that waits in this thread.
        return self._written_count == len(self._futures)

    def write(self, recording: Recording) -> None:
        """Add a recording to the queue."""
        write = functools.partial(self._write, recording)
        try:
            self._futures.append(self._executor.submit(_write_after_pause, write))
        except RuntimeError:  # no new threads can be started during interpreter shutdown
            write()
            self._written_count -= 1  # `idle` compares with the number of futures

    def close(self) -> None:
        """Stop accepting recordings. The queued recordings are still written."""
        self._executor.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until all files are written."""
        wait(self._futures)

    def _write(self, recording: Recording) -> None:
        try:
            run_without_waiting(recording.write())
        except Exception as error:  # noqa: BLE001  # the future's exception is never retrieved
            logger.warning(
                "The manifest %s cannot be written: %s", recording.capture.manifest_path, describe_error(error)
            )
            recording.capture.problems.append(describe_error(error))
        finally:
            self._written_count += 1


def _write_after_pause(write: Callable[[], None]) -> None:
    time.sleep(SERVE_S)
    write()


def _reset_affinity() -> None:
    """Allow this thread to run on all cores. Engines pin their process to a few cores and busy-wait on them."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
