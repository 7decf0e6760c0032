"""Parts of a job as decorators and context managers: global steps and the stages inside of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from profdeck.base.blocking import drive, resolve_later
from profdeck.base.errors import ConfigError
from profdeck.base.identity import NAME

if TYPE_CHECKING:
    from profdeck.lifecycle.controller import Controller
    from profdeck.records.capture import Capture

F = TypeVar("F", bound=Callable[..., Any])


class StepScope:
    """One global step as a context manager; see `Profiler.capture`."""

    __slots__ = ("_controller", "_global_step", "_nested", "_profiler")

    def __init__(self, profiler: _Steps, controller: Controller | None, global_step: int) -> None:
        self._profiler = profiler
        self._controller = controller
        self._global_step = global_step
        self._nested = False

    def __enter__(self) -> Capture | None:
        controller, step = self._controller, self._global_step
        if controller is None:
            return self._profiler.start(step)
        if not controller.enter(step):
            return None
        # Who finds its step already begun did not begin it, and must not end it either.
        self._nested = controller.under_way(step)
        return controller.start_now(step)

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if self._nested:
            return
        if error is None:
            self._profiler.stop()
        else:
            self._profiler.close(cast("str", reason_of(error)))

    async def __aenter__(self) -> Capture | None:
        if self._controller is not None:
            self._nested = self._controller.under_way(self._global_step)
        return await self._profiler.astart(self._global_step)

    async def __aexit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if self._nested:
            return
        if error is None:
            await self._profiler.astop()
        else:
            await self._profiler.aclose(cast("str", reason_of(error)))


class StageScope:
    """A named part of a global step, as a decorator or context manager; see `Profiler.stage`. Can be re-entered."""

    def __init__(self, name: str, controller: Controller | None, resolve_now: Callable[[Any], Awaitable[Any]]) -> None:
        self._name = name
        self._controller = controller
        self._resolve_now = resolve_now
        self._marks: list[AbstractContextManager[object] | None] = []

    def __call__(self, function: F) -> F:
        """Wrap a function or coroutine function, so that every call of it is the stage."""
        new = functools.partial(StageScope, self._name, self._controller, self._resolve_now)
        return decorated(function, self._name, None if self._controller is None else new)

    def __enter__(self) -> Self:
        if self._controller is not None:
            self._push(drive(self._controller.enter_stage(self._name, self._resolve_now)))
        return self

    def __exit__(self, *error: object) -> None:
        if self._controller is not None and self._pop(error):
            drive(self._controller.stop_capture(reason_of(cast("BaseException | None", error[1])), self._resolve_now))

    async def __aenter__(self) -> Self:
        if self._controller is not None:
            self._push(await self._controller.enter_stage(self._name, resolve_later))
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._controller is not None and self._pop(error):
            await self._controller.stop_capture(reason_of(cast("BaseException | None", error[1])), resolve_later)

    def _push(self, mark: AbstractContextManager[object] | None) -> None:
        if mark is not None:
            mark.__enter__()
        self._marks.append(mark)

    def _pop(self, error: tuple[Any, ...]) -> bool:
        """Leave the stage; True if it was a capture of its own, which must now end."""
        mark = self._marks.pop()
        if mark is not None:
            mark.__exit__(*error)
        return mark is None


class _Steps(Protocol):
    """What begins and ends global steps."""

    def start(self, global_step: int) -> Capture | None: ...
    def stop(self) -> None: ...
    def close(self, reason: str = ...) -> None: ...
    async def astart(self, global_step: int) -> Capture | None: ...
    async def astop(self) -> None: ...
    async def aclose(self, reason: str = ...) -> None: ...


class _Both(AbstractContextManager[object], AbstractAsyncContextManager[object], Protocol):
    """A context manager, sync and async."""


def check_stage(name: str) -> None:
    """Check the name of a stage.

    Raises:
        ConfigError: it cannot be used in file names.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"stage {name!r}: expected a letter, then up to 63 letters, digits, '_' or '-', as files are named so."
        )


def decorated(function: F, name: str, new: Callable[[], _Both] | None) -> F:
    """Wrap a function or coroutine function, so that every call of it is a stage.

    Args:
        function: what to wrap.
        name: that of the stage.
        new: makes the stage of one call; None if there is nothing to do.

    Raises:
        ConfigError: it is a generator.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"stage {name!r} cannot decorate the generator {function.__qualname__}: its body runs after the call. "
            "Use 'with profiler.stage(...)' inside of it."
        )
    if new is None:
        return function
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def arun(*args: Any, **kwargs: Any) -> Any:
            async with new():
                return await function(*args, **kwargs)

        return cast("F", arun)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with new():
            return function(*args, **kwargs)

    return cast("F", run)


def reason_of(error: BaseException | None) -> str | None:
    """Say why an exception ends a capture before its time; None without one."""
    return None if error is None else f"an exception ended it: {type(error).__name__}: {error}".rstrip(": ")
