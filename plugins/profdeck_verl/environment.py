"""Environment of a job's actors, so that rollout engines load profdeck and NVTX does not occupy CUPTI."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from profdeck.plugin import settings_environ
from profdeck_verl.constants import TOOL
from profdeck_verl.settings import merge_configs


def patch_runtime_env(module: ModuleType) -> None:
    """Patch ``get_ppo_ray_runtime_env`` to add profdeck's run and output directory to the environment of all actors."""
    original: Any = module.get_ppo_ray_runtime_env

    @functools.wraps(original)
    def get_ppo_ray_runtime_env(config: Any = None) -> Any:
        if config is None or (config.get("global_profiler") or {}).get("tool") != TOOL:
            return original(config) if config is not None else original()  # no parameter before verl 0.9.1
        environment = original(_select_torch(config))
        profdeck_config, _ = merge_configs(config)  # The trainer logs the notes.
        settings = settings_environ({"run": profdeck_config.run, "output": str(profdeck_config.output)})
        environment["env_vars"] = {**environment["env_vars"], **settings}
        return environment

    module.get_ppo_ray_runtime_env = get_ppo_ray_runtime_env  # type: ignore[attr-defined]


def _select_torch(config: Any) -> Any:
    """Return the config with the tool ``torch``, for which verl prevents NVTX from occupying CUPTI."""
    from omegaconf import OmegaConf

    return OmegaConf.merge(config, {"global_profiler": {"tool": "torch"}})
