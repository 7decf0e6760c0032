"""Worker side of the vLLM backend: one RPC method in each worker of an engine.

vLLM and vLLM-Omni call worker methods by name on every rank (``collective_rpc``), so the method is added to the base
class of the workers. The method never raises, and returns errors as replies. After an exception, vLLM would leave the
replies of other ranks in its queues, and the next call would read them.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from profdeck import Identity
from profdeck.engines import (
    BatchKind,
    CaptureRequest,
    EngineConfig,
    EngineRecorder,
    Reply,
    RequestState,
    handle_command,
    reply_data,
)
from profdeck.plugin import describe_error
from profdeck_vllm.library import LIBRARY

logger = logging.getLogger("profdeck")

METHOD = "profdeck_command"
"""The name of the RPC method."""
DESCRIBE_WORKER = "describe_worker"
"""The command that returns the description of a worker in a vLLM-Omni pipeline. See `WorkerAgent.description`."""

_AGENT = "_profdeck_agent"


class WorkerAgent(ABC):
    """Handles capture commands in one worker. The worker's methods are patched only while a capture is active."""

    iteration_methods: ClassVar[Sequence[str]]
    """Worker methods that start an iteration. A worker may lack some of them."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        device = worker.current_platform.device_type if hasattr(worker, "current_platform") else str(worker.device)
        self.recorder = EngineRecorder(self._identity({}), device.partition(":")[0], _versions())
        self._patched_methods: tuple[str, ...] = ()
        self._in_iteration = False

    @classmethod
    def for_worker(cls, worker: Any) -> WorkerAgent:
        """Return the agent of a worker. The first call creates it."""
        agent: WorkerAgent | None = vars(worker).get(_AGENT)
        if agent is None:
            agent = cls(worker)
            setattr(worker, _AGENT, agent)
        return agent

    @abstractmethod
    def local_identity(self, engine: Mapping[str, Any]) -> Identity:
        """Return the worker's identity in its engine, or in its stage of a pipeline.

        Args:
            engine: the ``engine`` field of the request.
        """

    @property
    @abstractmethod
    def stage(self) -> int | None:
        """The index of the worker's vLLM-Omni stage; None in other engines."""

    @abstractmethod
    def create_patches(self, request: CaptureRequest) -> Mapping[str, Callable[..., Any]]:
        """Return the replacements of worker methods, by name, for the duration of a capture."""

    @classmethod
    def collect_replies(cls, reply: Any) -> Any:
        """Return the value of the RPC method for this worker's reply."""
        return reply

    @property
    def description(self) -> dict[str, Any]:
        """The worker's rank in its stage, its process ID, and a key that is unique in the pipeline."""
        identity = self.local_identity({})
        key = f"{identity.host}:{identity.pid}:{self.stage}:{identity.rank}"
        return {"key": key, "rank": identity.rank, "pid": identity.pid}

    def _identity(self, engine: Mapping[str, Any]) -> Identity:
        """Return the worker's identity. In a pipeline, ranks are numbered across the stages that record."""
        identity = self.local_identity(engine)
        pipeline_workers = engine.get("workers")
        entry = pipeline_workers.get(self.description["key"]) if pipeline_workers else None
        if pipeline_workers and entry:
            identity = attrs.evolve(identity, rank=int(entry["rank"]), world_size=len(pipeline_workers))
        stage = self.stage if entry is None else entry["stage"]
        if stage is None:
            return identity
        return attrs.evolve(identity, parallel={"stage": int(stage), **identity.parallel})

    def handle(self, command: str, payload: Mapping[str, Any]) -> Any:
        """Run a command and return a plain-data reply; see `profdeck.engine.worker.recorder.handle_command`."""
        if command == DESCRIBE_WORKER:
            return self.description
        return reply_data(handle_command(command, payload, self.recorder, self.start, self.stop))

    def start(self, request: CaptureRequest) -> None:
        """Start a capture and patch the worker until the capture ends.

        Raises:
            ProfdeckError: the request is rejected.
        """
        if self.recorder.reply().state in {RequestState.IDLE, RequestState.ENDED}:
            self.recorder.identity = self._identity(request.engine)
        self.recorder.start(request)
        if self.recorder.active:
            self._patch(request)

    def start_configured(self, config: EngineConfig) -> None:
        """Start the capture that the config requests. Logs errors instead of raising them."""
        request = config.own_request()
        if self.stage is not None:  # Ranks are only unique within a stage, so each stage is a separate capture.
            request = attrs.evolve(request, id=f"{request.id}-stage{self.stage}")
        try:
            self.start(request)
        except Exception as error:  # noqa: BLE001  # the engine must continue to serve
            logger.warning("The capture that the config requests cannot start: %s", describe_error(error))

    def stop(self, reason: str | None) -> None:
        """Stop the capture and restore the worker.

        If the recorder defers the stop to the worker thread, both happen at the next iteration.

        Args:
            reason: why the capture ends early; None for a regular stop.
        """
        self.end_iteration()
        self.recorder.stop(reason)
        if not self.recorder.active:
            self._restore()

    def begin_iteration(self, batch: BatchKind | None, label: str) -> None:
        """Report the start of an iteration to the recorder."""
        self._in_iteration = True
        self.recorder.begin(batch, label)

    def end_iteration(self) -> None:
        """Report the end of the current iteration, if any, and restore the worker if the capture is finished."""
        if self._in_iteration:
            self._in_iteration = False
            self.recorder.end()
        if not self.recorder.active:
            self._restore()

    def _patch(self, request: CaptureRequest) -> None:
        original_shutdown = self.worker.shutdown

        def shutdown(*args: Any, **kwargs: Any) -> Any:
            self.stop("the engine shut down during the capture")
            return original_shutdown(*args, **kwargs)

        patches = {**self.create_patches(request), "shutdown": shutdown}
        self._patched_methods = tuple(patches)
        vars(self.worker).update(patches)

    def _restore(self) -> None:
        for name in self._patched_methods:
            vars(self.worker).pop(name, None)
        self._patched_methods = ()


def install(base: type, agent: type[WorkerAgent]) -> None:
    """Add the RPC method to a worker base class. If the config requests a capture, start it at the first iteration."""
    if METHOD in vars(base):
        return

    def command(worker: Any, command: str, payload: Mapping[str, Any]) -> Any:
        """Run a command in this worker; see `WorkerAgent.handle`."""
        try:
            reply = agent.for_worker(worker).handle(command, payload)
        except Exception as error:  # noqa: BLE001  # must not raise, see the module docstring
            text, idle = describe_error(error), RequestState.IDLE
            reply = reply_data(Reply(rank=worker.rank, world_size=0, host="", pid=os.getpid(), state=idle, error=text))
        return agent.collect_replies(reply)

    setattr(base, METHOD, command)
    config = EngineConfig.load("vllm")
    if config.captures_by_itself:
        config.name_run()
        _start_at_first_iteration(base, agent, config)


def _start_at_first_iteration(base: Any, agent: type[WorkerAgent], config: EngineConfig) -> None:
    original_init = base.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        # Ranks and devices are unknown before the first iteration, and iterations are counted from it.
        original_methods = {name: getattr(self, name) for name in agent.iteration_methods if hasattr(self, name)}

        def create_starter(name: str) -> Callable[..., Any]:
            def start(*args: Any, **kwargs: Any) -> Any:
                for starter in original_methods:
                    vars(self).pop(starter, None)
                agent.for_worker(self).start_configured(config)
                return vars(self).get(name, original_methods[name])(*args, **kwargs)

            return start

        vars(self).update({name: create_starter(name) for name in original_methods})

    base.__init__ = init  # Workers of all kinds call this constructor.


def _versions() -> dict[str, str]:
    return dict(filter(None, [LIBRARY.installed()]))
