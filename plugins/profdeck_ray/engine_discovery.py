"""Discovery of Ray actors that hold an engine."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs

from profdeck.engines import (
    Actor,
    ActorGroup,
    AskActor,
    FoundActor,
    FoundActors,
    NoEngineError,
    Outcome,
    fan_out,
    run_in_thread,
)
from profdeck.plugin import CaptureError, ConfigError, TargetError, TargetsConfig
from profdeck_ray.actors import find_matching, find_members, find_named, find_namespaces, is_pattern

T = TypeVar("T")
ALL = "*"
"""Pattern that matches all actor names."""

_CLUSTER_TIMEOUT_S = 10.0


@attrs.frozen
class PlacementGroup(ActorGroup):
    """A Ray placement group as a target. It represents the actors in the group that hold an engine."""

    id: str
    attribute: str | None = None
    """Dotted path from each actor to its engine."""

    def __str__(self) -> str:
        return f"PlacementGroup({self.id})"

    @classmethod
    def of(cls, target: object, attribute: str | None = None) -> PlacementGroup | None:
        """Convert a Ray placement group. Return ``None`` for any other object."""
        if isinstance(target, cls):
            return target
        module = sys.modules.get("ray.util.placement_group")  # a process that has a group has imported this module
        if module is not None and isinstance(target, module.PlacementGroup):
            return cls(target.id.hex(), attribute)
        return None

    async def find_actors(self, given: Sequence[object], ask: AskActor) -> FoundActors:
        """Find the named actors in the group that hold an engine."""
        members, unnamed = await _query(find_members, self.id, self.attribute)
        candidates = [member for member in members if member.actor not in given]
        actors, notes = await _keep_with_engine(candidates, ask, str(self))
        if unnamed:
            notes.append(f"Skipped unnamed actors in {self}, which cannot be looked up: {unnamed}.")
        return actors, notes


async def find_configured(config: TargetsConfig, ask: AskActor) -> FoundActors:
    """Find the actors listed in a config. An actor that matches a pattern is included only if it holds an engine.

    Raises:
        TargetError: The cluster does not respond, or this process has not joined one.
    """
    names = [name for name in config.actors if not is_pattern(name)]
    patterns = [name for name in config.actors if is_pattern(name)]
    namespace, attribute = config.actor_namespace, config.actor_attribute
    named = await _query(find_named, names, namespace, attribute) if names else []
    if not patterns:
        return named, []
    matching, notes = await _find_matching_with_engine(patterns, namespace, attribute, ask)
    return named + [actor for actor in matching if actor.key not in names], notes


async def find_namespace(names: Sequence[str], ask: AskActor) -> tuple[str, list[str]]:
    """Find the namespace of the only job that has engines. By default, each Ray job has its own namespace.

    Args:
        names: Actor names or patterns.
        ask: Connects to an actor's engine.

    Returns:
        The namespace, and a warning about actors in other namespaces that did not respond.

    Raises:
        ConfigError: Several jobs have engines.
        CaptureError: No job has an engine, or the cluster does not respond.
    """
    answered, silent = Counter[str](), Counter[str]()

    async def search(namespace: str) -> None:
        async def ask_and_count(actor: Actor) -> None:
            await ask(actor)
            answered[namespace] += 1

        actors, _ = await _find_matching_with_engine(names, namespace, None, ask_and_count)
        silent[namespace] = len(actors) - answered[namespace]

    namespaces = await _query(find_namespaces, names)
    await asyncio.gather(*map(search, namespaces))
    answered, silent = +answered, +silent
    if len(answered) > 1:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(answered.items()))
        raise ConfigError(
            f"Several Ray jobs have engines. Select one with --set server.targets.actor_namespace=NAME. Engines by "
            f"namespace: {listed}."
        )
    if not answered:
        searched = f"actors named {', '.join(names)}" if list(names) != [ALL] else "named actors"
        listed = ", ".join(f"{count} in {name}" for name, count in sorted(silent.items()))
        note = f" Actors that did not respond (busy, or without profdeck): {listed}." if silent else ""
        raise CaptureError(
            f"No engine found in the {searched}, in {len(namespaces)} namespaces of the Ray cluster.{note} If an actor "
            "has started a server, pass the server's --url."
        )
    (namespace,) = answered
    silent_elsewhere = sum(count for name, count in silent.items() if name != namespace)
    note = f"Skipped actors in other namespaces, which did not respond: {silent_elsewhere}."
    return namespace, [note] if silent_elsewhere else []


async def _find_matching_with_engine(
    patterns: Sequence[str], namespace: str | None, attribute: str | None, ask: AskActor
) -> FoundActors:
    matching = await _query(find_matching, patterns, namespace, attribute)
    return await _keep_with_engine(matching, ask, f"actors matching {', '.join(patterns)}")


async def _keep_with_engine(candidates: Sequence[FoundActor], ask: AskActor, selection: str) -> FoundActors:
    """Remove actors without an engine, and return a note about them.

    Args:
        candidates: Actors to check.
        ask: Connects to an actor's engine.
        selection: Description of the candidates, for the note.
    """
    actors = [candidate.actor for candidate in candidates if isinstance(candidate.actor, Actor)]
    results = await fan_out(ask, actors, timeout_s=_CLUSTER_TIMEOUT_S, each_timeout_s=_CLUSTER_TIMEOUT_S)
    # Keep actors that did not respond: the next request to them reports the reason.
    without_engine = {actor for actor, result in zip(actors, results, strict=True) if isinstance(result, NoEngineError)}
    kept = [candidate for candidate in candidates if candidate.actor not in without_engine]
    if not without_engine:
        return kept, []
    return kept, [f"Skipped actors without an engine ({selection}): {', '.join(sorted(map(str, without_engine)))}."]


async def _query(call: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking cluster query in a thread.

    Raises:
        TargetError: The query failed or timed out.
    """
    try:
        async with asyncio.timeout(_CLUSTER_TIMEOUT_S):
            return await run_in_thread(call, *arguments)
    except TimeoutError:
        text = f"The Ray cluster did not respond within {_CLUSTER_TIMEOUT_S:g} seconds."
        raise TargetError(text, Outcome.TIMED_OUT, "Check with 'ray status' that the head node is running.") from None
