"""Records of deleted steps: one file for each deleted global step, in the run's ``pruned`` directory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from pathlib import Path

import attrs
import msgspec

from profdeck.base.json_files import JsonKind
from profdeck_traces.base.files import lock_directory, replace_file

_DIRECTORY = "pruned"


@attrs.frozen(kw_only=True)
class PrunedStep:
    """Record of a deleted global step and its captures."""

    first_step: int
    last_step: int
    role: str | None = None
    """In runs of earlier versions, the role whose captures were deleted. None for all roles."""
    captures: tuple[str, ...]
    """IDs of the deleted captures."""
    size_bytes: int
    pruned_ns: int = attrs.field(factory=time.time_ns)
    """Time of the deletion in Unix nanoseconds."""


_STEP = JsonKind(PrunedStep)


def read_pruned(run: Path) -> tuple[PrunedStep, ...]:
    """Return the records of deleted steps, sorted by step.

    Unreadable records are skipped, and so are steps whose directory still exists because their deletion was
    interrupted.
    """
    steps = []
    for file in (run / _DIRECTORY).glob("step_*.json"):
        with contextlib.suppress(OSError, ValueError):
            step = _STEP.read(file)
            if step.role is not None or not (run / file.stem).exists():
                steps.append(step)
    return tuple(sorted(steps, key=lambda step: (step.first_step, step.role or "")))


@contextlib.contextmanager
def locked_records(run: Path) -> Generator[None, None, None]:
    """Hold a lock inside the ``with`` block, so that only one process at a time deletes steps of the run.

    Raises:
        OSError: the directory ``pruned`` cannot be created or opened.
    """
    (run / _DIRECTORY).mkdir(exist_ok=True)
    with lock_directory(run / _DIRECTORY):
        yield


def write_pruned(run: Path, step: PrunedStep) -> None:
    """Write a step's record before the step is deleted.

    Raises:
        OSError: the record cannot be written.
    """
    content = msgspec.json.format(msgspec.json.encode(step), indent=1)
    replace_file(run / _DIRECTORY / f"step_{step.first_step:06d}.json", content, durable=True)
