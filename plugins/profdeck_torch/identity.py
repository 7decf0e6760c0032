"""Who this process is, as ``torch.distributed`` knows it."""

from __future__ import annotations

from typing import Any

from profdeck import Identity


def identity(role: str = "trainer", *, mesh: Any = None, replica: int | None = None) -> Identity:
    """Describe this process from an initialised ``torch.distributed``; a single process without one.

    Args:
        role: what the process does in the job.
        mesh: a ``torch.distributed.device_mesh.DeviceMesh`` with named dimensions, such as ``("dp", "tp")``,
            from which the parallel coordinates are taken.
        replica: which copy of an engine this process belongs to.
    """
    import torch.distributed as dist

    parallel = {}
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
