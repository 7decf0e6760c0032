"""Worker functions of tests. Child processes import this module instead of the tests."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.progress import Progress
from profdeck_traces.reading.integrity import TraceCheck, check_trace


def check(path: Path, on_progress: Progress | None) -> TraceCheck:
    return check_trace(path, on_progress=on_progress)


def obey(order: str, on_progress: Progress | None) -> tuple[str, int]:
    """Execute a command, and return it with the PID."""
    if on_progress:
        on_progress(1, 2)
    command, _, path = order.partition(" ")
    if command in ORDERS:
        ORDERS[command](path)
    return order, os.getpid()


class OddError(Exception):
    """Cannot be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def torn(_: str) -> NoReturn:
    raise TraceError("It is torn.")


def fault(_: str) -> NoReturn:
    raise ValueError("a bug")


def odd_fault(_: str) -> NoReturn:
    raise OddError(1, 2)


def wait(path: str) -> None:
    """Write a file with the PID as suffix, and wait forever."""
    Path(path).with_suffix(f".{os.getpid()}").touch()
    threading.Event().wait()


def wait_once(path: str) -> None:
    """Like `wait`, but return immediately if a process has waited at this path before."""
    if not Path(path).exists():
        Path(path).touch()
        wait(path)


ORDERS: dict[str, Callable[[str], object]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda _: os._exit(3),
    "leave": lambda _: sys.exit("bye"),
    "unreadable": torn,
    "fault": fault,
    "odd-fault": odd_fault,
    "wait": wait,
    "wait_once": wait_once,
    # A reader and a writer wait for each other at a named pipe.
    "meet-as-reader": lambda path: Path(path).open("rb").close(),
    "meet-as-writer": lambda path: Path(path).open("wb").close(),
}
