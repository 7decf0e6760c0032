"""What a host calls: start, step and stop, as methods, context managers and decorators, sync and async.

Both façades run the same operations (`profdeck.base.operations`). Operations of device backends never wait, so the sync
façade needs no event loop for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from profdeck.base.operations import Operation, begin, finish
from profdeck.lifecycle.scopes import Scope, check_stage, reason_of
from profdeck.records.capture import Capture, Step, Unit

if TYPE_CHECKING:
    from profdeck.backends.api import TargetState
    from profdeck.base.identity import Identity
    from profdeck.config.model import Config
    from profdeck.lifecycle.role import Role
    from profdeck.lifecycle.role_group import RoleGroup
    from profdeck.lifecycle.sharing import SharedSteps

# What can configure a profiler without arguments; `profdeck.config.sources` reads it.
_VARIABLES = ("PROFDECK_CONFIG", "PROFDECK__")


class Profiler:
    """Captures the global steps that the config selects, in this process and in the engines that it controls.

    Call ``start(n)`` when global step ``n`` begins and ``stop()`` when it ends, or wrap the step in
    ``with profiler.capture(n)``. In between, ``step(n)`` marks the end of a global step inside a longer capture,
    and ``step(i, "mini_batch")`` that of a mini-batch. None of them raises because profiling went wrong, unless
    the config says ``on_error: raise``.

    A profiler has one or several roles. Their engines start and stop together, and this process starts to record when
    they have started. Captures have the ids of the global steps, so those of all roles and processes of a job are in
    one run. Of several ranks that control the targets of a config, rank 0 captures them.
    """

    def __init__(self, group: RoleGroup | None = None, shared: SharedSteps | None = None) -> None:
        """Use `from_config`. Without roles the profiler does nothing, at no cost."""
        if group is None:
            from profdeck.lifecycle.role_group import RoleGroup

            group = RoleGroup()
        self._group = group
        self._shared = shared
        self._caller = object()  # not this profiler: shared steps must not keep it alive
        self._roles, self._busy = group.roles, group.busy  # read by each idle step

    @classmethod
    def from_config(  # noqa: PLR0913 - all but the first are keywords
        cls,
        config: str | os.PathLike[str] | None = None,
        *,
        role: str | None = "trainer",
        identity: Identity | None = None,
        settings: Mapping[str, Any] | None = None,
        target: object = None,
        targets: Mapping[str, Sequence[object]] | None = None,
        listeners: Iterable[object] = (),
        shared: bool = False,
    ) -> Self:
        """Build the profiler of this process; everything that can be wrong is found here, before training.

        Args:
            config: a YAML or TOML file. Without one, the file that ``PROFDECK_CONFIG`` names. If nothing selects
                what to record, ``settings`` and ``PROFDECK__...`` variables included, the profiler does nothing.
            role: the function of this process in the job; selects the role in the config. None if this process only
                controls the targets of other roles.
            identity: rank, world size and parallel coordinates, when neither the launcher's environment nor the
                backend's library knows them. Its role wins over ``role``.
            settings: config values by dotted key, such as ``{"steps": [10], "trainer.ranks": "all"}``.
            target: engine to record instead of this process: an engine object, the handle of an actor that holds
                one, or a server URL. A list of these, or a placement group, is recorded as one capture.
            targets: engines of other roles to record, too: the targets that the config names, and lists of targets by
                role for roles whose config names none. ``{}`` selects only the targets of the config. Default: no
                other roles, and ``{}`` with ``role=None``.
            listeners: objects with hook implementations, in addition to the listeners that the config names.
            shared: several callers in this process use the profiler of the role together, such as the workers that a
                trainer puts into one actor. Each calls this method and uses the result as if it were alone: the
                first that begins a global step begins it for all, and the last that ends it ends it. Mini-batches are
                counted by the first caller that reports one. `close`, and an exception inside ``capture``, end the
                capture for all. Later calls pass the same arguments, or only the role.

        Raises:
            ConfigError: the config, an option or a target is wrong, or a shared profiler has other arguments.
            PluginError: a backend or a listener cannot be used, or a backend cannot record in this process.
        """

        def open_group() -> RoleGroup:
            from profdeck.lifecycle.role_group import RoleGroup

            if config is None and not settings and not any(name.startswith(_VARIABLES) for name in os.environ):
                return RoleGroup()  # at no cost to the many jobs that only might be profiled
            from profdeck.config.sources import load_config
            from profdeck.lifecycle import opening

            loaded = load_config(config, settings=settings).config
            return opening.open_group(
                loaded, role=role, identity=identity, target=target, targets=targets, listeners=listeners
            )

        if not shared:
            return cls(open_group())
        arguments: dict[str, object] = {
            "config": None if config is None else os.fspath(config),
            "settings": dict(settings) if settings else None,
            "identity": identity,
            "target": target,
            "targets": targets,
            "listeners": [*listeners] or None,
        }
        return cls._join(identity.role if identity else role, arguments, open_group)

    @classmethod
    def of(  # noqa: PLR0913 - as above
        cls,
        config: Config,
        *,
        role: str | None = "trainer",
        identity: Identity | None = None,
        target: object = None,
        targets: Mapping[str, Sequence[object]] | None = None,
        listeners: Iterable[object] = (),
        shared: bool = False,
    ) -> Self:
        """Build the profiler of this process from a config that is loaded; see `from_config`."""
        from profdeck.lifecycle import opening

        def open_group() -> RoleGroup:
            return opening.open_group(
                config, role=role, identity=identity, target=target, targets=targets, listeners=listeners
            )

        if not shared:
            return cls(open_group())
        arguments: dict[str, object] = {
            "config": config,
            "identity": identity,
            "target": target,
            "targets": targets,
            "listeners": [*listeners] or None,
        }
        return cls._join(identity.role if identity else role, arguments, open_group)

    @classmethod
    def _join(cls, role: str | None, arguments: Mapping[str, object], open_group: Callable[[], RoleGroup]) -> Self:
        from profdeck.lifecycle.sharing import join

        steps = join(role, arguments, open_group)
        return cls(steps.group, steps)

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
        """Whether this process can record anything at all: the config selects one of its roles, and its rank."""
        return bool(self._roles)

    @property
    def active(self) -> Capture | None:
        """The capture of the current global step, if any; with several roles, that of the first role that has one.

        None between two steps that share a capture.
        """
        for role in self._roles:
            if (capture := role.active) is not None:
                return capture
        return None

    @property
    def captures(self) -> dict[str, Capture]:
        """The captures of the current global step, by role."""
        return {role.identity.role: role.active for role in self._roles if role.active is not None}

    @property
    def states(self) -> dict[str, TargetState]:
        """The last known state of each target of a capture, by its name. Sends no request."""
        return {name: state for role in self._roles for name, state in role.states.items()}

    # The sync façade.

    def start(self, global_step: int) -> Capture | None:
        """Begin a global step: start captures, continue them, or do nothing, as the config selects.

        Returns:
            The running capture, as `active` returns it.
        """
        if self._shared is None:
            for role in self._roles:  # not any(), which costs an idle step several calls
                if role.enters(global_step):
                    break
            else:
                return None
        for roles in self._group.phases(self._due(global_step)):
            self._group.finish_start(begin([role.start(global_step) for role in roles]))
        return self.active

    def step(self, index: int, unit: Unit | str = Unit.GLOBAL_STEP) -> None:
        """Report that a global step, or a unit inside it, has ended; does nothing while no capture is running.

        Args:
            index: the global step as the host numbers it, or the mini-batch, counted from 0 in each global step.
            unit: the unit that has ended.
        """
        # A flag, not a swapped method: hosts may cache profiler.step before the loop.
        if self._busy:
            self._group.blocker.finish(begin(self._stepping(index, Unit(unit))))

    def stop(self) -> None:
        """End the global step: end its captures, unless the next step belongs to them too. Harmless when idle.

        Inside a running event loop the capture of an engine ends a little later; `astop` waits for that.
        """
        if self._busy or self._shared is not None:
            self._group.finish_end(self._stopping())

    def close(self, reason: str | None = None) -> None:
        """End all captures now, marking them partial. Harmless when idle; the profiler can be used again.

        Inside a running event loop the capture of an engine ends a little later; `aclose` waits for that.

        Args:
            reason: the reason; None if the host has finished. A capture of a schedule without end that still warms up
                is then withdrawn, as if the schedule had ended before.
        """
        try:
            self._group.finish_end(self._closing(reason))
        finally:
            self._group.blocker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        self.close(reason_of(error))
        self._pause_requests()

    # The async façade.

    async def astart(self, global_step: int) -> Capture | None:
        """Async version of `start`."""
        for roles in self._group.phases(self._due(global_step)):
            await self._group.afinish_start(begin([role.start(global_step) for role in roles]))
        return self.active

    async def astep(self, index: int, unit: Unit | str = Unit.GLOBAL_STEP) -> None:
        """Async version of `step`."""
        if self._busy:
            await finish(begin(self._stepping(index, Unit(unit))))

    async def astop(self) -> None:
        """Async version of `stop`."""
        await finish(begin(self._stopping().values()))

    async def await_window(self, timeout_s: float, on_state: Callable[[TargetState], None] | None = None) -> bool:
        """Wait until the engines have recorded the windows of the running captures; `astop` is then due.

        Args:
            timeout_s: the longest wait, in seconds.
            on_state: called with the state of the engines of a role, once or twice a second for each role.

        Returns:
            Whether they have. False after the timeout, and if no capture of an engine is running.

        Raises:
            CaptureError: an engine cannot be reached.
        """
        import asyncio

        waiting = [role.await_window(timeout_s, on_state) for role in self._roles if role.controls_engine]
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error
        return bool(ended) and all(ended)

    async def aclose(self, reason: str | None = None) -> None:
        """Async version of `close`."""
        await finish(begin(self._closing(reason).values()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        await self.aclose(reason_of(error))
        self._pause_requests()

    # Scopes.

    def capture(self, global_step: int) -> Scope[Capture | None]:
        """Return a context manager, sync and async, around one global step: start at entry, stop at exit.

        An exception inside ends the captures, whose traces are kept and marked partial, and is raised to the caller.
        """
        return Scope(self, self._group, global_step, None)

    def stage(self, name: str) -> Scope[None]:
        """Return a decorator and context manager, sync and async, that names a part of the global step.

        In continuous mode the stage is annotated in the trace; in discrete mode it is a capture of its own, of all
        roles. Engines have no annotations.

        Raises:
            ConfigError: the name cannot be used in file names.
        """
        check_stage(name)
        return Scope(self, self._group, None, name)

    # Operations.

    def _due(self, step: int) -> list[Role]:
        """Return the roles that have something to do at the start of a global step."""
        if self._shared is not None and not self._shared.enter(self._caller, step):
            return []
        return [role for role in self._roles if role.enters(step)]

    def _has_begun(self, step: int) -> bool:
        """Return whether this caller has begun the step. A nested scope of the step must not end it."""
        if self._shared is not None:
            return self._shared.is_inside(self._caller, step)
        return any(role.machine.is_open(step) for role in self._roles)

    def _stepping(self, index: int, unit: Unit) -> list[Operation[None]]:
        if self._shared is not None and not self._shared.counts(self._caller, index, unit):
            return []
        return [role.step(Step(unit, index)) for role in self._group.busy_roles]

    def _stopping(self) -> dict[Role, Operation[None]]:
        if self._shared is not None and not self._shared.leave(self._caller):
            return {}
        return {role: role.stop() for role in self._group.busy_roles}

    def _closing(self, reason: str | None) -> dict[Role, Operation[None]]:
        if self._shared is not None:
            self._shared.clear()
        return {role: role.close(reason) for role in self._roles}

    def _pause_requests(self) -> None:
        for role in self._roles:
            if role.watch is not None:
                role.watch.pause()
