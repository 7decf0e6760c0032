"""What the manifest of a fleet says of its targets."""

from __future__ import annotations

import attrs

from profdeck.base.outcome import Outcome
from profdeck.config.targets import Policy, WorkerType


@attrs.frozen(kw_only=True)
class TargetRecord:
    """Result of one target. Times are Unix nanoseconds on the clock of the requesting process."""

    name: str
    """URL of a server, type of an engine object, or class and name (or ID) of an actor, such as
    ``Actor(Rollout, rollout_0)``. Each actor in a placement group has its own record."""
    replica: int
    worker_type: WorkerType | None = None
    """What it does behind its router; None where nothing tells."""
    capture: str | None = None
    """The id of its own capture, which has a manifest in the replica's directory; None if there was none."""
    outcome: Outcome | None = None
    """How its stop came out, or its start if it did not take part; None if it was not asked to start."""
    reason: str | None = None
    """Why it did not take part, or what is missing."""
    fix: str | None = None
    """What to do about that."""
    sent_ns: int | None = None
    """When its start was sent."""
    started_ns: int | None = None
    """When it had started; None if it did not take part."""
    ended_ns: int | None = None
    """When its files were whole, or it was given up."""

    @property
    def took_part(self) -> bool:
        """Whether it recorded."""
        return self.started_ns is not None


@attrs.frozen(kw_only=True)
class FleetRecord:
    """What came of all targets of one capture."""

    policy: Policy
    needed: int | None = None
    """How many targets had to start; None as long as their number is unknown."""
    start_skew_ms: float | None = None
    """The time between the first and the last start that was sent, in milliseconds; None if fewer than two were."""
    targets: tuple[TargetRecord, ...] = ()
    """By replica."""
