"""The plugin manager of the process.

pluggy registers functions of plugin objects and excludes plugin objects from a call. profdeck registers two objects per
plugin, one with its implementations and one with its wrappers: a call to another plugin excludes the implementations
and keeps the wrappers.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from typing import Any, TypeAlias

import attrs
import pluggy

from profdeck.backends.api import Backend
from profdeck.backends.hookspecs import NAMESPACE, Hooks, hookimpl
from profdeck.backends.plugins import (
    HOOK_OPTIONS,
    Implementation,
    check_backend,
    check_hooks,
    hook_names,
    listener_name,
)
from profdeck.base.interrupts import is_interruption
from profdeck.records.capture import CaptureRecord
from profdeck_traces.base.errors import BrokenPluginError, PluginError, describe_error

logger = logging.getLogger("profdeck")


@attrs.define(eq=False)
class CallProgress:
    """Progress of a call to one hook implementation."""

    results: list[Any] | None = None
    """The return values; None if the call has not returned or raised an exception."""
    pending: list[ObservedAwaitable] = attrs.field(factory=list)
    """Awaitables that have not completed."""
    error: BaseException | None = None
    """The exception that the call or one of its awaitables raised."""

    def observe(self, results: list[Any]) -> list[Any]:
        """Store the return values and return them, with awaitables that record their completion."""
        self.results, observed = results, list(results)
        for index, result in enumerate(observed):
            if inspect.isawaitable(result):
                observed[index] = awaitable = ObservedAwaitable(self, results, index, result)
                self.pending.append(awaitable)
        return observed


@attrs.define(eq=False)
class ObservedAwaitable:
    """An awaitable that records its result."""

    progress: CallProgress
    results: list[Any]
    index: int
    awaitable: Awaitable[Any]
    started: bool = False

    def __await__(self) -> Generator[Any, Any, Any]:
        self.started = True
        try:
            result = yield from self.awaitable.__await__()
        except BaseException as error:
            self.progress.error = error
            raise
        self.results[self.index] = result
        self.progress.pending.remove(self)
        return result

    def close(self) -> None:
        """Do nothing: wrappers may close a coroutine that they discard, but ``profile_stop`` must run."""

    def abandon(self) -> None:
        """Close the coroutine if it was not awaited."""
        if inspect.iscoroutine(self.awaitable) and inspect.getcoroutinestate(self.awaitable) == inspect.CORO_CREATED:
            self.awaitable.close()


@attrs.frozen(eq=False)
class PluginObject:
    """An object for pluggy. It is hashable, although plugins may be compared by value."""

    plugin_name: str


@attrs.frozen(eq=False)
class RegisteredPlugin:
    """The objects that pluggy has for one plugin."""

    name: str
    """The name that wrappers and messages see."""
    hooks: PluginObject
    wrappers: PluginObject
    source: object = None
    """The registered object; None for a backend class."""


class CallObserver:
    """Innermost wrapper: records the return value or exception of each implementation.

    Outer wrappers may raise before the call, suppress an exception, discard an awaitable, or raise after the return.
    """

    def __init__(self, progress_by_capture: dict[CaptureRecord, CallProgress]) -> None:
        self.progress_by_capture = progress_by_capture

    @hookimpl(wrapper=True, trylast=True)
    def profile_start(self, capture: CaptureRecord) -> Generator[None, list[Any], list[Any]]:
        """Record the progress of the call."""
        progress = self.progress_by_capture[capture] = CallProgress()
        try:
            results = yield
        except GeneratorExit as error:
            progress.error = RuntimeError(describe_error(error))
            raise progress.error from error
        except BaseException as error:
            progress.error = error
            raise
        return progress.observe(results)

    profile_stop = profile_start

    @hookimpl(wrapper=True, trylast=True)
    def profile_step(self, capture: CaptureRecord) -> Generator[None, list[Any], list[Any]]:
        """Store the exception if the call raises one."""
        try:
            return (yield)
        except BaseException as error:
            self.progress_by_capture[capture] = CallProgress(error=error)
            raise


def is_observer(implementation: pluggy.HookImpl) -> bool:
    """Return whether an implementation belongs to a `CallObserver`, which records return values."""
    return isinstance(implementation.plugin, CallObserver)


class PluginManager(pluggy.PluginManager):
    """The plugins of this process."""

    def __init__(self) -> None:
        super().__init__(NAMESPACE)
        self.add_hookspecs(Hooks)
        self.global_plugins: dict[str, RegisteredPlugin] = {}
        """Plugins that are called for all captures of this process, by name."""
        self.generation = 0
        """Number of changes of `global_plugins`. Selections of an earlier generation are outdated."""
        self.progress_by_capture: dict[CaptureRecord, CallProgress] = {}
        """Progress of implementations whose call is in progress."""
        self._observer = CallObserver(self.progress_by_capture)
        self._mutex = threading.RLock()
        self._numbers = itertools.count()
        # Filled by finalizers, which may run while pluggy iterates over its plugins.
        self._expired: deque[RegisteredPlugin] = deque()
        self._backends: weakref.WeakKeyDictionary[type[Backend], _BackendClass] = weakref.WeakKeyDictionary()

    def add(
        self, name: str, functions: Iterable[tuple[Implementation, Callable[..., Any]]], source: object = None
    ) -> RegisteredPlugin:
        """Register functions as one plugin."""
        hooks: dict[str, Callable[..., Any]] = {}
        wrappers: dict[str, Callable[..., Any]] = {}
        for item, function in functions:
            isolated = _isolated(name, function) if item.hook == "profiler_opened" else function
            (wrappers if item.wraps else hooks)[item.attribute] = isolated
        added = RegisteredPlugin(name, _plugin_object(name, hooks), _plugin_object(name, wrappers), source)
        with self._mutex:
            while self._expired:
                self._remove(self._expired.popleft())
            number = next(self._numbers)
            try:
                self.register(added.hooks, f"{name} {number}")
                self.register(added.wrappers, f"{name} {number} wrappers")
            except BaseException:  # for example, Ctrl-C during profiler_opened
                self._remove(added)
                raise
            # The wrapper that is registered last is the innermost. Calls of other threads always have one.
            observer, self._observer = self._observer, CallObserver(self.progress_by_capture)
            self.register(self._observer, f"observer {number}")
            self._unregister(observer)
        return added

    @property
    def execute(self) -> Callable[[str, list[pluggy.HookImpl], Mapping[str, Any], bool], Any]:
        """The internal function of pluggy that calls a given list of hook implementations.

        ``subset_hook_caller`` is not used, because it would also call plugins that are registered later.
        """
        return self._inner_hookexec

    def remove_with(self, owner: object, plugin: RegisteredPlugin) -> None:
        """Unregister a plugin some time after its owner is garbage-collected."""
        weakref.finalize(owner, self._expired.append, plugin).atexit = False

    def backend_class(self, cls: type[Backend]) -> _BackendClass:
        """Return the registration of a backend class; the first call registers it.

        Raises:
            BrokenPluginError: the class does not follow the hook specifications.
        """
        with self._mutex:
            if cls not in self._backends:
                self._backends[cls] = _BackendClass(self, cls)
            return self._backends[cls]

    def register_global(self, plugin: object, name: str | None = None) -> str:
        """Validate and register an object that is called for all captures of this process; return its name.

        Raises:
            BrokenPluginError: the object does not follow the hook specifications, or the name is in use.
        """
        name = name or listener_name(plugin)
        with self._mutex:
            if name in self.global_plugins:
                raise BrokenPluginError(
                    f"A plugin '{name}' is already registered. Unregister it, or choose another name."
                )
            if registered := [other_name for other_name, item in self.global_plugins.items() if item.source is plugin]:
                raise BrokenPluginError(f"The plugin '{name}' is already registered as '{registered[0]}'.")
            self.global_plugins[name] = self.add_object(name, plugin)
            self.generation += 1  # last: a selection of this generation includes the plugin
        return name

    def unregister_global(self, name: str) -> None:
        """Unregister an object that was registered with `register_global`.

        Raises:
            PluginError: no plugin has this name.
        """
        with self._mutex:
            if name not in self.global_plugins:
                registered = ", ".join(self.global_plugins) or "none"
                raise PluginError(f"No plugin '{name}' is registered. Registered: {registered}.")
            plugin = self.global_plugins.pop(name)
            self.generation += 1
            self._remove(plugin)

    def add_object(self, name: str, plugin: object) -> RegisteredPlugin:
        """Validate an object and register its hook implementations.

        Raises:
            BrokenPluginError: the object does not follow the hook specifications.
        """
        implemented = check_hooks("listener", name, plugin)
        if not implemented:
            raise BrokenPluginError(
                f"The listener '{name}' implements no hook. Mark its methods with @profdeck.hookimpl; the hooks are "
                f"{', '.join(hook_names())}."
            )
        return self.add(name, [(item, getattr(plugin, item.attribute)) for item in implemented], plugin)

    def _remove(self, plugin: RegisteredPlugin) -> None:
        self._unregister(plugin.hooks)
        self._unregister(plugin.wrappers)

    def _unregister(self, plugin: object) -> None:
        if self.is_registered(plugin):
            self.unregister(plugin)


@functools.cache
def plugin_manager() -> PluginManager:
    """Return the plugin manager of this process."""
    return PluginManager()


def _isolated(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that logs exceptions instead of raising them.

    After an exception, pluggy would skip the remaining plugins of a historic call, and raise again at each later
    registration.
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BaseException as error:  # a plugin must not prevent the job
            if is_interruption(error):
                raise
            logger.warning("The plugin %s failed at profiler_opened: %s", name, describe_error(error))

    return call


def _plugin_object(name: str, functions: dict[str, Callable[..., Any]]) -> PluginObject:
    methods = {attribute: staticmethod(function) for attribute, function in functions.items()}
    cls: type[PluginObject] = type("PluginHooks", (PluginObject,), methods)
    return cls(name)


_BackendsByCapture: TypeAlias = "weakref.WeakKeyDictionary[CaptureRecord, weakref.ref[Backend]]"


class _BackendClass:
    """Registration of a backend class: forwards each hook call to the backend that records the capture.

    A process has one backend per role, per target and per request. Registering each of them would take 1 ms and keep
    it alive.
    """

    def __init__(self, manager: PluginManager, cls: type[Backend]) -> None:
        self.backends: _BackendsByCapture = weakref.WeakKeyDictionary()
        functions = [(item, _forwarding(self.backends, item)) for item in check_backend(cls)]
        self.plugin = manager.add(cls.name, functions)
        manager.remove_with(cls, self.plugin)


def _forwarding(backends: _BackendsByCapture, item: Implementation) -> Callable[..., Any]:
    """Return a function with the arguments of a hook that calls the implementation of the capture's backend."""
    attribute = item.attribute
    arguments = ("capture", "step", "plugin_name") if item.hook == "profile_step" else ("capture", "plugin_name")
    accepted = [arguments.index(name) for name in item.parameters]

    def forward(capture: CaptureRecord, plugin_name: str) -> Any:
        values = capture, plugin_name
        return getattr(backends[capture](), attribute)(*[values[index] for index in accepted])

    def forward_step(capture: CaptureRecord, step: object, plugin_name: str) -> Any:
        values = capture, step, plugin_name
        return getattr(backends[capture](), attribute)(*[values[index] for index in accepted])

    def wrap(capture: CaptureRecord, plugin_name: str) -> Any:
        return (yield from forward(capture, plugin_name))

    def wrap_step(capture: CaptureRecord, step: object, plugin_name: str) -> Any:
        return (yield from forward_step(capture, step, plugin_name))

    function: Callable[..., Any]
    if item.hook == "profile_step":
        function = wrap_step if item.wraps else forward_step
    else:
        function = wrap if item.wraps else forward
    setattr(function, HOOK_OPTIONS, {**item.options, "specname": item.hook})
    return function
