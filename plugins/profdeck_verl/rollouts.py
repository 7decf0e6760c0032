"""Captures verl's rollout servers (vLLM or SGLang) as one fleet, in the process that drives the job."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import attrs

from profdeck import PlacedEngine, ProfdeckError, Profiler
from profdeck.plugin import Config, Mode, TargetsConfig, describe_error, structure
from profdeck_verl import steps
from profdeck_verl.constants import ENGINE_ATTRIBUTES, REWARD, ROLLOUT, TOOL
from profdeck_verl.plain_data import to_plain

logger = logging.getLogger("profdeck")


def patch_server_managers(module: ModuleType) -> None:
    """Patch the profiling methods of `LLMServerManager` (before verl 0.8.0: `AgentLoopManager`)."""
    for name in ("LLMServerManager", "AgentLoopManager"):
        cls = vars(module).get(name)
        if cls is not None and "start_profile" in vars(cls):
            _patch_manager(cls)


def _patch_manager(cls: Any) -> None:
    original_start, original_stop = cls.start_profile, cls.stop_profile

    @functools.wraps(original_start)
    def start_profile(self: Any, **keywords: Any) -> Any:
        if (rollouts := Rollouts.for_manager(self)) is None:
            return original_start(self, **keywords)
        step = keywords.get("global_step", steps.current_step())
        caller = sys._getframe(1)  # noqa: SLF001  # see `_call`
        return _call(rollouts.start, rollouts.astart, step, caller=caller)

    @functools.wraps(original_stop)
    def stop_profile(self: Any, **keywords: Any) -> Any:
        if (rollouts := Rollouts.for_manager(self)) is None:
            return original_stop(self, **keywords)
        return _call(rollouts.stop, rollouts.astop, caller=sys._getframe(1))  # noqa: SLF001  # see `_call`

    cls.start_profile, cls.stop_profile = start_profile, stop_profile


def _call(function: Callable[..., None], async_function: Callable[..., Any], *arguments: Any, caller: Any) -> Any:
    """Call the async function if the caller is a coroutine, which awaits the result. Otherwise, call the other one.

    verl detects coroutine callers in the same way. If other callers run in an event loop, a thread runs the function.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function(*arguments)
    if caller.f_code.co_flags & inspect.CO_COROUTINE:
        return async_function(*arguments)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function, *arguments).result()


class Rollouts:
    """Captures the servers of one manager as a fleet."""

    def __init__(self, manager: Any, config: Config) -> None:
        """Args:
        manager: verl's `LLMServerManager`.
        config: profdeck's config of the job.
        """
        self._manager = manager
        self._config = config
        self._profiler: Profiler | None = None
        self._replicas: tuple[int, ...] = ()
        self._active_step: int | None = None

    @classmethod
    def for_manager(cls, manager: Any) -> Rollouts | None:
        """Return the object of a manager; None if the job does not use profdeck, or its config lacks the role."""
        if not hasattr(manager, "_profdeck"):
            data = to_plain(manager.config.get(TOOL)) if hasattr(manager.config, "get") else None
            config = None if data is None else structure(data, Config, where=TOOL)
            role = None if config is None else config.roles.get(_role_name(manager))
            manager._profdeck = None if config is None or role is None else cls(manager, config)  # noqa: SLF001  # added here
        rollouts: Rollouts | None = manager._profdeck  # noqa: SLF001  # added here
        return rollouts

    def start(self, step: int | None) -> None:
        """Start a global step, unless the step is already active."""
        if (profiler := self._begin_step(step)) is not None:
            profiler.start(step or 0)

    def stop(self) -> None:
        """End the active step."""
        self._active_step = None
        if self._profiler is not None:
            self._profiler.stop()

    async def astart(self, step: int | None) -> None:
        """Async version of `start`."""
        if (profiler := self._begin_step(step)) is not None:
            await profiler.astart(step or 0)

    async def astop(self) -> None:
        """Async version of `stop`."""
        self._active_step = None
        if self._profiler is not None:
            await self._profiler.astop()

    def _begin_step(self, step: int | None) -> Profiler | None:
        """Return the profiler that must start the step; None if it is unknown or already active."""
        if step is None:
            logger.warning("profdeck: the global step is unknown, so no rollout is captured in this step.")
        if step is None or step == self._active_step:
            return None
        self._active_step = step
        replicas = tuple(replica.replica_rank for replica in self._manager.rollout_replicas)
        if self._profiler is None or replicas != self._replicas:  # verl can add and remove servers.
            self._profiler, self._replicas = self._create_profiler(), replicas
        return self._profiler

    def _create_profiler(self) -> Profiler | None:
        role_name = _role_name(self._manager)
        role = self._config.roles[role_name]
        targets = attrs.evolve(role.targets or TargetsConfig(), actor_attribute=ENGINE_ATTRIBUTES.get(role.backend))
        roles = {role_name: attrs.evolve(role, targets=targets)}
        # Rollouts have no stages, even if each stage of the workers is a separate capture.
        config = attrs.evolve(self._config, roles=roles, mode=Mode.CONTINUOUS, on_demand=False)
        if self._profiler is None:
            config = attrs.evolve(config, on_demand=self._config.on_demand)
        try:
            return Profiler.of(config, role=role_name, target=[*map(_placed_engine, self._manager.rollout_replicas)])
        except ProfdeckError as error:
            logger.warning("profdeck: no rollout is captured: %s", describe_error(error))
            return None


def _role_name(manager: Any) -> str:
    replicas = getattr(manager, "rollout_replicas", ())
    return REWARD if any(getattr(replica, "is_reward_model", False) for replica in replicas) else ROLLOUT


def _placed_engine(replica: Any) -> PlacedEngine:
    """Return a replica with the indices of its GPUs in the job. verl numbers the GPUs consecutively, by replica."""
    first = replica.replica_rank * replica.world_size
    gpu_ranks = [first + rank for rank in range(replica.world_size)]
    return PlacedEngine(replica.servers[0], gpu_ranks)  # The other servers are headless.
