"""Callbacks that run after the import of a module. Registering a callback does not import the module."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

logger = logging.getLogger("profdeck")

Callback = Callable[[ModuleType], None]


def after_import(name: str, done: Callback) -> None:
    """Call ``done`` with a module after its import, or immediately if the module is already imported.

    Exceptions that ``done`` raises are logged, because they must not break an import of the host.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _call(done, module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _callbacks.setdefault(name, []).append(done)


_callbacks: dict[str, list[Callback]] = {}
"""Callbacks by the name of the module."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules with callbacks by calling the remaining finders, and wraps their loaders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _callbacks:
            return None
        following = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in following if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module with its own loader, and then runs the callbacks."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:  # callers that read its source or resources need its own loader
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        for callback in _callbacks.pop(module.__name__, ()):
            _call(callback, module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def _call(callback: Callback, module: ModuleType) -> None:
    try:
        callback(module)
    except Exception:  # an unsupported release of the host must still run
        logger.exception("profdeck could not patch %s, so this module is not captured.", module.__name__)
