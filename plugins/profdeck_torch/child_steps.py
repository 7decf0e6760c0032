"""Optimizer steps in child processes, which ``profdeck run`` does not record but reports."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from profdeck.plugin import after_import


class ChildSteps:
    """Counts the child processes that have stepped an optimizer, including their descendants.

    Detects processes of `multiprocessing` with any start method, and forked processes.
    """

    def __init__(self) -> None:
        self.processes = 0
        """Number of processes that have stepped an optimizer. Set at the end of `attached`."""
        self._directory: Path | None = None
        """Contains a file for each process that has stepped an optimizer."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Detect the optimizer steps of the processes that start during this context."""
        owner = os.getpid()
        self._directory = Path(tempfile.mkdtemp(prefix="profdeck-"))
        try:
            with _reporting_children(self._directory):
                yield
        finally:
            if os.getpid() == owner:  # a forked process can also reach this line
                self.processes = sum(1 for _ in self._directory.iterdir())
                shutil.rmtree(self._directory, ignore_errors=True)

    def report(self) -> None:
        """Report that this process has stepped an optimizer."""
        if self._directory is not None:
            _report(self._directory)


@contextmanager
def _reporting_children(directory: Path) -> Iterator[None]:
    """Pass the directory to the processes that this process starts."""
    original_start = BaseProcess.start

    @functools.wraps(original_start)
    def start(process: BaseProcess) -> None:
        # An attribute of the instance, because the start method `spawn` sends the instance to the new process.
        process.run = _Run(process, directory)  # type: ignore[method-assign]
        try:
            original_start(process)
        finally:
            vars(process).pop("run", None)

    setattr(BaseProcess, "start", start)  # noqa: B010  # mypy rejects the assignment
    try:
        yield
    finally:
        setattr(BaseProcess, "start", original_start)  # noqa: B010  # as above


class _Run:
    """Replaces ``run`` of a process to report its optimizer steps."""

    def __init__(self, process: BaseProcess, directory: Path) -> None:
        self._process = process
        self._directory = directory
        self._stepped = False

    def __call__(self) -> None:
        vars(self._process).pop("run", None)
        after_import("torch.optim.optimizer", self._add_hook)
        with _reporting_children(self._directory):
            try:
                self._process.run()
            finally:
                if self._stepped:
                    _report(self._directory)

    def _add_hook(self, module: ModuleType) -> None:
        module.register_optimizer_step_post_hook(self._on_optimizer_step)

    def _on_optimizer_step(self, *_: Any) -> None:
        # The compiler traces this function in a compiled optimizer. Such steps are reported at the end of the process.
        if sys.modules["torch.compiler"].is_dynamo_compiling():
            self._stepped = True
        elif not self._stepped:
            self._stepped = True
            _report(self._directory)


def _report(directory: Path) -> None:
    with suppress(OSError):  # the parent has ended
        (directory / str(os.getpid())).touch()
