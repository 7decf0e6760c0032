"""The host API: start, step and stop as methods, context managers and decorators, sync and async.

Both façades run the same operations (`profdeck.base.operations`). Operations of device backends never wait, so the sync
façade needs no event loop for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self, SupportsIndex, cast

from profdeck.base.compilation import compiling_check, report_compiled_call
from profdeck.base.operations import Operation, begin, finish
from profdeck.lifecycle.scopes import Scope, reason_of
from profdeck.records.capture import MAX_INDEX, Capture, Unit
from profdeck_traces.base.errors import to_text

if TYPE_CHECKING:
    from profdeck.backends.api import TargetState
    from profdeck.base.identity import Identity
    from profdeck.config.model import Config
    from profdeck.lifecycle.role import Role
    from profdeck.lifecycle.role_group import RoleGroup
    from profdeck.lifecycle.sharing import SharedSteps

# Environment variables that can configure a profiler without arguments. `profdeck.config.sources` reads them.
_VARIABLES = ("PROFDECK_CONFIG", "PROFDECK__")

_CHECKS = 2
"""Number of global steps in which the arguments of `Profiler.step` are checked even without a capture."""


class Profiler:
    """Captures the global steps that the config selects, in this process and in the engines that it controls.

    Call ``start(n)`` when global step ``n`` begins and ``stop()`` when it ends, or wrap the step in
    ``with profiler.capture(n)``. In between, ``step(n)`` marks the end of a global step inside a longer capture,
    and ``step(i, "mini_batch")`` marks the end of a mini-batch. If profiling fails or an argument is invalid, none of
    these calls raises an error unless the config sets ``on_error: raise``. An invalid argument is logged once.
    In code that ``torch.compile`` traces, these calls do nothing, and a warning is logged once. In such code, do not
    enter a context manager that was created outside it: this causes a graph break, or an error with ``fullgraph=True``.

    Steps and indexes can be NumPy integers or integer tensors with one element. If step numbers repeat, for example in
    each epoch, each step is captured only once.

    A profiler has one or more roles. The captures of all engines start and stop together, and this process starts
    recording after the engines. Capture IDs are derived from global steps, so the captures of all roles and processes
    of a job belong to one run. If several ranks control the same targets, only rank 0 captures these targets.
    """

    def __init__(self, group: RoleGroup | None = None, shared: SharedSteps | None = None) -> None:
        """Use `from_config` instead. A profiler without roles does nothing and has no overhead."""
        if group is None:
            from profdeck.lifecycle.role_group import RoleGroup

            group = RoleGroup()
        self._group = group
        self._shared = shared
        self._caller = object()  # not the profiler: shared steps must not keep the profiler alive
        # Idle steps read only these attributes.
        self._roles, self._busy = group.roles, group.busy
        self._is_compiling = compiling_check()
        self._checks_left = _CHECKS if group.roles else 0
        """Number of global steps in which the arguments of `step` are still checked even if no capture is running."""

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
        """Build the profiler of this process. All errors in the config are reported here, before training.

        Args:
            config: a YAML or TOML file. Default: the file that ``PROFDECK_CONFIG`` names. The profiler does nothing
                unless the file, ``settings`` or a ``PROFDECK__...`` variable selects what to record.
            role: the role of this process in the job, as named in the config. None if this process only controls the
                targets of other roles.
            identity: rank, world size and parallel coordinates, if neither the launcher's environment nor the
                backend's library provides them. Its role takes precedence over ``role``.
            settings: config values by dotted key, such as ``{"steps": [10], "trainer.ranks": "all"}``.
            target: engine to record instead of this process: an engine object, the handle of an actor that holds
                one, or a server URL. A list of these, or a placement group, is recorded as one capture.
            targets: engines of other roles to record as well. Maps each role without targets in the config to a list
                of targets; the targets in the config are always included. ``{}`` selects only the targets in the
                config. Default: no other roles, or ``{}`` with ``role=None``.
            listeners: objects with hook implementations, in addition to the listeners that the config names.
            shared: share the profiler of the role between several callers in this process, such as the workers that
                a trainer puts into one actor. Each caller calls this method and uses the result like its own profiler.
                The first caller that begins a global step begins it for all, and the last caller that ends it ends it
                for all. Only the mini-batches of the first caller that reports one are counted. `close`, and an
                exception inside ``capture``, end the capture for all. Later calls must pass the same arguments, or
                only the role.

        Raises:
            ConfigError: the config, an option or a target is invalid, or a shared profiler has different arguments.
            PluginError: a backend or a listener cannot be used, or a backend cannot record in this process.
        """
        listeners = tuple(listeners)

        def build_group() -> RoleGroup:
            from profdeck.lifecycle.role_group import RoleGroup

            if config is None and not settings and not any(name.startswith(_VARIABLES) for name in os.environ):
                return RoleGroup()  # no overhead for jobs that do not use profiling
            from profdeck.config.sources import load_config
            from profdeck.lifecycle import role_factory

            loaded = load_config(config, settings=settings).config
            return role_factory.build_group(
                loaded, role=role, identity=identity, target=target, targets=targets, listeners=listeners
            )

        if not shared:
            return cls(build_group())
        arguments: dict[str, object] = {
            "config": None if config is None else os.fspath(config),
            "settings": dict(settings) if settings else None,
            "identity": identity,
            "target": target,
            "targets": targets,
            "listeners": listeners or None,
        }
        return cls._join(identity.role if identity else role, arguments, build_group)

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
        """Build the profiler of this process from a loaded config; see `from_config`."""
        from profdeck.lifecycle import role_factory

        listeners = tuple(listeners)

        def build_group() -> RoleGroup:
            return role_factory.build_group(
                config, role=role, identity=identity, target=target, targets=targets, listeners=listeners
            )

        if not shared:
            return cls(build_group())
        arguments: dict[str, object] = {
            "config": config,
            "identity": identity,
            "target": target,
            "targets": targets,
            "listeners": listeners or None,
        }
        return cls._join(identity.role if identity else role, arguments, build_group)

    @classmethod
    def _join(cls, role: str | None, arguments: Mapping[str, object], build_group: Callable[[], RoleGroup]) -> Self:
        from profdeck.lifecycle.sharing import join

        steps = join(role, arguments, build_group)
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

        return plugin_manager().register_global(plugin, name)

    @staticmethod
    def unregister(name: str) -> None:
        """Stop calling the hooks of an object that was registered with `register`.

        Raises:
            PluginError: no object is registered under the name.
        """
        from profdeck.backends.plugin_manager import plugin_manager

        plugin_manager().unregister_global(name)

    @property
    def enabled(self) -> bool:
        """True if this process can record: the config selects one of its roles, and its rank."""
        return bool(self._roles)

    @property
    def active(self) -> Capture | None:
        """The capture of the current global step. None if there is none, or between two global steps of a capture.

        With several roles, this is the capture of the first role that has one.
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
        """The last known state of each target of a capture, by target name. Sends no request."""
        return {name: state for role in self._roles for name, state in role.states.items()}

    # The sync façade.

    # With `Never`, type checkers reject extra arguments. At run time, they are logged, so that the job continues.

    def start(self, global_step: SupportsIndex | None = None, *extra: Never, **unknown: Never) -> Capture | None:
        """Begin a global step. Depending on the config, start captures, continue them or do nothing.

        Returns:
            The running capture, or None; the same value as `active`.
        """
        if self._is_compiling():
            report_compiled_call("profiler.start")
            return None
        index: int | None
        if type(global_step) is int and 0 <= global_step <= MAX_INDEX and not (extra or unknown):
            index = global_step  # avoids a slower call in idle steps
        else:
            index = self._group.to_index("global_step", global_step, (*extra, *unknown))
        if index is None:
            return None
        if self._checks_left:
            self._checks_left -= 1
        if self._shared is None:
            for role in self._roles:  # a loop, because any() is slower in idle steps
                if role.must_start(index):
                    break
            else:
                return None
        for roles in self._group.phases(self._roles_to_start(index)):
            self._group.finish_start(begin([role.start(index) for role in roles]))
        return self.active

    def step(
        self,
        index: SupportsIndex | None = None,
        unit: Unit | str = Unit.GLOBAL_STEP,
        *extra: Never,
        **unknown: Never,
    ) -> None:
        """Report that a global step, or a unit inside it, has ended. Does nothing if no capture is running.

        Args:
            index: the host's number of the global step, or the index of the mini-batch, counted from 0 in each global
                step. Required: a call without it is an invalid argument.
            unit: the unit that has ended.
        """
        # A flag, not a swapped method: hosts may cache profiler.step before the loop.
        if self._busy or self._checks_left:
            if self._is_compiling():
                report_compiled_call("profiler.step")
                return
            self._group.blocker.finish(begin(self._step_operations(index, unit, (*extra, *unknown))))

    def stop(self, *_extra: Never, **_unknown: Never) -> None:
        """End the global step. Its captures end too, unless they also record the next step.

        Safe to call if no capture is running. Inside a running event loop, captures of engines end shortly after the
        call; use `astop` to wait for them.
        """
        if self._busy or self._shared is not None:
            if self._is_compiling():
                report_compiled_call("profiler.stop")
                return
            self._group.finish_end(self._stop_operations())

    def close(self, reason: str | None = None) -> None:
        """End all captures now and mark them partial. The profiler can be used again.

        Safe to call if no capture is running. Inside a running event loop, use `aclose`; see `stop`.

        Args:
            reason: the reason for ending the captures; None if the host has finished. If the host has finished, a
                capture that is still warming up is withdrawn if its schedule has no end.
        """
        if self._is_compiling():
            report_compiled_call("profiler.close")
            return
        try:
            self._group.finish_end(self._close_operations(reason))
        finally:
            self._group.blocker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        self.close(reason_of(error))
        self._pause_requests()

    # The async façade.

    async def astart(self, global_step: SupportsIndex | None = None, *extra: Never, **unknown: Never) -> Capture | None:
        """Async version of `start`."""
        index = self._group.to_index("global_step", global_step, (*extra, *unknown))
        if index is None:
            return None
        if self._checks_left:
            self._checks_left -= 1
        for roles in self._group.phases(self._roles_to_start(index)):
            await self._group.afinish_start(begin([role.start(index) for role in roles]))
        return self.active

    async def astep(
        self,
        index: SupportsIndex | None = None,
        unit: Unit | str = Unit.GLOBAL_STEP,
        *extra: Never,
        **unknown: Never,
    ) -> None:
        """Async version of `step`."""
        if self._busy or self._checks_left:
            await finish(begin(self._step_operations(index, unit, (*extra, *unknown))))

    async def astop(self, *_extra: Never, **_unknown: Never) -> None:
        """Async version of `stop`."""
        await finish(begin(self._stop_operations().values()))

    async def await_window(self, timeout_s: float, on_state: Callable[[TargetState], None] | None = None) -> bool:
        """Wait until the engines have recorded the windows of the running captures. Call `astop` afterwards.

        Args:
            timeout_s: the time limit, in seconds.
            on_state: called once or twice a second for each role, with the state of the role's engines.

        Returns:
            True if all windows were recorded; False after the timeout, or if no capture of an engine is running.

        Raises:
            CaptureError: an engine cannot be reached.
        """
        import asyncio

        waits = [role.await_window(timeout_s, on_state) for role in self._roles if role.controls_engine]
        results = await asyncio.gather(*waits, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return bool(results) and all(results)

    async def aclose(self, reason: str | None = None) -> None:
        """Async version of `close`."""
        await finish(begin(self._close_operations(reason).values()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        await self.aclose(reason_of(error))
        self._pause_requests()

    # Scopes.

    def capture(
        self, global_step: SupportsIndex | None = None, *extra: Never, **unknown: Never
    ) -> Scope[Capture | None]:
        """Return a sync and async context manager that starts a global step at entry and stops it at exit.

        An exception inside the block ends the captures and propagates to the caller. The traces of these captures are
        kept and marked partial.
        """
        if self._is_compiling():
            report_compiled_call("profiler.capture")
            # torch.compile supports nullcontext around graph breaks.
            return cast("Scope[Capture | None]", nullcontext())
        index = self._group.to_index("global_step", global_step, (*extra, *unknown))
        if index is None:
            return Profiler().capture(0)  # does nothing
        return Scope(self, self._group, index, None)

    def stage(self, name: str | None = None, *extra: Never, **unknown: Never) -> Scope[None]:
        """Return a decorator and context manager, sync and async, for a named stage of the global step.

        In continuous mode, the stage is annotated in the trace. In discrete mode, it is a separate capture of all
        roles. Stages are not annotated in the traces of engines.

        A stage is not recorded if its name contains characters other than letters, digits, ``_`` and ``-``.
        """
        if self._is_compiling():
            report_compiled_call("profiler.stage")
            return cast("Scope[None]", nullcontext())  # as above
        checked_name = self._group.to_stage_name(name, (*extra, *unknown))
        if checked_name is None:
            return Profiler().stage("invalid")  # does nothing
        return Scope(self, self._group, None, checked_name)

    # Operations.

    def _roles_to_start(self, step: int) -> list[Role]:
        """Return the roles whose `start` must be called for a global step.

        Empty if another caller has already begun a shared step.
        """
        if self._shared is not None and not self._shared.enter(self._caller, step):
            return []
        return [role for role in self._roles if role.must_start(step)]

    def _has_begun(self, step: int) -> bool:
        """Return whether this caller has begun the step. A nested scope must not end the step."""
        if self._shared is not None:
            return self._shared.is_inside(self._caller, step)
        return any(role.machine.is_open(step) for role in self._roles)

    def _step_operations(
        self, index: SupportsIndex | None, unit: Unit | str, unexpected: tuple[object, ...]
    ) -> list[Operation[None]]:
        step = self._group.to_step(index, unit, unexpected)
        if step is not None and step.unit is Unit.GLOBAL_STEP and self._checks_left == _CHECKS and self._shared is None:
            self._group.report_missing_start()
        if (
            step is None
            or not self._busy
            or (self._shared is not None and not self._shared.counts(self._caller, step.index, step.unit))
        ):
            return []
        return [role.step(step) for role in self._group.busy_roles]

    def _stop_operations(self) -> dict[Role, Operation[None]]:
        if self._shared is not None and not self._shared.leave(self._caller):
            return {}
        return {role: role.stop() for role in self._group.busy_roles}

    def _close_operations(self, reason: str | None) -> dict[Role, Operation[None]]:
        if self._shared is not None:
            self._shared.clear()
        text = None if reason is None else to_text(reason)
        return {role: role.close(text) for role in self._roles}

    def _pause_requests(self) -> None:
        for role in self._roles:
            if role.watch is not None:
                role.watch.pause()
