"""Ctrl-C while a sync façade or a command drives an event loop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

_GENTLE = 2
"""How many interrupts only cancel. One more may find the loop in a call that blocks, where nothing else helps."""


def run(runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, as `asyncio.Runner.run` does, where the first Ctrl-C and the second cancel it.

    A second Ctrl-C is for work that takes its time to end: it gives that up. asyncio's own handler then raises at once,
    at any place of its loop; a callback that is lost in this way is one that others wait for without end.

    Where the host has a handler of its own, or this is not the main thread, nothing is changed.

    Raises:
        KeyboardInterrupt: it was interrupted, and has ended.
    """
    presses = _Presses(runner.get_loop())
    with presses.watched():
        try:
            result = runner.run(presses.cancelling(work))
        except BaseException as error:
            if presses.count and not isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise
    if presses.count:
        raise KeyboardInterrupt
    return result


class _Presses:
    """The interrupts that come while a loop runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.count = 0
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take interrupts in the place of Python's own handler, if that is there."""
        ours = threading.current_thread() is threading.main_thread()
        ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        handler = self._press  # one object, by which it is known again
        if ours:
            signal.signal(signal.SIGINT, handler)
        try:
            yield
        finally:
            if ours and signal.getsignal(signal.SIGINT) is handler:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    async def cancelling(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work that interrupts cancel."""
        import asyncio

        self._task = asyncio.current_task()
        if self.count:
            self._cancel()
        return await work

    def _press(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.count > _GENTLE:
            raise KeyboardInterrupt
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
