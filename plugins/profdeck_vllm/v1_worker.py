"""Records in the workers of vLLM's V1 engines, which vLLM-Omni's stages of language models have, too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from profdeck import Identity
from profdeck.engines import CaptureRequest
from profdeck.plugin import describe_error
from profdeck_vllm import worker
from profdeck_vllm.iterations import describe

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_BASE = "vllm.v1.worker.worker_base"


def install() -> None:
    """Let the workers of this process, and of those that it starts, record."""
    from vllm.v1.worker.worker_base import WorkerBase

    worker.install(WorkerBase, V1WorkerAgent)


def installed() -> bool:
    """Tell whether `install` has run in this process; then it has in the workers that it started, too."""
    module = sys.modules.get(_BASE)
    return module is not None and hasattr(module.WorkerBase, worker.METHOD)


class V1WorkerAgent(worker.WorkerAgent):
    """Records in one worker. An iteration is execute_model and, where that returns None, the sample_tokens after it."""

    iterating = ("execute_model",)

    @property
    def stage(self) -> int | None:
        """Read the model's config, which has a stage in vLLM-Omni."""
        found: int | None = getattr(getattr(self.worker.vllm_config, "model_config", None), "stage_id", None)
        return found

    def place(self, engine: Mapping[str, Any]) -> Identity:
        """Return the place of the worker in its engine: ranks count over all data-parallel engines.

        Args:
            engine: ``data_parallel_size``: how many of those there are; of dense models a worker does not know.
        """
        from vllm.distributed import parallel_state

        config = self.worker.vllm_config.parallel_config
        size = max(config.data_parallel_size, int(engine.get("data_parallel_size", 1)))
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
            rank=index * config.world_size + self.worker.rank,
            world_size=max(size, index + 1) * config.world_size,
            local_rank=self.worker.local_rank,
            parallel=coordinates,
        )

    def wrappers(self, request: CaptureRequest) -> Mapping[str, Callable[..., Any]]:
        """Wrap execute_model and, where there is one, sample_tokens."""
        detailed = bool(request.engine.get("detailed"))
        execute, sample = self.worker.execute_model, getattr(self.worker, "sample_tokens", None)

        def execute_model(output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
            self.end_iteration()  # of the last one, should nothing have been sampled
            if output.total_num_scheduled_tokens:
                self._begin(output, detailed=detailed)
            try:
                result = execute(output, *args, **kwargs)
            except BaseException:
                self.end_iteration()
                raise
            if result is not None:
                self.end_iteration()
            return result

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            try:
                return sample(*args, **kwargs)  # type: ignore[misc]  # wrapped only if there is one
            finally:
                self.end_iteration()

        wrapped = {"execute_model": execute_model}
        return wrapped if sample is None else wrapped | {"sample_tokens": sample_tokens}

    def _begin(self, output: SchedulerOutput, *, detailed: bool) -> None:
        try:
            batch, label = describe(output, detailed=detailed)
        except Exception as error:  # noqa: BLE001  # a vLLM of which we know too little
            self.recorder.stop(f"The batch cannot be read: {describe_error(error)}.")
        else:
            self.begin_iteration(batch, label)
