"""Parses YAML and TOML files into mappings, lists, strings, numbers, booleans and ``None``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from profdeck_traces.base.credentials import redact
from profdeck_traces.base.errors import ConfigError

_MAX_VALUES = 100_000
_MAX_DEPTH = 32
_TOO_DEEP = f"it has more than {_MAX_DEPTH} levels of nesting"
_MAX_SHOWN = 120


def read_document(path: Path) -> Any:
    """Parse a YAML or TOML file. The suffix of the file name determines the format.

    Raises:
        ConfigError: The file cannot be read, is invalid or is too complex, or its suffix is unknown.
    """
    readers: dict[str, Callable[[str], Any]] = {
        ".yaml": parse_yaml,
        ".yml": parse_yaml,
        ".toml": _parse_toml,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: the file name must end in .yaml, .yml or .toml.")
    try:
        return reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()}: {_reason(error)}") from None


def parse_yaml(text: str) -> Any:
    """Parse a YAML document.

    Raises:
        ValueError: The text is not valid YAML, or the document is too complex.
    """
    import yaml

    from profdeck_traces.base.yaml_loader import CoreLoader

    try:
        return _check_size(yaml.load(text, CoreLoader))  # noqa: S506  # a subclass of SafeLoader
    except RecursionError as error:
        raise ValueError(_reason(error)) from None
    except (yaml.YAMLError, AttributeError, TypeError) as error:  # PyYAML raises the last two for misused tags
        raise ValueError(str(error)) from None


def _parse_toml(text: str) -> Any:
    import tomllib

    return _check_size(tomllib.loads(text))


def _check_size(data: Any) -> Any:
    """Return `data` unless it has too many values or levels.

    YAML aliases can expand a few lines to billions of values, or make a value contain itself.

    Raises:
        ValueError: A limit is exceeded.
    """
    pending = [(data, 0)]
    for count, (value, depth) in enumerate(pending):  # the loop appends to the list
        if count > _MAX_VALUES:
            raise ValueError(f"it has more than {_MAX_VALUES:,} values")
        if depth > _MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if isinstance(value, Mapping):
            pending += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list | set | tuple):
            pending += [(inner, depth + 1) for inner in value]
    return data


def _reason(error: Exception) -> str:
    return _TOO_DEEP if isinstance(error, RecursionError) else str(error)


def show(value: Any) -> str:
    """Format an invalid value and its type for an error message."""
    names = {str: "text", bool: "a bool", int: "an integer", float: "a number", list: "a list", dict: "a mapping"}
    if value is None:
        return "nothing (null)"
    kind = names.get(type(value), type(value).__name__)
    try:
        return f"{shortened(redact(repr(value)))} ({kind})"
    except (ValueError, RecursionError):  # an integer with thousands of digits, or a recursive list
        return f"{kind} that is too large to display"


def shortened(text: str) -> str:
    """Truncate a string to at most `_MAX_SHOWN` characters, including the ``...`` at the end."""
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
