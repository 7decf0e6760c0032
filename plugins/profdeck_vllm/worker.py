"""The side of the backend that runs in each worker of an engine, behind one RPC method.

vLLM and vLLM-Omni call methods of their workers by name on every rank (``collective_rpc``), so a method added to a
base class can be called in workers of every kind. An exception in it would leave answers of other ranks unread in
vLLM's queues, where the next call would take them for its own: it never raises, and refusals are answers.
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
SEAT = "seat"
"""The command that asks a worker of a vLLM-Omni pipeline who it is: see `WorkerAgent.seat`."""

_AGENT = "_profdeck_agent"


class WorkerAgent(ABC):
    """Records in one worker: while a request is under way, its methods are wrapped and report their iterations."""

    iterating: ClassVar[Sequence[str]]
    """The methods of a worker with which an iteration begins, where it has them."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        device = worker.current_platform.device_type if hasattr(worker, "current_platform") else str(worker.device)
        self.recorder = EngineRecorder(self._identity({}), device.partition(":")[0], _versions())
        self._wrapped: tuple[str, ...] = ()
        self._open = False

    @classmethod
    def of(cls, worker: Any) -> WorkerAgent:
        """Return the agent of a worker, the same for its whole life."""
        agent: WorkerAgent | None = vars(worker).get(_AGENT)
        if agent is None:
            agent = cls(worker)
            setattr(worker, _AGENT, agent)
        return agent

    @abstractmethod
    def place(self, engine: Mapping[str, Any]) -> Identity:
        """Return the place of the worker in its engine, or in its stage of a pipeline.

        Args:
            engine: what the request says of the engine.
        """

    @property
    @abstractmethod
    def stage(self) -> int | None:
        """The stage of a vLLM-Omni pipeline that it works for; None in other engines."""

    @abstractmethod
    def wrappers(self, request: CaptureRequest) -> Mapping[str, Callable[..., Any]]:
        """Return what takes the place of methods of the worker while it records."""

    @classmethod
    def answers(cls, answer: Any) -> Any:
        """Return what the worker answers for itself, or for all whose answers do not reach the one that asks."""
        return answer

    @property
    def seat(self) -> dict[str, Any]:
        """The worker's rank in its stage, and what tells it from all other workers of the pipeline."""
        own = self.place({})
        key = f"{own.host}:{own.pid}:{self.stage}:{own.rank}"
        return {"key": key, "rank": own.rank, "pid": own.pid}

    def _identity(self, engine: Mapping[str, Any]) -> Identity:
        """Return the worker's place; in a pipeline its rank counts over the stages that record."""
        own = self.place(engine)
        seats = engine.get("seats")
        seat = seats.get(self.seat["key"]) if seats else None
        if seats and seat:
            own = attrs.evolve(own, rank=int(seat["rank"]), world_size=len(seats))
        stage = self.stage if seat is None else seat["stage"]
        return own if stage is None else attrs.evolve(own, parallel={"stage": int(stage), **own.parallel})

    def handle(self, command: str, payload: Mapping[str, Any]) -> Any:
        """Execute a command and return a plain-data reply; see `profdeck.engine.worker.recorder.handle_command`."""
        if command == SEAT:
            return self.seat
        return reply_data(handle_command(command, payload, self.recorder, self.start, self.stop))

    def start(self, request: CaptureRequest) -> None:
        """Take a request and watch the iterations until it has ended.

        Raises:
            ProfdeckError: it is refused.
        """
        if self.recorder.reply().state in {RequestState.IDLE, RequestState.ENDED}:
            self.recorder.identity = self._identity(request.engine)
        self.recorder.start(request)
        if self.recorder.active:
            self._wrap(request)

    def start_armed(self, armed: EngineConfig) -> None:
        """Start the capture that the config arms; what keeps it from starting is logged."""
        request = armed.armed_request()
        if self.stage is not None:  # nobody has numbered the workers of all stages
            request = attrs.evolve(request, id=f"{request.id}-stage{self.stage}")
        try:
            self.start(request)
        except Exception as error:  # noqa: BLE001  # the engine serves on
            logger.warning("The capture that the config requests cannot start: %s", describe_error(error))

    def stop(self, reason: str | None) -> None:
        """End the request and leave the worker as it was, now or, if that must wait, at its next iteration."""
        self.end_iteration()
        self.recorder.stop(reason)
        if not self.recorder.active:
            self.unwrap()

    def begin_iteration(self, batch: BatchKind | None, label: str) -> None:
        """Report that an iteration begins."""
        self._open = True
        self.recorder.begin(batch, label)

    def end_iteration(self) -> None:
        """Report that the iteration has ended, if one is under way."""
        if self._open:
            self._open = False
            self.recorder.end()
        if not self.recorder.active:
            self.unwrap()

    def _wrap(self, request: CaptureRequest) -> None:
        shutdown = self.worker.shutdown

        def shut_down(*args: Any, **kwargs: Any) -> Any:
            self.stop("the engine shut down in mid-capture")
            return shutdown(*args, **kwargs)

        wrappers = {**self.wrappers(request), "shutdown": shut_down}
        self._wrapped = tuple(wrappers)
        vars(self.worker).update(wrappers)

    def unwrap(self) -> None:
        """Leave the worker as it was."""
        for name in self._wrapped:
            vars(self.worker).pop(name, None)
        self._wrapped = ()


def install(base: type, agent: type[WorkerAgent]) -> None:
    """Add the RPC method to the workers of a base class, and the capture that the config arms, if it does."""
    if METHOD in vars(base):
        return

    def command(worker: Any, command: str, payload: Mapping[str, Any]) -> Any:
        """Carry out a command in this worker; see `WorkerAgent.handle`."""
        try:
            answer = agent.of(worker).handle(command, payload)
        except Exception as error:  # noqa: BLE001  # see the head of this module
            text, idle = describe_error(error), RequestState.IDLE
            answer = reply_data(Reply(rank=worker.rank, world_size=0, host="", pid=os.getpid(), state=idle, error=text))
        return agent.answers(answer)

    setattr(base, METHOD, command)
    armed = EngineConfig.load("vllm")
    if armed.is_armed:
        armed.export_run_name()
        _arm(base, agent, armed)


def _arm(base: Any, agent: type[WorkerAgent], armed: EngineConfig) -> None:
    build = base.__init__

    def build_armed(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        # Ranks and devices are known only when the first iteration comes, and iterations are counted from it.
        own = {name: getattr(self, name) for name in agent.iterating if hasattr(self, name)}

        def first(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                for wrapped in own:
                    vars(self).pop(wrapped, None)  # these functions themselves
                agent.of(self).start_armed(armed)
                return vars(self).get(name, own[name])(*args, **kwargs)

            return call

        vars(self).update({name: first(name) for name in own})

    base.__init__ = build_armed  # the only place where workers of all kinds pass


def _versions() -> dict[str, str]:
    return dict(filter(None, [LIBRARY.installed()]))
