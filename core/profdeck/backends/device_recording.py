"""Recorder cycles of a capture, independent of the device.

A cycle is one recording by the device's library. A capture of global steps or engine iterations has one cycle. A
capture of mini-batches has one cycle for each cycle of its window, and each cycle has its own output.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import attrs

from profdeck.base.errors import LeaseError
from profdeck.config.options import CommonOptions
from profdeck.config.schedule import WindowPhase
from profdeck.config.structuring import unstructure
from profdeck.records.artifact import Artifact, Output
from profdeck.records.capture import Capture, Unit


class RecordingCycle(Protocol):
    """One recording by a device's library, including its warm-up. `CaptureCycles` defines positions."""

    first: int | None
    """First recorded position; None during the warm-up."""

    def start(self) -> None:
        """Start at the position that was passed to the factory."""

    def step(self) -> None:
        """Advance to the next position."""

    def stop(self) -> None:
        """Stop recording."""

    def abandon(self) -> None:
        """Discard the recorded data, which contains no requested position. Called after `stop`, instead of writing."""


C = TypeVar("C", bound=RecordingCycle)


@attrs.frozen
class CyclePart:
    """Recorded range of a recorder cycle, and the name that distinguishes the cycle's files."""

    iterations: tuple[int, int] | None
    """First and last mini-batch or engine iteration, both included; None for global steps."""
    name: str | None
    """Part of the file names that distinguishes the cycles of a capture; None if the capture has only one cycle."""


class OneAtATime:
    """Lock for libraries that support only one recording per process. Other captures wait for its release."""

    def __init__(self, library: str) -> None:
        """Args:
        library: the library's name, for messages.
        """
        self._library = library
        self._active: dict[int, Capture] = {}
        """The capture that holds the lock, by process ID, so that a forked child ignores its parent's entry."""

    def acquire(self, capture: Capture) -> None:
        """Acquire the lock for a capture.

        Raises:
            LeaseError: another capture holds the lock.
        """
        active = self._active.setdefault(os.getpid(), capture)  # atomic, so no mutex is needed
        if active is not capture:
            role = active.identity.role
            raise LeaseError(
                f"Capture {active.id} of the role {role} is being recorded in this process; {self._library} "
                "supports only one recording at a time. Capture the roles at different steps or stages.",
                f"{self._library}, held by this process ({role}, {active.id})",
            )

    def release(self, capture: Capture) -> None:
        """Release the lock if the capture holds it."""
        if self._active.get(os.getpid()) is capture:
            del self._active[os.getpid()]


def recording_metadata(capture: Capture, options: CommonOptions) -> str:
    """Return a capture's ID, identity and options as JSON, for the trace metadata."""
    about = {"capture": capture.id, **unstructure(capture.identity), "options": unstructure(options)}
    return json.dumps(about)


class CaptureCycles(Generic[C]):
    """Starts, advances and stops the recorder cycles of one capture.

    A position is the index of the current global step, mini-batch or engine iteration, whichever the capture counts.
    """

    def __init__(
        self,
        capture: Capture,
        create: Callable[[int], C],
        write: Callable[[C, CyclePart], Artifact],
        outputs: list[Output],
    ) -> None:
        """Args:
        capture: the capture to record.
        create: returns a new cycle that starts at the given position.
        write: writes the data of a cycle and returns the artifact. Must not raise. Cycles that end before the capture
            are written immediately. The last cycle may be written by any thread.
        outputs: list to which the artifacts are added. For the last cycle, a function that writes the artifact is
            added.
        """
        self._capture = capture
        self._create = create
        self._write = write
        self._outputs = outputs
        self._cycle: C | None = None
        if capture.first_iteration is not None:
            self.position = capture.first_iteration
        else:
            self.position = capture.passed_over if capture.window else capture.current_step

    def start(self) -> None:
        """Start a recorder cycle, unless the recorder must be off at the current position."""
        if self.phase(self.position) is not WindowPhase.OFF:
            cycle = self._create(self.position)
            cycle.start()
            self._cycle = cycle

    def step(self) -> None:
        """Advance to the next position."""
        if self.phase(self.position) is WindowPhase.RECORD_LAST:
            self._end(self.position, write_now=True)
        self.position += 1
        if self._cycle is not None:
            self._cycle.step()
        else:
            self.start()

    def stop(self) -> None:
        """End the current cycle. `outputs` writes its artifact later."""
        # At a scheduled end, no mini-batch is in progress, so the current position is empty. The capture's problems
        # contain the reason for an early end.
        is_in_progress = self._capture.problems or self._capture.first_iteration is not None
        self._end(self.position if is_in_progress else self.position - 1, write_now=False)
        if (problem := self._describe_missing_recording()) is not None:
            self._capture.problems.append(problem)

    def _describe_missing_recording(self) -> str | None:
        window, is_recorded = self._capture.window, bool(self._outputs)
        if window is None:
            return None if is_recorded else "The capture ended before recording started."
        if is_recorded and self._capture.problems:  # they contain the reason for an early end
            return None
        if self.position == 0:
            return (
                "The window counts mini-batches, but the host reported none. Call profiler.step(i, 'mini_batch') after "
                "each mini-batch i, counted from 0 in each global step."
            )
        if not is_recorded:
            return f"The capture ended after mini-batch {self.position - 1}, before the window started to record."
        recorded = window.count_recorded(self.position - self._capture.passed_over)
        requested = window.repeat * window.active
        if recorded < requested:
            return (
                f"The window recorded {recorded} of {requested} mini-batches, because the capture ended after "
                f"mini-batch {self.position - 1}. Select fewer mini-batches, or set repeat: 0 to record until the end."
            )
        return None

    def phase(self, position: int) -> WindowPhase:
        """Return the phase of the recorder at a position."""
        if self._capture.first_iteration is not None:
            return WindowPhase.RECORD
        if self._capture.window is not None:
            return self._capture.window.phase(position - self._capture.passed_over)
        return WindowPhase.WARMUP if position < self._capture.first_step else WindowPhase.RECORD

    def _end(self, last: int, *, write_now: bool) -> None:
        cycle, self._cycle = self._cycle, None
        if cycle is None:
            return
        cycle.stop()
        has_iterations = self._capture.unit is not Unit.GLOBAL_STEP
        # Discard a cycle that only warmed up, or that started after the host's last mini-batch. If the host reported no
        # mini-batches, the cycle contains the complete step.
        if cycle.first is None or (has_iterations and last < cycle.first and self.position > 0):
            cycle.abandon()
            return
        iterations = (cycle.first, max(last, cycle.first)) if has_iterations else None
        name = None
        if iterations and self._capture.window:
            name = "mb{:04d}-{:04d}".format(*iterations)
        write = functools.partial(self._write, cycle, CyclePart(iterations, name))
        if not write_now:
            self._outputs.append(write)
            return
        # Writing between mini-batches blocks the training step, but it releases the memory before the next cycle.
        artifact = write()
        self._outputs.append(artifact)
        self._capture.artifacts += (artifact,)  # kept even if the stop fails and returns no outputs
