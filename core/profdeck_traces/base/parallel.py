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
    """Call a function on each item, on so many items at the same time; return the results in the order of the items.

    With one process, or one item, all of it happens in this process. More are children of it: none outlives this call,
    whether that returns, raises or is interrupted, nor this process, even if that is killed. They are killed without
    further notice, so that what they write must have no name yet or lie where the caller tidies up.

    Args:
        function: Called with an item and a progress callback, which is None if there is none here. It has to be
            importable where it runs, and items and results have to be picklable.
        items: What to read, such as paths; errors name an item by its ``str``.
        sizes_bytes: How large each item is.
        processes: How many items are read, and are in memory, at the same time.
        on_progress: Called with the bytes read and the sum of the sizes: never with less than before, and with all of
            them in the end. Called from this thread or, with one process, from those that the function reports from.

    Returns:
        For each item the result, or the TraceError that the function raised or that says what killed its worker.

    Raises:
        Exception: Whatever else the function raised, with a note that names the item; the other items are given up.
    """
    job: TraceJob[T, R] = TraceJob(items, sizes_bytes, on_progress)
    if min(processes, len(items)) > 1:
        _in_processes(function, job, processes)
    else:
        for index, item in enumerate(items):
            progress = partial(_report_to, job, index) if on_progress else None
            job.take(index, TraceResult(_call(function, item, progress)))
    return job.results()


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
        # Largest first: a large item that begins last keeps one worker busy while the others have nothing to do.
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
        """Whether every item has a result."""
        return len(self._results) == len(self.items)

    def results(self) -> list[R | TraceError]:
        """Return the results in the order of the items."""
        return [self._results[index] for index in range(len(self.items))]

    def take(self, index: int, report: ReportResult[R]) -> bool:
        """Take what is said of an item; return whether that was the last word on it, or raise it."""
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
    job.take(index, read_bytes)


def _call(function: TraceFunction[T, R], item: T, progress: Progress | None) -> R | TraceError:
    try:
        return function(item, progress)
    except TraceError as error:
        return error.with_traceback(None)  # its frames hold what had been read
    except BaseException as error:
        error.add_note(f"This happened in {item}.")
        raise


def run_item(
    function: TraceFunction[T, R], item: T, send: Callable[[int], None] | None
) -> TraceResult[R] | BaseException:
    """Call a function on one item. Return the result or the exception in a form that can be pickled."""
    try:
        return TraceResult(_call(function, item, _seldom(send) if send else None))
    except BaseException as error:  # noqa: BLE001 - it is raised where the results are collected
        text = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
        except Exception:  # noqa: BLE001 - a class whose arguments are not those of its constructor, or worse
            return RuntimeError(text)
        error.add_note(f"In the worker:\n{text}")
        return error


def _seldom(send: Callable[[int], None]) -> Progress:
    """Make a progress callback that sends some of what it is told."""
    due_s = 0.0

    def report(read_bytes: int, _: int) -> None:
        nonlocal due_s
        now_s = time.monotonic()
        if now_s >= due_s:
            due_s = now_s + _REPORT_EVERY_S
            send(read_bytes)

    return report


# --- Processes of this machine. `concurrent.futures` would lose all pending items with one killed worker, and does not
# say which item that had.


class _Worker(Generic[T, R]):
    """A child process that works on one item at a time."""

    def __init__(self, function: TraceFunction[T, R], *, reporting: bool) -> None:
        context: Any = multiprocessing.get_context(_start_method())
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(function, theirs, reporting), daemon=True)
        self._process.start()
        # Now the child alone has that end, and the connection ends with it.
        theirs.close()
        self.index = -1
        """The item that it works on."""
        self._item: T

    def begin(self, index: int, item: T) -> None:
        self.index, self._item = index, item
        with suppress(OSError):  # it has died, as `receive` will find
            self.connection.send(item)

    def receive(self) -> ReportResult[R]:
        """Return the next thing that it says, or what is to be said of its death."""
        try:
            report: ReportResult[R] = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
        else:
            return report
        code = self._process.exitcode
        if code >= 0:
            return RuntimeError(f"The worker process ended with exit code {code} while it read {self._item}.")
        return TraceResult(
            TraceError(
                f"Cannot read {self._item}: the worker process was killed by {signal.Signals(-code).name}. "
                "If the memory ran out, read fewer traces at the same time (--processes)."
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
                worker = workers[connection]  # type: ignore[index]  # the connections that were asked for
                if job.take(worker.index, worker.receive()):
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


def forks() -> bool:
    """Tell whether processes that are started now begin with the memory of this one."""
    return _start_method() == "fork"


def _start_method() -> str:
    # A forked worker starts with what is imported here; a spawned one spends 0.12 s on its own imports, a fifth of the
    # time that a trace takes. But a fork takes over the locks that other threads hold, and nobody to release them.
    # Python's threads count, and not those of numpy's OpenBLAS, which stops them for a fork. Elsewhere than on Linux,
    # system libraries do not survive a fork.
    return "fork" if sys.platform == "linux" and threading.active_count() == 1 else "spawn"


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back, from this thread and from what it starts, until no child can be lost or print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(function: TraceFunction[T, R], connection: Connection, reporting: bool) -> None:  # noqa: FBT001 - a process target
    """Work until the parent kills this process or ends itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all; the parent acts on it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lock = threading.Lock()  # a function reports from a thread of its own

    def send(report: ReportResult[R]) -> None:
        with lock:
            connection.send(report)

    while True:
        item = connection.recv()
        send(run_item(function, item, send if reporting else None))


def _end_with_parent() -> None:
    # Through a pipe that ends with the parent. Later siblings have forked copies of its other end: the last one ends
    # first, and so on.
    multiprocessing.parent_process().join()  # type: ignore[union-attr]  # None in a process without a parent
    os._exit(1)
