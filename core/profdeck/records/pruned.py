"""What was deleted of a run, to keep it small: a file for each global step, or each role in one, in its directory
``pruned``.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import attrs
import msgspec

from profdeck.base.json_files import JsonKind
from profdeck_traces.base.files import replace_file

_DIRECTORY = "pruned"


@attrs.frozen(kw_only=True)
class PrunedStep:
    """The captures that began at one global step, all of them or all of one role deleted."""

    first_step: int
    last_step: int
    role: str | None = None
    """Of which role they are; None if all roles' are gone."""
    captures: tuple[str, ...]
    """Their ids."""
    size_bytes: int
    pruned_ns: int = attrs.field(factory=time.time_ns)
    """When, in Unix nanoseconds."""

    @property
    def name(self) -> str:
        """The name of its directory, in which those of a role have another: ``step_000010.rollout``."""
        return f"{self.step_name}.{self.role}" if self.role else self.step_name

    @property
    def step_name(self) -> str:
        """The name of the directory of the whole step."""
        return f"step_{self.first_step:06d}"


_STEP = JsonKind(PrunedStep)


def read_pruned(run: Path) -> tuple[PrunedStep, ...]:
    """Return what was deleted, by step, as far as its files can be read."""
    found = []
    for file in (run / _DIRECTORY).glob("step_*.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(_STEP.read(file))
    return tuple(sorted(found, key=lambda one: (one.first_step, one.role or "")))


def write_pruned(run: Path, step: PrunedStep) -> None:
    """Record that a step was deleted.

    Raises:
        OSError: it cannot be written.
    """
    (run / _DIRECTORY).mkdir(exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(step), indent=1)
    replace_file(run / _DIRECTORY / f"{step.name}.json", content, durable=True)
