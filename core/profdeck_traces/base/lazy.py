"""Support for modules that import their public names from other modules on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    module: dict[str, Any], *homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` functions for a module with lazy imports.

    Args:
        module: the ``globals()`` of the module.
        homes: maps each module to the names to import from it, separated by spaces.
    """
    home_of = {name: home for part in homes for home, names in part.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        value = module[name] = getattr(import_module(home_of[name]), name)
        return value

    return get, lambda: sorted({*module, *home_of})
