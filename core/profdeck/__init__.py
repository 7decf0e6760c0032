"""profdeck: one lifecycle for the profilers of LLM engines.

>>> from profdeck import Profiler
>>> profiler = Profiler.from_config("profdeck.yaml", role="trainer")  # doctest: +SKIP
>>> with profiler.capture(global_step=10):  # doctest: +SKIP
...     train_step()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profdeck.backend import Backend, Library
    from profdeck.capture import Artifact, Capture, ClockAnchor, Status, Step, Unit
    from profdeck.errors import ProfdeckError
    from profdeck.hookspecs import hookimpl
    from profdeck.identity import Identity
    from profdeck.options import Activity, CommonOptions
    from profdeck.profiler import Profiler

__version__ = "0.1.0"

_HOMES = {
    "Activity": "options",
    "Artifact": "capture",
    "Backend": "backend",
    "Capture": "capture",
    "ClockAnchor": "capture",
    "CommonOptions": "options",
    "Identity": "identity",
    "Library": "backend",
    "ProfdeckError": "errors",
    "Profiler": "profiler",
    "Status": "capture",
    "Step": "capture",
    "Unit": "capture",
    "hookimpl": "hookspecs",
}

__all__ = [  # noqa: RUF022  # as a reader meets them
    "Profiler", "Identity", "Capture", "Artifact", "ClockAnchor", "Status", "Step", "Unit",
    "Backend", "Library", "CommonOptions", "Activity", "hookimpl", "ProfdeckError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # The names are imported when first used, so that `import profdeck` costs nothing to those who only may need it.
    if name not in _HOMES:
        raise AttributeError(f"module 'profdeck' has no attribute '{name}'")
    from importlib import import_module

    value = getattr(import_module(f"profdeck.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
