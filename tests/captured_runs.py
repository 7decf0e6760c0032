"""Write runs of GPU jobs with several captures: the traces of `gpu_job.GpuJob` and their manifests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import attrs

from gpu_job import GpuJob
from profdeck.base.identity import Identity
from profdeck.records.artifact import Artifact, ClockAnchor
from profdeck.records.capture import CaptureRecord, CaptureState
from profdeck.records.manifest import ManifestWriter, write_manifest

FIRST_NS = 1_700_000_000 * 10**9
_S = 10**9


def write_run(
    run: Path,
    captures: int,
    job: Callable[[int], GpuJob],
    *,
    every: int = 50,
    first_ns: int = FIRST_NS,
    cold: Callable[[int], bool | None] = lambda _: None,
) -> Path:
    """Write a run of the role trainer.

    Args:
        run: Its directory.
        captures: Number of captures.
        job: Function that maps a capture number to the recorded job.
        every: Number of global steps between the starts of two captures.
        first_ns: Start time of the first capture. Each capture takes one second.
        cold: Function that maps a capture number to the manifest's `cold_first_step`. None omits the key.
    """
    for number in range(captures):
        write_capture(run, number * every, job(number), first_ns + number * _S, cold=cold(number))
    return run


def write_capture(
    run: Path,
    step: int,
    job: GpuJob,
    started_ns: int = FIRST_NS,
    *,
    cold: bool | None = None,
    stage: str | None = None,
    role: str = "trainer",
) -> None:
    """Write one capture of all ranks of a job."""
    directory = run / f"step_{step:06d}" / role
    job.write(directory)
    for rank in range(job.ranks):
        capture = CaptureRecord(
            id=f"step{step}-{stage}" if stage else f"step{step}",
            directory=directory,
            identity=Identity(role=role, rank=rank, world_size=job.ranks),
            first_step=step,
            current_step=max(step, job.steps - 1),
            started_ns=started_ns,
            stage=stage,
            cold_first_step=cold,
        )
        write_record(capture, directory / f"rank{rank}.trace.json.gz")


def write_record(capture: CaptureRecord, trace: Path, anchors: tuple[ClockAnchor, ...] = ()) -> None:
    """Move a trace to the path of its capture, and write the manifest of its rank.

    Args:
        capture: New capture of the trace.
        trace: Path of the gzip-compressed trace.
        anchors: Clock anchors of the trace.
    """
    moved = capture.artifact_path(".trace.json.gz")
    shutil.move(trace, moved)
    for state in (CaptureState.STARTING, CaptureState.RECORDING, CaptureState.STOPPING):
        capture.move_to(state)
    capture.conclude((Artifact(path=moved, size_bytes=moved.stat().st_size, anchors=anchors),))
    ranks = tuple(range(capture.identity.world_size))
    writer = ManifestWriter(backend="torch", versions={}, options={}, expected_ranks=ranks)
    write_manifest(capture, attrs.evolve(writer, write=lambda path, content: path.write_bytes(content) and None))
