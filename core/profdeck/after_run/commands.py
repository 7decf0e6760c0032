"""Runs the commands and listeners of a finish, each with a deadline."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from profdeck.after_run.record import (
    CommandResult,
)
from profdeck.backends.plugin_manager import plugin_manager
from profdeck.backends.plugins import load_listener
from profdeck_traces.base.errors import describe_error

OUTPUT_BYTES = 16 << 10
"""How much of the output of a command or a listener is kept: its end."""
_TERM_GRACE_S = 5.0
_DRAIN_S = 1.0


# What is run.


def run_part(
    name: str, arguments: Sequence[str], given: Path, environment: Mapping[str, str], timeout_s: float
) -> CommandResult:
    """Run one thing to its end, or to its deadline, in a process group of its own.

    Args:
        name: what to call it.
        arguments: its command line.
        given: the file that is its input.
        environment: its environment.
        timeout_s: after so many seconds its group is ended.

    Raises:
        BaseException: what a signal's handler raised meanwhile, after the group has been ended.
    """
    started_ns, began_s = time.time_ns(), time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    exit_code: int | None = None
    problem: str | None = None
    tail = _Tail()
    try:
        with termination.held(), given.open("rb") as stdin:
            process = subprocess.Popen(
                arguments,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            tail.follow(process.stdout)
        exit_code = process.wait(timeout_s)
        problem = _how_it_ended(exit_code)
    except (OSError, ValueError) as error:
        problem = f"cannot be started: {describe_error(error)}"
    except BaseException as error:
        assert process is not None  # noqa: S101  # a signal is held back until then
        exit_code = _end_group(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        problem = f"had not ended after timeout_s={timeout_s:g} seconds, and was ended"
    return CommandResult(
        name=name,
        started_ns=started_ns,
        duration_s=round(time.monotonic() - began_s, 3),
        exit_code=exit_code,
        output=tail.text(),
        problem=problem,
    )


def _how_it_ended(exit_code: int) -> str | None:
    """Say it of what ended by itself; None if it ended well."""
    if exit_code >= 0:
        return f"ended with exit status {exit_code}" if exit_code else None
    names = {int(number): number.name for number in signal.Signals}
    return f"was ended by {names.get(-exit_code, f'signal {-exit_code}')}"


class _Tail:
    """Reads output to its end, so that nobody is blocked, and keeps the last of it."""

    def __init__(self) -> None:
        self._kept = b""
        self._thread: threading.Thread | None = None

    def follow(self, stream: IO[bytes] | None) -> None:
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def text(self) -> str:
        if self._thread is not None:
            self._thread.join(_DRAIN_S)  # what was left in the background may hold the pipe
        return self._kept[-OUTPUT_BYTES:].decode(errors="replace")

    def _read(self, stream: IO[bytes] | None) -> None:
        assert stream is not None  # noqa: S101  # it is a pipe
        with stream:
            while data := os.read(stream.fileno(), 1 << 16):
                self._kept = (self._kept + data)[-OUTPUT_BYTES:]


def _end_group(process: subprocess.Popen[bytes]) -> int | None:
    """End a process with all that it started in its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_GRACE_S)
    return process.poll()


def notify_listener(name: str, options: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Call ``capture_finished`` of one listener.

    Raises:
        PluginError: the listener cannot be loaded.
        Exception: from the listener.
    """
    manager = plugin_manager()
    manager.add_object(name, load_listener(name, options))
    for result in manager.hook.capture_finished(manifest=manifest, plugin_name=name):
        if inspect.isawaitable(result):
            import asyncio

            asyncio.run(_await(result))


async def _await(result: Awaitable[object]) -> None:
    await result


class _Termination:
    """Turns a SIGTERM into SystemExit, so that what runs is ended and the record says so."""

    def __init__(self) -> None:
        self._held = False
        self._came = False

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise it as long as the block runs."""
        signal.signal(signal.SIGTERM, self._end)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raise it at the end of the block: so nothing is started that nobody ends."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._came:
            raise SystemExit(128 + signal.SIGTERM)

    def _end(self, number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the tidying up
        self._came = True
        if not self._held:
            raise SystemExit(128 + number)


termination = _Termination()
