"""PyYAML loader for the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema).

The core schema is close to JSON and TOML: ``010`` is the number 10, and ``10:20``, ``yes`` and ``2026-02-30`` are
strings. By default, PyYAML implements YAML 1.1, which parses them as 8, 620, True and an invalid date.
"""

from __future__ import annotations

import re
from typing import Any

import yaml


class CoreLoader(yaml.SafeLoader):
    """YAML loader for the core schema. It rejects duplicate keys, for which PyYAML silently keeps the last value."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's signature

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002  # as above
        """Convert a mapping node. Raise ``ConstructorError`` if it contains a duplicate key."""
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
    CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _integer(loader: CoreLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)


CoreLoader.add_constructor("tag:yaml.org,2002:int", _integer)
