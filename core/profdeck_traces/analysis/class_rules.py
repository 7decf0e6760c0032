"""Reads a user's own classes of kernels from a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from profdeck_traces.analysis.classes import Rule
from profdeck_traces.base.documents import read_document, show
from profdeck_traces.base.errors import ConfigError, did_you_mean

_KEYS = ("class", "pattern")


def load_rules(path: Path) -> tuple[Rule, ...]:
    """Read the rules for kernel classes from a file.

    A YAML file contains a list of ``{class: moe, pattern: my_moe_.*}``, optionally under the key ``rules``. A TOML file
    contains ``[[rules]]`` tables with the same keys. Patterns are Python regular expressions.

    Raises:
        ConfigError: The file cannot be read, or a rule is invalid.
    """
    data = read_document(path)
    if isinstance(data, dict) and set(data) == {"rules"}:
        data = data["rules"]
    if not isinstance(data, list):
        raise ConfigError(
            f"{path}: expected a list of rules such as {{class: moe, pattern: my_moe_.*}} (in TOML: tables [[rules]] "
            f"with these keys), got {show(data)}."
        )
    return tuple(_rule(entry, f"{path}: rule {number}") for number, entry in enumerate(data, 1))


def _rule(entry: Any, where: str) -> Rule:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected the keys {' and '.join(_KEYS)}, got {show(entry)}.")
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(
                f"{where}: unknown key '{key}'.{did_you_mean(str(key), _KEYS)} Allowed: {', '.join(_KEYS)}."
            )
    for key in _KEYS:
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise ConfigError(f"{where}: '{key}' must be a text that is not empty, got {show(entry.get(key))}.")
    try:
        return Rule(entry["class"], re.compile(entry["pattern"]))
    except re.error as error:
        raise ConfigError(
            f"{where}: the pattern {entry['pattern']!r} is no regular expression: {error}. "
            "Write a backslash before characters that stand for themselves, such as \\( and \\[."
        ) from None
