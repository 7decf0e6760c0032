"""Lists, imports and checks entry points of installed distributions."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeVar

from profdeck_traces.base.errors import BrokenPluginError, PluginError, UnknownPluginError, did_you_mean

T = TypeVar("T")
logger = logging.getLogger("profdeck")

TRACE_NAMES = "profdeck.trace_names"
"""Entry-point group of patterns that match the names of engine iterations in traces."""


def installed(group: str) -> dict[str, metadata.EntryPoint]:
    """Return a group's entry points by name, without importing them.

    If several distributions use the same name, profdeck's entry point takes precedence. Distributions are searched
    again if `sys.path` has changed since the last call.
    """
    points: dict[str, metadata.EntryPoint] = {}
    for point in _all_points(metadata.entry_points, tuple(sys.path)).select(group=group):
        # Read a distribution's name only if there is a conflict, because this requires parsing its metadata.
        if point.name not in points or not _is_own(points[point.name]):
            points[point.name] = point
    return dict(sorted(points.items()))


@functools.lru_cache(maxsize=1)
def _all_points(read: Callable[[], metadata.EntryPoints], _path: tuple[str, ...]) -> metadata.EntryPoints:
    return read()


def _is_own(point: metadata.EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == "profdeck"


def load(group: str, name: str) -> Any:
    """Import the object behind an entry point.

    Raises:
        UnknownPluginError: No distribution provides an entry point with this name.
        MissingLibraryError: A library that the module requires is not installed.
        BrokenPluginError: The import fails.
    """
    points = installed(group)
    if name not in points:
        kind, listed = _kind(group), ", ".join(points) or "none"
        raise UnknownPluginError(f"There is no {kind} '{name}'.{did_you_mean(name, points)} Installed: {listed}.")
    return _load(points[name])


def load_instances(group: str, cls: type[T]) -> list[T]:
    """Load the objects of an entry-point group, sorted by name. Skip broken plugins with a warning."""
    loaded = []
    for point in installed(group).values():
        try:
            loaded.append(check_instance(point, _load(point), cls))
        except PluginError as error:
            logger.warning("%s The plugin is ignored.", error)
    return loaded


def check_instance(point: metadata.EntryPoint, value: object, cls: type[T]) -> T:
    """Return `value`, the object of an entry point, if it is an instance of `cls`.

    Raises:
        BrokenPluginError: `value` is not an instance of `cls`.
    """
    if not isinstance(value, cls):
        raise BrokenPluginError(
            f"The entry point '{point.name}' in {point.group} must be an instance of "
            f"{cls.__module__}.{cls.__name__}, got {value!r}."
        )
    return value


def _load(point: metadata.EntryPoint) -> Any:
    try:
        return point.load()
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
        raise BrokenPluginError(
            f"The {_kind(point.group)} '{point.name}' of {package} fails to import ({point.value}): "
            f"{type(error).__name__}: {error}. Correct, reinstall or remove that package."
        ) from error


def _kind(group: str) -> str:
    return group.rpartition(".")[2].rstrip("s")
