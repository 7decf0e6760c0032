"""Runs an operation on many targets concurrently, with a time limit."""

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

    async def run(target: T) -> R:
        return await operation(target)

    tasks = [loop.create_task(run(target)) for target in targets]
    expired: set[asyncio.Task[R]] = set()

    def expire() -> None:
        for task in tasks:
            if not task.done():
                expired.add(task)
                task.cancel()

    timer = loop.call_later(limit_s, expire)  # one timer is enough, because all operations start at the same time
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        timer.cancel()
    for index, result in enumerate(results):
        if isinstance(result, asyncio.CancelledError) and tasks[index] in expired:
            results[index] = TimeoutError(f"The operation did not finish within {limit_s:g} seconds.")
    return results
