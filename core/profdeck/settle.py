"""How coroutines of the controller are run: by hand in the sync façade, by the event loop in the async one."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def settle_later(awaitable: Awaitable[T]) -> T:
    """Await: the async façade's way to settle."""
    return await awaitable


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine of the sync façade was suspended")  # a bug of ours
