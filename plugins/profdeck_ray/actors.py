"""Connection to a Ray cluster, and blocking queries for its actors."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import attrs

from profdeck.base.errors import CaptureError, MissingLibraryError, TargetError
from profdeck.base.outcome import Outcome
from profdeck.engine.clusters import FoundActor
from profdeck_ray.engine import RayActor

_JOIN = "Join the cluster before the capture: ray.init(address='auto')."
_ADDRESS_VARIABLE = "RAY_ADDRESS"  # defined by Ray
_CONNECT_S = 10.0
_BY_NAME = "Actors are found by name"
_INTERNAL_NAMESPACES = ("_ray_internal_", "profdeck")
"""Prefixes of the namespaces of Ray's own actors, and of profdeck's."""


def require(purpose: str) -> None:
    """Check that Ray is installed.

    Raises:
        MissingLibraryError: Ray is not installed. The message starts with `purpose`.
    """
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        raise MissingLibraryError.of(purpose, "ray")


def join(until: ExitStack) -> None:
    """Join the cluster that ``RAY_ADDRESS`` names or that runs on this host, and leave it when `until` is closed.

    Raises:
        CaptureError: The cluster cannot be joined.
        MissingLibraryError: Ray is not installed.
    """
    require("targets.actors: they need")
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get(_ADDRESS_VARIABLE) or "auto"
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal() and "//" not in address:  # Ray would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise CaptureError(
            f"The Ray cluster at {_ADDRESS_VARIABLE}={address} cannot be joined: {why} Run this command "
            f"on a node of the cluster, or set {_ADDRESS_VARIABLE} to HOST:PORT of its head node."
        ) from None
    until.callback(ray.shutdown)


def find_named(names: Sequence[str], namespace: str | None, attribute: str | None) -> list[FoundActor]:
    """Find actors by name.

    Args:
        names: Names of the actors.
        namespace: Namespace of the names. ``None``: the namespace of this process.
        attribute: Dotted path of the engine in the actors.

    Raises:
        TargetError: This process has not joined a cluster.
    """
    ray = _connected_ray(_BY_NAME)
    actors = []
    for name in names:
        try:
            actor: RayActor | TargetError = _actor(ray.get_actor(name, namespace=namespace), attribute, name)
        except ValueError:
            where = f"the namespace {namespace}" if namespace else "the namespace of this process"
            text = f"There is no Ray actor named '{name}' in {where}."
            fix = "Create it with options(name=...), or correct actors and actor_namespace of the targets."
            actor = TargetError(text, Outcome.UNREACHABLE, fix)
        actors.append(FoundActor(name, actor))
    return actors


def find_matching(patterns: Sequence[str], namespace: str | None, attribute: str | None) -> list[FoundActor]:
    """Find the living actors whose names match one of the patterns; arguments as those of `find_named`.

    Raises:
        TargetError: This process has not joined a cluster, or this version of Ray cannot be queried.
    """
    where = namespace or _connected_ray(_BY_NAME).get_runtime_context().namespace
    names = {name for of, name, _ in _living_actors(_BY_NAME) if of == where and matches(name, patterns)}
    return find_named(sorted(names), namespace, attribute)


def find_namespaces(patterns: Sequence[str]) -> list[str]:
    """Return the namespaces of jobs with living actors whose names match one of the patterns.

    Raises:
        TargetError: As `find_matching`.
    """
    return sorted({namespace for namespace, name in _actors_of_jobs() if matches(name, patterns)})


def find_all() -> dict[str, RayActor]:
    """Return the living actors that have a name, by their names in manifests.

    Raises:
        TargetError: As `find_matching`.
    """
    actors: dict[str, RayActor] = {}
    for namespace, name in _actors_of_jobs():
        with contextlib.suppress(ValueError):  # the actor has just exited
            handle = _connected_ray(_BY_NAME).get_actor(name, namespace=namespace)
            for actor in (_actor(handle), _actor(handle, name=name)):  # a manifest has the id or the name
                actors[str(actor)] = actor
    return actors


def find_members(group_id: str, attribute: str | None) -> tuple[list[FoundActor], int]:
    """Find the actors that are scheduled in a placement group.

    Returns:
        The actors that have a name, and the number of actors without a name. Only the creator of an actor without a
        name can reach it.

    Raises:
        TargetError: As `find_matching`.
    """
    members, unnamed = [], 0
    for namespace, name, group in _living_actors("A placement group is looked up"):
        if group != group_id:
            continue
        if name:
            (actor,) = find_named([name], namespace, attribute)
            members.append(attrs.evolve(actor, key=f"{namespace}/{name}"))
        else:
            unnamed += 1
    return members, unnamed


def is_pattern(name: str) -> bool:
    """Return whether a name is a pattern, in which ``*`` matches any text."""
    return "*" in name


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name matches one of the patterns. An empty name matches none."""
    return bool(name) and any(fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in patterns)


def _actor(handle: object, attribute: str | None = None, name: str | None = None) -> RayActor:
    actor = RayActor.of(handle, attribute, name)
    assert actor is not None  # noqa: S101  # the object is a handle
    return actor


def _actors_of_jobs() -> Iterator[tuple[str, str]]:
    for namespace, name, _ in _living_actors(_BY_NAME):
        if name and not namespace.startswith(_INTERNAL_NAMESPACES):
            yield namespace, name


def _living_actors(purpose: str) -> Iterator[tuple[str, str, str]]:
    """Yield namespace, name and placement group of each actor that is not dead. Missing values are empty."""
    ray = _connected_ray(purpose)
    try:
        from ray._private.state import state
        from ray.core.generated.gcs_pb2 import ActorTableData

        # The source of `ray.util.state.list_actors`, which additionally needs a dashboard.
        rows = state._connect_and_get_accessor().get_actor_table(None, None)  # noqa: SLF001  # no public API
    except (ImportError, AttributeError, TypeError) as error:
        text = f"Ray {ray.__version__} does not tell in a known way which actors there are: {error}."
        raise TargetError(text, Outcome.REFUSED, "Pass the actors, or name them in the targets.") from None
    for row in map(ActorTableData.FromString, rows):
        if row.state != ActorTableData.DEAD:
            yield row.ray_namespace, row.name, row.placement_group_id.hex()


def _connected_ray(purpose: str) -> Any:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        raise TargetError(f"{purpose} in a Ray cluster, and this process is in none.", Outcome.UNREACHABLE, _JOIN)
    return ray
