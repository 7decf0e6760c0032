"""The side of the backend that runs in each worker of an engine, behind one RPC method.

vLLM calls methods of its workers by name on every rank (``collective_rpc``), so a method added to ``WorkerBase`` can be
called in workers of every kind. An exception in it would leave answers of other ranks unread in vLLM's queues, where
the next call would take them for its own: it never raises, and refusals are answers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from profdeck.base.errors import describe as describe_error
from profdeck.base.identity import Identity
from profdeck.engine.engine_config import EngineConfig
from profdeck.engine.worker.recorder import EngineRecorder, handle, plain
from profdeck.records.request import CaptureRequest, Reply, RequestState
from profdeck_vllm.iterations import describe
from profdeck_vllm.library import LIBRARY

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.worker_base import WorkerBase

logger = logging.getLogger("profdeck")

METHOD = "profdeck_command"
"""The name of the RPC method."""

_AGENT = "_profdeck_agent"


def install() -> None:
    """Add the RPC method to all workers of this process, and the capture that the config arms, if it does."""
    from vllm.v1.worker.worker_base import WorkerBase

    if METHOD in vars(WorkerBase):
        return
    setattr(WorkerBase, METHOD, _command)
    armed = EngineConfig.load("vllm")
    if armed.captures_by_itself:
        armed.name_run()
        _arm_new_workers(WorkerBase, armed)


def installed() -> bool:
    """Tell whether `install` has run in this process; then it has in the workers that it started, too."""
    import sys

    module = sys.modules.get("vllm.v1.worker.worker_base")
    return module is not None and hasattr(module.WorkerBase, METHOD)


def _command(worker: WorkerBase, command: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Carry out a command in this worker and answer in plain data; see `WorkerAgent.handle`."""
    try:
        return _agent(worker).handle(command, payload)
    except Exception as error:  # noqa: BLE001  # see the head of this module
        error_text = describe_error(error)
        return plain(
            Reply(rank=worker.rank, world_size=0, host="", pid=os.getpid(), state=RequestState.IDLE, error=error_text)
        )


def _agent(worker: WorkerBase) -> WorkerAgent:
    agent: WorkerAgent | None = vars(worker).get(_AGENT)
    if agent is None:
        agent = WorkerAgent(worker)
        setattr(worker, _AGENT, agent)
    return agent


def _arm_new_workers(base: type[WorkerBase], armed: EngineConfig) -> None:
    build = base.__init__

    def build_armed(self: WorkerBase, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        # Ranks and devices are known only when the first iteration comes, and iterations are counted from it.
        own = self.execute_model

        def execute_model(output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
            del self.execute_model  # this function itself
            agent = _agent(self)
            try:
                agent.start(armed.own_request())
            except Exception as error:  # noqa: BLE001  # the engine serves on
                logger.warning("The capture that the config arms cannot start: %s", describe_error(error))
            execute = self.execute_model if agent.recorder.active else own
            return execute(output, *args, **kwargs)

        self.execute_model = execute_model  # on this worker only

    base.__init__ = build_armed  # the only place where workers of all kinds pass


class WorkerAgent:
    """Records in one worker."""

    def __init__(self, worker: WorkerBase) -> None:
        device = worker.current_platform.device_type if hasattr(worker, "current_platform") else str(worker.device)
        self.recorder = EngineRecorder(place(worker, 1), device.partition(":")[0], _versions())
        self._worker = worker
        self._detailed = False
        self._open = False

    def handle(self, command: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a command and answer in plain data; see `profdeck.engine.worker.recorder.handle`."""
        return plain(handle(command, payload, self.recorder, self.start, self.stop))

    def start(self, request: CaptureRequest) -> None:
        """Take a request and watch the iterations until it has ended.

        Raises:
            ProfdeckError: it is refused.
        """
        if self.recorder.reply().state in {RequestState.IDLE, RequestState.ENDED}:
            self.recorder.identity = place(self._worker, int(request.engine.get("data_parallel_size", 1)))
        self.recorder.start(request)
        self._detailed = bool(request.engine.get("detailed"))
        if self.recorder.active:
            self._wrap()

    def stop(self, reason: str | None) -> None:
        """End the request and leave the worker as it was, now or, if that must wait, at its next iteration."""
        self._end_iteration()
        self.recorder.stop(reason)
        if not self.recorder.active:
            self._unwrap()

    # An iteration is execute_model and, where that returns None, the sample_tokens that follows.

    def _wrap(self) -> None:
        worker, execute, sample = self._worker, self._worker.execute_model, getattr(self._worker, "sample_tokens", None)
        shutdown = worker.shutdown

        def execute_model(output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
            self._end_iteration()  # of the last one, should nothing have been sampled
            if output.total_num_scheduled_tokens:
                self._begin_iteration(output)
            try:
                result = execute(output, *args, **kwargs)
            except BaseException:
                self._end_iteration()
                raise
            if result is not None:
                self._end_iteration()
            return result

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            try:
                return sample(*args, **kwargs)  # type: ignore[misc]  # wrapped only if there is one
            finally:
                self._end_iteration()

        def shut_down(*args: Any, **kwargs: Any) -> Any:
            self.stop("the engine shut down in mid-capture")
            return shutdown(*args, **kwargs)

        wrappers = {"execute_model": execute_model, "shutdown": shut_down}
        vars(worker).update(wrappers if sample is None else wrappers | {"sample_tokens": sample_tokens})

    def _unwrap(self) -> None:
        for name in ("execute_model", "sample_tokens", "shutdown"):
            vars(self._worker).pop(name, None)

    def _begin_iteration(self, output: SchedulerOutput) -> None:
        try:
            batch, label = describe(output, detailed=self._detailed)
        except Exception as error:  # noqa: BLE001  # a vLLM of which we know too little
            self.recorder.stop(f"The batch cannot be read: {describe_error(error)}.")
        else:
            self._open = True
            self.recorder.begin(batch, label)

    def _end_iteration(self) -> None:
        if self._open:
            self._open = False
            self.recorder.end()
        if not self.recorder.active:
            self._unwrap()


def place(worker: WorkerBase, data_parallel_size: int) -> Identity:
    """Return the place of a worker in its engine: ranks count over all data-parallel engines.

    Args:
        worker: the worker, whose parallel groups need not exist yet.
        data_parallel_size: how many data-parallel engines there are; of dense models a worker does not know.
    """
    from vllm.distributed import parallel_state

    config = worker.vllm_config.parallel_config
    size = max(config.data_parallel_size, data_parallel_size)
    index = getattr(config, "data_parallel_index", config.data_parallel_rank)
    coordinates = {"dp": index} if size > 1 else {}
    for name in ("pp", "pcp", "tp", "dcp", "ep"):
        try:
            group = getattr(parallel_state, f"get_{name}_group")()
        except (AttributeError, AssertionError):  # not in this release; not initialised
            continue
        if group.world_size > 1 and (name != "ep" or config.enable_expert_parallel):
            coordinates[name] = group.rank_in_group
    return Identity(
        rank=index * config.world_size + worker.rank,
        world_size=max(size, index + 1) * config.world_size,
        local_rank=worker.local_rank,
        parallel=coordinates,
    )


def _versions() -> dict[str, str]:
    return dict(filter(None, [LIBRARY.installed()]))
