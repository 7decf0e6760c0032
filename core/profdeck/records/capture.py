"""A capture: one recording, from a start to a stop, its state and what it left behind."""

from __future__ import annotations

import contextlib
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

if TYPE_CHECKING:
    from profdeck.records.request import CaptureRequest
    from profdeck.records.targets import FleetRecord


class Unit(StrEnum):
    """What a boundary inside a capture separates."""

    GLOBAL_STEP = "global_step"
    MINI_BATCH = "mini_batch"
    ENGINE_ITERATION = "engine_iteration"


@attrs.frozen
class Step:
    """A boundary: the unit that just ended and its index (global steps as the host numbers them, others from 0)."""

    unit: Unit
    index: int


class CaptureState(StrEnum):
    """Where a capture is in its life. It only ever moves forward."""

    NEW = "new"
    STARTING = "starting"
    """Also as long as it waits for its turn: `Capture.waits_for`."""
    RECORDING = "recording"
    STOPPING = "stopping"
    ENDED = "ended"


_NEXT = {
    CaptureState.NEW: {CaptureState.STARTING, CaptureState.ENDED},
    CaptureState.STARTING: {CaptureState.RECORDING, CaptureState.ENDED},
    CaptureState.RECORDING: {CaptureState.STOPPING},
    CaptureState.STOPPING: {CaptureState.ENDED},
    CaptureState.ENDED: set[CaptureState](),
}


@attrs.frozen
class Owner:
    """The process and thread that started a capture: only they may step and stop it."""

    pid: int = attrs.field(factory=os.getpid)
    thread: int = attrs.field(factory=threading.get_ident)


@attrs.define(eq=False, kw_only=True)
class Capture:
    """One recording by one process. Hooks receive it; backends write below ``directory`` only."""

    id: str
    """The same on every rank of the job, such as ``step10`` or ``step10-actor_update``."""
    directory: Path
    identity: Identity
    first_step: int
    """The first global step that is recorded."""
    current_step: int
    """The global step that is under way; below ``first_step`` while warming up."""
    stage: str | None = None
    unit: Unit = Unit.GLOBAL_STEP
    """What the window counts and the steps in the recording stand for."""
    window: Window | None = None
    iterations: Iterations | None = None
    """The engine iterations that were asked for; None for all until the stop."""
    first_iteration: int | None = None
    """In a process of an engine: the first iteration that is recorded, counted from the start of the request."""
    passed_over: int = 0
    """Mini-batches of the window that went by before the recording began, as another one held the device."""
    target: str | None = None
    """What is asked to record, when that is not this process: an engine or a server. Its processes write manifests
    of their own, and this capture's is about the target as a whole."""
    request: CaptureRequest | None = None
    """What the target's processes are asked for, here and in each of them."""
    expected_ranks: tuple[int, ...] | None = None
    """The ranks that should have recorded, where the backend learns that from the target."""
    fleet: FleetRecord | None = None
    """What came of each target, when many are asked together."""
    demand: str | None = None
    """The token of the request that it was asked for with while the job ran; None for what the config selects."""
    annotate: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext
    """Makes a context manager that marks a stage in the recording; the backend sets it at start."""
    owner: Owner = attrs.field(factory=Owner)
    state: CaptureState = CaptureState.NEW
    status: Status = Status.RECORDING
    artifacts: tuple[Artifact, ...] = ()
    problems: list[str] = attrs.field(factory=list)
    """What went wrong, one sentence each."""
    notes: list[str] = attrs.field(factory=list)
    """What was harmless but unexpected, such as a second start."""
    started_ns: int = attrs.field(factory=time.time_ns)
    ended_ns: int | None = None
    stall_s: float | None = None
    """For how many seconds its start and stop kept an engine's process from its work."""
    waits_for: str | None = None
    """While it waits for its turn, and when that never came: what is held and by whom."""
    waited_s: float | None = None
    """For how many seconds it waited for its turn; None if it did not wait, or still does."""
    clock: HostClock | None = None
    """Of a target on another host: how its clock stands to that of this one."""
    cold_first_step: bool | None = None
    """True if the recorder started in the first recorded step, without warm-up; this step takes longer. None if nothing
    has been recorded yet, or the backend has no cold first step."""

    @property
    def stem(self) -> str:
        """What the names of all files of this rank, or about this target, in this capture start with."""
        return f"{self.identity.stem if self.target is None else 'target'}.{self.id}"

    @property
    def manifest_path(self) -> Path:
        """Where this rank's manifest stands."""
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

    def move_to(self, state: CaptureState) -> None:
        """Advance the state.

        Raises:
            CaptureError: the state machine has no such transition.
        """
        if state not in _NEXT[self.state]:
            raise CaptureError(f"Capture {self.id} cannot go from {self.state} to {state}.")
        self.state = state

    def conclude(self, artifacts: tuple[Artifact, ...]) -> None:
        """Record what came out and judge it. Nothing can be added afterwards but problems of listeners."""
        self.artifacts = artifacts
        self.ended_ns = time.time_ns()
        self.problems += [f"{item.path.name}: {item.problem}" for item in artifacts if item.problem]
        # A target's traces are in the manifests of its ranks: it fails when it did not start.
        recorded = any(item.size_bytes for item in artifacts) or (
            self.target is not None and self.state is CaptureState.STOPPING
        )
        self.move_to(CaptureState.ENDED)
        if not recorded:
            if not self.problems:
                self.problems.append("The backend left no file.")
            self.status = Status.FAILED if self.waits_for is None else Status.MISSING  # it could not even try
        elif self.problems or not all(item.whole for item in artifacts):
            self.status = Status.PARTIAL
        else:
            self.status = Status.COMPLETE
