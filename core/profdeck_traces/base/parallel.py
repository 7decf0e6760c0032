"""Calls a function for many traces in parallel, using several processes on this host.

Each process reads one item at a time, the largest items first. Results have the same order as the items. If a process
dies, only its current item is lost.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import attrs

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.progress import Progress

T = TypeVar("T")
R = TypeVar("R")

TraceFunction = Callable[[T, Progress | None], R]
"""Function that reads one item. The function may report progress in bytes, from any thread."""

_REPORT_EVERY_S = 0.05


def map_traces(
    function: TraceFunction[T, R],
    items: Sequence[T],
    sizes_bytes: Sequence[int],
    *,
    processes: int = 1,
    on_progress: Progress | None = None,
) -> list[R | TraceError]:
    """Call a function on each item, in up to `processes` worker processes, and return the results in item order.

    With one process or one item, the function is called in this process. Otherwise, it is called in child processes.
    They are killed when this call returns, raises or is interrupted, and when this process exits or is killed.
    Therefore, the function must write only temporary files, or files that the caller removes.

    Args:
        function: Called with an item and a progress callback, or ``None`` if `on_progress` is ``None``. The function
            must be importable in the child processes. Items and results must be picklable.
        items: The items to read, such as paths. Error messages contain the ``str`` of an item.
        sizes_bytes: The size of each item.
        processes: Number of items that are read, and are in memory, at the same time.
        on_progress: Called with the number of bytes read so far, which never decreases, and the total. After the last
            item, the two are equal. It is called from this thread or, with one process, from the threads in which the
            function reports progress.

    Returns:
        For each item, the result or a `TraceError`. The error was raised by the function, or reports the signal that
        killed the worker process.

    Raises:
        Exception: Any other exception of the function, with a note that contains the item. The remaining items are
            cancelled.
    """
    job: TraceJob[T, R] = TraceJob(items, sizes_bytes, on_progress)
    if min(processes, len(items)) > 1:
        _in_processes(function, job, processes)
    else:
        for index, item in enumerate(items):
            progress = partial(_report_to, job, index) if on_progress else None
            job.handle_report(index, TraceResult(_call(function, item, progress)))
    return job.results()


def without_errors(results: Sequence[R | TraceError]) -> list[R]:
    """Return the results of `map_traces` if none of them is an error.

    Raises:
        TraceError: The first error in the results.
    """
    values: list[R] = []
    for result in results:
        if isinstance(result, TraceError):
            raise result
        values.append(result)
    return values


@attrs.frozen
class TraceResult(Generic[R]):
    """Result of reading one item: the function's return value, or the `TraceError` that it raised."""

    value: R | TraceError


ReportResult = int | TraceResult[R] | BaseException
"""A worker's report on one item: the number of bytes read so far, the result, or an exception to raise."""


class TraceJob(Generic[T, R]):
    """Items to read, their results, and the total progress."""

    def __init__(self, items: Sequence[T], sizes_bytes: Sequence[int], on_progress: Progress | None) -> None:
        self.items = items
        # Largest first: if a large item started last, one worker would be busy while the others are idle.
        largest_first = sorted(zip((-size for size in sizes_bytes), range(len(items)), strict=True))
        self.waiting = deque(index for _, index in largest_first)
        self.reporting = on_progress is not None
        self._on_progress = on_progress
        self._sizes_bytes = sizes_bytes
        self._total_bytes = sum(sizes_bytes)
        self._read_bytes = [0] * len(items)
        self._results: dict[int, R | TraceError] = {}

    @property
    def done(self) -> bool:
        """True if every item has a result."""
        return len(self._results) == len(self.items)

    def results(self) -> list[R | TraceError]:
        """Return the results in the order of the items."""
        return [self._results[index] for index in range(len(self.items))]

    def handle_report(self, index: int, report: ReportResult[R]) -> bool:
        """Record progress or the result of an item. Return True if the report is the result.

        Raises:
            BaseException: The report is an exception, which is raised.
        """
        if isinstance(report, BaseException):
            raise report
        if isinstance(report, int):
            self._advance(index, report)
            return False
        self._results[index] = report.value
        self._advance(index, self._sizes_bytes[index])
        return True

    def _advance(self, index: int, read_bytes: int) -> None:
        read_bytes = min(read_bytes, self._sizes_bytes[index])
        if self._on_progress and read_bytes > self._read_bytes[index]:
            self._read_bytes[index] = read_bytes
            self._on_progress(sum(self._read_bytes), self._total_bytes)


def _report_to(job: TraceJob[T, R], index: int, read_bytes: int, _: int) -> None:
    job.handle_report(index, read_bytes)


def _call(function: TraceFunction[T, R], item: T, progress: Progress | None) -> R | TraceError:
    try:
        return function(item, progress)
    except TraceError as error:
        return error.with_traceback(None)  # the frames keep large buffers alive
    except BaseException as error:
        error.add_note(f"The error occurred while reading {item}.")
        raise


def run_item(
    function: TraceFunction[T, R], item: T, send: Callable[[int], None] | None
) -> TraceResult[R] | BaseException:
    """Call a function on one item. Return the result or the exception in a form that can be pickled."""
    try:
        return TraceResult(_call(function, item, _throttled(send) if send else None))
    except BaseException as error:  # noqa: BLE001 - raised in the parent process
        text = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 - pickled in the same line
        except Exception:  # noqa: BLE001 - such as an exception class with other constructor arguments
            return RuntimeError(text)
        error.add_note(f"In the worker:\n{text}")
        return error


def _throttled(send: Callable[[int], None]) -> Progress:
    """Return a progress callback that sends at most one report per `_REPORT_EVERY_S`."""
    due_s = 0.0

    def report(read_bytes: int, _: int) -> None:
        nonlocal due_s
        now_s = time.monotonic()
        if now_s >= due_s:
            due_s = now_s + _REPORT_EVERY_S
            send(read_bytes)

    return report


# --- Worker processes. `concurrent.futures` is not used: if a worker is killed, it loses all pending items and does not
# report the current item of that worker.


class _Worker(Generic[T, R]):
    """A child process that reads one item at a time."""

    def __init__(self, function: TraceFunction[T, R], *, reporting: bool) -> None:
        context: Any = multiprocessing.get_context(_start_method())
        self.connection, child_connection = context.Pipe()
        self._process = context.Process(target=_work, args=(function, child_connection, reporting), daemon=True)
        self._process.start()
        # Only the child keeps this end open, so that `connection` reaches its end when the child exits.
        child_connection.close()
        self.index = -1
        """Index of the current item."""
        self._item: T

    def begin(self, index: int, item: T) -> None:
        self.index, self._item = index, item
        with suppress(OSError):  # if the process has died, `receive` reports it
            self.connection.send(item)

    def receive(self) -> ReportResult[R]:
        """Wait for the next report of the process. If the process has exited, return an error."""
        try:
            report: ReportResult[R] = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
        else:
            return report
        code = self._process.exitcode
        if code >= 0:
            return RuntimeError(f"The worker process exited with code {code} while reading {self._item}.")
        return TraceResult(
            TraceError(
                f"Cannot read {self._item}: the worker process was killed by {signal.Signals(-code).name}. "
                "If the host ran out of memory, read fewer traces at the same time (--processes)."
            )
        )

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.connection.close()


def _in_processes(function: TraceFunction[T, R], job: TraceJob[T, R], processes: int) -> None:
    workers: dict[Connection, _Worker[T, R]] = {}
    try:
        while not job.done:
            while job.waiting and len(workers) < processes:
                with _without_interrupts():
                    worker = _Worker(function, reporting=job.reporting)
                    workers[worker.connection] = worker
                _begin_next(worker, job)
            for connection in wait(list(workers)):
                worker = workers[connection]  # type: ignore[index]  # `wait` returns connections of `workers`
                if job.handle_report(worker.index, worker.receive()):
                    if job.waiting and worker.alive:
                        _begin_next(worker, job)
                    else:
                        workers.pop(worker.connection).end()
    finally:
        for worker in workers.values():
            worker.end()


def _begin_next(worker: _Worker[T, R], job: TraceJob[T, R]) -> None:
    index = job.waiting.popleft()
    worker.begin(index, job.items[index])


def _start_method() -> str:
    # A forked worker inherits the imported modules. A spawned worker imports them in 0.12 s, a fifth of the time for
    # reading a trace. However, a fork copies locks that other threads hold, and nothing releases them in the child.
    # The threads of numpy's OpenBLAS do not count, because OpenBLAS stops them before a fork. On systems other than
    # Linux, system libraries do not support a fork.
    return "fork" if sys.platform == "linux" and threading.active_count() == 1 else "spawn"


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT in this thread, and in processes that it starts, until the ``with`` block ends.

    An interrupt in between could leave a worker without an owner, or print the traceback of a worker.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _work(function: TraceFunction[T, R], connection: Connection, reporting: bool) -> None:  # noqa: FBT001 - a process target
    """Read items until the parent kills this process or exits."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the terminal sends them to all processes; the parent handles them
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    lock = threading.Lock()  # functions may report progress from other threads

    def send(report: ReportResult[R]) -> None:
        with lock:
            connection.send(report)

    while True:
        item = connection.recv()
        send(run_item(function, item, send if reporting else None))


def _exit_with_parent() -> None:
    # `join` waits until the parent closes its end of a pipe. Siblings that were forked later inherit that end, so the
    # workers exit in reverse start order.
    multiprocessing.parent_process().join()  # type: ignore[union-attr]  # None in a process without a parent
    os._exit(1)
