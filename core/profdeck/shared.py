"""One profiler shared by several wrappers in a process, such as the workers of a trainer in one actor."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self
from weakref import WeakValueDictionary

from profdeck.base.errors import ConfigError
from profdeck.lifecycle.scopes import StageScope, StepScope
from profdeck.profiler import Profiler
from profdeck.records.capture import Unit

if TYPE_CHECKING:
    from profdeck.base.identity import Identity
    from profdeck.config.model import Config
    from profdeck.records.capture import Capture


class SharedProfiler:
    """A wrapper's part in the one profiler that its process has for a role.

    Each wrapper builds its own and uses it as if it were alone, with the methods of `Profiler`. The first that begins
    a global step begins it for all; the last that ends it ends it. So several may begin the same step, none ends
    what another still needs, and a wrapper that begins or ends a step twice changes nothing. Mini-batches are counted
    by the first wrapper that reports one. `close`, and an exception inside of ``capture``, end the capture for all.
    """

    _groups: ClassVar[WeakValueDictionary[tuple[int, str], _Group]] = WeakValueDictionary()
    """By process and role; gone with the last wrapper."""

    def __init__(self, group: _Group) -> None:
        """Use `from_config`."""
        self._group = group
        self._whole = group.profiler
        self._token = object()
        """What the group knows this wrapper by; it must not keep it alive."""

    @classmethod
    def from_config(
        cls,
        config: str | os.PathLike[str] | None = None,
        *,
        role: str = "trainer",
        identity: Identity | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Self:
        """Take part in this process's profiler of a role; the first call for that role builds it.

        The arguments are those of `Profiler.from_config`; later calls give the same, or only the role.

        Raises:
            ConfigError: the config or an option is wrong, or the first call for that role gave something else.
            PluginError: the backend cannot be used, or cannot record in this process.
        """
        given = {"config": config and os.fspath(config), "identity": identity, "settings": settings and dict(settings)}
        build = functools.partial(Profiler.from_config, config, role=role, identity=identity, settings=settings)
        return cls._join(identity.role if identity else role, given, build)

    @classmethod
    def of(cls, config: Config, *, role: str, identity: Identity | None = None) -> Self:
        """Take part in this process's profiler of a role by a config that is loaded; see `from_config`."""
        given = {"config": config, "identity": identity}
        return cls._join(role, given, functools.partial(Profiler.of, config, role=role, identity=identity))

    @classmethod
    def _join(cls, role: str, given: Mapping[str, object], build: Callable[[], Profiler]) -> Self:
        key = os.getpid(), role  # a forked child has its own
        group = cls._groups.get(key)
        if group is None:
            group = cls._groups.setdefault(key, _Group(build(), given))
        for what, value in given.items():
            if value and value != group.given.get(what):
                raise ConfigError(
                    f"{what}: the role '{role}' of this process is shared already, with {group.given.get(what)!r} and "
                    f"not {value!r}. Give all wrappers the same, or another role."
                )
        return cls(group)

    @property
    def enabled(self) -> bool:
        """Whether this process can record anything at all: its role and rank are selected by the config."""
        return self._whole.enabled

    @property
    def active(self) -> Capture | None:
        """The capture of the global step that is under way, if any."""
        return self._whole.active

    def start(self, global_step: int) -> Capture | None:
        """Begin a global step here, and for all if no wrapper has begun it; returns the running capture, or None."""
        if self._group.enter(self._token, global_step):
            return self._whole.start(global_step)
        return self._whole.active

    def step(self, index: int, unit: Unit | str = Unit.GLOBAL_STEP) -> None:
        """Report that a global step, or a mini-batch, has ended; of a global step the first report counts."""
        if self._group.counts(self._token, index, Unit(unit)):
            self._whole.step(index, unit)

    def stop(self) -> None:
        """End the global step here, and for all if no wrapper is in it any more. Harmless when idle."""
        if self._group.leave(self._token):
            self._whole.stop()

    def close(self, reason: str | None = None) -> None:
        """End any capture now, for all, marking it partial. Harmless when idle."""
        self._group.end()
        self._whole.close(reason)

    async def astart(self, global_step: int) -> Capture | None:
        """Do what `start` does, without blocking the event loop while the backend waits."""
        if self._group.enter(self._token, global_step):
            return await self._whole.astart(global_step)
        return self._whole.active

    async def astep(self, index: int, unit: Unit | str = Unit.GLOBAL_STEP) -> None:
        """Do what `step` does, without blocking the event loop while the backend waits."""
        if self._group.counts(self._token, index, Unit(unit)):
            await self._whole.astep(index, unit)

    async def astop(self) -> None:
        """Do what `stop` does, without blocking the event loop while the backend waits."""
        if self._group.leave(self._token):
            await self._whole.astop()

    async def aclose(self, reason: str | None = None) -> None:
        """Do what `close` does, without blocking the event loop while the backend waits."""
        self._group.end()
        await self._whole.aclose(reason)

    def capture(self, global_step: int) -> StepScope:
        """Return a context manager, sync and async, around one global step; see `Profiler.capture`."""
        return StepScope(self, None, global_step)

    def stage(self, name: str) -> StageScope:
        """Return a decorator and context manager that names a part of the global step; see `Profiler.stage`."""
        return self._whole.stage(name)


class _Group:
    """The wrappers of one role in one process."""

    def __init__(self, profiler: Profiler, given: Mapping[str, object]) -> None:
        self.profiler = profiler
        self.given = given
        """What it was built with."""
        self._mutex = threading.Lock()
        self._step: int | None = None
        self._inside: set[object] = set()
        """The wrappers that have begun that step and not ended it."""
        self._passed: int | None = None
        """The global step that was reported last."""
        self._counting: object = None
        """The wrapper whose mini-batches count in that step."""

    def enter(self, wrapper: object, step: int) -> bool:
        """Let a wrapper begin a step; True if it is the first."""
        with self._mutex:
            if step != self._step:
                self._inside.clear()  # who is late has forgotten to end the one before
            self._step, first = step, not self._inside
            self._inside.add(wrapper)
            if first:
                self._counting = None
            return first

    def leave(self, wrapper: object) -> bool:
        """Let a wrapper end the step; True if it was the last inside."""
        with self._mutex:
            if wrapper not in self._inside:
                return False
            self._inside.discard(wrapper)
            return not self._inside

    def counts(self, wrapper: object, index: int, unit: Unit) -> bool:
        """Tell whether a report is to be passed on."""
        with self._mutex:
            if unit is not Unit.GLOBAL_STEP:
                self._counting = self._counting or wrapper
                return self._counting is wrapper
            first, self._passed = index != self._passed, index
            return first

    def end(self) -> None:
        """Let no wrapper be in a step any more."""
        with self._mutex:
            self._inside.clear()
