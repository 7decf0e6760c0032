"""Searches for the actors of a Ray cluster that hold an engine."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs

from profdeck.base.blocking import in_thread
from profdeck.base.errors import CaptureError, ConfigError, TargetError
from profdeck.base.outcome import Outcome
from profdeck.config.targets import TargetsConfig
from profdeck.engine.clusters import Actor, ActorGroup, AskActor, FoundActor, FoundActors, NoEngineError
from profdeck.replicas.fan_out import fan_out
from profdeck_ray.actors import find_matching, find_members, find_named, find_namespaces, is_pattern

T = TypeVar("T")
ALL = "*"
"""Pattern that matches the names of all actors."""

_CLUSTER_TIMEOUT_S = 10.0


@attrs.frozen
class PlacementGroup(ActorGroup):
    """A placement group, which stands for the actors in it that hold an engine."""

    id: str
    attribute: str | None = None
    """Dotted path of the engines in the actors."""

    def __str__(self) -> str:
        return f"PlacementGroup({self.id})"

    @classmethod
    def of(cls, target: object, attribute: str | None = None) -> PlacementGroup | None:
        """Return the group for an object of Ray, or ``None`` for other objects."""
        if isinstance(target, cls):
            return target
        module = sys.modules.get("ray.util.placement_group")  # imported by any process that has a group
        if module is not None and isinstance(target, module.PlacementGroup):
            return cls(target.id.hex(), attribute)
        return None

    async def find_actors(self, given: Sequence[object], ask: AskActor) -> FoundActors:
        """Find the actors of the group that have a name and hold an engine."""
        members, unnamed = await _query(find_members, self.id, self.attribute)
        found, notes = await _with_engine([one for one in members if one.actor not in given], ask, str(self))
        if unnamed:
            notes.append(f"Not asked in {self}, as they have no name to be found by: {unnamed} of its actors.")
        return found, notes


async def find_configured(config: TargetsConfig, ask: AskActor) -> FoundActors:
    """Find the actors that a config names, and of those that match its patterns the ones that hold an engine.

    Raises:
        TargetError: The cluster does not answer, or this process has not joined one.
    """
    names = [name for name in config.actors if not is_pattern(name)]
    patterns = [name for name in config.actors if is_pattern(name)]
    where = config.actor_namespace, config.actor_attribute
    found = await _query(find_named, names, *where) if names else []
    if not patterns:
        return found, []
    matching, notes = await _find_matching_with_engine(patterns, *where, ask)
    return found + [one for one in matching if one.key not in names], notes


async def find_namespace(names: Sequence[str], ask: AskActor) -> tuple[str, list[str]]:
    """Return the namespace of the only job whose actors hold engines. By default, each Ray job has its own namespace.

    Args:
        names: Names or patterns of actors.
        ask: Reaches the engine of an actor.

    Returns:
        The namespace, and a warning about actors of other namespaces that did not answer.

    Raises:
        ConfigError: Several jobs have engines.
        CaptureError: No job has an engine, or the cluster does not answer.
    """
    answered, silent = Counter[str](), Counter[str]()

    async def search(namespace: str) -> None:
        async def ask_and_count(actor: Actor) -> None:
            await ask(actor)
            answered[namespace] += 1

        found, _ = await _find_matching_with_engine(names, namespace, None, ask_and_count)
        silent[namespace] = len(found) - answered[namespace]

    namespaces = await _query(find_namespaces, names)
    await asyncio.gather(*map(search, namespaces))
    answered, silent = +answered, +silent
    if len(answered) > 1:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(answered.items()))
        raise ConfigError(f"Several Ray jobs have engines; choose one by its --ray-namespace: {listed}.")
    if not answered:
        which = f"actors named {', '.join(names)}" if list(names) != [ALL] else "actors that have a name"
        listed = ", ".join(f"{count} in {name}" for name, count in sorted(silent.items()))
        text = f" Some do not say whether they do, as they are busy or lack profdeck: {listed}." if silent else ""
        raise CaptureError(
            f"No engine was found in the {which}, in {len(namespaces)} namespaces of the Ray cluster.{text} For an "
            "actor that has started a server, give the server's --url."
        )
    (namespace,) = answered
    others = sum(count for name, count in silent.items() if name != namespace)
    text = f"{others} actors of other namespaces do not say whether they hold an engine; they are left out."
    return namespace, [text] if others else []


async def _find_matching_with_engine(
    patterns: Sequence[str], namespace: str | None, attribute: str | None, ask: AskActor
) -> FoundActors:
    matching = await _query(find_matching, patterns, namespace, attribute)
    return await _with_engine(matching, ask, f"the actors {', '.join(patterns)}")


async def _with_engine(candidates: Sequence[FoundActor], ask: AskActor, where: str) -> FoundActors:
    actors = [one.actor for one in candidates if isinstance(one.actor, Actor)]
    results = await fan_out(ask, actors, timeout_s=_CLUSTER_TIMEOUT_S, each_timeout_s=_CLUSTER_TIMEOUT_S)
    # An actor that does not answer stays a target: the next request to it reports the reason.
    without = {actor for actor, result in zip(actors, results, strict=True) if isinstance(result, NoEngineError)}
    found = [one for one in candidates if one.actor not in without]
    if not without:
        return found, []
    return found, [f"Not asked in {where}, as they hold no engine: {', '.join(sorted(map(str, without)))}."]


async def _query(call: Callable[..., T], *arguments: Any) -> T:
    """Call a blocking query of the cluster in a thread.

    Raises:
        TargetError: The cluster does not answer in time, or the query raises it.
    """
    try:
        async with asyncio.timeout(_CLUSTER_TIMEOUT_S):
            return await in_thread(call, *arguments)
    except TimeoutError:
        text = f"The Ray cluster did not answer within {_CLUSTER_TIMEOUT_S:g} seconds."
        raise TargetError(text, Outcome.TIMED_OUT, "See with 'ray status' whether its head node is up.") from None
