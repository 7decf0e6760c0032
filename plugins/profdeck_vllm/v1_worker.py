"""Worker agent for vLLM's V1 engines, including the language model stages of vLLM-Omni."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from profdeck import Identity
from profdeck.engines import CaptureRequest
from profdeck.plugin import describe_error
from profdeck_vllm import scheduler_state, worker
from profdeck_vllm.iterations import IterationReader

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_BASE = "vllm.v1.worker.worker_base"
# Some connectors require ``kv_both``, which does not identify the engine's role.
_WORKER_TYPES = {"kv_producer": "prefill", "kv_consumer": "decode"}


def install() -> None:
    """Patch the worker and the scheduler in this process. Child processes load the patches through vLLM's plugins."""
    from vllm.v1.worker.worker_base import WorkerBase

    worker.install(WorkerBase, V1WorkerAgent)
    scheduler_state.install()


def is_installed() -> bool:
    """Return whether `install` has run in this process, and therefore also in the workers that it started."""
    module = sys.modules.get(_BASE)
    return module is not None and hasattr(module.WorkerBase, worker.METHOD)


class V1WorkerAgent(worker.WorkerAgent):
    """Agent of one V1 worker.

    An iteration is a call of execute_model. If execute_model returns None, the iteration includes sample_tokens.
    """

    iteration_methods = ("execute_model",)

    @property
    def stage(self) -> int | None:
        """The ``stage_id`` of the model config; only vLLM-Omni sets it."""
        stage_id: int | None = getattr(getattr(self.worker.vllm_config, "model_config", None), "stage_id", None)
        return stage_id

    def local_identity(self, engine: Mapping[str, Any]) -> Identity:
        """Return the worker's identity in its engine. Ranks are numbered across all data-parallel engines.

        Args:
            engine: may contain ``data_parallel_size``, because workers of dense models do not know it.
        """
        from vllm.distributed import parallel_state

        config = self.worker.vllm_config.parallel_config
        kv_transfer = getattr(self.worker.vllm_config, "kv_transfer_config", None)
        size = max(config.data_parallel_size, int(engine.get("data_parallel_size", 1)))
        index = getattr(config, "data_parallel_index", config.data_parallel_rank)
        coordinates = {"dp": index} if size > 1 else {}
        for name in ("pp", "pcp", "tp", "dcp", "ep"):
            try:
                group = getattr(parallel_state, f"get_{name}_group")()
            except (AttributeError, AssertionError):  # not in this release, or not initialized
                continue
            if group.world_size > 1 and (name != "ep" or config.enable_expert_parallel):
                coordinates[name] = group.rank_in_group
        return Identity(
            rank=index * config.world_size + self.worker.rank,
            world_size=max(size, index + 1) * config.world_size,
            local_rank=self.worker.local_rank,
            parallel=coordinates,
            worker_type=_WORKER_TYPES.get(getattr(kv_transfer, "kv_role", "")),
        )

    def create_patches(self, request: CaptureRequest) -> Mapping[str, Callable[..., Any]]:
        """Return replacements of execute_model and, if the worker has it, sample_tokens."""
        reader = IterationReader(detailed=bool(request.engine.get("detailed")))
        execute, sample = self.worker.execute_model, getattr(self.worker, "sample_tokens", None)

        def execute_model(output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
            self.end_iteration()  # The previous iteration is still open if sample_tokens was not called.
            self._begin(output, reader)
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
                return sample(*args, **kwargs)  # type: ignore[misc]  # patched only if not None
            finally:
                self.end_iteration()

        patches = {"execute_model": execute_model}
        return patches if sample is None else patches | {"sample_tokens": sample_tokens}

    def _begin(self, output: SchedulerOutput, reader: IterationReader) -> None:
        try:
            reader.read_finished(output)
            if not output.total_num_scheduled_tokens:
                # After the last request, vLLM runs an empty batch to notify the workers of finished requests.
                if not reader.has_unfinished_requests:
                    self.recorder.report_idle()
                return
            batch, label = reader.describe(output)
        except Exception as error:  # noqa: BLE001  # batch attributes may differ in untested vLLM releases
            self.recorder.stop(f"Could not read the batch: {describe_error(error)}.")
        else:
            self.begin_iteration(batch, label)
