"""Operations: generators that yield the awaitables of hooks, so that both façades run the same code.

An operation of a device backend never yields: its first resumption is its last. Other operations finish in the event
loop of the caller, or in a private one for the sync façade.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import attrs

from profdeck.base import ctrl_c
from profdeck.base.blocking import run_without_loop
from profdeck.base.errors import CaptureError

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
Operation: TypeAlias = Generator[Awaitable[Any], Any, T]


@attrs.define(eq=False)
class RunningOperation:
    """The progress of one operation."""

    operation: Operation[Any]
    awaitable: Awaitable[Any] | None = None
    """The awaitable that the operation waits for; None once the operation has ended."""
    result: Any = None
    error: BaseException | None = None

    async def finish(self) -> None:
        """Await what the operation yields until it ends."""
        while self.awaitable is not None:
            try:
                value = await self.awaitable
            except BaseException as error:  # noqa: BLE001  # the operation handles it
                self._resume(functools.partial(self.operation.throw, error))
            else:
                self._resume(functools.partial(self.operation.send, value))

    def refuse(self, error: Exception) -> None:
        """Raise an error in the operation wherever it would wait."""
        while self.awaitable is not None:
            if inspect.iscoroutine(self.awaitable):
                self.awaitable.close()
            self._resume(functools.partial(self.operation.throw, error))

    def _resume(self, resume: Callable[[], Awaitable[Any]]) -> None:
        self.awaitable = None
        try:
            self.awaitable = resume()
        except StopIteration as end:
            self.result = end.value
        except BaseException as error:  # noqa: BLE001  # `results` raises it when other operations have ended
            self.error = error


def begin(operations: Iterable[Operation[Any]]) -> list[RunningOperation]:
    """Run operations until each of them waits or has ended."""
    runs = []
    for operation in operations:
        runs.append(run := RunningOperation(operation))
        try:
            run.awaitable = next(operation)
        except StopIteration as end:
            run.result = end.value
        except BaseException as error:  # noqa: BLE001  # as above
            run.error = error
    return runs


def results(runs: Iterable[RunningOperation]) -> list[Any]:
    """Return the results of operations that have ended.

    Raises:
        BaseException: the first error of an operation.
    """
    values = []
    for run in runs:
        if run.error is not None:
            raise run.error
        values.append(run.result)
    return values


async def finish(runs: Iterable[RunningOperation]) -> list[Any]:
    """Finish operations concurrently and return their results.

    Raises:
        BaseException: the first error of an operation, after all operations have ended.
    """
    runs = list(runs)
    waiting = [run.finish() for run in runs if run.awaitable is not None]
    if len(waiting) == 1:
        await waiting[0]
    elif waiting:
        import asyncio

        await asyncio.gather(*waiting)
    return results(runs)


async def run(operation: Operation[T]) -> T:
    """Run one operation and return its result."""
    (result,) = await finish(begin([operation]))
    value: T = result
    return value


def run_without_waiting(operation: Operation[T]) -> T:
    """Run an operation of a device backend, which never waits, and return its result.

    Raises:
        RuntimeError: a hook returned an awaitable that waits.
    """
    return run_without_loop(run(operation))


class Blocker:
    """Finishes operations by blocking the calling thread."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        """Tasks in progress: event loops hold their tasks weakly."""

    def finish(self, runs: list[RunningOperation], *, in_background: bool = False) -> list[Any]:
        """Finish operations in a private event loop and return their results.

        Args:
            runs: the operations.
            in_background: if an event loop is running on this thread, let the operations end there later, and return
                no results. Otherwise they fail in that case.

        Raises:
            BaseException: the first error of an operation.
        """
        if all(run.awaitable is None for run in runs):
            return results(runs)
        loop = running_loop()
        if loop is None:
            import asyncio

            self._runner = self._runner or asyncio.Runner()
            return ctrl_c.run(self._runner, finish(runs))
        if in_background:
            task = loop.create_task(finish(runs))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return []
        for run in runs:
            run.refuse(
                CaptureError(
                    "start, step and stop cannot wait inside a running event loop, and this backend has to: "
                    "call 'await profiler.astart(...)', 'astep' and 'astop', or use 'async with'."
                )
            )
        return results(runs)

    def close(self) -> None:
        """Close the private event loop."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs on this thread, if any."""
    import asyncio

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
