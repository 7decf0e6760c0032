"""profdeck: one lifecycle for the profilers of LLM engines.

>>> from profdeck import Profiler
>>> profiler = Profiler.from_config("profdeck.yaml", role="trainer")  # doctest: +SKIP
>>> with profiler.capture(global_step=10):  # doctest: +SKIP
...     train_step()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from profdeck_traces.base.lazy import lazy_names
from profdeck_traces.base.version import __version__ as __version__

if TYPE_CHECKING:
    from profdeck.backends.api import Backend, Library
    from profdeck.backends.hookspecs import HOOKSPEC_VERSION, hookimpl
    from profdeck.base.identity import Identity
    from profdeck.base.observer import Observer
    from profdeck.config.options import Activity, CommonOptions
    from profdeck.on_demand.client import JobCapture, JobRequest, capture_job
    from profdeck.profiler import Profiler
    from profdeck.records.artifact import Artifact, ClockAnchor
    from profdeck.records.capture import Capture, Step, Unit
    from profdeck.records.status import Status
    from profdeck.replicas.placement import PlacedEngine
    from profdeck.server_capture import (
        ServerCapture,
        ServerObserver,
        ServerRequest,
        acapture_servers,
        capture_servers,
    )
    from profdeck_traces.base.errors import ProfdeckError

_HOMES = {
    "profdeck.backends.hookspecs": "HOOKSPEC_VERSION hookimpl",
    "profdeck.config.options": "Activity CommonOptions",
    "profdeck.records.artifact": "Artifact ClockAnchor",
    "profdeck.backends.api": "Backend Library",
    "profdeck.records.capture": "Capture Step Unit",
    "profdeck.base.identity": "Identity",
    "profdeck.base.observer": "Observer",
    "profdeck_traces.base.errors": "ProfdeckError",
    "profdeck.on_demand.client": "JobCapture JobRequest capture_job",
    "profdeck.profiler": "Profiler",
    "profdeck.replicas.placement": "PlacedEngine",
    "profdeck.records.status": "Status",
    "profdeck.server_capture": "ServerCapture ServerObserver ServerRequest acapture_servers capture_servers",
}

_REPLACED = {
    "SharedProfiler": "Profiler.from_config(..., shared=True)",
    "Fleet": "Profiler.from_config(..., role=None, targets={...})",
}

__all__ = [  # noqa: RUF022  # grouped by topic
    "Profiler", "PlacedEngine", "Identity", "Capture", "Artifact", "ClockAnchor", "Status", "Step",
    "Unit", "Backend", "Library", "CommonOptions", "Activity", "hookimpl", "HOOKSPEC_VERSION",
    "capture_servers", "acapture_servers", "ServerRequest", "ServerObserver", "ServerCapture",
    "capture_job", "JobRequest", "Observer", "JobCapture", "ProfdeckError",
]  # fmt: skip


_import_name, __dir__ = lazy_names(globals(), _HOMES)


def __getattr__(name: str) -> Any:
    if name in _REPLACED:
        raise ImportError(f"profdeck.{name} was replaced by profdeck.{_REPLACED[name]}.")
    return _import_name(name)
