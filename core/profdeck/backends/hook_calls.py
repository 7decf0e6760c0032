"""The hook calls of one role."""

from __future__ import annotations

import inspect
import traceback
import weakref
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, Self

import attrs
import pluggy

from profdeck.backends.api import Backend
from profdeck.backends.plugin_manager import (
    CallProgress,
    PluginManager,
    PluginObject,
    RegisteredPlugin,
    is_observer,
    plugin_manager,
)
from profdeck.backends.plugins import RECORDING_HOOKS
from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.base.interrupts import is_interruption
from profdeck.base.operations import Operation
from profdeck.records.capture import CaptureRecord, Step
from profdeck_traces.base.errors import PluginError, ProfdeckError, describe_error


@attrs.frozen(eq=False)
class HookCall:
    """One plugin's call of one hook, with the wrappers of all participating plugins around it."""

    plugin: RegisteredPlugin
    is_backend: bool
    role: RoleHooks
    hook: str
    implementations: list[pluggy.HookImpl]
    """The plugin's implementations and the wrappers, without those of plugins that are registered later."""
    manager: PluginManager
    generation: int
    """The manager's generation for which the implementations were selected."""

    def select(self) -> list[pluggy.HookImpl]:
        """Return the plugin's implementations and all currently registered wrappers.

        Raises:
            PluginError: the plugin was unregistered.
        """
        if self.generation == self.manager.generation:
            return self.implementations
        if (call := self.role.current_call(self)) is None:
            raise PluginError(f"The plugin was unregistered before {self} was called.")
        return call.implementations

    def report_step(self, capture: CaptureRecord, step: Step) -> list[Any]:
        """Call ``profile_step`` and return the results, which may be awaitables.

        Raises:
            BaseException: the implementation or a wrapper raised an error.
            CaptureError: a wrapper suppressed the implementation's error.
            PluginError: a wrapper did not return a list, or the plugin was unregistered.
        """
        arguments = {"capture": capture, "step": step, "plugin_name": self.plugin.name}
        try:
            results = self.manager.execute(self.hook, self.select(), arguments, False)  # noqa: FBT003  # pluggy signature
        except GeneratorExit as error:  # would otherwise close this operation's generator
            raise PluginError(f"{self}: {describe_error(error)}") from error
        finally:
            failed = self.manager.progress_by_capture.pop(capture, None)
        if failed is not None and failed.error is not None:
            reason = describe_error(failed.error).rstrip(".")
            raise CaptureError(f"{reason}. A wrapper suppressed this error.") from failed.error
        return self.check_results(results)

    def check_results(self, results: Any) -> list[Any]:
        """Return a call's results after checking that they are a list.

        Raises:
            PluginError: a wrapper did not return a list.
        """
        if not isinstance(results, list):
            raise PluginError(
                f"A wrapper around {self} returned {results!r} instead of the results. "
                "End the wrapper with 'return results', where results is the value of its yield."
            )
        return results

    def failed_wrapper(self, error: BaseException) -> str | None:
        """Return the name of the plugin whose wrapper raised an error; None if no wrapper is known to have failed."""
        plugins = {code: item.plugin for item in self.implementations for code in _codes(item.function)}
        frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        plugin = next((plugins[code] for code in reversed(frames) if code in plugins), None)
        return plugin.plugin_name if isinstance(plugin, PluginObject) and plugin is not self.plugin.hooks else None

    def __str__(self) -> str:
        return f"{self.hook} of {self.plugin.name}"


def _codes(function: object) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions that it defines."""
    codes = [getattr(function, "__code__", None)]
    while codes:
        if isinstance(code := codes.pop(), CodeType):
            yield code
            codes.extend(code.co_consts)


@attrs.define(eq=False)
class Invocation:
    """One call of ``profile_start`` or ``profile_stop``, as a context manager.

    Exiting the context closes all awaitables that were not awaited.
    """

    call: HookCall
    progress: CallProgress | None = None
    """The progress of the implementation; None if it was not called."""

    def run(self, capture: CaptureRecord) -> Operation[list[Any]]:
        """Call the hook, yield its awaitables and return the results.

        Raises:
            BaseException: the implementation or a wrapper raised an error.
            CaptureError: a wrapper suppressed the implementation's error or discarded its awaitable.
        """
        call, manager = self.call, self.call.manager
        arguments = {"capture": capture, "plugin_name": call.plugin.name}
        implementations = call.select()
        try:
            # The call is inlined to keep tracebacks short (see test_start_adds_few_stack_frames).
            results = manager.execute(call.hook, implementations, arguments, False)  # noqa: FBT003  # pluggy signature
        except GeneratorExit as error:  # as in `report_step`
            raise PluginError(f"{call}: {describe_error(error)}") from error
        finally:
            self.progress = manager.progress_by_capture.pop(capture, None)
        results = call.check_results(results)
        for index, result in enumerate(results):
            if inspect.isawaitable(result):
                results[index] = yield result
        if self.progress is None or self.progress.results is None:
            raise CaptureError(f"{call} did not return; a wrapper suppressed its error.")
        if self.progress.pending:
            raise CaptureError(f"{call} was not awaited; a wrapper discarded its awaitable.")
        return results

    def run_to_completion(self, capture: CaptureRecord) -> Operation[list[Any]]:
        """Call the hook as `run` does, but complete the implementation even if a wrapper fails.

        Raises:
            BaseException: the error that `run` raised. It is raised again after the implementation has completed.
        """
        try:
            return (yield from self.run(capture))
        except GeneratorExit:  # nothing can be awaited any more
            raise
        except BaseException:
            try:
                if self.progress is None:
                    self._call_without_wrappers(capture)
                if self.progress is not None:
                    for awaitable in self.progress.pending[:]:
                        if not awaitable.started:
                            yield awaitable
            except BaseException as error:
                if is_interruption(error):
                    raise
                # `describe` reports this error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for awaitable in self.progress.pending if self.progress else ():
            awaitable.abandon()

    def describe(self, error: BaseException) -> str:
        """Return the reason of a failure. It names the plugin whose implementation or wrapper failed."""
        if self.raised(error):
            return f"{self.call}: {describe_error(error)}"
        wrapper = self.call.failed_wrapper(error)
        if wrapper is None and isinstance(error, ProfdeckError) and str(self.call) in str(error):  # raised by `run`
            return str(error)
        subject = f"The wrapper of {wrapper}" if wrapper else "A wrapper"
        reason = f"{subject} failed around {self.call}: {describe_error(error)}"
        if self.progress is None or self.progress.error is None:
            return reason
        return f"{reason}. {self.call} failed: {describe_error(self.progress.error)}"

    def raised(self, error: BaseException) -> bool:
        """Return whether the implementation raised an error, or one of its awaitables did."""
        return self.progress is not None and self.progress.error is error

    @property
    def completed(self) -> bool:
        """True if the implementation has returned and its awaitables have completed."""
        return self.progress is not None and self.progress.results is not None and not self.progress.pending

    def _call_without_wrappers(self, capture: CaptureRecord) -> None:
        call, manager = self.call, self.call.manager
        unwrapped = [item for item in call.implementations if item.plugin is call.plugin.hooks or is_observer(item)]
        arguments = {"capture": capture, "plugin_name": call.plugin.name}
        try:
            manager.execute(call.hook, unwrapped, arguments, False)  # noqa: FBT003  # pluggy signature
        finally:
            self.progress = manager.progress_by_capture.pop(capture, None)


class RoleHooks:
    """The hook calls of one role: of its backend, its listeners and the globally registered plugins."""

    def __init__(
        self, cls: type[Backend], listeners: Iterable[tuple[str, object]] = (), *, role: RoleHooks | None = None
    ) -> None:
        """Validate and register the backend class and the listeners.

        Args:
            cls: the class of the backend.
            listeners: names and objects.
            role: for the targets of a role, the hook calls of the role. Its listeners are not called for each target,
                but their wrappers are.

        Raises:
            BrokenPluginError: a plugin does not follow the hook specifications.
        """
        self._manager = manager = plugin_manager()
        self._backend = manager.backend_class(cls)
        self._role = role  # a reference keeps the role's listeners registered
        self._listeners: list[RegisteredPlugin] = [] if role is None else role._listeners  # noqa: SLF001
        self._generation = -1
        self._calls: dict[str, tuple[HookCall, ...]] = {}
        for name, listener in listeners:
            plugin = manager.add_object(name, listener)
            manager.remove_with(self, plugin)
            self._listeners.append(plugin)

    def bind(self, capture: CaptureRecord, backend: Backend) -> None:
        """Record a capture with a backend, which the caller must keep alive."""
        self._backend.backends[capture] = weakref.ref(backend)

    def open(self, role: str, identity: Identity, backend_name: str) -> None:
        """Call ``profiler_opened``."""
        self._manager.hook.profiler_opened.call_historic(
            kwargs={"role": role, "identity": identity, "backend_name": backend_name}
        )

    def calls(self, hook: str) -> tuple[HookCall, ...]:
        """Return one call per plugin that implements a hook, in order."""
        if self._generation != self._manager.generation:
            generation = self._manager.generation
            self._calls = {name: self._select(name, generation) for name in RECORDING_HOOKS}
            self._generation = generation
        return self._calls[hook]

    def current_call(self, call: HookCall) -> HookCall | None:
        """Return the call that replaces a call of an earlier generation; None if the plugin was unregistered."""
        return next((item for item in self.calls(call.hook) if item.plugin is call.plugin), None)

    def _select(self, hook: str, generation: int) -> tuple[HookCall, ...]:
        manager, backend = self._manager, self._backend.plugin
        # An object can be both a listener of the role and registered globally. Call such an object once.
        sources = {id(plugin.source) for plugin in self._listeners}
        global_plugins = [plugin for plugin in manager.global_plugins.values() if id(plugin.source) not in sources]
        plugins = [*self._listeners, *global_plugins, backend]
        wrappers = {plugin.wrappers for plugin in plugins}
        called = {plugin.hooks: plugin for plugin in (plugins if self._role is None else [backend])}
        implemented = getattr(manager.hook, hook).get_hookimpls()

        def rank(item: pluggy.HookImpl) -> int:
            return 0 if item.tryfirst else 3 if item.trylast else 1 if item.plugin is backend.hooks else 2

        ordered = sorted((item for item in reversed(implemented) if item.plugin in called), key=rank)
        return tuple(
            HookCall(
                called[hooks],
                hooks is backend.hooks,
                self,
                hook,
                [item for item in implemented if item.plugin is hooks or item.plugin in wrappers or is_observer(item)],
                manager,
                generation,
            )
            for hooks in dict.fromkeys(item.plugin for item in ordered)
        )
