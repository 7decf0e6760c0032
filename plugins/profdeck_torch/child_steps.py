"""Detection of optimizer steps in child processes, which ``profdeck run`` reports but does not record."""

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
    """Counts the child processes and their descendants that have run an optimizer step.

    Detects processes started with `multiprocessing`, using any start method, and forked processes.
    """

    def __init__(self) -> None:
        self.processes = 0
        """Number of processes that have run an optimizer step. Set when the context manager `attached` exits."""
        self._directory: Path | None = None
        """Directory with one file for each process that has run an optimizer step."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Detect optimizer steps in processes that start while this context manager is active."""
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
        """Report that this process has run an optimizer step."""
        if self._directory is not None:
            _report(self._directory)


@contextmanager
def _reporting_children(directory: Path) -> Iterator[None]:
    """Make the processes that this process starts report their optimizer steps in the directory."""
    original_start = BaseProcess.start

    @functools.wraps(original_start)
    def start(process: BaseProcess) -> None:
        # Stored on the instance because the `spawn` start method pickles the instance for the new process.
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
    """Replacement for a process's ``run`` method that also reports optimizer steps."""

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
        # When the optimizer is compiled, the compiler traces this function, and the step is reported when `run` ends.
        if sys.modules["torch.compiler"].is_dynamo_compiling():
            self._stepped = True
        elif not self._stepped:
            self._stepped = True
            _report(self._directory)


def _report(directory: Path) -> None:
    with suppress(OSError):  # the parent may have deleted the directory
        (directory / str(os.getpid())).touch()
