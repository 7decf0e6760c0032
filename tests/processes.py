"""Helpers for tests that start processes."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    """Return a TCP port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def python_path(*directories: str | Path) -> str:
    """Return a PYTHONPATH with these directories, followed by the inherited PYTHONPATH."""
    return os.pathsep.join(map(str, filter(None, [*directories, os.environ.get("PYTHONPATH")])))


def command_path(directory: Path) -> str:
    """Write the scripts `profdeck` and `torchrun` to a directory. Return a PATH that starts with this directory.

    The environment may lack these scripts, or its scripts may use a Python without profdeck.
    """
    for name, module in (("profdeck", "profdeck"), ("torchrun", "torch.distributed.run")):
        script = directory / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
        script.chmod(0o755)
    return os.pathsep.join([str(directory), str(Path(sys.executable).parent), os.environ["PATH"]])


@contextmanager
def ending() -> Iterator[list[subprocess.Popen[str]]]:
    """Yield a list for the started processes. At the end, kill the processes in it that are still running."""
    started: list[subprocess.Popen[str]] = []
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def until(condition: Callable[[], object], *, every_s: float = 0.01, timeout_s: float = 120) -> None:
    """Poll a condition until it is true, for changes without an event, such as a file of another process."""
    pause, deadline = threading.Event(), time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"The condition was not met within {timeout_s:g} seconds."
        pause.wait(every_s)
