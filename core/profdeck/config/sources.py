"""Loads the config from its sources, in increasing precedence: defaults, file, environment, settings.

The sources are merged as plain data before validation. Each key has a recorded source, for error messages and for
`profdeck config show`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from profdeck.config.model import TOP_LEVEL_KEYS, Config
from profdeck.config.structuring import structure, unstructure
from profdeck_traces.base.documents import parse_yaml, read_document, shortened, show
from profdeck_traces.base.errors import ConfigError
from profdeck_traces.base.files import user_path

CONFIG_VARIABLE = "PROFDECK_CONFIG"
_PREFIX = "PROFDECK__"

Key = tuple[str, ...]


@attrs.frozen
class Loaded:
    """A validated config, and the source of each value."""

    config: Config
    sources: Mapping[Key, str]
    """Source of each key that was set, such as ``('roles', 'trainer', 'backend'): 'file a.yaml'``."""

    def source(self, key: Key) -> str:
        """Return the source of a key or of its closest parent; ``default`` if no source sets it."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.sources:
                return self.sources[key[:length]]
        return "default"

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Yield the dotted key, value and source of each config value, in the order of the models' fields."""
        for key, value in _leaves(unstructure(self.config)):
            yield ".".join(key), value, self.source(key)


@attrs.define
class ConfigDraft:
    """Config data before validation, and the source of each key."""

    data: dict[str, Any] = attrs.field(factory=dict)
    sources: dict[Key, str] = attrs.field(factory=dict)

    def set(self, dotted: str, value: Any, source: str) -> None:
        """Set the value of a dotted key, such as ``trainer.ranks``.

        Raises:
            ConfigError: the key does not fit the structure of the config.
        """
        _set_value(self.data, self.sources, _parse_key(dotted.split("."), self.data, dotted), value, source)

    def get(self, *key: str) -> Any:
        """Return the value of a key, or None if the key is not set."""
        value: Any = self.data
        for part in key:
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def checked(self) -> Loaded:
        """Return the validated config.

        Raises:
            ConfigError: a key or value is invalid.
        """
        return Loaded(structure(self.data, Config, where=""), self.sources)


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    settings_source: str = "call",
    environ: Mapping[str, str] = os.environ,
) -> Loaded:
    """Read, merge and validate the config. Takes the same arguments as `load_draft`.

    Raises:
        ConfigError: a file cannot be read, or a key or value is invalid.
    """
    return load_draft(path, settings=settings, settings_source=settings_source, environ=environ).checked()


def load_draft(
    path: str | os.PathLike[str] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    settings_source: str = "call",
    environ: Mapping[str, str] = os.environ,
) -> ConfigDraft:
    """Read and merge the config without validating it.

    Args:
        path: a YAML or TOML file. Default: the file that ``PROFDECK_CONFIG`` names, if any.
        settings: values by dotted key, such as ``{"trainer.options.record_shapes": True}``. These values override
            all other sources.
        settings_source: the source that ``sources`` records for these settings.
        environ: the environment in which ``PROFDECK_CONFIG`` and ``PROFDECK__...`` are looked up.

    Raises:
        ConfigError: a file cannot be read, or a setting does not fit the structure of the config.
    """
    draft = ConfigDraft()
    file = path or environ.get(CONFIG_VARIABLE)
    if file:
        source = f"file {file}" if path else f"file {file} ({CONFIG_VARIABLE})"
        for key, value in _leaves(_read(user_path(file, None if path else CONFIG_VARIABLE))):
            _set_value(draft.data, draft.sources, key, value, source)
    for name, text in sorted(environ.items()):
        if name.startswith(_PREFIX):
            key = _parse_key([part.lower() for part in name[len(_PREFIX) :].split("__")], draft.data, name)
            _set_value(draft.data, draft.sources, key, _parse_value(text, name), f"environment {name}")
    for dotted, value in (settings or {}).items():
        draft.set(dotted, value, settings_source)
    return draft


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse a setting such as ``trainer.options.record_shapes=true`` into its dotted key and its value.

    Raises:
        ConfigError: the key is missing, or the value is not valid YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: expected key=value, such as trainer.options.record_shapes=true.")
    return key.strip(), _parse_value(value, f"--set {key}")


def settings_environ(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that pass settings to another process."""
    return {_PREFIX + key.replace(".", "__").upper(): json.dumps(value) for key, value in settings.items()}


def _read(path: Path) -> dict[str, Any]:
    data = read_document(path)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(data).__name__}.")
    return data


def _parse_value(text: str, where: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError:
        raise ConfigError(
            f"{where}: {shortened(repr(text))} is not valid YAML. Quote the value, or write a list as [a, b]."
        ) from None


def _parse_key(parts: list[str], data: Mapping[str, Any], where: str) -> Key:
    """Expand ``trainer.x`` to ``roles.trainer.x``.

    Names of existing roles match regardless of case, because the names of environment variables are in upper case.
    """
    if not all(parts):
        raise ConfigError(f"{where}: the key has an empty part. Expected a key such as trainer.backend.")
    if parts[0] not in TOP_LEVEL_KEYS:
        parts = ["roles", *parts]
    if parts[0] == "roles" and len(parts) > 1:
        roles = data.get("roles")
        names = roles if isinstance(roles, Mapping) else {}
        parts[1] = next((role for role in names if str(role).lower() == parts[1].lower()), parts[1])
        if len(parts) == 2:  # noqa: PLR2004  # roles and one name: a role without a key
            raise ConfigError(
                f"{where}: '{parts[1]}' is not a key of the config. Expected one of {', '.join(TOP_LEVEL_KEYS)}, "
                f"or a key of a role, such as {parts[1]}.backend."
            )
    return tuple(parts)


def _set_value(data: dict[str, Any], sources: dict[Key, str], key: Key, value: Any, source: str) -> None:
    mapping = data
    for part in key[:-1]:
        child = mapping.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(
                f"{'.'.join(key)} ({source}): cannot be set, because '{part}' is {show(child)}, not a mapping."
            )
        mapping = child
    mapping[key[-1]] = value
    sources[key] = source


def _leaves(data: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    for name, value in data.items():
        key = (*prefix, name)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key)
        else:
            yield key, value
