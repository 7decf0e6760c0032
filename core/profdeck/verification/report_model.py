"""Reports about the files of a run: the results of `profdeck.verification.run_report.read_run`."""

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

# From best to worst. The status of a capture or run is the worst status of its parts.
_ORDER = (Status.COMPLETE, Status.RECORDING, Status.PARTIAL, Status.FAILED, Status.MISSING)


@attrs.frozen(kw_only=True)
class ArtifactReport:
    """State of one artifact on disk."""

    path: Path
    kind: str
    size_bytes: int
    events: int | None
    whole: bool
    problem: str | None
    iterations: tuple[int, int] | None
    notes: tuple[str, ...] = ()
    """Remarks that are not problems."""
    kept: bool = False
    """True if the result comes from the cache, because the file has not changed."""


@attrs.frozen(kw_only=True)
class RankReport:
    """State of one rank's files in one capture."""

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
        """Total size of the artifacts in bytes."""
        return sum(artifact.size_bytes for artifact in self.artifacts)

    @property
    def events(self) -> int:
        """Number of trace events in all readable artifacts."""
        return sum(artifact.events or 0 for artifact in self.artifacts)


@attrs.frozen(kw_only=True)
class CaptureReport:
    """A capture of one role or replica, with all ranks."""

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
    """Result of a capture request for an engine, a server or a fleet, written by the requesting process."""

    id: str
    role: str
    replica: int | None
    target: str
    policy: Policy | None
    """For a fleet, the policy for the number of targets that had to start."""
    needed: int | None
    """Number of targets that `policy` required."""
    start_skew_ms: float | None
    """For a fleet, the time in milliseconds between the first and the last start request."""
    targets: tuple[TargetRecord, ...]
    """For a fleet, the outcome of each target. Each target that received a request also has its own report."""
    first_step: int
    status: Status
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    artifacts: tuple[ArtifactReport, ...]
    manifest: Path


@attrs.frozen(kw_only=True)
class RunReport:
    """State of all captures in a run."""

    path: Path
    captures: tuple[CaptureReport, ...]
    targets: tuple[TargetReport, ...]
    problems: tuple[str, ...]
    """Problems outside captures, such as roles without a capture and files that no manifest lists."""
    pruned: tuple[PrunedStep, ...] = ()
    """Steps that `profdeck prune` deleted."""

    @property
    def status(self) -> Status:
        """Worst status of the captures and targets; ``missing`` if there are none."""
        parts = [*(part.status for part in self.captures), *(part.status for part in self.targets)]
        return worst(parts) if parts else Status.MISSING


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst status, or ``complete`` if there are none."""
    return max(statuses, key=_ORDER.index, default=Status.COMPLETE)


def plain(report: RunReport) -> dict[str, Any]:
    """Convert a report to JSON data."""
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
    """Return the counts and sizes of a report as JSON data."""
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
