"""Patches verl's trainers: adds profdeck's config to the job's config, in the process that drives the job."""

from __future__ import annotations

import functools
import inspect
import logging
from types import ModuleType
from typing import Any

from profdeck.plugin import Config, build_backend, unstructure
from profdeck_verl import steps
from profdeck_verl.constants import CONFIG, ROLE, TOOL, TRAINER
from profdeck_verl.rollouts import Rollouts
from profdeck_verl.settings import load_config
from profdeck_verl.steps import EveryStep

logger = logging.getLogger("profdeck")

_IS_CAPTURED = "_profdeck_captures"
"""Attribute of trainers: whether their config is prepared. It caches `is_prepared`, which is slow for OmegaConf."""

WORKERS = {"actor": "actor_rollout_ref.actor", "ref": "actor_rollout_ref.ref", "critic": "critic"}
"""Training workers, and the config keys that contain their profiler options."""


def patch_trainers(module: ModuleType) -> None:
    """Patch the trainer classes of a module to prepare their config in the constructor."""
    for cls in vars(module).values():
        if inspect.isclass(cls) and cls.__module__ == module.__name__ and "__init__" in vars(cls):
            _patch_trainer(cls)


def _patch_trainer(cls: Any) -> None:
    original_init = cls.__init__
    if next(iter([*inspect.signature(original_init).parameters][1:]), None) != "config":
        return

    @functools.wraps(original_init)
    def init(self: Any, config: Any, *arguments: Any, **keywords: Any) -> None:
        prepare_config(config)
        setattr(self, _IS_CAPTURED, is_prepared(config))
        original_init(self, config, *arguments, **keywords)

    cls.__init__ = init
    original_start, original_stop = vars(cls).get("_start_profiling"), vars(cls).get("_stop_profiling")
    # Rollouters have an async method. Their trainer is in another process.
    if original_start is None or original_stop is None or inspect.iscoroutinefunction(original_start):
        return

    @functools.wraps(original_start)
    def start_profiling(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if getattr(self, _IS_CAPTURED, False):
            steps.set_current_step(int(self.global_steps))
            # Start before the workers: they share the devices, and run after the rollouts of a step.
            for rollouts in _find_rollouts(self):
                rollouts.start(steps.current_step())
        return original_start(self, *arguments, **keywords)

    @functools.wraps(original_stop)
    def stop_profiling(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = original_stop(self, *arguments, **keywords)
        if getattr(self, _IS_CAPTURED, False):
            for rollouts in _find_rollouts(self):
                rollouts.stop()
        return result

    cls._start_profiling, cls._stop_profiling = start_profiling, stop_profiling


def _find_rollouts(trainer: Any) -> list[Rollouts]:
    get_managers = getattr(trainer, "_rollout_server_managers", None)
    managers = get_managers() if get_managers is not None else [getattr(trainer, "llm_server_manager", None)]
    rollouts = [Rollouts.for_manager(manager) for manager in managers if manager is not None]
    return [fleet for fleet in rollouts if fleet is not None]


def is_prepared(config: Any) -> bool:
    """Return whether a job's config contains profdeck's config."""
    profiler = config.get("global_profiler")
    return profiler is not None and isinstance(profiler.get("steps"), EveryStep)


def prepare_config(config: Any) -> None:
    """Add profdeck's config to a job's config, if the job selects profdeck and the config is not prepared yet.

    Raises:
        ConfigError: the config is invalid.
        PluginError: a backend cannot be used.
    """
    profiler = config.get("global_profiler")
    if profiler is None or profiler.get("tool") != TOOL or is_prepared(config):
        return
    profdeck_config = load_config(config)
    for role in profdeck_config.roles:
        build_backend(profdeck_config, role)  # Raises errors before the training starts.
    _add_profdeck_config(config, profdeck_config)
    run = profdeck_config.output / str(profdeck_config.run)
    logger.info("profdeck captures %s into %s.", ", ".join(profdeck_config.roles), run)


def _add_profdeck_config(config: Any, profdeck_config: Config) -> None:
    from omegaconf import OmegaConf, open_dict

    data = unstructure(profdeck_config)
    with open_dict(config):
        for worker, key in WORKERS.items():
            worker_config = OmegaConf.select(config, key)
            if worker_config is None or worker_config.get("profiler") is None:
                continue
            # Enable all ranks, because profdeck's config selects ranks.
            worker_config.profiler.enable = worker_config.profiler.all_ranks = True
            role = worker if worker in profdeck_config.roles else TRAINER
            tools = worker_config.profiler.get("tool_config") or {}
            worker_config.profiler.tool_config = {**tools, TOOL: {CONFIG: data, ROLE: role}}
        # verl's servers warn about unknown tools. profdeck sends requests to the servers itself.
        rollout = OmegaConf.select(config, "actor_rollout_ref.rollout")
        if rollout is not None and "profiler" in rollout:
            rollout.profiler = None
        profiler = config.global_profiler
        profiler.profile_continuous_steps = False
        profiler.finish_hook_cmd = None  # profdeck runs the finish command after all files are complete.
        profiler._set_flag("allow_objects", True)  # noqa: SLF001, FBT003  # OmegaConf has no public API for this
        profiler.steps = EveryStep()
        config[TOOL] = data
