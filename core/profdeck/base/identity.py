"""Who this process is in the job: role, rank, replica and parallel coordinates."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import validators

from profdeck.base.errors import ConfigError

# Launchers that number their processes, in order of precedence: (rank, world size, local rank).
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, Ray Train, most trainers
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""Roles, stages and backends: they become names of files and directories."""


@attrs.frozen(kw_only=True)
class Identity:
    """The place of one process in the job. Ranks count from 0 over all processes of the role."""

    role: str = attrs.field(default="trainer", validator=validators.matches_re(NAME))
    rank: int = attrs.field(default=0, validator=validators.ge(0))
    world_size: int = attrs.field(default=1, validator=validators.ge(1))
    local_rank: int = attrs.field(default=0, validator=validators.ge(0))
    replica: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)))
    """Which copy of an engine this process belongs to; None for processes that are not replicated."""
    parallel: Mapping[str, int] = attrs.field(factory=dict)
    """Coordinates by parallel dimension, such as ``{"tp": 0, "pp": 1, "dp": 3}``."""
    host: str = attrs.field(factory=socket.gethostname)
    pid: int = attrs.field(factory=os.getpid)

    @rank.validator
    def _rank_in_world(self, _: object, rank: int) -> None:
        if rank >= self.world_size:
            raise ValueError(f"rank {rank} is not below the world size {self.world_size}; give both, or neither")

    @parallel.validator
    def _short_dimension_names(self, _: object, parallel: Mapping[str, int]) -> None:
        for name, index in parallel.items():
            if not re.fullmatch(r"[a-z]{1,8}", name) or index < 0:
                raise ValueError(
                    f"parallel coordinate {name!r}={index!r}: expected a short lower-case name and an index from 0"
                )

    @property
    def stem(self) -> str:
        """The start of this rank's file names, such as ``rank_0003_tp1-dp1``."""
        coordinates = "-".join(f"{name}{index}" for name, index in self.parallel.items())
        return f"rank_{self.rank:04d}" + (f"_{coordinates}" if coordinates else "")


def launcher_identity(role: str, environ: Mapping[str, str] = os.environ) -> Identity | None:
    """Return the identity that the launcher's environment gives; None without a launcher.

    Raises:
        ConfigError: a launcher variable is not a number.
        ValueError: the variables contradict each other.
    """
    for rank, world_size, local_rank in _LAUNCHERS:
        if rank in environ and world_size in environ:
            return Identity(
                role=role,
                rank=_number(environ, rank),
                world_size=_number(environ, world_size),
                local_rank=_number(environ, local_rank) if local_rank in environ else 0,
            )
    return None


def distributed_identity(role: str = "trainer", *, mesh: Any = None, replica: int | None = None) -> Identity:
    """Describe this process from an initialised ``torch.distributed``; a single process without one.

    The parallel coordinates are those of ``mesh``, else those of Megatron Core if its parallel state is initialised.

    Args:
        role: what the process does in the job.
        mesh: a ``torch.distributed.device_mesh.DeviceMesh`` with named dimensions, such as ``("dp", "tp")``,
            from which the parallel coordinates are taken.
        replica: which copy of an engine this process belongs to.
    """
    import torch.distributed as dist

    parallel = _of_megatron()
    if mesh is not None and mesh.get_coordinate() is not None:
        parallel = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate(), strict=False))
    if not (dist.is_available() and dist.is_initialized()):
        return Identity(role=role, parallel=parallel, replica=replica)
    return Identity(
        role=role,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        parallel=parallel,
        replica=replica,
    )


MEGATRON = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
    "dp": "data_parallel",
}
"""Parallel dimensions and their names in ``megatron.core.parallel_state`` (0.16.1)."""


def _of_megatron() -> dict[str, int]:
    """Return the coordinates that Megatron Core knows; who uses it has imported it."""
    state = sys.modules.get("megatron.core.parallel_state")
    try:
        if state is None or not state.model_parallel_is_initialized():
            return {}
        sizes = {name: getattr(state, f"get_{key}_world_size")() for name, key in MEGATRON.items()}
        return {name: getattr(state, f"get_{MEGATRON[name]}_rank")() for name, size in sizes.items() if size > 1}
    except (AttributeError, AssertionError, RuntimeError):  # another release, or groups that it did not make
        return {}


def parallel_from_environment(environ: Mapping[str, str] = os.environ) -> dict[str, int]:
    """Read ``PROFDECK_PARALLEL``, such as ``tp=0,pp=1,dp=3``.

    Raises:
        ConfigError: the variable has another form.
    """
    text = environ.get("PROFDECK_PARALLEL", "")
    pairs = [part.split("=") for part in text.replace(" ", "").split(",") if part]
    try:
        return {name: int(index) for name, index in pairs}
    except ValueError:
        raise ConfigError(f"PROFDECK_PARALLEL={text!r}: expected a form such as 'tp=0,pp=1,dp=3'.") from None


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(
            f"The environment variable {name}={environ[name]!r} is not a number; the launcher should set the rank."
        ) from None
