"""profdeck: one lifecycle for the profilers of LLM engines.

>>> from profdeck import Profiler
>>> profiler = Profiler.from_config("profdeck.yaml", role="trainer")  # doctest: +SKIP
>>> with profiler.capture(global_step=10):  # doctest: +SKIP
...     train_step()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from profdeck.base.version import __version__ as __version__

if TYPE_CHECKING:
    from profdeck.backends.api import Backend, Library
    from profdeck.backends.hookspecs import HOOKSPEC_VERSION, hookimpl
    from profdeck.base.errors import ProfdeckError
    from profdeck.base.identity import Identity
    from profdeck.config.options import Activity, CommonOptions
    from profdeck.profiler import Profiler
    from profdeck.records.artifact import Artifact, ClockAnchor
    from profdeck.records.capture import Capture, Step, Unit
    from profdeck.records.status import Status
    from profdeck.replicas.placement import PlacedEngine

_HOMES = {
    "HOOKSPEC_VERSION": "backends.hookspecs",
    "Activity": "config.options",
    "Artifact": "records.artifact",
    "Backend": "backends.api",
    "Capture": "records.capture",
    "ClockAnchor": "records.artifact",
    "CommonOptions": "config.options",
    "Identity": "base.identity",
    "Library": "backends.api",
    "ProfdeckError": "base.errors",
    "Profiler": "profiler",
    "PlacedEngine": "replicas.placement",
    "Status": "records.status",
    "Step": "records.capture",
    "Unit": "records.capture",
    "hookimpl": "backends.hookspecs",
}

_REPLACED = {
    "SharedProfiler": "Profiler.from_config(..., shared=True)",
    "Fleet": "Profiler.from_config(..., role=None, targets={...})",
}

__all__ = [  # noqa: RUF022  # as a reader meets them
    "Profiler", "PlacedEngine", "Identity", "Capture", "Artifact", "ClockAnchor", "Status", "Step",
    "Unit", "Backend", "Library", "CommonOptions", "Activity", "hookimpl", "HOOKSPEC_VERSION",
    "ProfdeckError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # The names are imported when first used, so that `import profdeck` costs nothing to those who only may need it.
    if name in _REPLACED:
        raise ImportError(f"profdeck.{name} was replaced by profdeck.{_REPLACED[name]}.")
    if name not in _HOMES:
        raise AttributeError(f"module 'profdeck' has no attribute '{name}'")
    from importlib import import_module

    value = getattr(import_module(f"profdeck.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
