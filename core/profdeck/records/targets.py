"""Records of targets in the manifest of a fleet."""

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
    """Worker type in its router; None if unknown."""
    capture: str | None = None
    """ID of the target's own capture; None if there is none. Its manifest is in the replica's directory."""
    outcome: Outcome | None = None
    """Outcome of the stop, or of the start if the target did not participate; None if no start was requested."""
    reason: str | None = None
    """Reason why the target did not participate, or why its data is incomplete."""
    fix: str | None = None
    """Suggested solution for `reason`."""
    sent_ns: int | None = None
    """Time at which the start request was sent."""
    started_ns: int | None = None
    """Time at which the target had started; None if it did not participate."""
    ended_ns: int | None = None
    """Time at which the target's files were complete, or at which waiting for them was aborted."""

    @property
    def took_part(self) -> bool:
        """True if the target recorded."""
        return self.started_ns is not None


@attrs.frozen(kw_only=True)
class FleetRecord:
    """Results of all targets of one capture."""

    policy: Policy
    needed: int | None = None
    """Number of targets that had to start; None while the number of targets is unknown."""
    found: int | None = None
    """Number of targets found, including those not selected; None if it is unknown."""
    start_skew_ms: float | None = None
    """Time between the first and the last start request in milliseconds; None if fewer than two were sent."""
    targets: tuple[TargetRecord, ...] = ()
    """One record per target, sorted by replica."""
