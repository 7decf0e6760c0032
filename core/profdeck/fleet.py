"""The targets of several roles, started and stopped together beside the trainer's own profiler."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from profdeck.base import ctrl_c
from profdeck.base.blocking import resolve_later
from profdeck.base.errors import describe
from profdeck.config.sources import load
from profdeck.lifecycle.scopes import StageScope, check_stage, decorated
from profdeck.profiler import Profiler

if TYPE_CHECKING:
    from profdeck.backends.api import TargetState
    from profdeck.records.capture import Capture

F = TypeVar("F", bound=Callable[..., Any])

_CLOSED = "the fleet was closed in mid-capture"


class Fleet:
    """Captures the engines of several roles, such as rollouts and reward models, at the global steps of the config.

    It has a `Profiler` per role, and does to all of them at once what one does alone. Captures have the ids of the
    global steps, so those of the trainer's own profiler are the same and in the same run. Build it in the process
    that drives the job; of several ranks that do, rank 0 asks what the config finds.
    """

    def __init__(self, profilers: Mapping[str, Profiler]) -> None:
        """Use `from_config`."""
        self.profilers = dict(profilers)
        """By role; for what only one of them is to do."""
        # Those that can record; asked before anything else, as idle steps must cost nothing.
        self._controllers = {
            profiler: profiler._controller  # noqa: SLF001  # they are one
            for profiler in self.profilers.values()
            if profiler._controller is not None  # noqa: SLF001  # as above
        }
        self._runner: asyncio.Runner | None = None

    @classmethod
    def from_config(
        cls,
        config: str | os.PathLike[str] | None = None,
        *,
        targets: Mapping[str, Sequence[object]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Self:
        """Build the fleet of all roles that have targets; what can be wrong is found here, before training.

        Args:
            config: as in `Profiler.from_config`.
            targets: for each role whose config names no targets, a list of URLs, engine objects, handles of actors
                that hold an engine, or placement groups. A single target is also passed as a list.
            settings: config values by dotted key.

        Raises:
            ConfigError: the config, an option or a target is wrong.
            PluginError: a backend cannot be used.
        """
        given = dict(targets or {})
        found = [name for name, role in load(config, settings=settings).config.roles.items() if role.targets]
        handles = {role: list(given[role]) if role in given else None for role in dict.fromkeys([*found, *given])}
        return cls(
            {
                role: Profiler.from_config(config, role=role, settings=settings, target=target)
                for role, target in handles.items()
            }
        )

    @property
    def enabled(self) -> bool:
        """Whether it can record anything at all."""
        return any(profiler.enabled for profiler in self.profilers.values())

    @property
    def active(self) -> dict[str, Capture]:
        """The captures that are running, by role."""
        found = {role: profiler.active for role, profiler in self.profilers.items()}
        return {role: capture for role, capture in found.items() if capture is not None}

    @property
    def states(self) -> dict[str, TargetState]:
        """How far each target said that it was when it was last asked, by its name. Asks nothing."""
        return {name: state for profiler in self.profilers.values() for name, state in profiler.states.items()}

    # The sync façade.

    def start(self, global_step: int) -> dict[str, Capture]:
        """Begin a global step: start captures, go on with them, or do nothing, as the config says.

        Returns:
            The running captures, by role.
        """
        if self._due(global_step):
            self._run(self.astart, Profiler.start, global_step)
        return self.active

    def step(self, index: int) -> None:
        """Report that a global step has ended, inside of captures of several."""
        for profiler in self.profilers.values():
            profiler.step(index)

    def stop(self) -> None:
        """End the global step: end the captures, unless the next step belongs to them too. Harmless when idle."""
        if self._at_work():
            self._run(self.astop, Profiler.stop)

    def close(self, reason: str = _CLOSED) -> None:
        """End all captures now, marking them partial. Harmless when idle; the fleet can be used again."""
        try:
            self._run(self.aclose, Profiler.close, reason)
        finally:
            if self._runner is not None:
                self._runner.close()
                self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        self.close(_reason(error))

    # The async façade.

    async def astart(self, global_step: int) -> dict[str, Capture]:
        """Do what `start` does, without blocking the event loop."""
        try:
            await _all([profiler.astart(global_step) for profiler in self._due(global_step)])
        except BaseException as error:
            await self._take_back(error)
            raise
        return self.active

    async def astep(self, index: int) -> None:
        """Do what `step` does, without blocking the event loop."""
        await _all([profiler.astep(index) for profiler in self.profilers.values()])

    async def astop(self) -> None:
        """Do what `stop` does, without blocking the event loop."""
        await _all([profiler.astop() for profiler in self.profilers.values()])

    async def await_window(self, timeout_s: float, on_state: Callable[[str, TargetState], None] | None = None) -> bool:
        """Wait until all targets have recorded the windows of the running captures; `astop` is then due.

        Args:
            timeout_s: how long to wait at most, in seconds.
            on_state: told, by role, how far they are, once or twice a second.

        Returns:
            Whether they have. False when the time is over, and when nothing is running.

        Raises:
            CaptureError: no target of a role can be reached.
        """

        def telling(role: str) -> Callable[[TargetState], None] | None:
            return None if on_state is None else lambda state: on_state(role, state)

        waiting = [self.profilers[role].await_window(timeout_s, telling(role)) for role in self.active]
        return bool(waiting) and all(await _all(waiting))

    async def aclose(self, reason: str = _CLOSED) -> None:
        """Do what `close` does, without blocking the event loop."""
        await _all([profiler.aclose(reason) for profiler in self.profilers.values()])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        await self.aclose(_reason(error))

    def capture(self, global_step: int) -> FleetScope:
        """Return a context manager, sync and async, around one global step: start at entry, stop at exit.

        An exception inside ends the captures, whose traces are kept and marked partial, and goes on to the caller.
        """
        return FleetScope(self, global_step)

    def stage(self, name: str) -> FleetStage:
        """Return a decorator and context manager, sync and async, that names a part of the global step.

        In discrete mode it is a capture of its own, of the engines of all roles. In continuous mode it does nothing, as
        engines have no place for the mark.

        Raises:
            ConfigError: the name cannot be used in file names.
        """
        check_stage(name)
        return FleetStage(self, name)

    def _due(self, global_step: int) -> list[Profiler]:
        return [profiler for profiler, controller in self._controllers.items() if controller.enter(global_step)]

    def _at_work(self) -> list[Profiler]:
        return [profiler for profiler, controller in self._controllers.items() if not controller.at_rest]

    async def _take_back(self, error: BaseException) -> None:
        """End what others have begun: who gets an exception and no capture does not stop them."""
        interrupted = isinstance(error, asyncio.CancelledError)
        reason = "interrupted" if interrupted else f"the start of another role failed: {describe(error)}"
        await asyncio.shield(self.aclose(reason))

    def _run(self, together: Callable[..., Awaitable[Any]], one: Callable[..., Any], *arguments: Any) -> None:
        """Do something to all roles at once; where an event loop runs, to one after the other, as a profiler can."""
        if not self._block(functools.partial(together, *arguments)):
            for profiler in self.profilers.values():
                one(profiler, *arguments)

    def _block(self, work: Callable[[], Awaitable[Any]]) -> bool:
        """Bring work to its end by blocking; False, and nothing is done, where an event loop runs."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._runner = self._runner or asyncio.Runner()
            ctrl_c.run(self._runner, resolve_later(work()))
            return True
        return False


class FleetScope:
    """One global step as a context manager; see `Fleet.capture`."""

    def __init__(self, fleet: Fleet, global_step: int) -> None:
        self._fleet = fleet
        self._global_step = global_step

    def __enter__(self) -> dict[str, Capture]:
        return self._fleet.start(self._global_step)

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is None:
            self._fleet.stop()
        else:
            self._fleet.close(_reason(error))

    async def __aenter__(self) -> dict[str, Capture]:
        return await self._fleet.astart(self._global_step)

    async def __aexit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is None:
            await self._fleet.astop()
        else:
            await self._fleet.aclose(_reason(error))


class FleetStage:
    """A named part of a global step, as a decorator or context manager; see `Fleet.stage`. Can be re-entered."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet = fleet
        self._at_work, self._block, self._take_back = fleet._at_work, fleet._block, fleet._take_back  # noqa: SLF001  # they are one
        self._name = name
        self._entered: list[list[StageScope]] = []

    def __call__(self, function: F) -> F:
        """Wrap a function or coroutine function, so that every call of it is the stage."""
        new = functools.partial(FleetStage, self._fleet, self._name)
        return decorated(function, self._name, new if self._fleet.enabled else None)

    def __enter__(self) -> Self:
        stages = self._new()
        if stages and not self._block(functools.partial(self._enter, stages)):
            for stage in stages:
                stage.__enter__()
        self._entered.append(stages)
        return self

    def __exit__(self, *error: object) -> None:
        stages = self._entered.pop()
        if stages and not self._block(functools.partial(self._exit, stages, error)):
            for stage in stages:
                stage.__exit__(*error)

    async def __aenter__(self) -> Self:
        stages = self._new()
        await self._enter(stages)
        self._entered.append(stages)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._exit(self._entered.pop(), error)

    def _new(self) -> list[StageScope]:
        return [profiler.stage(self._name) for profiler in self._at_work()]

    async def _enter(self, stages: Sequence[StageScope]) -> None:
        try:
            await _all([stage.__aenter__() for stage in stages])
        except BaseException as error:
            await self._take_back(error)
            raise

    @staticmethod
    async def _exit(stages: Sequence[StageScope], error: Sequence[object]) -> None:
        await _all([stage.__aexit__(*error) for stage in stages])


async def _all(operations: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await all of them, and raise what the first one raised when all are done."""
    results = await asyncio.gather(*operations, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _reason(error: BaseException | None) -> str:
    return _CLOSED if error is None else f"an exception ended it: {describe(error)}"
