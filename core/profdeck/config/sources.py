"""Where config values come from: defaults < file < environment < call or command line.

The layers are merged as plain data, each value remembering its source, and only then checked: an error can name
the place that is wrong, and `profdeck config show` can say where every value came from.
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

CONFIG_VARIABLE = "PROFDECK_CONFIG"
_PREFIX = "PROFDECK__"

Key = tuple[str, ...]


@attrs.frozen
class Loaded:
    """A checked config and the source of every value in it."""

    config: Config
    sources: Mapping[Key, str]
    """The source of each key that was given, such as ``('roles', 'trainer', 'backend'): 'file a.yaml'``."""

    def source(self, key: Key) -> str:
        """Return where the value of a key came from; ``default`` when nothing gave it."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.sources:
                return self.sources[key[:length]]
        return "default"

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Yield dotted key, value and source of every value of the config, in the order of the models."""
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
            ConfigError: it has no place in the config.
        """
        _put(self.data, self.sources, _key(dotted.split("."), self.data, dotted), value, source)

    def get(self, *key: str) -> Any:
        """Return what is there, None if nothing is."""
        place: Any = self.data
        for part in key:
            place = place.get(part) if isinstance(place, Mapping) else None
        return place

    def checked(self) -> Loaded:
        """Check it.

        Raises:
            ConfigError: a key or value is wrong.
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
    named = path or environ.get(CONFIG_VARIABLE)
    if named:
        origin = f"file {named}" if path else f"file {named} ({CONFIG_VARIABLE})"
        for key, value in _leaves(_read(Path(named))):
            _put(draft.data, draft.sources, key, value, origin)
    for name, text in sorted(environ.items()):
        if name.startswith(_PREFIX):
            key = _key([part.lower() for part in name[len(_PREFIX) :].split("__")], draft.data, name)
            _put(draft.data, draft.sources, key, _scalar(text, name), f"environment {name}")
    for dotted, value in (settings or {}).items():
        draft.set(dotted, value, settings_source)
    return draft


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse ``trainer.options.record_shapes=true`` into key and value; the value is read as YAML.

    Raises:
        ConfigError: there is no ``=``, or the value is not YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: expected key=value, such as trainer.options.record_shapes=true.")
    return key.strip(), _scalar(value, f"--set {key}")


def settings_environ(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that pass settings to another process."""
    return {_PREFIX + key.replace(".", "__").upper(): json.dumps(value) for key, value in settings.items()}


def _read(path: Path) -> dict[str, Any]:
    data = read_document(path)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values at the top, got {type(data).__name__}.")
    return data


def _scalar(text: str, where: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError:
        raise ConfigError(
            f"{where}: {shortened(repr(text))} is not a YAML value; quote it, or write lists as [a, b]."
        ) from None


def _key(parts: list[str], data: Mapping[str, Any], where: str) -> Key:
    """Expand ``trainer.x`` to ``roles.trainer.x``; role names match without case, as the environment has none."""
    if not all(parts):
        raise ConfigError(f"{where}: a part of the key is empty; expected a form such as trainer.backend.")
    if parts[0] not in TOP_LEVEL_KEYS:
        parts = ["roles", *parts]
    if parts[0] == "roles" and len(parts) > 1:
        roles = data.get("roles")
        known = roles if isinstance(roles, Mapping) else {}
        parts[1] = next((role for role in known if str(role).lower() == parts[1].lower()), parts[1])
        if len(parts) == 2:  # noqa: PLR2004  # roles and one name: a role without a key
            raise ConfigError(
                f"{where}: '{parts[1]}' is no key of the config; expected one of {', '.join(TOP_LEVEL_KEYS)}, "
                f"or a role with a key, such as {parts[1]}.backend."
            )
    return tuple(parts)


def _put(data: dict[str, Any], sources: dict[Key, str], key: Key, value: Any, source: str) -> None:
    place = data
    for part in key[:-1]:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{'.'.join(key)} ({source}): cannot be set, since '{part}' is {show(inner)} and not a mapping."
            )
        place = inner
    place[key[-1]] = value
    sources[key] = source


def _leaves(data: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    for name, value in data.items():
        key = (*prefix, name)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key)
        else:
            yield key, value
