"""The backend `replaying`, which writes traces of `gpu_job.GpuJob`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import ClassVar

import attrs

from gpu_job import GpuJob
from profdeck import Artifact, Backend, Capture, hookimpl


@attrs.define
class ReplayingBackend(Backend):
    """Records nothing. When a capture stops, writes the trace of a GPU job with one rank."""

    name: ClassVar[str] = "replaying"

    @hookimpl
    def profile_start(self, capture: Capture) -> None:
        """Record nothing."""

    @hookimpl
    def profile_stop(self, capture: Capture) -> Sequence[Artifact]:
        """Write the trace."""
        trace = capture.artifact_path(".trace.json.gz")
        directory = capture.directory / f".replayed-{capture.id}"
        GpuJob(steps=4, product_us=100.0 + capture.first_step).write(directory)
        shutil.move(directory / "rank0.trace.json.gz", trace)
        directory.rmdir()
        return [Artifact(path=trace, size_bytes=trace.stat().st_size)]
