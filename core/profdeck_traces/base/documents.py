"""Reads YAML and TOML as plain data: mappings, lists, texts, numbers, truth values and null.

YAML's plain scalars are those of the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), as in
TOML and JSON: 010 is ten, and 10:20, yes and 2026-02-30 are texts. PyYAML's own are of YAML 1.1, where these are eight,
620, true and no date at all.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from profdeck_traces.base.errors import ConfigError

_MOST_VALUES = 100_000
_MOST_DEEP = 32
_SHOWN = 120


class _Loader(yaml.SafeLoader):
    """Reads YAML as the module says. A key that is there twice is an error: PyYAML takes the last one in silence."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's signature

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002  # as above
        """Make a mapping."""
        seen = set[Any]()
        for key, _ in node.value:
            text = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if text is not None and text in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is there twice", key.start_mark
                )
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
    """Read what a YAML or TOML file holds.

    Raises:
        ConfigError: It cannot be read.
    """
    readers: dict[str, Callable[[str], Any]] = {
        ".yaml": parse_yaml,
        ".yml": parse_yaml,
        ".toml": lambda text: _bounded(tomllib.loads(text)),
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: expected a file that ends in .yaml, .yml or .toml.")
    try:
        return reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()}: {_reason(error)}") from None


def parse_yaml(text: str) -> Any:
    """Read YAML.

    Raises:
        ValueError: it is none, or more than anybody writes.
    """
    try:
        return _bounded(yaml.load(text, _Loader))  # noqa: S506  # a safe one
    except RecursionError as error:
        raise ValueError(_reason(error)) from None
    except (yaml.YAMLError, AttributeError, TypeError) as error:  # the last two: of a tag that its value does not fit
        raise ValueError(str(error)) from None


def _bounded(data: Any) -> Any:
    """Return data that somebody may have written: aliases make a few lines into billions of values, or into a circle.

    Raises:
        ValueError: it is more than that.
    """
    left = [(data, 0)]
    for count, (value, depth) in enumerate(left):  # which grows meanwhile
        if count > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES:,} values")
        if depth > _MOST_DEEP:
            raise ValueError(f"it is nested more than {_MOST_DEEP} deep")
        if isinstance(value, Mapping):
            left += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list | set | tuple):
            left += [(inner, depth + 1) for inner in value]
    return data


def _reason(error: Exception) -> str:
    return f"it is nested more than {_MOST_DEEP} deep" if isinstance(error, RecursionError) else str(error)


def show(value: Any) -> str:
    """Format an invalid value and its type for an error message."""
    names = {str: "text", bool: "a bool", int: "an integer", float: "a number", list: "a list", dict: "a mapping"}
    if value is None:
        return "nothing (null)"
    kind = names.get(type(value), type(value).__name__)
    try:
        return f"{shortened(repr(value))} ({kind})"
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in itself
        return f"{kind} that is too large to be shown"


def shortened(text: str) -> str:
    """Truncate a string to at most `_SHOWN` characters, including the ``...`` at the end."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
