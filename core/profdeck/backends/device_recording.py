"""The cycles of a capture: when the recorder of a device begins one, moves it on and ends it, whatever the device is.

A cycle is one recording by the device's library. A capture of global steps or engine iterations is one cycle; one of
mini-batches has a cycle per cycle of its window, each with an output of its own.
"""

from __future__ import annotations

import functools
import json
import threading
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
    """One recording by a device's library, from its warm-up to its end. Positions are those of `CaptureCycles`."""

    first: int | None
    """The first position that is recorded; None as long as it only warms up."""

    def start(self) -> None:
        """Begin, at the position for which it was made."""

    def step(self) -> None:
        """Pass to the next position."""

    def stop(self) -> None:
        """End."""

    def abandon(self) -> None:
        """Throw away what it left, as nothing that was asked for is in it. Called after `stop`, instead of a write."""


C = TypeVar("C", bound=RecordingCycle)


@attrs.frozen
class CyclePart:
    """Recorded range of a recorder cycle, and the name that distinguishes the cycle's files."""

    iterations: tuple[int, int] | None
    """First and last mini-batch or engine iteration, both included; None for global steps."""
    name: str | None
    """What tells its files from those of other cycles of the same capture; None where there is one cycle."""


class OneAtATime:
    """Lock for libraries that support only one recording per process. Other captures wait for its release."""

    def __init__(self, library: str) -> None:
        """Args:
        library: its name, for messages.
        """
        self._library = library
        self._active: Capture | None = None
        self._mutex = threading.Lock()

    def take(self, capture: Capture) -> None:
        """Let a capture record from now on.

        Raises:
            LeaseError: another one does.
        """
        with self._mutex:
            active = self._active
            if active is None:
                self._active = capture
        if active is not None:
            role = active.identity.role
            raise LeaseError(
                f"Capture {active.id} of the role {role} is being recorded in this process; {self._library} "
                "records one at a time. Capture the roles at different steps or stages.",
                f"{self._library}, held by this process ({role}, {active.id})",
            )

    def release(self, capture: Capture) -> None:
        """Let the next one record, if this one did."""
        with self._mutex:
            if self._active is capture:
                self._active = None


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
        make: Callable[[int], C],
        write: Callable[[C, CyclePart], Artifact],
        outputs: list[Output],
    ) -> None:
        """Args:
        capture: what to record.
        make: makes the cycle that begins at a position.
        write: writes what a cycle recorded; called by any thread, and right away for cycles that end before the
            capture does. Must not raise.
        outputs: where artifacts are added as they are written, and what writes the last one.
        """
        self._capture = capture
        self._make = make
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
            cycle = self._make(self.position)
            cycle.start()
            self._cycle = cycle

    def step(self) -> None:
        """Advance to the next position."""
        if self.phase(self.position) is WindowPhase.RECORD_LAST:
            self._end(self.position, at_once=True)
        self.position += 1
        if self._cycle is not None:
            self._cycle.step()
        else:
            self.start()

    def stop(self) -> None:
        """End what was recorded since the last cycle ended."""
        # At a normal end the host has reported its last mini-batch, and the one that then began is empty. Before
        # that, core has noted why the capture ends early.
        unit_open = self._capture.problems or self._capture.first_iteration is not None
        self._end(self.position if unit_open else self.position - 1, at_once=False)
        if not self._outputs:
            self._capture.problems.append("The capture ended before anything was to be recorded.")

    def phase(self, position: int) -> WindowPhase:
        """Return what is done at a position."""
        if self._capture.first_iteration is not None:
            return WindowPhase.RECORD
        if self._capture.window is not None:
            return self._capture.window.phase(position - self._capture.passed_over)
        return WindowPhase.WARMUP if position < self._capture.first_step else WindowPhase.RECORD

    def _end(self, last: int, *, at_once: bool) -> None:
        cycle, self._cycle = self._cycle, None
        if cycle is None:
            return
        cycle.stop()
        counts = self._capture.unit is not Unit.GLOBAL_STEP
        if cycle.first is None or (counts and last < cycle.first and self._outputs):
            cycle.abandon()  # it only warmed up, or began and the host was done
            return
        iterations = (cycle.first, max(last, cycle.first)) if counts else None
        name = None
        if iterations and self._capture.window:
            name = "mb{:04d}-{:04d}".format(*iterations)
        write = functools.partial(self._write, cycle, CyclePart(iterations, name))
        # A training step waits for what is written between its mini-batches, but its memory is free then.
        self._outputs.append(write() if at_once else write)
