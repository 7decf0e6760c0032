"""Processes that tests start."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ending() -> Iterator[list[subprocess.Popen[str]]]:
    """Take processes, with pipes, and end those that still run."""
    started: list[subprocess.Popen[str]] = []
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def until(condition: Callable[[], object]) -> None:
    """Wait for what no event tells, such as a file of another process."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.01)
