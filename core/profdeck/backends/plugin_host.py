"""Finds the configured plugins by entry point and calls their hooks through a typed façade over pluggy."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import attrs
import pluggy

from profdeck.backends.api import Backend
from profdeck.backends.hookspecs import NAMESPACE, Hooks
from profdeck.base.entry_points import load
from profdeck.base.errors import BrokenPluginError, PluginError, describe
from profdeck.base.interruptions import is_of_signal
from profdeck.records.artifact import Output
from profdeck.records.capture import Capture, Step

logger = logging.getLogger("profdeck")

BACKENDS = "profdeck.backends"
LISTENERS = "profdeck.listeners"

Resolve = Callable[[Awaitable[Any]], Awaitable[Any]]
"""How a façade brings an awaitable that a hook returned to its result."""


def load_backend(name: str) -> type[Backend]:
    """Import a backend's class; the library that it drives is not needed for that.

    Raises:
        PluginError: it is unknown, fails to import, or is not a backend.
    """
    cls = load(BACKENDS, name)
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise BrokenPluginError(f"The backend '{name}' is {cls!r}, not a subclass of profdeck.Backend.")
    if not attrs.has(cls.Options):
        raise BrokenPluginError(f"The backend '{name}' has Options that are not an attrs class: {cls.Options!r}.")
    for hook in ("profile_start", "profile_stop"):
        if not hasattr(getattr(cls, hook, None), f"{NAMESPACE}_impl"):
            raise BrokenPluginError(f"The backend '{name}' does not mark a method {hook} with @profdeck.hookimpl.")
    return cls


def require_libraries(cls: type[Backend]) -> None:
    """Check that what the backend drives is installed in supported versions.

    Raises:
        MissingLibraryError: something is not installed.
        IncompatibleLibraryError: a version is not supported.
    """
    for library in cls.libraries:
        library.require(cls.name)


class Plugins:
    """The plugins of one process: its backend and its listeners, called one by one so that none hides another."""

    def __init__(
        self, backend: Backend, listeners: Iterable[tuple[str, object]] = (), *, checked: bool = False
    ) -> None:
        """Args:
        backend: what records.
        listeners: by name, what is told of it.
        checked: whether the class of the backend is known to follow the hook specification; a fleet has thousands.
        """
        named = [(backend.name, backend), *listeners]
        if not checked:
            _check(named)
        self._backend, *self._listeners = (_Member(name, _Hooks(plugin), plugin is backend) for name, plugin in named)

    async def start(self, capture: Capture, resolve: Resolve) -> None:
        """Start the backend, then the listeners. A listener that fails is noted and passed over.

        Raises:
            BaseException: whatever the backend raised, or a cancellation; nothing is then recording.
        """
        await self._backend.call("profile_start", resolve, capture=capture)
        try:
            for listener in self._listeners:
                listener.started = await listener.attempt("profile_start", resolve, capture=capture)
        except BaseException:
            left = await self.stop(capture, resolve)
            capture.artifacts = tuple(item() if callable(item) else item for item in left)
            raise

    def step(self, capture: Capture) -> Callable[[Step, Resolve], Coroutine[Any, Any, None]]:
        """Freeze the step hooks of all plugins into one plain callable for the time of a capture."""
        members = [self._backend, *(listener for listener in self._listeners if listener.started)]
        hooks = [(member, member.hooks.profile_step) for member in members]

        async def passed(step: Step, resolve: Resolve) -> None:
            for member, hook in hooks:
                try:
                    for result in filter(inspect.isawaitable, hook(capture=capture, step=step)):
                        await resolve(result)
                except Exception as error:  # noqa: BLE001  # the next plugin and the host's step go on
                    member.failed(capture, f"at {step.unit} {step.index}", error)

        return passed

    async def stop(self, capture: Capture, resolve: Resolve) -> tuple[Output, ...]:
        """Stop the backend and return what it left or what writes it; a failure is a problem of the capture."""
        try:
            artifacts = await self._backend.call("profile_stop", resolve, capture=capture)
            return tuple(artifacts or ())
        except Exception as error:  # noqa: BLE001  # judged by the caller through capture.problems
            self._backend.failed(capture, "at its stop", error)
            return ()

    async def announce(self, capture: Capture, resolve: Resolve) -> None:
        """Tell every listener that started that the capture has ended; failures are noted."""
        for listener in self._listeners:
            if listener.started:
                listener.started = False
                await listener.attempt("profile_stop", resolve, capture=capture)


@attrs.define
class _Member:
    name: str
    hooks: Any
    records: bool
    """Whether this is the backend: its failures are problems of the capture, a listener's are not."""
    started: bool = False

    def failed(self, capture: Capture, when: str, error: Exception) -> None:
        if is_of_signal(error):
            raise error
        text = f"{self.name} {when}: {describe(error)}"
        if self.records:
            capture.problems.append(text)
        else:
            capture.notes.append(f"The listener {text}")
            logger.warning("Capture %s: the listener %s", capture.id, text)

    async def attempt(self, hook: str, resolve: Resolve, *, capture: Capture) -> bool:
        """Call a hook; False if it failed."""
        try:
            await self.call(hook, resolve, capture=capture)
        except Exception as error:  # noqa: BLE001  # a listener's failure must cost no recording
            self.failed(capture, f"at {hook}", error)
            return False
        return True

    async def call(self, hook: str, resolve: Resolve, **arguments: object) -> Any:
        result = next(iter(getattr(self.hooks, hook)(**arguments)), None)
        return await resolve(result) if inspect.isawaitable(result) else result


class _Hooks:
    """Calls the hooks of one plugin, so that a failure of another cannot end the call. pluggy's own fan-out ends at the
    first exception.
    """

    def __init__(self, plugin: object) -> None:
        self.plugin = plugin

    def __getattr__(self, hook: str) -> Callable[..., list[Any]]:
        method: Any = getattr(self.plugin, hook, None)
        if not hasattr(method, f"{NAMESPACE}_impl"):
            return lambda **_: []
        taken = _parameters(getattr(method, "__func__", method))

        def call(**arguments: object) -> list[Any]:
            result = method(**{name: arguments[name] for name in taken if name in arguments})
            return [] if result is None else [result]

        return call


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return which arguments of a hook a plugin takes; a fleet has thousands of one class."""
    return tuple(inspect.signature(function).parameters)


def _check(plugins: Iterable[tuple[str, object]]) -> None:
    """Check plugins against the hook specification.

    Raises:
        BrokenPluginError: one does not follow it.
    """
    manager = pluggy.PluginManager(NAMESPACE)
    manager.add_hookspecs(Hooks)
    for number, (name, plugin) in enumerate(plugins):
        try:
            manager.register(plugin, f"{name} {number}")
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise BrokenPluginError(f"The plugin '{name}' does not follow the hook specification: {error}") from None


def load_plugins(backend: Backend, listeners: Iterable[str]) -> Plugins:
    """Build the façade for a backend and listeners by name.

    Raises:
        PluginError: a listener is unknown or broken, or a plugin does not follow the hook specification.
    """
    objects = []
    for name in listeners:
        plugin = load(LISTENERS, name)
        try:
            objects.append((name, plugin() if isinstance(plugin, type) else plugin))
        except PluginError:  # it says so itself
            raise
        except Exception as error:
            raise BrokenPluginError(f"The listener '{name}' cannot be built: {describe(error)}") from error
    return Plugins(backend, objects)
