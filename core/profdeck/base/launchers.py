"""Launcher plugins, which determine the rank of a process and the name of its job.

Each entry point in the group ``profdeck.launchers`` is a `Launcher` instance.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import attrs

from profdeck.base.identity import Identity
from profdeck_traces.base.entry_points import load_instances
from profdeck_traces.base.errors import ConfigError

LAUNCHERS = "profdeck.launchers"
_NO_ID = "none"


@attrs.frozen(kw_only=True)
class Launcher:
    """Names of the environment variables that a launcher sets in each process. An empty name means no variable."""

    name: str
    """Launcher name, used as a prefix of run names that contain the job ID."""
    priority: int = 0
    """If the variables of several launchers are set, the launcher with the highest priority is used."""
    rank: str = ""
    """Rank in the job, starting at 0."""
    world_size: str = ""
    """Number of processes in the job."""
    local_rank: str = ""
    """Rank on the host, starting at 0."""
    local_world_size: str = ""
    """Number of processes on the host."""
    rendezvous: tuple[str, str] | None = None
    """Host and port of the rendezvous, used as the run name if there is no job ID."""
    job_id: str = ""
    """Job ID, identical in all processes. The value ``none`` counts as no ID."""

    def identity(self, role: str, environ: Mapping[str, str]) -> Identity | None:
        """Read the identity from the environment. Return ``None`` if this launcher did not start the process.

        Raises:
            ConfigError: a variable is not a number.
            ValueError: the variables are inconsistent.
        """
        if self.rank not in environ or self.world_size not in environ:
            return None
        return Identity(
            role=role,
            rank=_number(environ, self.rank),
            world_size=_number(environ, self.world_size),
            local_rank=_number(environ, self.local_rank) if self.local_rank in environ else 0,
        )

    def job_name(self, environ: Mapping[str, str]) -> str | None:
        """Return a run name from the launcher name and the job ID, or ``None`` if there is no job ID."""
        job = environ.get(self.job_id, _NO_ID)
        return None if job == _NO_ID else f"{self.name}-{job}"

    def process_name(self) -> str | None:
        """Return the launcher's name for this process, such as an actor name, or ``None`` if it has no name."""
        return None

    def library_identity(self, role: str, *, mesh: Any = None, replica: int | None = None) -> Identity | None:  # noqa: ARG002  # for subclasses
        """Return the identity reported by the launcher's library, or ``None`` if it reports none."""
        return None


@functools.cache
def installed_launchers() -> tuple[Launcher, ...]:
    """Load all launcher plugins, sorted by descending priority."""
    return tuple(sorted(load_instances(LAUNCHERS, Launcher), key=lambda launcher: -launcher.priority))


def launcher_identity(role: str, environ: Mapping[str, str] = os.environ) -> Identity | None:
    """Read the identity from the launcher's environment variables. Return ``None`` without a launcher.

    Raises:
        ConfigError: a launcher variable is not a number.
        ValueError: the variables are inconsistent.
    """
    identities = (launcher.identity(role, environ) for launcher in installed_launchers())
    return next(filter(None, identities), None)


def process_name() -> str | None:
    """Return the name that a launcher gave to this process, such as an actor name, or ``None`` if it has no name."""
    return next(filter(None, (launcher.process_name() for launcher in installed_launchers())), None)


def library_identity(role: str = "trainer", *, mesh: Any = None, replica: int | None = None) -> Identity:
    """Return the identity reported by a launcher's library, or the identity of a single process if none reports one.

    Args:
        role: Role of this process in the job.
        mesh: Device mesh with named dimensions, which provides the parallel coordinates.
        replica: Number of this process's engine replica.
    """
    for launcher in installed_launchers():
        if (identity := launcher.library_identity(role, mesh=mesh, replica=replica)) is not None:
            return identity
    return Identity(role=role, replica=replica)


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(
            f"The environment variable {name}={environ[name]!r} is not a number. Check the launcher."
        ) from None
