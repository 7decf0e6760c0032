"""Records in the workers of vLLM-Omni's diffusion stages, which are none of vLLM's (0.18 to 0.30)."""

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
from profdeck_vllm.diffusion_phases import Phases

MODULE = "vllm_omni.diffusion.worker.diffusion_worker"

_COORDINATES = {
    "dp": "data_parallel",
    "cfg": "classifier_free_guidance",
    "sp": "sequence_parallel",
    "pp": "pipeline_parallel",
}
"""Parallel dimensions and their names in ``vllm_omni.diffusion.distributed.parallel_state``; tp is vLLM's."""


def install() -> None:
    """Let diffusion workers record as soon as their module is imported; stages of other kinds never do that."""
    after_import(MODULE, _install)


def _install(module: ModuleType) -> None:
    worker.install(module.DiffusionWorker, DiffusionWorkerAgent)


class DiffusionWorkerAgent(worker.WorkerAgent):
    """Records in one worker. An iteration is a request, a batch of requests, or a denoising step of several."""

    iterating = ("execute_model", "execute_model_batch", "execute_stepwise")

    @property
    def stage(self) -> int | None:
        """Read the config; 0.18 has no stage in it, and who asks knows."""
        return getattr(self.worker.od_config, "stage_id", None)

    def place(self, engine: Mapping[str, Any]) -> Identity:  # noqa: ARG002  # has no data-parallel engines
        """Return the place of the worker in its stage."""
        from vllm.distributed import parallel_state as vllm_state
        from vllm_omni.diffusion.distributed import parallel_state as state

        coordinates = {}
        groups = [(name, state, key) for name, key in _COORDINATES.items()]
        for name, module, key in [*groups, ("tp", vllm_state, "tensor_model_parallel")]:
            try:
                if getattr(module, f"get_{key}_world_size")() > 1:
                    coordinates[name] = getattr(module, f"get_{key}_rank")()
            except (AttributeError, AssertionError):  # not in this release; not initialised
                continue
        return Identity(
            rank=self.worker.rank,
            world_size=self.worker.od_config.num_gpus,
            local_rank=self.worker.local_rank,
            parallel=coordinates,
        )

    @classmethod
    def answers(cls, answer: Any) -> Any:
        """Gather the answers of all ranks, of which vLLM-Omni sends that of rank 0 only."""
        import torch.distributed as dist
        from vllm_omni.diffusion.distributed.parallel_state import get_world_group

        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [answer]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, answer, group=get_world_group().cpu_group)
        return gathered

    def start(self, request: CaptureRequest) -> None:
        """Take a request; its batches are of no kind."""
        super().start(attrs.evolve(request, batch_kinds=()))

    def wrappers(self, request: CaptureRequest) -> Mapping[str, Callable[..., Any]]:  # noqa: ARG002  # no options
        """Wrap what runs requests and steps, and mark the phases in them."""
        return {
            name: self._wrapper(name, getattr(self.worker, name))
            for name in self.iterating
            if hasattr(self.worker, name)
        }

    def _wrapper(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.begin_iteration(None, _label(name, args))
            try:
                with Phases(getattr(self.worker.model_runner, "pipeline", None)):
                    return own(*args, **kwargs)
            finally:
                self.end_iteration()

        return call


def _label(name: str, args: tuple[Any, ...]) -> str:
    """Name an iteration and, where it may have several, the number of its requests."""
    if name == "execute_model":
        return "diffusion_request(1)"
    scheduled = args[0] if args else None
    if name == "execute_stepwise":
        return f"diffusion_step({_count(scheduled, 'scheduled_request_ids')})"
    return f"diffusion_batch({_count(scheduled, 'scheduled_new_reqs')})"


def _count(scheduled: Any, attribute: str) -> int:
    return len(getattr(scheduled, attribute, None) or (1,))
