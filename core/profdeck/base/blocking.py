"""Run blocking calls in threads, and coroutines without an event loop."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

_MAX_THREADS = 16
"""More threads do not increase the throughput of disks and network file systems."""
_CHECK_S = 0.01
_FAST_CALLS = 5
"""Minimum number of calls per ``_CHECK_S`` that counts as fast. Fast calls do not wait for a disk, so another thread
would only slow them down."""
_GATHER_S = 0.5
"""Maximum time to gather calls before threads start.

Many targets often reply at the same time. Their replies are read first, because running threads slow down the loop.
"""


async def run_in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking call in a thread.

    Concurrent calls share threads, because starting a thread takes longer than most calls.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    batch = _gathering.get(loop) or _CallBatch(loop)
    batch.calls.append(functools.partial(_run_call, batch.callbacks, future, call, arguments))
    if loop not in _gathering:
        _gathering[loop] = batch
        loop.call_soon(batch.gather, 0)
    return await future


async def run_in_threads(call: Callable[[T], None], items: Collection[T]) -> None:
    """Run a blocking call for each item in threads, and wait until all calls have ended.

    Args:
        call: the function. It must store its own results.
        items: the arguments of the calls.

    Raises:
        Exception: the first error of a call. Other calls may still be running.
    """
    import asyncio

    loop, remaining = asyncio.get_running_loop(), len(items)
    future: asyncio.Future[None] = loop.create_future()
    batch = _CallBatch(loop)

    def complete(error: BaseException | None) -> None:
        nonlocal remaining
        remaining -= 1
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        elif not remaining:
            future.set_result(None)

    def run_item(item: T) -> None:
        raised = None
        try:
            call(item)
        except BaseException as error:  # noqa: BLE001  # raised in the awaiting coroutine
            raised = error
        batch.callbacks.append(functools.partial(complete, raised))

    if remaining:
        batch.calls.extend(functools.partial(run_item, item) for item in items)
        batch.run()
        await future


class _CallBatch:
    """Calls that share threads. A batch starts with one thread and adds threads while its calls are slow."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.calls = deque[Callable[[], None]]()
        """Calls that have not started."""
        self.callbacks = deque[Callable[[], None]]()
        """Functions that the event loop runs for completed calls."""
        self._loop = loop
        self._created_s = loop.time()
        self._threads = 0
        self._delivered = 0
        """Number of callbacks that have run."""
        self._completed = 0
        """Number of completed calls at the last check."""

    def gather(self, previous_count: int) -> None:
        """Wait until an iteration of the event loop adds no more calls, and then run the batch."""
        count = len(self.calls)
        if count > previous_count and self._loop.time() - self._created_s < _GATHER_S:
            self._loop.call_soon(self.gather, count)
        else:
            del _gathering[self._loop]
            self.run()

    def run(self) -> None:
        """Check repeatedly whether calls are slow, and start a thread if they are, until all calls have completed."""
        previous, self._completed = self._completed, self._delivered + len(self.callbacks)
        if self._completed - previous < _FAST_CALLS:
            self._run_callbacks()
            if self.calls and self._threads < _MAX_THREADS:
                self._threads += 1
                try:
                    self._loop.run_in_executor(None, self._work)
                except RuntimeError:  # at interpreter shutdown, no threads can start
                    self._work()
        if self.calls or self.callbacks:
            self._loop.call_later(_CHECK_S, self.run)

    def _work(self) -> None:
        try:
            _run_all(self.calls)
        finally:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._run_callbacks)

    def _run_callbacks(self) -> None:
        self._delivered += _run_all(self.callbacks)


_gathering: WeakKeyDictionary[asyncio.AbstractEventLoop, _CallBatch] = WeakKeyDictionary()
"""The batch that each event loop is gathering."""


def _run_call(
    callbacks: deque[Callable[[], None]], future: asyncio.Future[T], call: Callable[..., T], arguments: tuple[Any, ...]
) -> None:
    try:
        result = call(*arguments)
    except BaseException as error:  # noqa: BLE001  # raised in the awaiting coroutine
        callbacks.append(functools.partial(_resolve, future, future.set_exception, error))
    else:
        callbacks.append(functools.partial(_resolve, future, future.set_result, result))


def _resolve(future: asyncio.Future[T], resolve: Callable[[Any], None], outcome: object) -> None:
    if not future.done():  # the awaiting coroutine may have been cancelled
        resolve(outcome)


def _run_all(calls: deque[Callable[[], None]]) -> int:
    """Run all calls and return their number. Several threads can run the same calls concurrently."""
    count = 0
    while True:
        try:
            call = calls.popleft()
        except IndexError:
            return count
        call()
        count += 1


async def wait_for(event: asyncio.Event, limit_s: float) -> None:
    """Wait until an event is set, for at most ``limit_s`` seconds."""
    import asyncio

    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()


def run_without_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, without an event loop.

    Raises:
        RuntimeError: the coroutine suspended.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("the coroutine suspended, but it runs without an event loop")
