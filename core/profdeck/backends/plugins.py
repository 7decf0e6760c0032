"""Loads plugins by entry point, and validates them against the hook specifications."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, cast

import attrs
import pluggy

from profdeck.backends.api import Backend
from profdeck.backends.hookspecs import HOOKSPEC_VERSION, NAMESPACE, SUPPORTED_VERSIONS, Hooks
from profdeck.config.options import COMMON_OPTIONS, CommonOptions
from profdeck.config.structuring import structure
from profdeck_traces.base.entry_points import installed, load
from profdeck_traces.base.errors import (
    BrokenPluginError,
    ConfigError,
    PluginError,
    UnknownPluginError,
    describe_error,
    did_you_mean,
)

BACKENDS = "profdeck.backends"
LISTENERS = "profdeck.listeners"

RECORDING_HOOKS = ("profile_start", "profile_step", "profile_stop")
HOOK_OPTIONS = f"{NAMESPACE}_impl"
"""Attribute in which pluggy stores the options of a hook implementation."""
_REQUIRED_HOOKS = ("profile_start", "profile_stop")

_specifications = pluggy.PluginManager(NAMESPACE)
_specifications.add_hookspecs(Hooks)


@attrs.frozen
class Implementation:
    """One hook implementation or wrapper of a plugin."""

    attribute: str
    hook: str
    parameters: tuple[str, ...]
    wraps: bool
    options: dict[str, Any]


def implementations(plugin: object) -> Iterator[Implementation]:
    """Yield the hook implementations of an object, a module or a class."""
    for attribute in dir(plugin):
        static = inspect.getattr_static(plugin, attribute, None)
        options = getattr(getattr(static, "__func__", static), HOOK_OPTIONS, None)
        if isinstance(options, dict):
            is_method = inspect.isclass(plugin) and inspect.isfunction(static)
            function = MethodType(static, plugin) if is_method else getattr(plugin, attribute)
            implementation = pluggy.HookImpl(plugin, "", function, cast("Any", options))
            yield Implementation(
                attribute,
                options.get("specname") or attribute,
                (*implementation.argnames, *implementation.kwargnames),
                bool(implementation.wrapper or implementation.hookwrapper),
                options,
            )


def check_hooks(kind: str, name: str, plugin: object) -> list[Implementation]:
    """Check a plugin against the hook specifications and return its implementations.

    Args:
        kind: ``backend``, ``listener`` or ``plugin``, for messages.
        name: the plugin's name.
        plugin: an object, a module or a class.

    Raises:
        BrokenPluginError: the plugin does not follow the hook specifications.
    """
    if kind == "listener":
        _require_object(name, plugin)
    version = getattr(plugin, "hookspec_version", HOOKSPEC_VERSION)
    if version not in SUPPORTED_VERSIONS:
        raise BrokenPluginError(
            f"The {kind} '{name}' was built for version {version} of profdeck's hooks; this version of profdeck "
            f"supports {', '.join(map(str, SUPPORTED_VERSIONS))}. Install a matching version of one of them."
        )
    implemented = []
    for item in implementations(plugin):
        caller: pluggy.HookCaller | None = getattr(_specifications.hook, item.hook, None)
        if caller is None or caller.spec is None:
            if item.options.get("optionalhook"):
                continue
            raise BrokenPluginError(
                f"The {kind} '{name}' implements '{item.hook}', which is not a hook of profdeck."
                f"{did_you_mean(item.hook, hook_names())} The hooks are {', '.join(hook_names())}."
            )
        accepted = tuple(caller.spec.argnames)
        if unknown := [argument for argument in item.parameters if argument not in accepted]:
            raise BrokenPluginError(
                f"The {kind} '{name}': {item.hook} has no argument {', '.join(map(repr, unknown))}."
                f"{did_you_mean(unknown[0], accepted)} Its arguments are {', '.join(accepted)}."
            )
        if item.wraps and not inspect.isgeneratorfunction(getattr(plugin, item.attribute)):
            raise BrokenPluginError(
                f"The {kind} '{name}': {item.attribute} is a wrapper and must be a generator with one yield."
            )
        if item.wraps and caller.is_historic():
            raise BrokenPluginError(
                f"The {kind} '{name}': {item.hook} is historic, and historic hooks have no wrappers."
            )
        implemented.append(item)
    return implemented


def _require_object(name: str, plugin: object) -> None:
    if isinstance(plugin, str):
        raise BrokenPluginError(
            f"The listener {plugin!r} is a string, not an object with hook implementations. Pass an object; names of "
            "installed listeners belong in the config key 'listeners'."
        )
    if isinstance(plugin, type):
        functions = (inspect.getattr_static(plugin, item.attribute) for item in implementations(plugin))
        if any(isinstance(function, FunctionType) for function in functions):
            raise BrokenPluginError(
                f"The listener '{name}' is a class, and its hooks need an instance. Pass {plugin.__name__}() instead "
                f"of {plugin.__name__}."
            )


def hook_names() -> tuple[str, ...]:
    """Return the names of all hooks."""
    return tuple(name for name in vars(Hooks) if not name.startswith("_"))


def load_backend(name: str) -> type[Backend]:
    """Import and validate a backend class. The backend's library does not need to be installed.

    Raises:
        PluginError: no distribution provides the backend, its import fails, or the class is not a usable backend.
    """
    cls = _load("backend", name)
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise BrokenPluginError(f"The backend '{name}' is {cls!r}, not a subclass of profdeck.Backend.")
    if getattr(cls, "name", None) != name:
        raise BrokenPluginError(
            f"The entry point '{name}' and the name of its backend differ: {cls.__name__}.name is "
            f"{getattr(cls, 'name', None)!r}. Give both the same name."
        )
    if not attrs.has(cls.Options):
        raise BrokenPluginError(f"The backend '{name}' has Options that are not an attrs class: {cls.Options!r}.")
    if not issubclass(cls.Options, CommonOptions):
        raise BrokenPluginError(
            f"The options of the backend '{name}' must extend profdeck.CommonOptions: class {cls.Options.__name__}"
            "(CommonOptions)."
        )
    check_backend(cls)
    return cls


def _load(kind: str, name: str) -> Any:
    groups = {"backend": BACKENDS, "listener": LISTENERS}
    group = groups.pop(kind)
    ((other_kind, other_group),) = groups.items()
    if name not in installed(group) and name in installed(other_group):
        key = "backend of a role" if other_kind == "backend" else "listeners"
        raise UnknownPluginError(
            f"'{name}' is a {other_kind}, not a {kind}. Its name belongs in the config key {key}. Installed {kind}s: "
            f"{', '.join(installed(group)) or 'none'}."
        )
    return load(group, name)


def check_backend(cls: type[Backend]) -> list[Implementation]:
    """Check that a class implements the hooks of a backend, and return its implementations.

    Raises:
        BrokenPluginError: the class does not implement the hooks, or its ``common_options`` are invalid.
    """
    implemented = check_hooks("backend", cls.name, cls)
    for hook in _REQUIRED_HOOKS:
        kinds = {item.wraps for item in implemented if item.hook == hook}
        if False not in kinds:
            only = " (only a wrapper)" if kinds else ""
            raise BrokenPluginError(
                f"The backend '{cls.name}' ({cls.__module__}.{cls.__qualname__}) has no implementation of {hook}"
                f"{only}. Mark a method {hook} with @profdeck.hookimpl."
            )
    if listener_hooks := [item.hook for item in implemented if item.hook not in RECORDING_HOOKS]:
        raise BrokenPluginError(
            f"The backend '{cls.name}' implements {', '.join(listener_hooks)}, which only listeners can implement. "
            "Move the method to a listener."
        )
    if unknown := sorted(set(cls.common_options) - COMMON_OPTIONS):
        raise BrokenPluginError(
            f"The backend '{cls.name}': common_options contains {', '.join(map(repr, unknown))}, which is not a common "
            f"option.{did_you_mean(unknown[0], COMMON_OPTIONS)} "
            f"The common options are {', '.join(sorted(COMMON_OPTIONS))}."
        )
    return implemented


def require_libraries(cls: type[Backend]) -> None:
    """Check that the libraries of a backend are installed in supported versions.

    Raises:
        MissingLibraryError: a library is not installed.
        IncompatibleLibraryError: a version is not supported.
    """
    for library in cls.libraries:
        library.require(cls.name)


def load_listener(name: str, options: Mapping[str, Any]) -> object:
    """Import a listener and create an instance if it is a class.

    Args:
        name: the name of its entry point.
        options: option values from the config, for the listener's class ``Options``.

    Raises:
        ConfigError: an option is invalid.
        PluginError: no distribution provides the listener, or it cannot be imported or created.
    """
    plugin = _load("listener", name)
    cls = listener_options(name, plugin)
    if cls is None and options:
        raise ConfigError(
            f"listener_options.{name}: this listener has no options. Remove the key. A listener that needs options "
            "defines a class Options."
        )
    arguments = () if cls is None else (structure(dict(options), cls, where=f"listener_options.{name}"),)
    try:
        return plugin(*arguments) if isinstance(plugin, type) else plugin
    except PluginError:
        raise
    except Exception as error:
        raise BrokenPluginError(f"The listener '{name}' cannot be created: {describe_error(error)}") from error


def listener_options(name: str, plugin: object) -> type | None:
    """Return the options class of an installed listener; None if it has none.

    Args:
        name: the name of the listener, for messages.
        plugin: the object of its entry point.

    Raises:
        BrokenPluginError: the options are not an attrs class, or the constructor has other arguments.
    """
    options = getattr(plugin, "Options", None)
    if options is not None and not (isinstance(plugin, type) and isinstance(options, type) and attrs.has(options)):
        raise BrokenPluginError(
            f"The listener '{name}' has Options, so it must be a class, and Options must be an attrs class."
        )
    if isinstance(plugin, type):
        try:
            signature = inspect.signature(plugin)
        except ValueError:  # constructors in C may have no signature
            return options
        try:
            signature.bind(*(() if options is None else (options,)))
        except TypeError as error:
            expected = (
                "Define a class Options, or remove the constructor's required arguments."
                if options is None
                else "A listener with Options requires a constructor __init__(self, options)."
            )
            raise BrokenPluginError(
                f"The listener '{name}' cannot be created: {plugin.__name__}{signature}: {error}. {expected}"
            ) from None
    return options


def listener_name(plugin: object) -> str:
    """Return the name of a listener that has no entry point."""
    return str(getattr(plugin, "__name__", None) or type(plugin).__name__)
