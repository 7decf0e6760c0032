"""Which actors of a Ray cluster hold an engine: those that a config names, and those of placement groups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from profdeck.base.blocking import in_thread
from profdeck.base.errors import TargetError
from profdeck.base.outcome import Outcome
from profdeck.config.targets import TargetsConfig
from profdeck.engine.transport.in_ray_actor import NoEngineError
from profdeck.engine.transport.ray_engine import RayActor
from profdeck.replicas.fan_out import fan_out
from profdeck.replicas.ray_actors import NamedActor, PlacementGroup, find_matching, find_named, is_pattern, members

T = TypeVar("T")
AskActor: TypeAlias = Callable[[RayActor], Awaitable[object]]
"""Reaches the engine that an actor holds; raises `NoEngineError` if it holds none."""

_CLUSTER_TIMEOUT_S = 10.0


async def actors_of_config(config: TargetsConfig, ask: AskActor) -> tuple[list[NamedActor], list[str]]:
    """Find the actors that a config names, and those that hold an engine of the ones that match its patterns.

    Returns:
        The actors; and what to note of those that are left out.

    Raises:
        TargetError: the cluster does not answer, or this process is in none.
    """
    names = [name for name in config.actors if not is_pattern(name)]
    patterns = [name for name in config.actors if is_pattern(name)]
    where = config.actor_namespace, config.actor_attribute
    found = await ask_cluster(find_named, names, *where) if names else []
    if not patterns:
        return found, []
    matching, notes = await actors_that_match(patterns, *where, ask)
    return found + [one for one in matching if one.key not in names], notes


async def actors_that_match(
    patterns: Sequence[str], namespace: str | None, attribute: str | None, ask: AskActor
) -> tuple[list[NamedActor], list[str]]:
    """Find the actors whose names match a pattern and that hold an engine.

    Args:
        patterns: of names, or names.
        namespace: where they have them; None for the namespace of this process.
        attribute: where they hold their engines.
        ask: asks an actor.

    Returns:
        The actors, with those that do not answer; and what to note of those that are left out.

    Raises:
        TargetError: as `actors_of_config`.
    """
    matching = await ask_cluster(find_matching, patterns, namespace, attribute)
    return await _holding(matching, ask, f"the actors {', '.join(patterns)}")


async def actors_of_group(
    group: PlacementGroup, given: Sequence[object], ask: AskActor
) -> tuple[list[NamedActor], list[str]]:
    """Find the actors of a placement group that hold an engine.

    Args:
        group: the group.
        given: actors that are targets already.
        ask: asks an actor.

    Returns:
        The actors; and what to note of those that are left out.

    Raises:
        TargetError: as `actors_of_config`.
    """
    named, others = await ask_cluster(members, group)
    found, notes = await _holding([one for one in named if one.actor not in given], ask, str(group))
    if others:
        notes.append(f"Not asked in {group}, as they have no name to be found by: {others} of its actors.")
    return found, notes


async def _holding(named: Sequence[NamedActor], ask: AskActor, where: str) -> tuple[list[NamedActor], list[str]]:
    actors = [one.actor for one in named if isinstance(one.actor, RayActor)]
    results = await fan_out(ask, actors, timeout_s=_CLUSTER_TIMEOUT_S, each_timeout_s=_CLUSTER_TIMEOUT_S)
    # Who does not answer is a target, too: what it is then asked says why.
    without = {actor for actor, result in zip(actors, results, strict=True) if isinstance(result, NoEngineError)}
    found = [one for one in named if one.actor not in without]
    if not without:
        return found, []
    return found, [f"Not asked in {where}, as they hold no engine: {', '.join(sorted(map(str, without)))}."]


async def ask_cluster(call: Callable[..., T], *arguments: Any) -> T:
    """Call what asks the Ray cluster and blocks.

    Raises:
        TargetError: it does not answer, and what the call raises.
    """
    try:
        async with asyncio.timeout(_CLUSTER_TIMEOUT_S):
            return await in_thread(call, *arguments)
    except TimeoutError:
        text = f"The Ray cluster did not answer within {_CLUSTER_TIMEOUT_S:g} seconds."
        raise TargetError(text, Outcome.TIMED_OUT, "See with 'ray status' whether its head node is up.") from None
