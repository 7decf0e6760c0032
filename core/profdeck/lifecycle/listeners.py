"""The listeners of a role: names from the config and objects passed by the host."""

from __future__ import annotations

from collections.abc import Iterable

from profdeck.backends.api import Backend, EngineBackend
from profdeck.backends.hook_calls import RoleHooks
from profdeck.backends.plugins import LISTENERS, implementations, listener_name, load_listener
from profdeck.config.model import Config
from profdeck_traces.base.entry_points import load


def role_hooks(backend: Backend, config: Config, objects: Iterable[object]) -> RoleHooks:
    """Return the hook calls of a role.

    Args:
        backend: the backend of the role.
        config: the config, which names listeners.
        objects: further listeners.

    Raises:
        PluginError: a plugin cannot be loaded or does not follow the hook specifications.
    """
    configured = [(name, load_listener(name, config.listener_options.get(name, {}))) for name in config.listeners]
    hooks = RoleHooks(type(backend), [*configured, *((listener_name(item), item) for item in objects)])
    if isinstance(backend, EngineBackend):
        from profdeck.replicas.fleet_backend import FleetBackend

        if isinstance(backend, FleetBackend):
            backend.use_hooks(hooks)
    return hooks


def is_notified_at_the_finish(name: str) -> bool:
    """Return whether a listener implements ``capture_finished``."""
    plugin = load(LISTENERS, name)
    return any(item.hook == "capture_finished" and not item.wraps for item in implementations(plugin))
