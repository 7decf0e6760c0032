"""Command-line options of the cluster plugin `ray`; see `profdeck.engine.clusters.Cluster.command_options`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated

import typer

from profdeck.engines import Actor
from profdeck_ray.actors import find_all, join


def capture_servers(
    *,
    ray: Annotated[
        list[str] | None,
        typer.Option(
            "--ray",
            metavar="NAME",
            help="Capture engines in named actors of a running Ray job; * matches any text, and --ray '*' selects all. "
            "Repeatable. The cluster is the one at RAY_ADDRESS, or else the one on this host.",
        ),
    ] = None,
) -> Sequence[str] | None:
    """Return the actor names given with ``--ray``, or ``None`` if the option is absent."""
    return ray


def collect(
    *,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Also fetch files from actors in the Ray cluster at RAY_ADDRESS or on this host."),
    ] = False,
) -> Callable[[ExitStack], Mapping[str, Actor]] | None:
    """Return a function that joins the cluster and returns its actors, or ``None`` without ``--ray``."""
    return _join_and_find_actors if ray else None


def _join_and_find_actors(until: ExitStack) -> Mapping[str, Actor]:
    join(until)
    return find_all()
