"""Writes runs of many captures, as jobs on GPUs leave them: traces of `gpu_job.GpuJob` with manifests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import attrs

from gpu_job import GpuJob
from profdeck.base.identity import Identity
from profdeck.records.artifact import Artifact
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
        captures: How many, of one step each and more.
        job: Returns the job to record, by capture number.
        every: Global steps from one capture to the next.
        first_ns: Start time of the first capture. Each capture takes one second.
        cold: Returns whether a capture's first step is cold, by capture number; None omits it from the manifest.
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
) -> None:
    """Write one capture of all ranks of a job."""
    directory = run / f"step_{step:06d}" / "trainer"
    job.write(directory)
    for rank in range(job.ranks):
        capture = CaptureRecord(
            id=f"step{step}-{stage}" if stage else f"step{step}",
            directory=directory,
            identity=Identity(role="trainer", rank=rank, world_size=job.ranks),
            first_step=step,
            current_step=step,
            started_ns=started_ns,
            stage=stage,
            cold_first_step=cold,
        )
        trace = capture.artifact_path(".trace.json.gz")
        shutil.move(directory / f"rank{rank}.trace.json.gz", trace)
        for state in (CaptureState.STARTING, CaptureState.RECORDING, CaptureState.STOPPING):
            capture.move_to(state)
        capture.conclude((Artifact(path=trace, size_bytes=trace.stat().st_size),))
        recorder = ManifestWriter(backend="torch", versions={}, options={}, expected_ranks=tuple(range(job.ranks)))
        write_manifest(capture, attrs.evolve(recorder, write=lambda path, content: path.write_bytes(content) and None))
