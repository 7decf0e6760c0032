"""Clusters: plugins for systems that hold engines in actors and run tasks on many nodes.

An entry point of the group ``profdeck.clusters`` is an instance of `Cluster`. Its name is that of an option of
commands.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, TypeAlias

import attrs

from profdeck.base.entry_points import load_instances
from profdeck.base.errors import ConfigError, TargetError, UnknownPluginError
from profdeck.config.targets import TargetsConfig
from profdeck.engine.engine import Engine
from profdeck.engine.options import EngineOptions

CLUSTERS = "profdeck.clusters"
ACTOR_PREFIX = "Actor("
"""Start of the names of actors in manifests."""


class NoEngineError(TargetError):
    """An actor does not hold an engine that the backend controls."""


class Actor(ABC):
    """An actor that holds an engine. Handles of the same actor are equal and have the same hash."""

    __slots__ = ()

    @abstractmethod
    def __str__(self) -> str:
        """Return the actor's name in manifests, which starts with `ACTOR_PREFIX`."""

    @abstractmethod
    def engine(self, *, backend: str, options: EngineOptions) -> Engine:
        """Return the engine that the actor holds, controlled through the actor.

        Args:
            backend: Name of the backend that connects to the engine in the actor's process.
            options: Options of the backend.
        """


AskActor: TypeAlias = Callable[[Actor], Awaitable[object]]
"""Reaches the engine that an actor holds. Raises `NoEngineError` if the actor holds none."""


@attrs.frozen
class FoundActor:
    """An actor that was found by name."""

    key: str
    """Key of the replica number: the same for every actor that gets this name."""
    actor: Actor | TargetError
    """The actor, or the reason why it was not found."""


FoundActors: TypeAlias = tuple[list[FoundActor], list[str]]
"""Actors that hold an engine or do not answer, and notes about the actors that are skipped."""


class ActorGroup(ABC):
    """A target that stands for several actors, which are found again for each capture."""

    __slots__ = ()

    @abstractmethod
    async def find_actors(self, given: Sequence[object], ask: AskActor) -> FoundActors:
        """Find the actors of the group that hold an engine.

        Args:
            given: Targets that are already known. They are skipped.
            ask: Reaches the engine of an actor.

        Raises:
            TargetError: The cluster cannot be queried.
        """


@attrs.frozen
class ActorSelection:
    """Actors that command-line options select."""

    names: tuple[str, ...]
    """Names or patterns, as `TargetsConfig.actors`."""
    namespace: str | None
    """Namespace of the names. ``None``: the only namespace whose actors hold engines."""


class Cluster(ABC):
    """A system that holds engines in actors and runs tasks on many nodes."""

    name: ClassVar[str]
    """Name of the entry point and of the command-line option."""
    title: ClassVar[str]
    """Name in messages."""
    log_directory: ClassVar[Path | None] = None
    """Directory of the logs of the job on this host, in which routers are searched."""

    @property
    @abstractmethod
    def command_options(self) -> Mapping[str, Callable[..., object]]:
        """Options that the cluster adds to commands, by the name of the command.

        The keyword parameters of a function are annotated for typer and become options. The function is called with
        their values. It returns ``None`` if the options do not select the cluster, and otherwise:

        - ``capture``: an `ActorSelection`.
        - ``collect``: a function. It gets an `ExitStack` that leaves the cluster, and returns the actors that can be
          found, by their names in manifests.
        - ``summary``: a `profdeck.traces.parallel.Executor`.
        """

    @abstractmethod
    def require(self, purpose: str) -> None:
        """Check that the cluster's library is installed.

        Args:
            purpose: Start of the message, such as ``targets.actors: they need``.

        Raises:
            MissingLibraryError: It is not installed.
        """

    @abstractmethod
    def as_target(self, target: object, attribute: str | None) -> Actor | ActorGroup | None:
        """Return the actor or group that an object of the cluster's library stands for, or ``None`` for other objects.

        Args:
            target: Any object that a host passes as a target.
            attribute: Dotted path of the engine in the actor. ``None``: the actor's only engine.

        Raises:
            ConfigError: The object is of the cluster's library and is not supported.
        """

    @abstractmethod
    async def find_actors(self, config: TargetsConfig, ask: AskActor) -> FoundActors:
        """Find the actors that `TargetsConfig.actors` names.

        Raises:
            TargetError: The cluster cannot be queried.
        """

    @abstractmethod
    async def find_namespace(self, names: Sequence[str], ask: AskActor) -> tuple[str, list[str]]:
        """Return the only namespace in which actors with these names hold engines, and warnings about other actors.

        Raises:
            ConfigError: Several namespaces have engines.
            CaptureError: No namespace has an engine, or the cluster cannot be queried.
        """

    @abstractmethod
    def join(self, until: ExitStack) -> None:
        """Join the cluster unless this process already has, and leave it when `until` is closed.

        Raises:
            CaptureError: The cluster cannot be joined.
            MissingLibraryError: The cluster's library is not installed.
        """


@functools.cache
def installed_clusters() -> tuple[Cluster, ...]:
    """Load the clusters of all plugins."""
    return tuple(load_instances(CLUSTERS, Cluster))  # type: ignore[type-abstract]  # instances are not created


def the_cluster(purpose: str) -> Cluster:
    """Return the installed cluster.

    Args:
        purpose: Start of the error message, such as ``targets.actors``.

    Raises:
        UnknownPluginError: No plugin has a cluster.
        ConfigError: Several plugins have a cluster.
    """
    clusters = installed_clusters()
    if not clusters:
        raise UnknownPluginError(
            f"{purpose}: no plugin for actors is installed (entry-point group {CLUSTERS}). "
            "Install a package that provides one, or reinstall profdeck, which comes with one."
        )
    if len(clusters) > 1:
        names = ", ".join(cluster.name for cluster in clusters)
        raise ConfigError(f"{purpose}: several plugins for actors are installed: {names}. Keep one of them.")
    return clusters[0]


def as_cluster_target(target: object, attribute: str | None = None) -> Actor | ActorGroup | None:
    """Return the actor or group that a target stands for, or ``None`` for other targets; see `Cluster.as_target`."""
    if target is None or isinstance(target, str):
        return None
    if isinstance(target, Actor | ActorGroup):
        return target
    targets = (cluster.as_target(target, attribute) for cluster in installed_clusters())
    return next((found for found in targets if found is not None), None)
