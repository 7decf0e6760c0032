"""One target of a fleet: its capture, and the outcome of its start and stop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import attrs

from profdeck.backends.api import EngineBackend
from profdeck.backends.hook_calls import RoleHooks
from profdeck.backends.recording import Recording, abandon
from profdeck.base.errors import TargetError, target_error
from profdeck.base.operations import run
from profdeck.base.outcome import Outcome
from profdeck.base.text import sentence
from profdeck.engine.clusters import Actor, ActorGroup
from profdeck.records import manifest
from profdeck.records.capture import CaptureRecord, CaptureState as Life
from profdeck.records.targets import TargetRecord
from profdeck.replicas.discovery import Target
from profdeck.replicas.start_gate import GatePass

_MAX_SHOWN = 3


@attrs.define(eq=False, kw_only=True)
class Member:
    """One target in one capture."""

    target: Target
    name: str
    backend: EngineBackend | None
    """Backend of the target; None if the target cannot be contacted."""
    capture: CaptureRecord
    recorder: manifest.ManifestWriter
    recording: Recording | None = None
    """The recording in progress, if any."""
    outcome: Outcome | None = None
    reason: str | None = None
    fix: str | None = None
    sent_ns: int | None = None
    """Unix time at which the start was sent, in nanoseconds."""
    started_ns: int | None = None
    ended_ns: int | None = None

    @property
    def record(self) -> TargetRecord:
        """Entry in the fleet's manifest."""
        return TargetRecord(
            name=self.name,
            replica=self.target.replica,
            worker_type=self.target.worker_type,
            capture=None if self.capture.state is Life.NEW else self.capture.id,
            outcome=self.outcome,
            reason=self.reason,
            fix=self.fix,
            sent_ns=self.sent_ns,
            started_ns=self.started_ns,
            ended_ns=self.ended_ns,
        )

    def prefix(self, text: str) -> str:
        """Return a message that begins with the replica number and the name of the target."""
        label, suffix = f"Replica {self.target.replica} ({self.name})", text.removeprefix(self.name)
        # Errors of a target often begin with its name, which must not be repeated.
        return f"{label}{suffix}" if suffix != text and suffix[:1] in {":", " "} else f"{label}: {text}"

    @property
    def bound_backend(self) -> EngineBackend:
        """Backend of the target, which must exist."""
        assert self.backend is not None  # noqa: S101  # targets without a backend are excluded before any operation
        return self.backend

    def set_failure(self, error: BaseException, timeout_error: TargetError | None = None) -> None:
        """Store the outcome, the reason and the fix of a failed operation.

        Args:
            error: the error of the operation.
            timeout_error: error to report instead of a `TimeoutError`.
        """
        failure, late_fix = target_error(error), ""
        if timeout_error is not None and isinstance(error, TimeoutError):
            failure, late_fix = timeout_error, self.bound_backend.late_fix
        fix = f"{late_fix} {failure.fix}".strip()
        self.outcome, self.reason, self.fix = failure.outcome, sentence(str(failure)), fix or None

    async def start(self, gate_pass: GatePass, hooks: RoleHooks) -> None:
        """Start the recording when the gate opens.

        Raises:
            CaptureError: the start failed. The target's manifest contains the reason.
        """
        try:
            if not self.bound_backend.wait_for(gate_pass):
                await gate_pass()
                # Backends that await the gate themselves send their requests first, in the same loop iteration.
                await asyncio.sleep(0)
            recording = Recording(self.capture, self.bound_backend, hooks, self.recorder)
            if not await run(recording.start()):
                recording.publish()
            self.recording = recording
            self.outcome, self.started_ns = Outcome.STARTED, time.time_ns()
        finally:
            gate_pass.abandon()
            if gate_pass.passed_ns is not None:
                self.sent_ns = time.time_ns() - (time.monotonic_ns() - gate_pass.passed_ns)

    async def stop(self, reason: str | None) -> None:
        """Stop the recording, and wait until its files are complete. The target's manifest lists missing files."""
        recording, self.recording = self.recording, None
        if recording is None:
            return
        problems = self.capture.problems
        try:
            await run(recording.close(reason))
            outcome = self.bound_backend.outcome or Outcome.FLUSHED
            # The outcome is still STARTED if the backend's stop raised an error.
            self.outcome = Outcome.FILES_MISSING if outcome is Outcome.STARTED else outcome
            self.fix = self.bound_backend.fix or self.outcome.fix or None
        finally:
            self.reason, self.ended_ns = " ".join(problems) or None, time.time_ns()

    def abandon(self, reason: str) -> None:
        """End the capture if its file names are reserved but it was not started."""
        if self.capture.state is Life.STARTING:
            self.reason = self.reason or sentence(reason)
            abandon(self.capture, self.recorder, self.reason)
            self.ended_ns = time.time_ns()


def target_key(handle: object) -> object:
    """Return a key that identifies a target."""
    return handle if isinstance(handle, str | Actor | ActorGroup) else id(handle)


NOT_COMPLETE = "are not complete"


def count_outcomes(outcomes: Sequence[Outcome | None], total: int, predicate: str) -> str:
    """Return a sentence with the number of targets to which a predicate applies, and their outcomes."""
    counts = Counter(str(outcome or "not asked") for outcome in outcomes)
    parts = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return f"{len(outcomes)} of {total} targets {predicate}: {parts}."


def timeout_error(text: str, option: str) -> TargetError:
    """Return the error for a target that exceeded the time limit of an option."""
    fix = f"Check its log for a hang. If the target is only slow, increase {option} under targets."
    return TargetError(text, Outcome.TIMED_OUT, fix)


def list_reasons(members: Sequence[Member]) -> str:
    """Return the failure reasons of the first targets, and the number of further targets."""
    return " ".join(truncate([member.prefix(member.reason) for member in members if member.reason]))


def truncate(texts: Sequence[str]) -> list[str]:
    """Return the first texts, and a sentence with the number of omitted texts."""
    omitted = len(texts) - _MAX_SHOWN
    return [*texts[:_MAX_SHOWN], *([f"And {omitted} more."] if omitted > 0 else [])]
