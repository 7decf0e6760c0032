"""Blocking functions that join a Ray cluster and look up its actors."""

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

from profdeck.engines import FoundActor, Outcome
from profdeck.plugin import CaptureError, MissingLibraryError, TargetError
from profdeck_ray.engine import RayActor

_JOIN = "Join the cluster before the capture: ray.init(address='auto')."
_ADDRESS_VARIABLE = "RAY_ADDRESS"  # defined by Ray
_CONNECT_S = 10.0
_BY_NAME = "Looking up actors by name"
_INTERNAL_NAMESPACES = ("_ray_internal_", "profdeck")
"""Namespace prefixes of internal actors, created by Ray or profdeck."""


def require(purpose: str) -> None:
    """Check that Ray is installed.

    Args:
        purpose: Start of the error message, such as ``targets.actors needs``.

    Raises:
        MissingLibraryError: Ray is not installed.
    """
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        raise MissingLibraryError.for_library(purpose, "ray")


def join(until: ExitStack) -> None:
    """Join the cluster at ``RAY_ADDRESS``, by default the one on this host. Leave it when `until` is closed.

    Raises:
        CaptureError: The cluster cannot be joined.
        MissingLibraryError: Ray is not installed.
    """
    require("targets.actors needs")
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
        reason = str(error).partition("\n")[0]
        raise CaptureError(
            f"Cannot join the Ray cluster at {_ADDRESS_VARIABLE}={address}: {reason} Run this command "
            f"on a cluster node, or set {_ADDRESS_VARIABLE} to HOST:PORT of the head node."
        ) from None
    until.callback(ray.shutdown)


def find_named(names: Sequence[str], namespace: str | None, attribute: str | None) -> list[FoundActor]:
    """Find actors by name.

    Args:
        names: Actor names.
        namespace: Ray namespace to search. ``None``: the namespace of this process.
        attribute: Dotted path from each actor to its engine.

    Raises:
        TargetError: This process has not joined a cluster.
    """
    ray = _connected_ray(_BY_NAME)
    actors = []
    for name in names:
        try:
            actor: RayActor | TargetError = _actor(ray.get_actor(name, namespace=namespace), attribute, name)
        except ValueError:
            searched = f"the namespace {namespace}" if namespace else "the namespace of this process"
            text = f"There is no Ray actor named '{name}' in {searched}."
            fix = "Create it with options(name=...), or correct targets.actors and targets.actor_namespace."
            actor = TargetError(text, Outcome.UNREACHABLE, fix)
        actors.append(FoundActor(name, actor))
    return actors


def find_matching(patterns: Sequence[str], namespace: str | None, attribute: str | None) -> list[FoundActor]:
    """Find the live actors whose names match any of the patterns.

    The other arguments are the same as in `find_named`.

    Raises:
        TargetError: This process has not joined a cluster, or this Ray version is not supported.
    """
    searched = namespace or _connected_ray(_BY_NAME).get_runtime_context().namespace
    names = {
        name
        for actor_namespace, name, _ in _live_actors(_BY_NAME)
        if actor_namespace == searched and matches(name, patterns)
    }
    return find_named(sorted(names), namespace, attribute)


def find_namespaces(patterns: Sequence[str]) -> list[str]:
    """Return the job namespaces that contain a live actor whose name matches any of the patterns.

    Raises:
        TargetError: See `find_matching`.
    """
    return sorted({namespace for namespace, name in _job_actors() if matches(name, patterns)})


def find_all() -> dict[str, RayActor]:
    """Return all live named actors, keyed by the names that manifests use.

    Raises:
        TargetError: See `find_matching`.
    """
    actors: dict[str, RayActor] = {}
    for namespace, name in _job_actors():
        with contextlib.suppress(ValueError):  # the actor has just exited
            handle = _connected_ray(_BY_NAME).get_actor(name, namespace=namespace)
            for actor in (_actor(handle), _actor(handle, name=name)):  # manifests use either the ID or the name
                actors[str(actor)] = actor
    return actors


def find_members(group_id: str, attribute: str | None) -> tuple[list[FoundActor], int]:
    """Find the actors scheduled in a placement group.

    Returns:
        The named actors, and the number of unnamed actors. Only its creator can reach an unnamed actor.

    Raises:
        TargetError: See `find_matching`.
    """
    members, unnamed = [], 0
    for namespace, name, group in _live_actors("Looking up a placement group"):
        if group != group_id:
            continue
        if name:
            (actor,) = find_named([name], namespace, attribute)
            members.append(attrs.evolve(actor, key=f"{namespace}/{name}"))
        else:
            unnamed += 1
    return members, unnamed


def is_pattern(name: str) -> bool:
    """Return whether a name contains the wildcard ``*``."""
    return "*" in name


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name matches any pattern, in which ``*`` matches any text. An empty name never matches."""
    return bool(name) and any(fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in patterns)


def _actor(handle: object, attribute: str | None = None, name: str | None = None) -> RayActor:
    actor = RayActor.of(handle, attribute, name)
    assert actor is not None  # noqa: S101  # the object is a handle
    return actor


def _job_actors() -> Iterator[tuple[str, str]]:
    """Yield the namespace and name of each live named actor that Ray or profdeck did not create for internal use."""
    for namespace, name, _ in _live_actors(_BY_NAME):
        if name and not namespace.startswith(_INTERNAL_NAMESPACES):
            yield namespace, name


def _live_actors(purpose: str) -> Iterator[tuple[str, str, str]]:
    """Yield the namespace, name and placement group ID of each live actor. Missing values are empty strings."""
    ray = _connected_ray(purpose)
    try:
        from ray._private.state import state
        from ray.core.generated.gcs_pb2 import ActorTableData

        # `ray.util.state.list_actors` reads the same table but requires the dashboard.
        rows = state._connect_and_get_accessor().get_actor_table(None, None)  # noqa: SLF001  # no public API
    except (ImportError, AttributeError, TypeError) as error:
        text = f"Cannot list the actors of Ray {ray.__version__}: {error}."
        raise TargetError(text, Outcome.REFUSED, "Pass actor handles, or set targets.actors to names.") from None
    for row in map(ActorTableData.FromString, rows):
        if row.state != ActorTableData.DEAD:
            yield row.ray_namespace, row.name, row.placement_group_id.hex()


def _connected_ray(purpose: str) -> Any:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        text = f"{purpose} requires a Ray cluster, but this process has not joined one."
        raise TargetError(text, Outcome.UNREACHABLE, _JOIN)
    return ray
