"""Writes segments, in several processes if there are several files."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from profdeck.errors import TraceError
from profdeck.traces.merge.segment import Segment, Task, write_segment


@attrs.frozen
class Written:
    """A segment and the file that it is in."""

    segment: Segment
    file: BinaryIO


OnRead = Callable[[int, int], None]
"""Told which task has read how many bytes of its source."""
Write = Callable[[Sequence[Task], OnRead], list[Written]]
"""Writes segments, those in front first, and returns them in this order.

Raises:
    TraceError: A process was killed.
"""


@contextmanager
def workers(count: int, directory: Path) -> Generator[Write, None, None]:
    """Provide what writes segments: so many processes, or, for one, this one.

    The files have no names, so that nothing can be left behind. The processes end with the context, and when this
    process dies.

    Args:
        count: How many.
        directory: Where the files are.
    """
    if count == 1:
        with _unnamed_file(directory) as file:
            yield functools.partial(_write_here, file)
        return
    started: list[_Worker] = []
    try:
        while len(started) < count:
            started.append(_Worker(directory))
        yield functools.partial(_write_there, started)
    finally:
        for worker in started:
            worker.end()


def _write_here(file: BinaryIO, tasks: Sequence[Task], on_read: OnRead) -> list[Written]:
    return [
        Written(write_segment(task, file, functools.partial(on_read, place)), file) for place, task in enumerate(tasks)
    ]


def _write_there(workers: Sequence[_Worker], tasks: Sequence[Task], on_read: OnRead) -> list[Written]:
    found: dict[int, Written] = {}
    waiting = iter(enumerate(tasks))
    busy: dict[Connection, tuple[_Worker, int]] = {}

    def begin(worker: _Worker) -> None:
        for place, task in waiting:
            worker.begin(task)
            busy[worker.connection] = worker, place
            return

    for worker in workers:
        begin(worker)
    while busy:
        for connection in wait(list(busy)):
            worker, place = busy[connection]  # type: ignore[index]  # it waits for no others
            answer = worker.answer()
            if isinstance(answer, int):
                on_read(place, answer)
            else:
                found[place] = Written(answer, worker.file)
                del busy[connection]  # type: ignore[arg-type]
                begin(worker)
    return [found[place] for place in range(len(tasks))]


class _Worker:
    """Another process; what it sends is how far it has read, and segments."""

    def __init__(self, directory: Path) -> None:
        # A copy of a process with threads may wait for ever for a lock that one of them had.
        alone = sys.platform == "linux" and len(list(Path("/proc/self/task").iterdir())) == 1
        context: Any = multiprocessing.get_context("fork" if alone else "spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(self.connection, theirs, directory))
        self._process.start()
        theirs.close()
        self._path: Path | None = None
        try:
            self.file: BinaryIO = os.fdopen(recv_handle(self.connection), "rb", buffering=0)
        except (EOFError, OSError, RuntimeError):
            self.connection.close()
            raise self._died() from None

    def begin(self, task: Task) -> None:
        """Have it write a segment."""
        self._path = task.source.path
        try:
            self.connection.send(task)
        except OSError:
            raise self._died() from None

    def answer(self) -> int | Segment:
        """Return what it sends.

        Raises:
            TraceError: It died.
            Exception: What it raised.
        """
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(answer, Exception):
            raise answer
        found: int | Segment = answer
        return found

    def end(self) -> None:
        """End it, whatever it does."""
        self.connection.close()
        self.file.close()
        self._process.kill()
        self._process.join()
        self._process.close()

    def _died(self) -> TraceError:
        self._process.join()
        return TraceError(
            f"Nothing was merged: the process that read {self._path} ended with exit code {self._process.exitcode}"
            " (negative: it was killed by that signal; -9 is how the kernel ends processes when memory is short)."
        )


def _work(theirs: Connection, connection: Connection, directory: Path) -> None:
    """Run in the other process; ends when nobody listens."""
    theirs.close()  # a copy of it would keep the connection open when the other process dies
    with suppress(EOFError, OSError, KeyboardInterrupt), _unnamed_file(directory) as file:
        send_handle(connection, file.fileno(), os.getppid())
        while True:
            task: Task = connection.recv()
            try:
                answer: Segment | Exception = write_segment(task, file, connection.send)
            except Exception as error:  # noqa: BLE001 - it is raised in the other process
                answer = error
            connection.send(answer)


def _unnamed_file(directory: Path) -> BinaryIO:
    return tempfile.TemporaryFile(dir=directory, buffering=0)
