"""One target of many: its capture, and how its start and stop came out."""

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

_MOST_SHOWN = 3


@attrs.define(eq=False, kw_only=True)
class Member:
    """One target in one capture."""

    target: Target
    name: str
    backend: EngineBackend | None
    """What asks it; None if it cannot be asked."""
    capture: CaptureRecord
    recorder: manifest.ManifestWriter
    recording: Recording | None = None
    """While it records."""
    outcome: Outcome | None = None
    reason: str | None = None
    fix: str | None = None
    sent_ns: int | None = None
    started_ns: int | None = None
    ended_ns: int | None = None

    @property
    def record(self) -> TargetRecord:
        """What the fleet's manifest says of it."""
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

    def said(self, text: str) -> str:
        """Begin a sentence with which one it is, once: errors of a target begin with its name."""
        rest = text.removeprefix(self.name)
        which = f"Replica {self.target.replica} ({self.name})"
        return f"{which}{rest}" if rest != text and rest[:1] in {":", " "} else f"{which}: {text}"

    @property
    def asked(self) -> EngineBackend:
        """What asks it."""
        assert self.backend is not None  # noqa: S101  # those without are left out before anything is asked
        return self.backend

    def failed(self, error: BaseException, late: TargetError | None = None) -> None:
        """Keep why an operation failed; ``late`` says that it took too long."""
        found, known = target_error(error), ""
        if late is not None and isinstance(error, TimeoutError):
            found, known = late, self.asked.late_fix
        fix = f"{known} {found.fix}".strip()
        self.outcome, self.reason, self.fix = found.outcome, sentence(str(found)), fix or None

    async def start(self, gate_pass: GatePass, hooks: RoleHooks) -> None:
        """Start it when the gate opens.

        Raises:
            CaptureError: it did not start; its manifest says why.
        """
        try:
            if not self.asked.wait_for(gate_pass):
                await gate_pass()
                await asyncio.sleep(0)  # those that wait by themselves leave first, in this very turn of the loop
            recording = Recording(self.capture, self.asked, hooks, self.recorder)
            if not await run(recording.start()):
                recording.publish()
            self.recording = recording
            self.outcome, self.started_ns = Outcome.STARTED, time.time_ns()
        finally:
            gate_pass.abandon()
            if gate_pass.passed_ns is not None:
                self.sent_ns = time.time_ns() - (time.monotonic_ns() - gate_pass.passed_ns)

    async def stop(self, reason: str | None) -> None:
        """Stop it, and wait until its files are whole. Its manifest says what is missing."""
        recording, self.recording = self.recording, None
        if recording is None:
            return
        problems = self.capture.problems
        try:
            await run(recording.close(reason))
            found = self.asked.outcome or Outcome.FLUSHED
            self.outcome = Outcome.FILES_MISSING if found is Outcome.STARTED else found  # its stop has raised
            self.fix = self.asked.fix or self.outcome.fix or None
        finally:
            self.reason, self.ended_ns = " ".join(problems) or None, time.time_ns()

    def abandon(self, reason: str) -> None:
        """End its capture if its names are reserved and nothing records it."""
        if self.capture.state is Life.STARTING:
            self.reason = self.reason or sentence(reason)
            abandon(self.capture, self.recorder, self.reason)
            self.ended_ns = time.time_ns()


def target_key(handle: object) -> object:
    """Return a key that identifies a target."""
    return handle if isinstance(handle, str | Actor | ActorGroup) else id(handle)


NOT_COMPLETE = "are not complete"


def counted(outcomes: Sequence[Outcome | None], total: int, what: str) -> str:
    """Say how many of all targets something is true of, and how they came out."""
    counts = Counter(str(outcome or "not asked") for outcome in outcomes)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{len(outcomes)} of {total} targets {what}: {kinds}."


def late_error(text: str, option: str) -> TargetError:
    """Return the error of a target that took too long."""
    return TargetError(
        text, Outcome.TIMED_OUT, f"See in its log whether it hangs; if it is only slow, raise {option} of the targets."
    )


def listed(members: Sequence[Member]) -> str:
    """Say what came of some targets."""
    return " ".join(shortened([member.said(member.reason) for member in members if member.reason]))


def shortened(texts: Sequence[str]) -> list[str]:
    """Leave out what is too much to read."""
    more = len(texts) - _MOST_SHOWN
    return [*texts[:_MOST_SHOWN], *([f"And {more} more."] if more > 0 else [])]


def error_of(result: object) -> BaseException:
    """Return a result that is an error as one."""
    assert isinstance(result, BaseException)  # noqa: S101  # no result is one
    return result
