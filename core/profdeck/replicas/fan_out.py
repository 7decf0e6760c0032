"""Does the same to many targets at once: the whole takes as long as the slowest of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def fan_out(
    operation: Callable[[T], Awaitable[R]], targets: Sequence[T], *, timeout_s: float, each_timeout_s: float
) -> list[R | BaseException]:
    """Run an operation on all targets concurrently and wait for the results.

    An operation that exceeds its time limit is cancelled and then awaited, so that it can clean up. If the caller is
    cancelled, all operations are cancelled and awaited in the same way.

    Args:
        operation: the operation to run for each target.
        targets: the targets.
        timeout_s: time limit for all targets together, in seconds.
        each_timeout_s: time limit for each target, in seconds.

    Returns:
        The result or exception of each target, in the order of the targets. The result of an
        operation that timed out is a `TimeoutError`.
    """
    loop, limit_s = asyncio.get_running_loop(), min(timeout_s, each_timeout_s)

    async def one(target: T) -> R:
        return await operation(target)

    tasks = [loop.create_task(one(target)) for target in targets]
    late: set[asyncio.Task[R]] = set()

    def expire() -> None:
        for task in tasks:
            if not task.done():
                late.add(task)
                task.cancel()

    timer = loop.call_later(limit_s, expire)  # one for all, as all begin now
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        timer.cancel()
    for number, result in enumerate(results):
        if isinstance(result, asyncio.CancelledError) and tasks[number] in late:
            results[number] = TimeoutError(f"It was not done within {limit_s:g} seconds.")
    return results
