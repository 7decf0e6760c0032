"""Cluster plugins, for systems that run engines in actors, and tasks on many nodes.

Each entry point in the group ``profdeck.clusters`` is a `Cluster` instance. Its name is also the name of a command-line
option.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, TypeAlias

import attrs

from profdeck.base.errors import TargetError
from profdeck.config.targets import TargetsConfig
from profdeck.engine.engine import Engine
from profdeck.engine.options import EngineOptions
from profdeck_traces.base.entry_points import load_instances
from profdeck_traces.base.errors import ConfigError, UnknownPluginError

CLUSTERS = "profdeck.clusters"
ACTOR_PREFIX = "Actor("
"""Prefix of actor names in manifests."""


class NoEngineError(TargetError):
    """Raised if an actor does not hold an engine that the backend can control."""


class Actor(ABC):
    """Handle of an actor that holds an engine. Handles of the same actor must be equal and have the same hash."""

    __slots__ = ()

    @abstractmethod
    def __str__(self) -> str:
        """Return the actor's name in manifests, which starts with `ACTOR_PREFIX`."""

    @abstractmethod
    def engine(self, *, backend: str, options: EngineOptions) -> Engine:
        """Return an object that controls the actor's engine through the actor.

        Args:
            backend: Name of the backend that connects to the engine in the actor's process.
            options: Backend options.
        """


AskActor: TypeAlias = Callable[[Actor], Awaitable[object]]
"""Connects to an actor's engine. Raises `NoEngineError` if the actor does not hold an engine."""


@attrs.frozen
class FoundActor:
    """Result of looking up an actor by name."""

    key: str
    """Key for the replica number. Actors that later get the same name have the same key."""
    actor: Actor | TargetError
    """The actor, or the lookup error."""


FoundActors: TypeAlias = tuple[list[FoundActor], list[str]]
"""Actors that hold an engine or did not respond, and notes about skipped actors."""


class ActorGroup(ABC):
    """A target that consists of several actors. Each capture looks them up again."""

    __slots__ = ()

    @abstractmethod
    async def find_actors(self, fixed_targets: Sequence[object], ask: AskActor) -> FoundActors:
        """Find the actors in the group that hold an engine.

        Args:
            fixed_targets: Targets to skip because they are already selected.
            ask: Connects to an actor's engine.

        Raises:
            TargetError: The cluster cannot be queried.
        """


class Cluster(ABC):
    """Base class for systems that run engines in actors, and tasks on many nodes."""

    name: ClassVar[str]
    """Name of the entry point and of the command-line option."""
    title: ClassVar[str]
    """Display name in messages."""
    log_directory: ClassVar[Path | None] = None
    """Log directory of the job on this host, which is searched for router URLs."""

    @property
    @abstractmethod
    def command_options(self) -> Mapping[str, Callable[..., object]]:
        """Functions that define command-line options, by command name.

        The keyword parameters of each function, annotated for typer, become options of the command. The function is
        called with their values. It returns ``None`` if the values do not select the cluster. Otherwise, it returns:

        - ``capture servers``: names or patterns of actors, as in `TargetsConfig.actors`.
        - ``collect``: a function that joins the cluster and returns its actors, keyed by their names in manifests. Its
          argument is an `ExitStack` that leaves the cluster when closed.
        """

    @abstractmethod
    def require(self, purpose: str) -> None:
        """Check that the cluster's library is installed.

        Args:
            purpose: Start of the error message, such as ``targets.actors needs``.

        Raises:
            MissingLibraryError: The library is not installed.
        """

    @abstractmethod
    def as_target(self, target: object, attribute: str | None) -> Actor | ActorGroup | None:
        """Convert an object of the cluster's library to an actor or group. Return ``None`` for other objects.

        Args:
            target: Any object that the host passes as a target.
            attribute: Dotted path from the actor to its engine. ``None``: use the only engine found.

        Raises:
            ConfigError: The object belongs to the cluster's library, but is not supported as a target.
        """

    @abstractmethod
    async def find_actors(self, config: TargetsConfig, ask: AskActor) -> FoundActors:
        """Find the actors listed in `TargetsConfig.actors`.

        Raises:
            TargetError: The cluster cannot be queried.
        """

    @abstractmethod
    async def find_namespace(self, names: Sequence[str], ask: AskActor) -> tuple[str, list[str]]:
        """Find the only namespace in which actors with these names hold engines. Also return warnings.

        Raises:
            ConfigError: Several namespaces have engines.
            CaptureError: No namespace has an engine, or the cluster cannot be queried.
        """

    @abstractmethod
    def join(self, until: ExitStack) -> None:
        """Join the cluster if this process has not joined it yet. Leave it when `until` is closed.

        Raises:
            CaptureError: The cluster cannot be joined.
            MissingLibraryError: The cluster's library is not installed.
        """


@functools.cache
def installed_clusters() -> tuple[Cluster, ...]:
    """Load all cluster plugins."""
    return tuple(load_instances(CLUSTERS, Cluster))  # type: ignore[type-abstract]  # only for isinstance


def get_cluster(purpose: str) -> Cluster:
    """Return the only installed cluster plugin.

    Args:
        purpose: Start of the error message, such as ``targets.actors``.

    Raises:
        UnknownPluginError: No cluster plugin is installed.
        ConfigError: Several cluster plugins are installed.
    """
    clusters = installed_clusters()
    if not clusters:
        raise UnknownPluginError(
            f"{purpose}: no cluster plugin is installed (entry-point group {CLUSTERS}). "
            "Install a package that provides one, or reinstall profdeck, which includes one."
        )
    if len(clusters) > 1:
        names = ", ".join(cluster.name for cluster in clusters)
        raise ConfigError(f"{purpose}: several cluster plugins are installed: {names}. Uninstall all but one.")
    return clusters[0]


def as_cluster_target(target: object, attribute: str | None = None) -> Actor | ActorGroup | None:
    """Convert a target to an actor or group; see `Cluster.as_target`. Return ``None`` for other targets."""
    if target is None or isinstance(target, str):
        return None
    if isinstance(target, Actor | ActorGroup):
        return target
    targets = (cluster.as_target(target, attribute) for cluster in installed_clusters())
    return next((converted for converted in targets if converted is not None), None)
