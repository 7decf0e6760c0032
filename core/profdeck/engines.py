"""API for engine plugins, both in the process that requests captures and in the engine's processes.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from profdeck_traces.base.lazy import lazy_names

if TYPE_CHECKING:
    from profdeck.backends.api import EngineBackend as EngineBackend, TargetState as TargetState
    from profdeck.base.blocking import run_in_thread as run_in_thread, run_without_loop as run_without_loop
    from profdeck.base.outcome import Outcome as Outcome
    from profdeck.engine.clusters import (
        Actor as Actor,
        ActorGroup as ActorGroup,
        AskActor as AskActor,
        Cluster as Cluster,
        FoundActor as FoundActor,
        FoundActors as FoundActors,
        NoEngineError as NoEngineError,
    )
    from profdeck.engine.control.control_backend import (
        ControlBackend as ControlBackend,
        EngineProfiler as EngineProfiler,
    )
    from profdeck.engine.control.engine_profiler import (
        OwnProfilerCapture as OwnProfilerCapture,
        TraceOrigin as TraceOrigin,
    )
    from profdeck.engine.engine import (
        Connects as Connects,
        Engine as Engine,
        FileHost as FileHost,
        RemoteFiles as RemoteFiles,
    )
    from profdeck.engine.engine_config import EngineConfig as EngineConfig
    from profdeck.engine.options import EngineOptions as EngineOptions
    from profdeck.engine.server.routes import Routes as Routes
    from profdeck.engine.transport.file_parts import (
        FilePart as FilePart,
        PartedFiles as PartedFiles,
        part_of as part_of,
    )
    from profdeck.engine.transport.http_client import HttpResponse as HttpResponse
    from profdeck.engine.transport.http_engine import HttpEngine as HttpEngine
    from profdeck.engine.worker.frontend import FrontendRecorder as FrontendRecorder
    from profdeck.engine.worker.recorder import (
        EngineRecorder as EngineRecorder,
        handle_command as handle_command,
        reply_data as reply_data,
    )
    from profdeck.records.capture import EngineCapture as EngineCapture
    from profdeck.records.host_clock import (
        MessageTimes as MessageTimes,
        better_clock as better_clock,
        compare_clocks as compare_clocks,
    )
    from profdeck.records.request import (
        Answer as Answer,
        BatchKind as BatchKind,
        CaptureRequest as CaptureRequest,
        Reply as Reply,
        RequestState as RequestState,
    )
    from profdeck.replicas.fan_out import fan_out as fan_out

SECTIONS = {
    "Requesting captures": {
        "profdeck.backends.api": "EngineBackend TargetState",
        "profdeck.engine.control.control_backend": "ControlBackend EngineProfiler",
        "profdeck.engine.control.engine_profiler": "OwnProfilerCapture TraceOrigin",
        "profdeck.engine.engine": "Connects Engine FileHost RemoteFiles",
        "profdeck.engine.options": "EngineOptions",
        "profdeck.engine.transport.http_engine": "HttpEngine",
        "profdeck.engine.transport.http_client": "HttpResponse",
        "profdeck.base.outcome": "Outcome",
    },
    "Requests and replies": {
        "profdeck.records.capture": "EngineCapture",
        "profdeck.records.request": "Answer BatchKind CaptureRequest Reply RequestState",
        "profdeck.records.host_clock": "MessageTimes better_clock compare_clocks",
        "profdeck.engine.transport.file_parts": "FilePart PartedFiles part_of",
    },
    "In the processes of an engine": {
        "profdeck.engine.engine_config": "EngineConfig",
        "profdeck.engine.worker.recorder": "EngineRecorder handle_command reply_data",
        "profdeck.engine.worker.frontend": "FrontendRecorder",
        "profdeck.engine.server.routes": "Routes",
    },
    "Clusters of actors": {
        "profdeck.engine.clusters": ("Actor ActorGroup AskActor Cluster FoundActor FoundActors NoEngineError"),
    },
    "Event loops": {
        "profdeck.base.blocking": "run_in_thread run_without_loop",
        "profdeck.replicas.fan_out": "fan_out",
    },
}
"""Public names, grouped by topic and by the module that defines them."""

__getattr__, __dir__ = lazy_names(globals(), *SECTIONS.values())
