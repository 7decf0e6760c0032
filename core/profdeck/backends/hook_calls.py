"""The hook calls of one role."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Iterable
from typing import Any

import attrs
import pluggy

from profdeck.backends.api import Backend
from profdeck.backends.plugin_manager import PluginManager, RegisteredPlugin, Returned, Witness, plugin_manager
from profdeck.backends.plugins import RECORDING_HOOKS
from profdeck.base.blocking import Resolve
from profdeck.base.errors import CaptureError, PluginError, describe
from profdeck.base.identity import Identity
from profdeck.base.interruptions import raise_of_signal
from profdeck.records.capture import Capture

logger = logging.getLogger("profdeck")


@attrs.frozen(eq=False)
class HookCall:
    """One plugin's call of one hook, with the wrappers of all participating plugins around it."""

    plugin: RegisteredPlugin
    is_backend: bool
    role: RoleHooks
    caller: pluggy.HookCaller
    manager: PluginManager
    generation: int
    """The manager's generation for which the caller was selected."""

    def results(self, **arguments: Any) -> list[Any]:
        """Call the hook and return the results, which may be awaitables.

        Raises:
            PluginError: a wrapper does not return a list.
        """
        is_current = self.generation == self.manager.generation
        caller = self.caller if is_current else self.role.current_caller(self)
        results = caller(plugin_name=self.plugin.name, **arguments) if caller else []
        if not isinstance(results, list):
            raise PluginError(
                f"A wrapper around {self.caller.name} returned {results!r} instead of the results. End it with "
                "'return results', where results is the value of its yield."
            )
        return results


@attrs.define(eq=False)
class Invocation:
    """One call of ``profile_start`` or ``profile_stop``."""

    call: HookCall
    returned: Returned | None = None
    """The return values of the implementation; None if it did not return."""

    async def run(self, capture: Capture, resolve: Resolve) -> list[Any]:
        """Call the hook and await its results.

        Raises:
            BaseException: from the implementation or a wrapper.
            CaptureError: a wrapper hides that the implementation failed or was not awaited.
        """
        try:
            try:
                results = self.call.results(capture=capture)
            finally:
                self.returned = self.call.manager.returned.pop(capture, None)
            for index, result in enumerate(results):
                if inspect.isawaitable(result):
                    results[index] = await resolve(result)
        finally:
            for awaitable in self.returned.pending if self.returned else ():
                awaitable.close()
        name = f"{self.call.caller.name} of {self.call.plugin.name}"
        if self.returned is None:
            raise CaptureError(f"{name} did not return; a wrapper suppressed its error.")
        if self.returned.pending:
            raise CaptureError(f"{name} was not awaited; a wrapper discarded its awaitable.")
        return results

    @property
    def completed(self) -> bool:
        """Whether the implementation has returned and its awaitables have completed."""
        return self.returned is not None and not self.returned.pending


class RoleHooks:
    """The hook calls of one role: of its backend, its listeners and the plugins that participate everywhere."""

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
        self._role = role  # its listeners are registered as long as it lives
        self._listeners: list[RegisteredPlugin] = [] if role is None else role._listeners  # noqa: SLF001
        self._generation = -1
        self._calls: dict[str, tuple[HookCall, ...]] = {}
        for name, listener in listeners:
            if all(plugin.source is not listener for plugin in manager.everywhere.values()):
                plugin = manager.add_object(name, listener)
                manager.remove_with(self, plugin)
                self._listeners.append(plugin)

    def bind(self, capture: Capture, backend: Backend) -> None:
        """Record a capture with a backend, which the caller must keep alive."""
        self._backend.backends[capture] = weakref.ref(backend)

    def open(self, role: str, identity: Identity, backend_name: str) -> None:
        """Call ``profiler_opened``; a failure is logged."""
        try:
            self._manager.hook.profiler_opened.call_historic(
                kwargs={"role": role, "identity": identity, "backend_name": backend_name}
            )
        except Exception as error:  # noqa: BLE001  # a plugin must not prevent the job
            raise_of_signal(error)
            logger.warning("A plugin failed at profiler_opened: %s", describe(error))

    def calls(self, hook: str) -> tuple[HookCall, ...]:
        """Return one call per plugin that implements a hook, in order."""
        if self._generation != self._manager.generation:
            generation = self._manager.generation
            self._calls = {name: self._select(name, generation) for name in RECORDING_HOOKS}
            self._generation = generation
        return self._calls[hook]

    def current_caller(self, call: HookCall) -> pluggy.HookCaller | None:
        """Return the caller for a call that precedes a registration; None if the plugin was unregistered."""
        return next((item.caller for item in self.calls(call.caller.name) if item.plugin is call.plugin), None)

    def _select(self, hook: str, generation: int) -> tuple[HookCall, ...]:
        manager, backend = self._manager, self._backend.plugin
        plugins = [*self._listeners, *manager.everywhere.values(), backend]
        wrappers = {plugin.wrappers for plugin in plugins}
        called = {plugin.hooks: plugin for plugin in (plugins if self._role is None else [backend])}
        implemented = getattr(manager.hook, hook).get_hookimpls()[::-1]
        excluded = {
            item.plugin for item in implemented if item.plugin not in wrappers and not isinstance(item.plugin, Witness)
        }

        def rank(item: pluggy.HookImpl) -> int:
            return 0 if item.tryfirst else 3 if item.trylast else 1 if item.plugin is backend.hooks else 2

        chosen = sorted((item for item in implemented if item.plugin in called), key=rank)
        return tuple(
            HookCall(
                called[hooks],
                hooks is backend.hooks,
                self,
                manager.subset_hook_caller(hook, excluded - {hooks}),
                manager,
                generation,
            )
            for hooks in dict.fromkeys(item.plugin for item in chosen)
        )
