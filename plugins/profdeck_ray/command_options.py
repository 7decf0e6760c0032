"""Options that the cluster `ray` adds to commands; see `profdeck.engine.clusters.Cluster.command_options`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Annotated

import typer

from profdeck.base.errors import ConfigError
from profdeck.engine.clusters import Actor, ActorSelection
from profdeck_ray.actors import find_all, join
from profdeck_ray.executor import RayExecutor
from profdeck_ray.held_engines import ALL


def capture(
    *,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Capture the engines that actors of a running Ray job hold, in the cluster that RAY_ADDRESS names or "
            "that runs on this host.",
        ),
    ] = False,
    actor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --ray: only actors of this name, in which * stands for anything. Repeatable. Default: all that "
            "have a name.",
        ),
    ] = None,
    ray_namespace: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --ray: that of the job. Default: that of the only job that has engines."
        ),
    ] = None,
) -> ActorSelection | None:
    """Return the actors to capture."""
    if ray:
        return ActorSelection(names=tuple(actor or [ALL]), namespace=ray_namespace)
    for flag, value in (("--actor", actor), ("--ray-namespace", ray_namespace)):
        if value:
            raise ConfigError(f"{flag} goes with --ray.")
    return None


def collect(
    *,
    ray: Annotated[
        bool, typer.Option("--ray", help="Ask actors, too, in the cluster of RAY_ADDRESS or of this host.")
    ] = False,
) -> Callable[[ExitStack], Mapping[str, Actor]] | None:
    """Return a function that joins the cluster and returns its actors."""
    return _joined if ray else None


def summary(
    *,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Read on the nodes of this Ray cluster, which must see the files."),
    ] = None,
) -> RayExecutor | None:
    """Return the executor that reads the traces."""
    return None if ray is None else RayExecutor(ray)


def _joined(until: ExitStack) -> Mapping[str, Actor]:
    join(until)
    return find_all()
