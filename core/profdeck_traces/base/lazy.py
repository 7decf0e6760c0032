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
        module: The ``globals()`` of the module.
        homes: Mappings from modules to the names to import from them, separated by spaces.
    """
    module_of = {name: home for mapping in homes for home, names in mapping.items() for name in names.split()}

    def get_attribute(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        value = module[name] = getattr(import_module(module_of[name]), name)
        return value

    return get_attribute, lambda: sorted({*module, *module_of})
