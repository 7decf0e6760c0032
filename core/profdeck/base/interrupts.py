"""Handling of Ctrl-C and SIGTERM while the sync façade or a CLI command runs an event loop."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

_MAX_CANCELLATIONS = 2
"""Number of interrupts that cancel the coroutine.

The next interrupt raises KeyboardInterrupt, because the loop may be blocked in a call that ignores cancellation.
"""
_DEFAULT_HANDLERS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


class StopSignal:
    """Delivers the first interrupt to a coroutine that waits for it. Every other interrupt cancels the coroutine."""

    def __init__(self) -> None:
        self._awaited: asyncio.Event | None = None
        self._received = False

    async def wait(self) -> None:
        """Wait for the first interrupt."""
        import asyncio

        self._awaited = asyncio.Event()
        try:
            await self._awaited.wait()
        finally:
            self._awaited = None

    def receive(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Handle an interrupt. Return False if the coroutine must be cancelled."""
        if self._received or self._awaited is None:
            return False
        self._received = True
        loop.call_soon_threadsafe(self._awaited.set)
        return True


def run(runner: asyncio.Runner, work: Coroutine[Any, Any, T], stop: StopSignal | None = None) -> T:
    """Run a coroutine like `asyncio.Runner.run`, except that the first and the second Ctrl-C both cancel it.

    A user can press Ctrl-C again to cancel a slow cleanup. At the second Ctrl-C, asyncio's own handler would raise
    KeyboardInterrupt immediately, anywhere in the loop, and could lose a callback that other code waits for.

    If the host has installed its own signal handler, or if this is not the main thread, no handler is changed.

    Args:
        runner: the runner that runs the coroutine.
        work: the coroutine.
        stop: receives the first interrupt if the coroutine waits for it. If given, SIGTERM is handled like Ctrl-C.

    Raises:
        KeyboardInterrupt: an interrupt cancelled the coroutine. Raised after the coroutine has ended.
    """
    interrupts = _InterruptHandler(runner.get_loop(), stop)
    with interrupts.install():
        try:
            result = runner.run(interrupts.run_cancellable(work))
        except BaseException as error:
            if interrupts.count and not isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise
    if interrupts.count:
        raise KeyboardInterrupt
    return result


def is_interruption(error: BaseException) -> bool:
    """Return whether an exception is meant to interrupt the host rather than being a bug in the code that raised it.

    Interruptions are Ctrl-C, exceptions raised by signal handlers, and the cancellation of the current task. The type
    alone is not sufficient, because plugins can raise the same types, such as ``SystemExit``. ``GeneratorExit`` is an
    interruption only outside of asyncio tasks.
    """
    import asyncio

    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop is running in this thread
            task = None
        if isinstance(error, GeneratorExit):
            return task is None
        return task is not None and task.cancelling() > 0
    return type(error) is KeyboardInterrupt or _is_raised_by_signal_handler(error)


def _is_raised_by_signal_handler(error: BaseException) -> bool:
    """Return whether the traceback contains a signal handler. Only signal handlers receive the interrupted frame."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if any(item is frame.f_back for item in (value if type(value) is tuple else (value,)) if item is not None):
                return True
    return False


def cancels_coroutine(handler: object) -> bool:
    """Return whether `run` installed a handler. Such a handler cancels the coroutine, which then ends its captures."""
    return isinstance(getattr(handler, "__self__", None), _InterruptHandler)


class _InterruptHandler:
    """Counts the interrupts that arrive while an event loop runs, and cancels its coroutine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stop: StopSignal | None) -> None:
        self.count = 0
        self._loop = loop
        self._stop = stop
        self._task: asyncio.Task[Any] | None = None

    @contextmanager
    def install(self) -> Iterator[None]:
        """Replace default signal handlers inside the block. Handlers that the host installed are kept."""
        handler = self._handle  # each attribute access creates a new object, and `is` is used below
        numbers = [signal.SIGINT] if self._stop is None else [signal.SIGINT, signal.SIGTERM]
        if threading.current_thread() is not threading.main_thread():
            numbers = []
        replaced = [number for number in numbers if signal.getsignal(number) is _DEFAULT_HANDLERS[number]]
        for number in replaced:
            signal.signal(number, handler)
        try:
            yield
        finally:
            for number in replaced:
                if signal.getsignal(number) is handler:
                    signal.signal(number, _DEFAULT_HANDLERS[number])

    async def run_cancellable(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that interrupts cancel."""
        import asyncio

        self._task = asyncio.current_task()
        if self.count:
            self._cancel()
        return await work

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._stop is not None and self._stop.receive(self._loop):
            return
        self.count += 1
        if self.count > _MAX_CANCELLATIONS:
            raise KeyboardInterrupt
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
