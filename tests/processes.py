"""Processes that tests start."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def free_port() -> int:
    """Return a port at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def until(condition: Callable[[], object], *, every_s: float = 0.01, timeout_s: float = 120) -> None:
    """Wait for what no event tells, such as a file of another process."""
    pause, deadline = threading.Event(), time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"It did not come within {timeout_s:g} seconds."
        pause.wait(every_s)
