"""Calls something when a module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

logger = logging.getLogger("profdeck")

Done = Callable[[ModuleType], None]


def after_import(name: str, done: Done) -> None:
    """Call ``done`` with a module after its import, or immediately if the module is already imported.

    Exceptions that ``done`` raises are logged, because they must not break an import of the host.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _call(done, module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _awaited.setdefault(name, []).append(done)


_awaited: dict[str, list[Done]] = {}
"""By module, what waits for it."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are awaited, by the finders after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _awaited:
            return None
        following = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in following if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module as another loader does, and calls what waits for it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:  # what asks for its source or resources finds the loader that has them
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        for done in _awaited.pop(module.__name__, ()):
            _call(done, module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def _call(done: Done, module: ModuleType) -> None:
    try:
        done(module)
    except Exception:  # a host of another release; it goes on without profdeck
        logger.exception("profdeck cannot be put in place in %s, so nothing of it is captured.", module.__name__)
