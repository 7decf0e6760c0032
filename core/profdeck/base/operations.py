"""Operations are generators that yield awaitables from hooks. The sync and async façades run the same operations.

Operations of device backends never yield, so the first ``next`` completes them. All other operations are finished in
the caller's event loop or, for the sync façade, in a private event loop.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import attrs

from profdeck.base import interrupts
from profdeck.base.blocking import run_without_loop
from profdeck.base.errors import CaptureError

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
Operation: TypeAlias = Generator[Awaitable[Any], Any, T]


@attrs.define(eq=False)
class RunningOperation:
    """An operation that has been started, and its result or error."""

    operation: Operation[Any]
    awaitable: Awaitable[Any] | None = None
    """The awaitable that the operation waits for; None once the operation has ended."""
    result: Any = None
    error: BaseException | None = None

    async def finish(self) -> None:
        """Await each awaitable that the operation yields, until the operation ends."""
        while self.awaitable is not None:
            try:
                value = await self.awaitable
            except BaseException as error:  # noqa: BLE001  # raised inside the operation
                if isinstance(error, GeneratorExit) and not interrupts.is_interruption(error):
                    error = RuntimeError("GeneratorExit")  # throwing GeneratorExit would close the operation
                self._resume(functools.partial(self.operation.throw, error))
            else:
                self._resume(functools.partial(self.operation.send, value))

    def refuse(self, error: Exception) -> None:
        """Raise an error inside the operation each time the operation would wait."""
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
        except BaseException as error:  # noqa: BLE001  # `results` raises it after the other operations have ended
            self.error = error


def begin(operations: Iterable[Operation[Any]]) -> list[RunningOperation]:
    """Start operations and run each of them until it waits or ends."""
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
        BaseException: the first interruption, such as Ctrl-C. Without an interruption, the first error of an operation.
    """
    runs = list(runs)
    errors = [run.error for run in runs if run.error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, Exception)), errors[0])
    return [run.result for run in runs]


async def finish(runs: Iterable[RunningOperation]) -> list[Any]:
    """Finish operations concurrently and return their results.

    Raises:
        BaseException: the first error of an operation. Raised after all operations have ended.
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
        RuntimeError: a hook returned an awaitable that does not complete immediately.
    """
    return run_without_loop(run(operation))


class Blocker:
    """Finishes operations by blocking the calling thread."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._closes = False
        """True if `finish` must close the private event loop before it returns."""
        self._tasks: set[asyncio.Task[Any]] = set()
        """Running tasks. They are stored here because event loops keep only weak references to tasks."""

    def finish(self, runs: list[RunningOperation]) -> list[Any]:
        """Finish operations in a private event loop and return their results.

        If this thread is already running an event loop, any operation that needs to wait fails.

        Raises:
            BaseException: the first error of an operation.
        """
        if all(run.awaitable is None for run in runs):
            return results(runs)
        if running_loop() is None:
            return self._finish_in_private_loop(runs)
        for run in runs:
            run.refuse(
                CaptureError(
                    "This backend must wait, but start, step and stop cannot wait inside a running event loop. "
                    "Use 'await profiler.astart(...)', 'astep' and 'astop', or 'async with'."
                )
            )
        return results(runs)

    def close(self) -> None:
        """Close the private event loop. If the loop is still running, `finish` closes it before returning."""
        runner = self._runner
        if runner is None:
            return
        self._closes = runner.get_loop().is_running()
        if not self._closes:
            self._runner = None
            runner.close()

    def _finish_in_private_loop(self, runs: list[RunningOperation]) -> list[Any]:
        import asyncio

        if self._runner is not None and self._runner.get_loop().is_running():  # in another thread
            with asyncio.Runner() as runner:
                return interrupts.run(runner, finish(runs))
        self._runner = self._runner or asyncio.Runner()
        try:
            return interrupts.run(self._runner, finish(runs))
        finally:
            if self._closes:
                self.close()

    def finish_end(self, at_once: Iterable[Operation[Any]], deferred: Iterable[Operation[Any]]) -> None:
        """Finish operations that end captures. Inside a running event loop, finish them in a task and do not block.

        Args:
            at_once: operations to start immediately.
            deferred: operations to start inside the task. They do not start if the task is cancelled before it runs.

        Raises:
            BaseException: the first error of the operations, unless they are finished in a task.
        """
        loop = running_loop()
        if loop is None:
            self.finish(begin([*at_once, *deferred]))
            return
        if deferred := list(deferred):
            self._start_task(loop, _run_all(deferred))
        runs = begin(at_once)
        if all(run.awaitable is None for run in runs):
            results(runs)
        else:
            self._start_task(loop, finish(runs))

    def _start_task(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _run_all(operations: list[Operation[Any]]) -> None:
    await finish(begin(operations))


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running event loop of this thread, or None."""
    import asyncio

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
