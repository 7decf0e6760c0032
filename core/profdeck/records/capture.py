"""Captures: their settings, state and results."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.config.schedule import Iterations, Window
from profdeck.records.artifact import Artifact
from profdeck.records.host_clock import HostClock
from profdeck.records.status import Status
from profdeck_traces.base.errors import to_text
from profdeck_traces.inputs.host_load import HostLoad

if TYPE_CHECKING:
    from profdeck.records.request import CaptureRequest
    from profdeck.records.targets import FleetRecord


MAX_INDEX = 10**15 - 1
"""Largest step number. Manifests that contain integers above 2**53 are rejected."""


def _do_nothing() -> None:
    """Do nothing. Default for `Capture.end_step`, for backends that do not annotate steps."""


class Unit(StrEnum):
    """Unit between two boundaries of a capture."""

    GLOBAL_STEP = "global_step"
    MINI_BATCH = "mini_batch"
    ENGINE_ITERATION = "engine_iteration"


@attrs.frozen
class Step:
    """The unit that ended at a boundary, and its index.

    Global steps have the host's step numbers. Other units are counted from 0.
    """

    unit: Unit
    index: int


class CaptureState(StrEnum):
    """State of a capture. It never returns to an earlier state."""

    NEW = "new"
    STARTING = "starting"
    """The capture is starting, or is waiting for a device (see `CaptureRecord.waits_for`)."""
    RECORDING = "recording"
    STOPPING = "stopping"
    ENDED = "ended"


_TRANSITIONS = {
    CaptureState.NEW: {CaptureState.STARTING, CaptureState.ENDED},
    CaptureState.STARTING: {CaptureState.RECORDING, CaptureState.ENDED},
    CaptureState.RECORDING: {CaptureState.STOPPING},
    CaptureState.STOPPING: {CaptureState.ENDED},
    CaptureState.ENDED: set[CaptureState](),
}


@attrs.frozen
class Owner:
    """The process and thread that started a capture. No other thread may step or stop it."""

    pid: int = attrs.field(factory=os.getpid)
    thread: threading.Thread = attrs.field(factory=threading.current_thread)
    """Thread object rather than a thread ID, because a later thread can reuse the ID."""


@attrs.define(eq=False, kw_only=True)
class Capture:
    """One recording by one process, passed to hooks. Backends may write only below ``directory``."""

    id: str
    """The same on every rank of the job, such as ``step10`` or ``step10-actor_update``."""
    directory: Path
    """The directory for this rank's files."""
    identity: Identity
    """Role, rank and replica of the recording process."""
    first_step: int
    """The first global step that is recorded."""
    current_step: int
    """The current global step. During the warm-up, it is less than ``first_step``."""
    stage: str | None = None
    """The stage of the global step that this capture records, or None for the complete step."""
    unit: Unit = Unit.GLOBAL_STEP
    """The unit in which the window and the recorded steps are counted."""
    window: Window | None = None
    """The window of mini-batches, or None to record all of them."""
    first_iteration: int | None = None
    """In an engine process, the first recorded iteration, counted from the start of the request."""
    passed_over: int = 0
    """The number of mini-batches that the window skipped because another capture held the device."""
    target: str | None = None
    """The engine or server that records, or None if this process records. The processes of a target write their own
    manifests."""
    annotate: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext
    """Function that returns a context manager for annotating a stage. The backend sets this function at start."""
    end_step: Callable[[], None] = attrs.field(default=_do_nothing)
    """Function that ends the trace annotation of the current step. It is called before the plugins run at the end of a
    step, and in an engine process when the engine becomes idle. Repeated calls must have no effect. A backend may set
    this function at start."""
    status: Status = Status.RECORDING
    """Status of the capture. After the capture has ended: complete, partial, missing or failed."""
    artifacts: tuple[Artifact, ...] = ()
    """The files that the capture has written."""
    problems: list[str] = attrs.field(factory=list)
    """Errors, one sentence each."""
    notes: list[str] = attrs.field(factory=list)
    """Unexpected but harmless events, such as a second start."""

    def report_problem(self, problem: str) -> None:
        """Add a problem. A capture with problems is not complete.

        Args:
            problem: a sentence that describes the error and its solution.
        """
        self.problems.append(to_text(problem))

    @property
    def stem(self) -> str:
        """The prefix of all file names of this rank or target in this capture."""
        return f"{self.identity.stem if self.target is None else 'target'}.{self.id}"

    @property
    def manifest_path(self) -> Path:
        """The path of this rank's manifest."""
        return self.directory / f"{self.stem}.json"

    def artifact_path(self, suffix: str, part: str | None = None) -> Path:
        """Return the path of an artifact.

        Args:
            suffix: The end of the file name, with its dot, such as ``.memory.json``.
            part: A name that distinguishes several artifacts of one kind.

        Raises:
            CaptureError: the path is that of the manifest, as with the suffix ``.json``.
        """
        path = self.directory / f"{self.stem}{f'.{part}' if part else ''}{suffix}"
        if path == self.manifest_path:
            raise CaptureError(
                f"artifact_path({suffix!r}): {path.name} is the capture's manifest. "
                "Use a suffix with a name, such as '.memory.json'."
            )
        return path


@attrs.define(eq=False, kw_only=True)
class EngineCapture(Capture):
    """A capture with additional fields for engine backends and engine processes."""

    iterations: Iterations | None = None
    """The requested engine iterations. None selects all iterations until the stop."""
    request: CaptureRequest | None = None
    """The request that is sent to the target's processes. In these processes, the request that was received."""
    expected_ranks: tuple[int, ...] | None = None
    """The ranks that should record, if the target reports them to the backend."""
    fleet: FleetRecord | None = None
    """The result of each target, for a capture with several targets."""
    clock: HostClock | None = None
    """Comparison of the clocks of the target's host and this host, if the target is on another host."""
    started_ns: int = attrs.field(factory=time.time_ns)
    """The start of the capture, as Unix time in nanoseconds."""


@attrs.define(eq=False, kw_only=True)
class CaptureRecord(EngineCapture):
    """A capture with its internal state."""

    demand: str | None = None
    """The token of the on-demand request, or None for a capture that the config selects."""
    owner: Owner = attrs.field(factory=Owner)
    state: CaptureState = CaptureState.NEW
    ended_ns: int | None = None
    stall_s: float | None = None
    """The time for which start and stop blocked an engine process, in seconds."""
    waits_for: str | None = None
    """The device that the capture is waiting for, or never received, and the current holder of the device."""
    waited_s: float | None = None
    """Time spent waiting for the device, in seconds. None if the capture did not wait or is still waiting."""
    cold_first_step: bool | None = None
    """True if the recorder started without warm-up in the first recorded step, which therefore takes longer. None if
    nothing has been recorded yet, or if the backend's first step is never slower."""

    host_load: HostLoad | None = None
    """Host load during the recording. None if another process does the recording."""
    unrecorded_step_s: float | None = None
    """Median duration of the global steps before the capture, in seconds. None if unknown."""

    real_directory: Path | None = None
    """The path of `directory`, with symbolic links resolved when the directory was created."""

    def check_directory(self) -> None:
        """Check that the directory and its parents have not been replaced by symbolic links since it was created.

        Raises:
            OSError: the path now leads to a different directory.
        """
        if self.real_directory is not None and self.directory.resolve() != self.real_directory:
            text = "replaced by a symbolic link during the capture"
            raise OSError(errno.ELOOP, text, str(self.directory))

    def artifact_path(self, suffix: str, part: str | None = None) -> Path:
        """Return the path of an artifact after checking the directory; see `Capture.artifact_path`.

        Raises:
            CaptureError: as in `Capture.artifact_path`.
            OSError: as in `check_directory`.
        """
        self.check_directory()
        return super().artifact_path(suffix, part)

    def move_to(self, state: CaptureState) -> None:
        """Advance the state.

        Raises:
            CaptureError: the state machine has no such transition.
        """
        if state not in _TRANSITIONS[self.state]:
            raise CaptureError(f"Capture {self.id} cannot change its state from {self.state} to {state}.")
        self.state = state

    def conclude(self, artifacts: tuple[Artifact, ...]) -> None:
        """End the capture: store the artifacts and set the final status.

        Afterwards, only problems of listeners may be added.
        """
        self.artifacts = artifacts
        self.ended_ns = time.time_ns()
        self.problems += [f"{item.path.name}: {item.problem}" for item in artifacts if item.problem]
        # The traces of a target are listed in its ranks' manifests, so a target that was started counts as recorded.
        recorded = any(item.size_bytes for item in artifacts) or (
            self.target is not None and self.state is CaptureState.STOPPING
        )
        self.move_to(CaptureState.ENDED)
        if not recorded:
            if not self.problems:
                self.problems.append("The backend wrote no file.")
            self.status = Status.FAILED if self.waits_for is None else Status.MISSING  # the device stayed busy
        elif self.problems or not all(item.whole for item in artifacts):
            self.status = Status.PARTIAL
        else:
            self.status = Status.COMPLETE
