"""Entry point of the cluster plugin `ray`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

from profdeck.engines import Actor, ActorGroup, AskActor, Cluster, FoundActors
from profdeck.plugin import TargetsConfig
from profdeck_ray import actors, engine_discovery
from profdeck_ray.engine import RayActor


class RayCluster(Cluster):
    """A Ray cluster."""

    name: ClassVar[str] = "ray"
    title: ClassVar[str] = "Ray"
    log_directory: ClassVar[Path | None] = Path("/tmp/ray/session_latest/logs")  # noqa: S108  # Ray's default

    @property
    def command_options(self) -> Mapping[str, Callable[..., object]]:
        """Functions that add Ray's options to `profdeck capture servers` and `profdeck collect`, keyed by command."""
        from profdeck_ray import command_options

        return {"capture servers": command_options.capture_servers, "collect": command_options.collect}

    def require(self, purpose: str) -> None:
        """Check that Ray is installed."""
        actors.require(purpose)

    def as_target(self, target: object, attribute: str | None) -> Actor | ActorGroup | None:
        """Convert a Ray actor handle to an actor, or a Ray placement group to an actor group."""
        return engine_discovery.PlacementGroup.of(target, attribute) or RayActor.of(target, attribute)

    async def find_actors(self, config: TargetsConfig, ask: AskActor) -> FoundActors:
        """Find the actors listed in a config, in the cluster that this process has joined."""
        return await engine_discovery.find_configured(config, ask)

    async def find_namespace(self, names: Sequence[str], ask: AskActor) -> tuple[str, list[str]]:
        """Find the namespace of the only job that has engines."""
        return await engine_discovery.find_namespace(names, ask)

    def join(self, until: ExitStack) -> None:
        """Join the cluster at ``RAY_ADDRESS``, by default the one on this host."""
        actors.join(until)


RAY = RayCluster()
