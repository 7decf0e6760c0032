"""Lets verl 0.9.1 start engines of SGLang 0.5.23, which runs on the CPU: verl itself names 0.5.12, which needs CUDA."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

from profdeck.base.imports import after_import


def _load_without_kernels(module: Any) -> None:
    """Import SGLang as it is: verl asks for its kernels for the CPU, of which there is no wheel."""

    def load() -> Any:
        from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

        return SGLangReplica

    module.RolloutReplicaRegistry._registry["sglang"] = load


def _accept_other_arguments(module: Any) -> None:
    """Let it look into `ServerArgs`, which is no dataclass any more."""
    shim: Any = types.SimpleNamespace(**vars(dataclasses))
    shim.fields = lambda cls: dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    module.dataclasses = shim


def _keep_weights(module: Any) -> None:
    """Let engines keep their weights: the interface of updates is another one. Who trains still gathers them."""

    async def update_weights(self: Any, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        import ray

        if hasattr(weights, "__aiter__"):
            async for _weight in weights:
                pass
        else:
            for _weight in weights:
                pass
        if global_steps is not None:
            server = ray.get_actor(f"sglang_server_{self.replica_rank}_{self.node_rank}")
            await server.set_global_steps.remote(global_steps)

    async def nothing(*_: Any, **__: Any) -> None: ...

    adapter = module.ServerAdapter
    adapter.update_weights = update_weights
    adapter.resume = adapter.release = adapter._init_server_adapter = nothing


_ROLLOUT = "verl.workers.rollout"
after_import(f"{_ROLLOUT}.replica", _load_without_kernels)
after_import(f"{_ROLLOUT}.sglang_rollout.async_sglang_server", _accept_other_arguments)
after_import(f"{_ROLLOUT}.sglang_rollout.sglang_rollout", _keep_weights)
