"""The trainers: prepare the config of a job when its trainer is built, in the process that drives it."""

from __future__ import annotations

import functools
import inspect
import logging
from types import ModuleType
from typing import Any

from profdeck.plugin import Config, build_backend, unstructure
from profdeck_verl import steps
from profdeck_verl.rollouts import Rollouts
from profdeck_verl.settings import resolved
from profdeck_verl.steps import EveryStep
from profdeck_verl.words import CONFIG, ROLE, TOOL, TRAINER

logger = logging.getLogger("profdeck")

_CAPTURED = "_profdeck_captures"
"""Set in trainers whose config is prepared; asking the config in each step takes longer than all else here."""

WORKERS = {"actor": "actor_rollout_ref.actor", "ref": "actor_rollout_ref.ref", "critic": "critic"}
"""Where verl's config has the profilers of training workers."""


def prepare_in(module: ModuleType) -> None:
    """Let the trainers of a module prepare their config as they are built."""
    for cls in vars(module).values():
        if inspect.isclass(cls) and cls.__module__ == module.__name__ and "__init__" in vars(cls):
            _prepare_in(cls)


def _prepare_in(cls: Any) -> None:
    initialise = cls.__init__
    if next(iter([*inspect.signature(initialise).parameters][1:]), None) != "config":
        return

    @functools.wraps(initialise)
    def init(self: Any, config: Any, *arguments: Any, **keywords: Any) -> None:
        prepare(config)
        setattr(self, _CAPTURED, is_prepared(config))
        initialise(self, config, *arguments, **keywords)

    cls.__init__ = init
    begin, end = vars(cls).get("_start_profiling"), vars(cls).get("_stop_profiling")
    if begin is None or end is None or inspect.iscoroutinefunction(begin):  # a rollouter, whose trainer is elsewhere
        return

    @functools.wraps(begin)
    def begun(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if getattr(self, _CAPTURED, False):
            steps.enter(int(self.global_steps))
            for rollouts in _rollouts(self):  # before the workers, which share their devices and come later in a step
                rollouts.start(steps.current())
        return begin(self, *arguments, **keywords)

    @functools.wraps(end)
    def ended(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = end(self, *arguments, **keywords)
        if getattr(self, _CAPTURED, False):
            for rollouts in _rollouts(self):
                rollouts.stop()
        return result

    cls._start_profiling, cls._stop_profiling = begun, ended


def _rollouts(trainer: Any) -> list[Rollouts]:
    of = getattr(trainer, "_rollout_server_managers", None)
    managers = of() if of is not None else [getattr(trainer, "llm_server_manager", None)]
    return [rollouts for manager in managers if manager is not None and (rollouts := Rollouts.of(manager)) is not None]


def is_prepared(config: Any) -> bool:
    """Tell whether profdeck's config is in that of a job."""
    profiler = config.get("global_profiler")
    return profiler is not None and isinstance(profiler.get("steps"), EveryStep)


def prepare(config: Any) -> None:
    """Put profdeck's config into that of a job, if the job asks for it; does it once.

    Raises:
        ConfigError: the config is wrong.
        PluginError: a backend cannot be used.
    """
    profiler = config.get("global_profiler")
    if profiler is None or profiler.get("tool") != TOOL or is_prepared(config):
        return
    found = resolved(config)
    for role in found.roles:
        build_backend(found, role)  # what is wrong is said before anything is trained
    _fill(config, found)
    logger.info("profdeck captures %s into %s.", ", ".join(found.roles), found.output / str(found.run))


def _fill(config: Any, found: Config) -> None:
    from omegaconf import OmegaConf, open_dict

    data = unstructure(found)
    with open_dict(config):
        for worker, place in WORKERS.items():
            own = OmegaConf.select(config, place)
            if own is None or own.get("profiler") is None:
                continue
            own.profiler.enable = own.profiler.all_ranks = True  # profdeck's config selects
            role = worker if worker in found.roles else TRAINER
            tools = own.profiler.get("tool_config") or {}
            own.profiler.tool_config = {**tools, TOOL: {CONFIG: data, ROLE: role}}
        # verl's servers know of two tools, and warn of any other; profdeck asks them itself.
        rollout = OmegaConf.select(config, "actor_rollout_ref.rollout")
        if rollout is not None and "profiler" in rollout:
            rollout.profiler = None
        profiler = config.global_profiler
        profiler.profile_continuous_steps = False
        profiler.finish_hook_cmd = None  # profdeck's own runs when all files are whole
        profiler._set_flag("allow_objects", True)  # noqa: SLF001, FBT003  # the only way to set it
        profiler.steps = EveryStep()
        config[TOOL] = data
