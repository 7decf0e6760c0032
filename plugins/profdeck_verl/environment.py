"""The environment of a job's actors: by it the engines of rollouts load profdeck, and NVTX leaves CUPTI to torch."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from profdeck.plugin import settings_environ
from profdeck_verl.settings import gathered
from profdeck_verl.words import TOOL


def put_in_place(module: ModuleType) -> None:
    """Add to what verl's driver gives to all of its actors."""
    own: Any = module.get_ppo_ray_runtime_env

    @functools.wraps(own)
    def get_ppo_ray_runtime_env(config: Any = None) -> Any:
        if config is None or (config.get("global_profiler") or {}).get("tool") != TOOL:
            return own(config) if config is not None else own()  # without a parameter before 0.9.1
        environment = own(_as_torch(config))
        found, _ = gathered(config)  # the trainer says the notes
        chosen = settings_environ({"run": found.run, "output": str(found.output)})
        environment["env_vars"] = {**environment["env_vars"], **chosen}
        return environment

    module.get_ppo_ray_runtime_env = get_ppo_ray_runtime_env  # type: ignore[attr-defined]


def _as_torch(config: Any) -> Any:
    """Return the config of a job that profiles by torch, for which verl keeps NVTX from taking CUPTI."""
    from omegaconf import OmegaConf

    return OmegaConf.merge(config, {"global_profiler": {"tool": "torch"}})
