"""Launchers of jobs: plugins that find the rank of a process and the name of its job.

An entry point of the group ``profdeck.launchers`` is an instance of `Launcher`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import attrs

from profdeck.base.entry_points import load_instances
from profdeck.base.errors import ConfigError
from profdeck.base.identity import Identity

LAUNCHERS = "profdeck.launchers"
_NO_ID = "none"


@attrs.frozen(kw_only=True)
class Launcher:
    """Names of the environment variables that a launcher sets in each process of a job. Empty: there is none."""

    name: str
    """Start of the names of runs that are named by `job_id`."""
    priority: int = 0
    """If the variables of several launchers are set, the highest priority is used."""
    rank: str = ""
    """Rank in the job, from 0."""
    world_size: str = ""
    """Number of processes in the job."""
    local_rank: str = ""
    """Rank on the host, from 0."""
    local_world_size: str = ""
    """Number of processes on the host."""
    rendezvous: tuple[str, str] | None = None
    """Host and port of the rendezvous. They name a run without a job id."""
    job_id: str = ""
    """Job id, the same in all processes. ``none`` is not an id."""

    def identity(self, role: str, environ: Mapping[str, str]) -> Identity | None:
        """Return the identity in the environment, or ``None`` if the launcher did not start this process.

        Raises:
            ConfigError: a variable is not a number.
            ValueError: the variables contradict each other.
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
        """Return the launcher's name with the job id, or ``None`` without a job id."""
        job = environ.get(self.job_id, _NO_ID)
        return None if job == _NO_ID else f"{self.name}-{job}"

    def library_identity(self, role: str, *, mesh: Any = None, replica: int | None = None) -> Identity | None:  # noqa: ARG002  # for subclasses
        """Return the identity that the launcher's library reports, or ``None``; see `library_identity`."""
        return None


@functools.cache
def installed_launchers() -> tuple[Launcher, ...]:
    """Load the launchers of all plugins, highest priority first."""
    return tuple(sorted(load_instances(LAUNCHERS, Launcher), key=lambda launcher: -launcher.priority))


def launcher_identity(role: str, environ: Mapping[str, str] = os.environ) -> Identity | None:
    """Return the identity in the launcher's environment variables, or ``None`` without a launcher.

    Raises:
        ConfigError: a launcher variable is not a number.
        ValueError: the variables contradict each other.
    """
    identities = (launcher.identity(role, environ) for launcher in installed_launchers())
    return next(filter(None, identities), None)


def library_identity(role: str = "trainer", *, mesh: Any = None, replica: int | None = None) -> Identity:
    """Return the identity that a launcher's library reports. Without such a library, return a single process.

    Args:
        role: Function of the process in the job.
        mesh: Device mesh with named dimensions, from which the parallel coordinates are read.
        replica: Number of the engine replica that this process belongs to.
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
            f"The environment variable {name}={environ[name]!r} is not a number; the launcher should set the rank."
        ) from None
