"""Finds Ray actors: by name, by a pattern of names, and those that are scheduled in a placement group."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs

from profdeck.base.errors import MissingLibraryError, TargetError
from profdeck.base.outcome import Outcome
from profdeck.engine.transport.ray_engine import RayActor

_JOIN = "Join the cluster before the capture: ray.init(address='auto')."
_NOT_OF_JOBS = ("_ray_internal_", "profdeck")
"""How the namespaces begin whose actors are Ray's own, or profdeck's."""


@attrs.frozen
class PlacementGroup:
    """A placement group, which stands for the actors in it that hold an engine."""

    id: str
    attribute: str | None = None
    """Where its actors hold their engines; see `RayActor`."""

    def __str__(self) -> str:
        return f"PlacementGroup({self.id})"

    @classmethod
    def of(cls, target: object, attribute: str | None = None) -> PlacementGroup | None:
        """Return the group that a target is; None for all that is none."""
        if isinstance(target, cls):
            return target
        module = sys.modules.get("ray.util.placement_group")  # who has one has imported it
        if module is not None and isinstance(target, module.PlacementGroup):
            return cls(target.id.hex(), attribute)
        return None


@attrs.frozen
class NamedActor:
    """An actor by its name."""

    key: str
    """The same for every actor that takes this name."""
    actor: RayActor | TargetError
    """Or why there is none."""


def require_ray() -> None:
    """Check that Ray is installed.

    Raises:
        MissingLibraryError: it is not.
    """
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        raise MissingLibraryError.of("targets.actors: they need", "ray")


def find_named(names: Sequence[str], namespace: str | None, attribute: str | None) -> list[NamedActor]:
    """Find actors by name. It asks the cluster, and blocks.

    Args:
        names: their names.
        namespace: where they have them; None for the namespace of this process.
        attribute: where they hold their engines.

    Raises:
        TargetError: this process is in no cluster.
    """
    ray = _cluster("Actors are found by name")
    found = []
    for name in names:
        try:
            actor = RayActor.of(ray.get_actor(name, namespace=namespace), attribute, name)
            assert actor is not None  # noqa: S101  # it is a handle
            found.append(NamedActor(name, actor))
        except ValueError:
            where = f"the namespace {namespace}" if namespace else "the namespace of this process"
            text = f"There is no Ray actor named '{name}' in {where}."
            fix = "Create it with options(name=...), or correct actors and actor_namespace of the targets."
            found.append(NamedActor(name, TargetError(text, Outcome.UNREACHABLE, fix)))
    return found


def find_matching(patterns: Sequence[str], namespace: str | None, attribute: str | None) -> list[NamedActor]:
    """Find the living actors whose names match a pattern, in which ``*`` stands for anything. It asks the cluster, and
    blocks.

    Args:
        patterns: of names.
        namespace: where they have them; None for the namespace of this process.
        attribute: where they hold their engines.

    Raises:
        TargetError: this process is in no cluster, or its Ray does not tell.
    """
    what = "Actors are found by name"
    where = namespace or _cluster(what).get_runtime_context().namespace
    named = [name for of, name, _ in _living(what) if of == where and matches(name, patterns)]
    return find_named(sorted(set(named)), namespace, attribute)


def namespaces_of_jobs(patterns: Sequence[str]) -> list[str]:
    """Return the namespaces in which living actors have names that match. It asks the cluster, and blocks.

    Raises:
        TargetError: as `find_matching`.
    """
    living = _living("Actors are found by name")
    found = {of for of, name, _ in living if matches(name, patterns) and not of.startswith(_NOT_OF_JOBS)}
    return sorted(found)


def find_called() -> dict[str, RayActor]:
    """Return the living actors that have a name, by what manifests call them. It asks the cluster, and blocks.

    Raises:
        TargetError: as `find_matching`.
    """
    what = "Actors are found by name"
    found: dict[str, RayActor] = {}
    for namespace, name, _ in [row for row in _living(what) if row[1] and not row[0].startswith(_NOT_OF_JOBS)]:
        with contextlib.suppress(ValueError):  # it has just ended
            handle = _cluster(what).get_actor(name, namespace=namespace)
            for actor in (RayActor.of(handle), RayActor.of(handle, name=name)):  # as it was given, or found
                assert actor is not None  # noqa: S101  # it is a handle
                found[str(actor)] = actor
    return found


def is_pattern(name: str) -> bool:
    """Tell whether a name stands for several."""
    return "*" in name


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a name matches one of the patterns."""
    return bool(name) and any(fnmatchcase(name, pattern.replace("[", "[[]")) for pattern in patterns)


def members(group: PlacementGroup) -> tuple[list[NamedActor], int]:
    """Find the actors that are scheduled in a placement group. It asks the cluster, and blocks.

    Returns:
        Those that have a name, and how many others there are: only by its name can an actor be reached by who did not
        create it.

    Raises:
        TargetError: this process is in no cluster, or its Ray does not tell.
    """
    found, others = [], 0
    for namespace, name, group_id in _living("A placement group is looked up"):
        if group_id != group.id:
            continue
        if name:
            (one,) = find_named([name], namespace, group.attribute)
            found.append(attrs.evolve(one, key=f"{namespace}/{name}"))
        else:
            others += 1
    return found, others


def _living(what: str) -> Iterator[tuple[str, str, str]]:
    """Yield namespace, name and placement group of each actor that is not dead; empty where it has none."""
    ray = _cluster(what)
    try:
        from ray._private.state import state
        from ray.core.generated.gcs_pb2 import ActorTableData

        # What `ray.util.state.list_actors` asks as well, which needs a dashboard.
        rows = state._connect_and_get_accessor().get_actor_table(None, None)  # noqa: SLF001  # as said
    except (ImportError, AttributeError, TypeError) as error:
        text = f"Ray {ray.__version__} does not tell in a known way which actors there are: {error}."
        raise TargetError(text, Outcome.REFUSED, "Pass the actors, or name them in the targets.") from None
    for row in map(ActorTableData.FromString, rows):
        if row.state != ActorTableData.DEAD:
            yield row.ray_namespace, row.name, row.placement_group_id.hex()


def _cluster(what: str) -> Any:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        raise TargetError(f"{what} in a Ray cluster, and this process is in none.", Outcome.UNREACHABLE, _JOIN)
    return ray
