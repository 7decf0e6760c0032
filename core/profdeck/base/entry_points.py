"""Finds and imports what distributions offer under a name: entry points, by group."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any, TypeVar

from profdeck.base.errors import BrokenPluginError, PluginError, UnknownPluginError, nearest

T = TypeVar("T")
logger = logging.getLogger("profdeck")


def installed(group: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of a group by name, without importing any of them."""
    return {point.name: point for point in sorted(metadata.entry_points(group=group), key=lambda p: p.name)}


def load(group: str, name: str) -> Any:
    """Import the object behind an entry point.

    Raises:
        UnknownPluginError: no distribution offers that name.
        BrokenPluginError: the import fails.
    """
    kind = group.rpartition(".")[2].rstrip("s")
    found = installed(group)
    if name not in found:
        listed = ", ".join(found) or "none"
        raise UnknownPluginError(f"There is no {kind} '{name}'.{nearest(name, found)} Installed: {listed}.")
    try:
        return found[name].load()
    except Exception as error:
        origin = found[name].dist
        package = f"{origin.name} {origin.version}" if origin else "an unknown distribution"
        raise BrokenPluginError(
            f"The {kind} '{name}' of {package} fails to import ({found[name].value}): "
            f"{type(error).__name__}: {error}. Reinstall or remove that package."
        ) from error


def load_instance(group: str, name: str, cls: type[T]) -> T:
    """Import the object behind an entry point, and check its class.

    Raises:
        UnknownPluginError: no distribution offers that name.
        BrokenPluginError: the import fails, or the object is not an instance of the class.
    """
    found = load(group, name)
    if not isinstance(found, cls):
        raise BrokenPluginError(
            f"The entry point '{name}' of {group} is {found!r}. "
            f"Expected an instance of {cls.__module__}.{cls.__name__}."
        )
    return found


def load_instances(group: str, cls: type[T]) -> list[T]:
    """Import the objects of a group, sorted by name. Log a warning for each broken plugin, and skip it."""
    loaded = []
    for name in installed(group):
        try:
            loaded.append(load_instance(group, name, cls))
        except PluginError as error:
            logger.warning("%s It is ignored.", error)
    return loaded
