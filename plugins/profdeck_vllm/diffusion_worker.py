"""Worker agent for diffusion stages of vLLM-Omni (0.18 to 0.30). Their workers do not inherit from vLLM's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import attrs

from profdeck import Identity
from profdeck.engines import CaptureRequest
from profdeck.plugin import after_import
from profdeck_vllm import worker
from profdeck_vllm.diffusion_phases import PhaseAnnotations

MODULE = "vllm_omni.diffusion.worker.diffusion_worker"

_COORDINATES = {
    "dp": "data_parallel",
    "cfg": "classifier_free_guidance",
    "sp": "sequence_parallel",
    "pp": "pipeline_parallel",
}
"""Parallel dimensions and their names in ``vllm_omni.diffusion.distributed.parallel_state``. vLLM provides tp."""


def install() -> None:
    """Patch the diffusion worker class when its module is first imported. Other stages never import it."""
    after_import(MODULE, _install)


def _install(module: ModuleType) -> None:
    worker.install(module.DiffusionWorker, DiffusionWorkerAgent)


class DiffusionWorkerAgent(worker.WorkerAgent):
    """Agent of one diffusion worker. An iteration is a request, a batch of requests, or one denoising step."""

    iteration_methods = ("execute_model", "execute_model_batch", "execute_stepwise")

    @property
    def stage(self) -> int | None:
        """The ``stage_id`` of the config; None in vLLM-Omni 0.18, where the start request contains it."""
        return getattr(self.worker.od_config, "stage_id", None)

    def local_identity(self, engine: Mapping[str, Any]) -> Identity:  # noqa: ARG002  # no data-parallel engines
        """Return the worker's identity in its stage."""
        from vllm.distributed import parallel_state as vllm_state
        from vllm_omni.diffusion.distributed import parallel_state as state

        coordinates = {}
        groups = [(name, state, key) for name, key in _COORDINATES.items()]
        for name, module, key in [*groups, ("tp", vllm_state, "tensor_model_parallel")]:
            try:
                if getattr(module, f"get_{key}_world_size")() > 1:
                    coordinates[name] = getattr(module, f"get_{key}_rank")()
            except (AttributeError, AssertionError):  # not in this release, or not initialized
                continue
        return Identity(
            rank=self.worker.rank,
            world_size=self.worker.od_config.num_gpus,
            local_rank=self.worker.local_rank,
            parallel=coordinates,
        )

    @classmethod
    def collect_replies(cls, reply: Any) -> Any:
        """Gather the replies of all ranks, because vLLM-Omni returns only the reply of rank 0."""
        import torch.distributed as dist
        from vllm_omni.diffusion.distributed.parallel_state import get_world_group

        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [reply]
        replies: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(replies, reply, group=get_world_group().cpu_group)
        return replies

    def start(self, request: CaptureRequest) -> None:
        """Start a capture. Ignores ``batch_kinds``, because diffusion batches have no kind."""
        super().start(attrs.evolve(request, batch_kinds=()))

    def create_patches(self, request: CaptureRequest) -> Mapping[str, Callable[..., Any]]:  # noqa: ARG002  # no options
        """Return replacements of the iteration methods that also annotate the phases."""
        return {
            name: self._create_patch(name, getattr(self.worker, name))
            for name in self.iteration_methods
            if hasattr(self.worker, name)
        }

    def _create_patch(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.begin_iteration(None, _iteration_label(name, args))
            try:
                with PhaseAnnotations(getattr(self.worker.model_runner, "pipeline", None)):
                    return original(*args, **kwargs)
            finally:
                self.end_iteration()

        return call


def _iteration_label(method: str, args: tuple[Any, ...]) -> str:
    """Return the name of an iteration in the trace, with its number of requests."""
    if method == "execute_model":
        return "diffusion_request(1)"
    scheduler_output = args[0] if args else None
    if method == "execute_stepwise":
        return f"diffusion_step({_count_requests(scheduler_output, 'scheduled_request_ids')})"
    return f"diffusion_batch({_count_requests(scheduler_output, 'scheduled_new_reqs')})"


def _count_requests(scheduler_output: Any, attribute: str) -> int:
    return len(getattr(scheduler_output, attribute, None) or (1,))
