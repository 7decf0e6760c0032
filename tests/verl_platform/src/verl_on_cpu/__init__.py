"""A platform of verl (0.9) for tests on the CPU: Ray gets pretended GPUs, torch gets none, gloo is the backend."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

import verl_on_cpu.sglang  # noqa: F401  # what it changes waits for imports
from profdeck.base.imports import after_import


def _device_module() -> types.ModuleType:
    module: Any = types.ModuleType("torch_cpu_device")
    for name in dir(torch.cpu):
        setattr(module, name, getattr(torch.cpu, name))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *_, **__: 0)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all"):
        setattr(module, name, lambda *_, **__: None)
    module.set_device = lambda *_: None
    module.mem_get_info = lambda *_: (8 << 30, 16 << 30)
    module.get_rng_state, module.set_rng_state = torch.get_rng_state, torch.set_rng_state
    module.current_device = module.get_device_name = lambda *_: "cpu"
    module.device_count = lambda: 1
    module.is_bf16_supported = lambda *_: True
    return module  # type: ignore[no-any-return]  # it is one


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The CPU as verl's device."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, *_: object, **__: object) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, *_: object) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, _: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    def cudart(self) -> None: ...


_init = torch.distributed.init_process_group


def _init_process_group(backend: str | None = None, *arguments: Any, **keywords: Any) -> None:
    """Begin a group: verl asks for a pair of backends that torch refuses."""
    _init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *arguments, **keywords)


torch.distributed.init_process_group = _init_process_group
# verl offloads a reference model to pinned memory, which torch has only beside an accelerator.
torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


def _keep_weights(module: types.ModuleType) -> None:
    """Let engines keep their weights: vLLM's linear layers for the CPU take no new ones once they are packed."""
    module.vLLMColocateWorkerExtension._update_weights = lambda *_, **__: None  # type: ignore[attr-defined]


after_import("verl.workers.rollout.vllm_rollout.utils", _keep_weights)
