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

_MOST_THREADS = 16
"""Disks and network file systems do so much at once; more threads cost more than they gain."""
_LOOK_S = 0.01
_QUICK = 5
"""As long as so many calls are made in that time they wait for no disk, and another thread would be in the way."""
_GATHER_S = 0.5
"""How long calls wait for others that come in the next turn of the loop: what many targets answer at once is read
first, as threads that run meanwhile take more from the loop than they gain."""


async def run_in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking call in a thread.

    Concurrent calls share threads, because starting a thread takes longer than most calls.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    called: asyncio.Future[T] = loop.create_future()
    calls = _gathered.get(loop) or _Calls(loop)
    calls.left.append(functools.partial(_make, calls.done, called, call, arguments))
    if loop not in _gathered:
        _gathered[loop] = calls
        loop.call_soon(calls.gather, 0)
    return await called


async def run_in_threads(call: Callable[[T], None], items: Collection[T]) -> None:
    """Call what blocks for each item, while the event loop goes on; returns when all has been done.

    Args:
        call: what to do; it keeps what comes out.
        items: what to do it to.

    Raises:
        Exception: what one of the calls raised; others may still be made.
    """
    import asyncio

    loop, count = asyncio.get_running_loop(), len(items)
    everything: asyncio.Future[None] = loop.create_future()
    calls = _Calls(loop)

    def made(error: BaseException | None) -> None:
        nonlocal count
        count -= 1
        if everything.done():
            return
        if error is not None:
            everything.set_exception(error)
        elif not count:
            everything.set_result(None)

    def make(item: T) -> None:
        problem = None
        try:
            call(item)
        except BaseException as error:  # noqa: BLE001  # the waiting call gets it
            problem = error
        calls.done.append(functools.partial(made, problem))

    if count:
        calls.left.extend(functools.partial(make, item) for item in items)
        calls.begin()
        await everything


class _Calls:
    """Calls that threads make together: one at first, and more if it does not get on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.left = deque[Callable[[], None]]()
        self.done = deque[Callable[[], None]]()
        """What the loop is to do for those that have been made."""
        self._loop = loop
        self._since_s = loop.time()
        self._threads = 0
        self._told = 0
        self._made = 0
        """How many of them had been made when they were last looked at."""

    def gather(self, before: int) -> None:
        """Begin when a turn of the loop brings no more than there were before."""
        count = len(self.left)
        if count > before and self._loop.time() - self._since_s < _GATHER_S:
            self._loop.call_soon(self.gather, count)
        else:
            del _gathered[self._loop]
            self.begin()

    def begin(self) -> None:
        """Begin, and look again and again whether that gets on."""
        before, self._made = self._made, self._told + len(self.done)
        if self._made - before < _QUICK:
            self._tell()
            if self.left and self._threads < _MOST_THREADS:
                self._threads += 1
                try:
                    self._loop.run_in_executor(None, self._work)
                except RuntimeError:  # the interpreter is ending, and starts no threads any more
                    self._work()
        if self.left or self.done:
            self._loop.call_later(_LOOK_S, self.begin)

    def _work(self) -> None:
        try:
            _empty(self.left)
        finally:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._told += _empty(self.done)


_gathered: WeakKeyDictionary[asyncio.AbstractEventLoop, _Calls] = WeakKeyDictionary()
"""By event loop, the calls that are being gathered."""


def _make(
    done: deque[Callable[[], None]], called: asyncio.Future[T], call: Callable[..., T], arguments: tuple[Any, ...]
) -> None:
    try:
        result = call(*arguments)
    except BaseException as error:  # noqa: BLE001  # the waiting call gets it
        done.append(functools.partial(_give, called, called.set_exception, error))
    else:
        done.append(functools.partial(_give, called, called.set_result, result))


def _give(called: asyncio.Future[T], give: Callable[[Any], None], result: object) -> None:
    if not called.done():  # somebody still waits
        give(result)


def _empty(calls: deque[Callable[[], None]]) -> int:
    """Make all calls, while others may do the same; returns how many it has made."""
    count = 0
    while True:
        try:
            make = calls.popleft()
        except IndexError:
            return count
        make()
        count += 1


async def wait_for(event: asyncio.Event, limit_s: float) -> None:
    """Wait for an event, or until the time is over."""
    import asyncio

    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()


def run_without_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("the coroutine suspended, but it runs without an event loop")
