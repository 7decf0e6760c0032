"""Launchers of training jobs, and process identities from torch.distributed and Megatron Core."""

from __future__ import annotations

import sys
from typing import Any

import attrs

from profdeck import Identity
from profdeck.plugin import Launcher


@attrs.frozen(kw_only=True)
class TorchLauncher(Launcher):
    """A launcher whose processes use torch.distributed."""

    def library_identity(self, role: str, *, mesh: Any = None, replica: int | None = None) -> Identity | None:
        """Return the identity reported by torch.distributed, or ``None`` if torch is not imported."""
        return None if "torch" not in sys.modules else distributed_identity(role, mesh=mesh, replica=replica)


TORCHRUN = TorchLauncher(
    name="torchrun",
    priority=40,
    rank="RANK",  # also set by Ray Train and most trainers
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    rendezvous=("MASTER_ADDR", "MASTER_PORT"),
    job_id="TORCHELASTIC_RUN_ID",
)
SLURM = Launcher(
    name="slurm",
    priority=30,
    rank="SLURM_PROCID",
    world_size="SLURM_NTASKS",
    local_rank="SLURM_LOCALID",
    job_id="SLURM_JOB_ID",
)
OPEN_MPI = Launcher(
    name="openmpi",
    priority=20,
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
)
MPICH = Launcher(name="mpich", priority=10, rank="PMI_RANK", world_size="PMI_SIZE", local_rank="MPI_LOCALRANKID")


def distributed_identity(role: str = "trainer", *, mesh: Any = None, replica: int | None = None) -> Identity:
    """Return the identity reported by ``torch.distributed``, or the identity of a single process if uninitialized.

    The parallel coordinates come from ``mesh``, or else from Megatron Core if its parallel state is initialized.

    Args:
        role: Role of this process in the job.
        mesh: A ``torch.distributed.device_mesh.DeviceMesh`` with named dimensions, such as ``("dp", "tp")``, which
            provides the parallel coordinates.
        replica: Number of this process's engine replica.
    """
    import torch.distributed as dist

    parallel = _megatron_coordinates()
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


def _megatron_coordinates() -> dict[str, int]:
    """Return the coordinates from Megatron Core. Jobs that use Megatron Core have already imported it."""
    state = sys.modules.get("megatron.core.parallel_state")
    try:
        if state is None or not state.model_parallel_is_initialized():
            return {}
        sizes = {name: getattr(state, f"get_{key}_world_size")() for name, key in MEGATRON.items()}
        return {name: getattr(state, f"get_{MEGATRON[name]}_rank")() for name, size in sizes.items() if size > 1}
    except (AttributeError, AssertionError, RuntimeError):  # another release, or groups created elsewhere
        return {}
