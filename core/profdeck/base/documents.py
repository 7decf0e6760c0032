"""Reads YAML and TOML files."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from profdeck.base.errors import ConfigError


def read_document(path: Path) -> Any:
    """Read what a YAML or TOML file holds.

    Raises:
        ConfigError: It cannot be read.
    """
    readers: dict[str, Callable[[str], Any]] = {
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
        ".toml": tomllib.loads,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: expected a file that ends in .yaml, .yml or .toml.")
    try:
        return reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from None
