"""What only CUDA has: ranges for nsys and snapshots of the caching allocator."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from profdeck import Artifact, Capture
from profdeck.capture import Output

logger = logging.getLogger("profdeck")

# The allocator's observer of exhausted memory cannot be taken off again: it is attached once and asks this.
_on_out_of_memory: list[tuple[Capture, list[Output]]] = []
_observed = False


@contextmanager
def profiler_range() -> Iterator[None]:
    """Call cudaProfilerStart at entry and cudaProfilerStop at exit."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


@contextmanager
def memory_history(capture: Capture, entries: int, artifacts: list[Output]) -> Iterator[None]:
    """Record the allocator's history; add a snapshot to ``artifacts`` at exit and whenever memory runs out."""
    global _observed  # noqa: PLW0603  # attached once per process
    torch.cuda.memory._record_memory_history(max_entries=entries)  # noqa: SLF001  # documented, though private
    if not _observed:
        torch._C._cuda_attachOutOfMemoryObserver(_out_of_memory)  # noqa: SLF001  # as torch's own docs do
        _observed = True
    _on_out_of_memory.append((capture, artifacts))
    try:
        yield
    finally:
        _on_out_of_memory.remove((capture, artifacts))
        try:
            _dump(capture.artifact_path(".memory.pickle"), artifacts)
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001  # as above


def _out_of_memory(*_: Any) -> None:
    for capture, artifacts in _on_out_of_memory:
        path = capture.artifact_path(".memory.pickle", "oom")
        if not path.exists():  # the first one shows the cause
            _dump(path, artifacts)


def _dump(path: Path, artifacts: list[Output]) -> None:
    try:
        torch.cuda.memory._dump_snapshot(str(path))  # noqa: SLF001  # documented, though private
        artifacts.append(Artifact(path=path, kind="memory_snapshot", size_bytes=path.stat().st_size))
    except (OSError, RuntimeError) as error:
        logger.warning("The memory snapshot %s cannot be written: %s", path, error)
        artifacts.append(Artifact(path=path, kind="memory_snapshot", whole=False, problem=f"not written: {error}"))
