"""Command-line options of the cluster plugin `ray`; see `profdeck.engine.clusters.Cluster.command_options`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Annotated

import typer

from profdeck.engines import Actor, ActorSelection
from profdeck.plugin import ConfigError
from profdeck_ray.actors import find_all, join
from profdeck_ray.held_engines import ALL


def capture(
    *,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Capture engines in actors of a running Ray job. The cluster is the one at RAY_ADDRESS, or else the "
            "one on this host.",
        ),
    ] = False,
    actor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --ray: capture only actors with this name; * matches any text. Repeatable. Default: all named "
            "actors.",
        ),
    ] = None,
    ray_namespace: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --ray: the job's Ray namespace. Default: that of the only job with engines."
        ),
    ] = None,
) -> ActorSelection | None:
    """Return the actors to capture, or ``None`` without ``--ray``."""
    if ray:
        return ActorSelection(names=tuple(actor or [ALL]), namespace=ray_namespace)
    for flag, value in (("--actor", actor), ("--ray-namespace", ray_namespace)):
        if value:
            raise ConfigError(f"{flag} requires --ray.")
    return None


def collect(
    *,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Also fetch files from actors in the Ray cluster at RAY_ADDRESS or on this host."),
    ] = False,
) -> Callable[[ExitStack], Mapping[str, Actor]] | None:
    """Return a function that joins the cluster and returns its actors, or ``None`` without ``--ray``."""
    return _joined if ray else None


def _joined(until: ExitStack) -> Mapping[str, Actor]:
    join(until)
    return find_all()
