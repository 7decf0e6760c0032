"""Parses YAML and TOML files into mappings, lists, strings, numbers, booleans and ``None``.

Plain scalars in YAML follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), as in TOML and
JSON: 010 is the number 10, and 10:20, yes and 2026-02-30 are strings. PyYAML implements YAML 1.1, which parses them as
8, 620, True and an invalid date.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from profdeck_traces.base.credentials import redact
from profdeck_traces.base.errors import ConfigError

_MAX_VALUES = 100_000
_MAX_DEPTH = 32
_TOO_DEEP = f"it has more than {_MAX_DEPTH} levels of nesting"
_MAX_SHOWN = 120


class _Loader(yaml.SafeLoader):
    """YAML loader for the core schema that rejects duplicate keys. PyYAML silently keeps the last value of a key."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's signature

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002  # as above
        """Convert a mapping node, and raise ``ConstructorError`` if it contains a key twice."""
        seen = set[Any]()
        for key, _ in node.value:
            text = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if text is not None and text in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(text)
        return dict(super().construct_mapping(node, deep=deep))


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def read_document(path: Path) -> Any:
    """Parse a YAML or TOML file. The suffix of the file name determines the format.

    Raises:
        ConfigError: The file cannot be read, is invalid or is too complex, or its suffix is unknown.
    """
    readers: dict[str, Callable[[str], Any]] = {
        ".yaml": parse_yaml,
        ".yml": parse_yaml,
        ".toml": lambda text: _check_size(tomllib.loads(text)),
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
    try:
        return _check_size(yaml.load(text, _Loader))  # noqa: S506  # a subclass of SafeLoader
    except RecursionError as error:
        raise ValueError(_reason(error)) from None
    except (yaml.YAMLError, AttributeError, TypeError) as error:  # PyYAML raises the last two for misused tags
        raise ValueError(str(error)) from None


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
