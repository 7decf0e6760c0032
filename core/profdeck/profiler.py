"""What a host calls: start, step and stop, as methods, context managers and decorators, sync and async.

Both façades run the same coroutines of the controller. The sync one drives them by hand: with a recorder whose
hooks are plain functions nothing ever suspends, and no event loop is involved.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from profdeck.base import ctrl_c
from profdeck.base.blocking import drive, resolve_later
from profdeck.base.errors import CaptureError
from profdeck.lifecycle.scopes import StageScope, StepScope, check_stage, reason_of
from profdeck.records.capture import Capture, Step, Unit

if TYPE_CHECKING:
    import asyncio

    from profdeck.backends.api import TargetState
    from profdeck.base.identity import Identity
    from profdeck.config.model import Config
    from profdeck.lifecycle.controller import Controller
    from profdeck.lifecycle.session import Session

# What can configure a profiler by itself; `profdeck.config.sources` reads them.
_VARIABLES = ("PROFDECK_CONFIG", "PROFDECK__")


class Profiler:
    """Captures the global steps that the config selects, in this process.

    Call ``start(n)`` when global step ``n`` begins and ``stop()`` when it ends, or wrap the step in
    ``with profiler.capture(n)``. In between, ``step(n)`` marks the end of a global step inside a longer capture,
    and ``step(i, "mini_batch")`` that of a mini-batch. None of them raises because profiling went wrong, unless
    the config says ``on_error: raise``.
    """

    def __init__(self, session: Session | None = None) -> None:
        """Use `from_config`. Without a session the profiler does nothing, at no cost."""
        self._recording = False
        self._runner: asyncio.Runner | None = None
        self._controller: Controller | None = None
        self._ending: asyncio.Task[None] | None = None  # loops hold their tasks weakly
        if session is not None:
            from profdeck.lifecycle.controller import Controller

            self._controller = Controller(session, self._changed, self._resolve_now)

    @classmethod
    def from_config(  # noqa: PLR0913 - all but the first are keywords
        cls,
        config: str | os.PathLike[str] | None = None,
        *,
        role: str = "trainer",
        identity: Identity | None = None,
        settings: Mapping[str, Any] | None = None,
        target: object = None,
        listeners: Iterable[object] = (),
    ) -> Self:
        """Build the profiler of this process; everything that can be wrong is found here, before training.

        Args:
            config: a YAML or TOML file. Without one, the file that ``PROFDECK_CONFIG`` names. Where nothing says
                what to record, ``settings`` and ``PROFDECK__...`` variables included, the profiler does nothing.
            role: what this process does in the job; selects the role in the config.
            identity: rank, world size and parallel coordinates, when neither the launcher's environment nor the
                backend's library knows them. Its role wins over ``role``.
            settings: config values by dotted key, such as ``{"steps": [10], "trainer.ranks": "all"}``.
            target: engine to record instead of this process: an engine object, the handle of an actor that holds
                one, or a server URL. A list of these, or a placement group, is recorded as one capture.
            listeners: objects with hook implementations, in addition to the listeners that the config names.

        Raises:
            ConfigError: the config or an option is wrong.
            PluginError: the backend or a listener cannot be used, or the backend cannot record in this process.
        """
        if config is None and not settings and not any(name.startswith(_VARIABLES) for name in os.environ):
            return cls()  # at no cost to the many jobs that only might be profiled
        from profdeck.config.sources import load

        loaded = load(config, settings=settings).config
        return cls.of(loaded, role=role, identity=identity, target=target, listeners=listeners)

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        role: str,
        identity: Identity | None = None,
        target: object = None,
        listeners: Iterable[object] = (),
    ) -> Self:
        """Build the profiler of this process from a config that is loaded; see `from_config`."""
        from profdeck.lifecycle.session import Session

        return cls(Session.open(config, role=role, identity=identity, target=target, listeners=listeners))

    @staticmethod
    def register(plugin: object, name: str | None = None) -> str:
        """Call the hooks of an object in all captures of this process, with its wrappers around those of other plugins.

        Args:
            plugin: an object or module with hook implementations.
            name: its name in messages, and for `unregister`. Default: the name of its class or module.

        Returns:
            The name.

        Raises:
            PluginError: the object does not follow the hook specifications, or the name is in use.
        """
        from profdeck.backends.plugin_manager import plugin_manager

        return plugin_manager().register_everywhere(plugin, name)

    @staticmethod
    def unregister(name: str) -> None:
        """Stop calling the hooks of an object that was registered with `register`.

        Raises:
            PluginError: no object is registered under the name.
        """
        from profdeck.backends.plugin_manager import plugin_manager

        plugin_manager().unregister_everywhere(name)

    @property
    def enabled(self) -> bool:
        """Whether this process can record anything at all: its role and rank are selected by the config."""
        return self._controller is not None

    @property
    def active(self) -> Capture | None:
        """The capture of the global step that is under way, if any: None between two steps that share a capture."""
        return self._controller.active if self._controller else None

    @property
    def states(self) -> Mapping[str, TargetState]:
        """How far each target of a capture said that it was when it was last asked, by its name. Asks nothing."""
        return self._controller.states if self._controller else {}

    # The sync façade.

    def start(self, global_step: int) -> Capture | None:
        """Begin global step ``global_step``: start a capture, go on with one, or do nothing, as the config says.

        Returns:
            The running capture, or None.
        """
        if self._controller is None or not self._controller.enter(global_step):
            return None
        return self._controller.start_now(global_step)

    def step(self, index: int, unit: Unit | str = Unit.GLOBAL_STEP) -> None:
        """Report that a global step, or a unit inside of it, has ended; does nothing while no capture is running.

        Args:
            index: the global step as the host numbers it, or the mini-batch, counted from 0 in each global step.
            unit: what has ended.
        """
        # A flag and not a swapped method: a host may have taken `step = profiler.step` before its loop.
        if self._recording and self._controller is not None:
            drive(self._controller.step(Step(Unit(unit), index), self._resolve_now))

    def stop(self) -> None:
        """End the global step: end the capture, unless the next step belongs to it too. Harmless when idle.

        Inside a running event loop the capture of an engine ends a little later; `astop` waits for that.
        """
        if self._controller is None or self._controller.at_rest:
            return
        if self._controller.suspends and (loop := _running_loop()):
            self._ending = loop.create_task(self._controller.stop(resolve_later))
        else:
            drive(self._controller.stop(self._resolve_now))

    def close(self, reason: str | None = None) -> None:
        """End any capture now, marking it partial. Harmless when idle; the profiler can be used again.

        Inside a running event loop the capture of an engine ends a little later; `aclose` waits for that.

        Args:
            reason: why; None where the host is done. A capture of a schedule without end that still warms up is then
                withdrawn, as if the schedule had ended before.
        """
        if self._controller is not None and self._controller.suspends and (loop := _running_loop()):
            self._ending = loop.create_task(self._controller.close(reason, resolve_later))
        elif self._controller is not None:
            drive(self._controller.close(reason, self._resolve_now))
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        self.close(reason_of(error))
        self._leave()

    # The async façade.

    async def astart(self, global_step: int) -> Capture | None:
        """Do what `start` does, without blocking the event loop while the backend waits."""
        if self._controller is None or not self._controller.enter(global_step):
            return None
        return await self._controller.start(global_step, resolve_later)

    async def astep(self, index: int, unit: Unit | str = Unit.GLOBAL_STEP) -> None:
        """Do what `step` does, without blocking the event loop while the backend waits."""
        if self._controller is not None and self._controller.capture is not None:
            await self._controller.step(Step(Unit(unit), index), resolve_later)

    async def astop(self) -> None:
        """Do what `stop` does, without blocking the event loop while the backend waits."""
        if self._controller is not None:
            await self._controller.stop(resolve_later)

    async def await_window(self, timeout_s: float, on_state: Callable[[TargetState], None] | None = None) -> bool:
        """Wait until the engine has recorded the window of the running capture; `astop` is then due.

        Args:
            timeout_s: how long to wait at most, in seconds.
            on_state: told how far it is, once or twice a second.

        Returns:
            Whether it has. False when the time is over, and when no capture of an engine is running.

        Raises:
            CaptureError: the engine cannot be reached.
        """
        return self._controller is not None and await self._controller.await_window(timeout_s, on_state)

    async def aclose(self, reason: str | None = None) -> None:
        """Do what `close` does, without blocking the event loop while the backend waits."""
        if self._controller is not None:
            await self._controller.close(reason, resolve_later)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        await self.aclose(reason_of(error))
        self._leave()

    # Parts of a step.

    def capture(self, global_step: int) -> StepScope:
        """Return a context manager, sync and async, around one global step: start at entry, stop at exit.

        An exception inside ends the capture, whose trace is kept and marked partial, and goes on to the caller.
        """
        return StepScope(self, self._controller, global_step)

    def stage(self, name: str) -> StageScope:
        """Return a decorator and context manager, sync and async, that names a part of the global step.

        In continuous mode the stage is marked in the trace; in discrete mode it is a capture of its own.

        Raises:
            ConfigError: the name cannot be used in file names.
        """
        check_stage(name)
        return StageScope(name, self._controller, self._resolve_now)

    def _leave(self) -> None:
        if self._controller is not None:
            self._controller.pause_requests()

    def _changed(self, capture: Capture | None) -> None:
        self._recording = capture is not None

    async def _resolve_now(self, awaitable: Awaitable[Any]) -> Any:
        """Bring an awaitable to its result by blocking; it never suspends the coroutine that calls it."""
        import asyncio

        if _running_loop() is None:
            self._runner = self._runner or asyncio.Runner()
            return ctrl_c.run(self._runner, resolve_later(awaitable))
        if inspect.iscoroutine(awaitable):
            awaitable.close()
        raise CaptureError(
            "start, step and stop cannot wait inside a running event loop, and this backend has to: "
            "call 'await profiler.astart(...)', 'astep' and 'astop', or use 'async with'."
        )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    import asyncio

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
