"""Global steps and stages as context managers and decorators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from profdeck.base.compilation import report_compiled_call
from profdeck.base.operations import Operation, begin, finish
from profdeck.base.text import describe_value
from profdeck_traces.base.errors import ConfigError, describe_error

if TYPE_CHECKING:
    from profdeck.lifecycle.role import Role
    from profdeck.lifecycle.role_group import RoleGroup
    from profdeck.records.capture import Capture

F = TypeVar("F", bound=Callable[..., Any])
T_co = TypeVar("T_co", covariant=True)

_Entered = tuple["tuple[Role, AbstractContextManager[object] | None]", ...]
"""Roles that have entered a stage, each with its annotation, or None if the stage is a separate capture."""


class Scope(Generic[T_co]):
    """Reusable context manager for a global step or stage; see `Profiler.capture` and `Profiler.stage`.

    In code that ``torch.compile`` traces, `Profiler.capture` and `Profiler.stage` return ``contextlib.nullcontext()``
    instead, because the compiler supports that context manager around graph breaks.
    """

    __slots__ = ("_entered", "_group", "_nested", "_profiler", "_stage", "_step")

    def __init__(self, profiler: _Steps, group: RoleGroup, step: int | None, stage: str | None) -> None:
        """Args:
        profiler: the profiler that begins and ends the global step.
        group: the profiler's roles, which enter and leave the stage.
        step: the global step; None for a stage.
        stage: the name of the stage; None for a global step.
        """
        self._profiler = profiler
        self._group = group
        self._step = step
        self._stage = stage
        self._nested = 0
        self._entered: tuple[_Entered, ...] = ()

    def __call__(self, function: F) -> F:
        """Wrap a function or coroutine function so that each call runs inside the stage.

        Raises:
            ConfigError: the object is not a function or method, or is a generator function.
            TypeError: the scope is a global step.
        """
        if self._stage is None:
            raise TypeError("A global step is not a decorator. Use 'with profiler.capture(step):' in the loop.")
        create_scope = functools.partial(Scope, self._profiler, self._group, None, self._stage)
        is_compiling = self._profiler._is_compiling  # noqa: SLF001  # internal API
        return _decorate(function, self._stage, create_scope if self._profiler.enabled else None, is_compiling)

    def __enter__(self) -> T_co:
        if self._step is None:
            entered: list[Any] = []
            for roles in self._group.phases(self._group.busy_roles) if self._group.busy else ():
                entered += self._group.finish_start(begin(self._enter_operations(roles)))
            self._push(entered)
            return cast("T_co", None)
        if self._group.busy and self._profiler._has_begun(self._step):  # noqa: SLF001  # internal API
            self._nested += 1
        capture: Any = self._profiler.start(self._step)
        return capture  # type: ignore[no-any-return]

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if self._step is None:
            if operations := self._exit_operations(error):
                self._group.finish_end(operations)
        elif self._nested:
            self._nested -= 1
        elif error is None:
            self._profiler.stop()
        else:
            self._profiler.close(reason_of(error))

    async def __aenter__(self) -> T_co:
        if self._step is None:
            entered: list[Any] = []
            for roles in self._group.phases(self._group.busy_roles) if self._group.busy else ():
                entered += await self._group.afinish_start(begin(self._enter_operations(roles)))
            self._push(entered)
            return cast("T_co", None)
        if self._group.busy and self._profiler._has_begun(self._step):  # noqa: SLF001  # as above
            self._nested += 1
        return cast("T_co", await self._profiler.astart(self._step))

    async def __aexit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if self._step is None:
            if operations := self._exit_operations(error):
                await finish(begin(operations.values()))
        elif self._nested:
            self._nested -= 1
        elif error is None:
            await self._profiler.astop()
        else:
            await self._profiler.aclose(reason_of(error))

    def _enter_operations(self, roles: list[Role]) -> list[Operation[Any]]:
        return [role.enter_stage(cast("str", self._stage)) for role in roles]

    def _push(self, entered: Collection[Any]) -> None:
        for _, annotation in entered:
            if annotation is not None:
                annotation.__enter__()
        self._entered = (*self._entered, tuple(entered))

    def _exit_operations(self, error: BaseException | None) -> dict[Role, Operation[None]]:
        """Exit the annotations of the stage and return the operations that end its captures.

        If no stage was entered, do nothing, because an unmatched exit must not crash the job.
        """
        *outer, entered = self._entered or ((),)
        self._entered = tuple(outer)
        reason = reason_of(error)
        operations: dict[Role, Operation[None]] = {}
        for role, annotation in entered:
            if annotation is None:
                operations[role] = role.stop_capture(reason)
            else:
                annotation.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        return operations


class _Steps(Protocol):
    """Methods of a profiler that a scope calls."""

    @property
    def enabled(self) -> bool: ...
    def _is_compiling(self) -> bool: ...
    def _has_begun(self, step: int) -> bool: ...
    def start(self, global_step: int) -> Capture | None: ...
    def stop(self) -> None: ...
    def close(self, reason: str | None = ...) -> None: ...
    async def astart(self, global_step: int) -> Capture | None: ...
    async def astop(self) -> None: ...
    async def aclose(self, reason: str | None = ...) -> None: ...


class _SyncAsyncContext(AbstractContextManager[object], AbstractAsyncContextManager[object], Protocol):
    """Context manager for ``with`` and ``async with``."""


def _decorate(
    function: F, name: str, create_scope: Callable[[], _SyncAsyncContext] | None, is_compiling: Callable[[], bool]
) -> F:
    """Wrap a function or coroutine function so that each call runs inside a stage.

    Args:
        function: the function.
        name: the name of the stage.
        create_scope: function that creates the scope for one call; None if the profiler is disabled.
        is_compiling: function that returns True while ``torch.compile`` traces the call.

    Raises:
        ConfigError: the object is not a function or method, or is a generator function. Also raised if the profiler is
            disabled.
    """
    if isinstance(function, staticmethod | classmethod):
        wrapped = _decorate(function.__func__, name, create_scope, is_compiling)
        return cast("F", type(function)(wrapped))
    if isinstance(function, type) or not callable(function):
        raise ConfigError(
            f"stage {name!r} cannot decorate {describe_value(function)}; expected a function or method. "
            "Decorate the methods of a class, or use 'with profiler.stage(...)'."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"stage {name!r} cannot decorate the generator {function.__qualname__}: its body runs after the call. "
            "Use 'with profiler.stage(...)' inside the generator."
        )
    if create_scope is None:
        return function
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def arun(*args: Any, **kwargs: Any) -> Any:
            async with create_scope():
                return await function(*args, **kwargs)

        return cast("F", arun)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            report_compiled_call("profiler.stage")
            return function(*args, **kwargs)
        with create_scope():
            return function(*args, **kwargs)

    return cast("F", run)


def reason_of(error: BaseException | None) -> str | None:
    """Return the reason for an early end that an exception caused, or None if there is no exception."""
    if error is None:
        return None
    reason = f"an exception ended it: {describe_error(error)}"
    if isinstance(error, StopIteration | StopAsyncIteration):
        reason += ". If the data loader ran out of batches, call next(loader) before the step begins"
    return reason
