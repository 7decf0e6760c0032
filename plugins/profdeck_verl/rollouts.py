"""The rollouts: verl's servers of vLLM and SGLang, captured as one fleet by the process that drives the job."""

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
from profdeck_verl.words import ENGINES, REWARD, ROLLOUT, TOOL, plain

logger = logging.getLogger("profdeck")


def put_in_place(module: ModuleType) -> None:
    """Let the manager of servers (of agent loops, before 0.8.0) capture them itself."""
    for name in ("LLMServerManager", "AgentLoopManager"):
        cls = vars(module).get(name)
        if cls is not None and "start_profile" in vars(cls):
            _put_in_place(cls)


def _put_in_place(cls: Any) -> None:
    start, stop = cls.start_profile, cls.stop_profile

    @functools.wraps(start)
    def start_profile(self: Any, **keywords: Any) -> Any:
        if (rollouts := Rollouts.of(self)) is None:
            return start(self, **keywords)
        step = keywords.get("global_step", steps.current())
        return _called(rollouts.start, rollouts.astart, step, by=sys._getframe(1))  # noqa: SLF001  # as verl does

    @functools.wraps(stop)
    def stop_profile(self: Any, **keywords: Any) -> Any:
        if (rollouts := Rollouts.of(self)) is None:
            return stop(self, **keywords)
        return _called(rollouts.stop, rollouts.astop, by=sys._getframe(1))  # noqa: SLF001  # as above

    cls.start_profile, cls.stop_profile = start_profile, stop_profile


def _called(now: Callable[..., None], later: Callable[..., Any], *arguments: Any, by: Any) -> Any:
    """Call one of two functions as verl's callers expect it: those in coroutines await, the others are blocked."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return now(*arguments)
    if by.f_code.co_flags & inspect.CO_COROUTINE:
        return later(*arguments)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(now, *arguments).result()


class Rollouts:
    """The servers of one manager as a fleet."""

    def __init__(self, manager: Any, config: Config) -> None:
        """Args:
        manager: verl's `LLMServerManager`.
        config: profdeck's, of the job.
        """
        self._manager = manager
        self._config = config
        self._profiler: Profiler | None = None
        self._replicas: tuple[int, ...] = ()
        self._under_way: int | None = None

    @classmethod
    def of(cls, manager: Any) -> Rollouts | None:
        """Return those of a manager; None if the job is not profdeck's, or its config has no such role."""
        if not hasattr(manager, "_profdeck"):
            data = plain(manager.config.get(TOOL)) if hasattr(manager.config, "get") else None
            config = None if data is None else structure(data, Config, where=TOOL)
            role = None if config is None else config.roles.get(_role(manager))
            manager._profdeck = None if config is None or role is None else cls(manager, config)  # noqa: SLF001  # ours
        found: Rollouts | None = manager._profdeck  # noqa: SLF001  # ours
        return found

    def start(self, step: int | None) -> None:
        """Begin a global step, unless that has been done."""
        if (profiler := self._due(step)) is not None:
            profiler.start(step or 0)

    def stop(self) -> None:
        """End it."""
        self._under_way = None
        if self._profiler is not None:
            self._profiler.stop()

    async def astart(self, step: int | None) -> None:
        """Do what `start` does in an event loop."""
        if (profiler := self._due(step)) is not None:
            await profiler.astart(step or 0)

    async def astop(self) -> None:
        """Do what `stop` does in an event loop."""
        self._under_way = None
        if self._profiler is not None:
            await self._profiler.astop()

    def _due(self, step: int | None) -> Profiler | None:
        if step is None:
            logger.warning("profdeck: nobody said which global step begins, so no rollout is captured in it.")
        if step is None or step == self._under_way:
            return None
        self._under_way = step
        replicas = tuple(replica.replica_rank for replica in self._manager.rollout_replicas)
        if self._profiler is None or replicas != self._replicas:  # servers come and go
            self._profiler, self._replicas = self._built(), replicas
        return self._profiler

    def _built(self) -> Profiler | None:
        name = _role(self._manager)
        role = self._config.roles[name]
        where = attrs.evolve(role.targets or TargetsConfig(), actor_attribute=ENGINES.get(role.backend))
        roles = {name: attrs.evolve(role, targets=where)}
        # Generating is one stage, also where each stage of the workers is a capture.
        config = attrs.evolve(self._config, roles=roles, mode=Mode.CONTINUOUS, on_demand=False)
        if self._profiler is None:
            config = attrs.evolve(config, on_demand=self._config.on_demand)
        try:
            return Profiler.of(config, role=name, target=[*map(_placed, self._manager.rollout_replicas)])
        except ProfdeckError as error:
            logger.warning("profdeck: no rollout is captured: %s", describe_error(error))
            return None


def _role(manager: Any) -> str:
    rewards = any(getattr(replica, "is_reward_model", False) for replica in getattr(manager, "rollout_replicas", ()))
    return REWARD if rewards else ROLLOUT


def _placed(replica: Any) -> PlacedEngine:
    """Say on which GPUs of the job a replica runs, as verl numbers them: one after the other, by replica."""
    first = replica.replica_rank * replica.world_size
    gpu_ranks = [first + rank for rank in range(replica.world_size)]
    return PlacedEngine(replica.servers[0], gpu_ranks)  # the other servers are headless
