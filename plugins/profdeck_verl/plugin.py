"""Patches verl. verl imports this module in each of its processes (entry points ``verl.plugins``, since 0.9.0).

The patches are applied when verl imports a module, and have no effect without ``global_profiler.tool=profdeck``:

- The environment of a job's actors makes engines load profdeck (`profdeck_verl.environment`).
- The constructor of a trainer adds profdeck's config to the config of its workers (`profdeck_verl.trainers`).
- `DistProfiler`, which workers call, uses profdeck's implementation (`profdeck_verl.workers`).
- The manager of rollout servers captures them as a fleet (`profdeck_verl.rollouts`).
"""

from __future__ import annotations

import functools
import importlib

from profdeck.plugin import after_import

PATCHES = {
    "verl.utils.profiler.profile": "profdeck_verl.workers:patch_profiler",
    "verl.trainer.constants_ppo": "profdeck_verl.environment:patch_runtime_env",
    "verl.trainer.ppo.ray_trainer": "profdeck_verl.trainers:patch_trainers",
    "verl.trainer.ppo.v1.trainer_base": "profdeck_verl.trainers:patch_trainers",
    "verl.experimental.separation.ray_trainer": "profdeck_verl.trainers:patch_trainers",
    "verl.experimental.one_step_off_policy.ray_trainer": "profdeck_verl.trainers:patch_trainers",
    "verl.experimental.fully_async_policy.fully_async_trainer": "profdeck_verl.trainers:patch_trainers",
    "verl.experimental.fully_async_policy.fully_async_rollouter": "profdeck_verl.trainers:patch_trainers",
    "verl.workers.rollout.llm_server": "profdeck_verl.rollouts:patch_server_managers",
    "verl.experimental.agent_loop.agent_loop": "profdeck_verl.rollouts:patch_server_managers",
}
"""Modules of verl, and the functions that patch them after their import."""


def _patch(function_path: str, module: object) -> None:
    module_name, _, function_name = function_path.partition(":")
    getattr(importlib.import_module(module_name), function_name)(module)


for _module_name, _function_path in PATCHES.items():
    after_import(_module_name, functools.partial(_patch, _function_path))
