"""What a run directory is found to hold: the result of reading it back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from profdeck.config.targets import Policy
from profdeck.records.pruned import PrunedStep
from profdeck.records.status import Status
from profdeck.records.targets import TargetRecord

# From the best to the worst; a capture or run is as good as its worst part.
_ORDER = (Status.COMPLETE, Status.RECORDING, Status.PARTIAL, Status.FAILED, Status.MISSING)


@attrs.frozen(kw_only=True)
class ArtifactReport:
    """One artifact as it stands on disk."""

    path: Path
    kind: str
    size_bytes: int
    events: int | None
    whole: bool
    problem: str | None
    iterations: tuple[int, int] | None
    notes: tuple[str, ...] = ()
    """What else there is to say of it."""
    kept: bool = False
    """Whether it was read before, and not again since it did not change."""


@attrs.frozen(kw_only=True)
class RankReport:
    """What one rank left of one capture."""

    rank: int
    parallel: dict[str, int]
    host: str | None
    status: Status
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    artifacts: tuple[ArtifactReport, ...]
    manifest: Path | None

    @property
    def size_bytes(self) -> int:
        """The size of all artifacts."""
        return sum(artifact.size_bytes for artifact in self.artifacts)

    @property
    def events(self) -> int:
        """The trace events in all artifacts that are here and can be read."""
        return sum(artifact.events or 0 for artifact in self.artifacts)


@attrs.frozen(kw_only=True)
class CaptureReport:
    """One capture of one role and replica, over all of its ranks."""

    id: str
    role: str
    replica: int | None
    backend: str
    stage: str | None
    first_step: int
    last_step: int
    ranks: tuple[RankReport, ...]

    @property
    def status(self) -> Status:
        """The worst status of its ranks."""
        return worst(rank.status for rank in self.ranks)


@attrs.frozen(kw_only=True)
class TargetReport:
    """What the process that asked for a capture says of an engine, a server or a fleet as a whole."""

    id: str
    role: str
    replica: int | None
    target: str
    policy: Policy | None
    """Of a fleet: how many targets had to start."""
    needed: int | None
    """The same as a number."""
    start_skew_ms: float | None
    """Of a fleet: the time between the first and the last start that was sent."""
    targets: tuple[TargetRecord, ...]
    """Of a fleet: what came of each target, each of which has a report of its own if it was asked."""
    first_step: int
    status: Status
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    artifacts: tuple[ArtifactReport, ...]
    manifest: Path


@attrs.frozen(kw_only=True)
class RunReport:
    """A whole run."""

    path: Path
    captures: tuple[CaptureReport, ...]
    targets: tuple[TargetReport, ...]
    problems: tuple[str, ...]
    """What belongs to no capture: roles that recorded nothing, files that no manifest mentions."""
    pruned: tuple[PrunedStep, ...] = ()
    """What was deleted on purpose."""

    @property
    def status(self) -> Status:
        """The worst status of its captures and targets; ``missing`` for a run without any."""
        parts = [*(part.status for part in self.captures), *(part.status for part in self.targets)]
        return worst(parts) if parts else Status.MISSING


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst of some statuses; ``complete`` for none."""
    return max(statuses, key=_ORDER.index, default=Status.COMPLETE)


def plain(report: RunReport) -> dict[str, Any]:
    """Turn a report into JSON data."""
    return {
        "path": str(report.path),
        "status": report.status,
        "problems": report.problems,
        "totals": totals(report),
        "captures": [
            {
                **attrs.asdict(capture, value_serializer=_paths_as_text),
                "status": capture.status,
                "ranks": [
                    {
                        **attrs.asdict(rank, value_serializer=_paths_as_text),
                        "size_bytes": rank.size_bytes,
                        "events": rank.events,
                    }
                    for rank in capture.ranks
                ],
            }
            for capture in report.captures
        ],
        "targets": [attrs.asdict(target, value_serializer=_paths_as_text) for target in report.targets],
        "pruned": [attrs.asdict(step) for step in report.pruned],
    }


def totals(report: RunReport) -> dict[str, Any]:
    """Count what is in a report, as JSON data."""
    ranks = [rank for capture in report.captures for rank in capture.ranks]
    return {
        "captures": len(report.captures),
        "ranks_by_status": dict(Counter(str(rank.status) for rank in ranks)),
        "size_bytes": sum(rank.size_bytes for rank in ranks),
        "events": sum(rank.events for rank in ranks),
        "not_read_again": sum(artifact.kept for rank in ranks for artifact in rank.artifacts),
    }


def _paths_as_text(_: object, __: object, value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
