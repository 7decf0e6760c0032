"""Detection of processes that have the same role and rank at the same time.

A restarted process also has the role and rank of its predecessor, but the two never run at the same time. The times are
read from manifests, because a process on another host cannot be checked.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from profdeck.base.processes import ProcessId
from profdeck.records.manifest import Manifest


@attrs.frozen
class _Claim:
    """Period in which a process is known to have had its role and rank, in Unix nanoseconds."""

    process: ProcessId
    start_ns: int
    end_ns: int

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> _Claim:
        end_ns = manifest.ended_ns or (time.time_ns() if manifest.under_way else manifest.started_ns)
        return cls(manifest.process, manifest.joined_ns or manifest.started_ns, end_ns)

    def extended(self, other: _Claim | None) -> _Claim:
        """Return a claim that combines this claim with another one made by the same process."""
        if other is None:
            return self
        return _Claim(self.process, min(self.start_ns, other.start_ns), max(self.end_ns, other.end_ns))

    def conflicts_with(self, other: _Claim) -> bool:
        """Return whether the claims are from different processes and overlap in time."""
        return self.process != other.process and self.start_ns < other.end_ns and other.start_ns < self.end_ns


def find_conflicts(manifests: Iterable[tuple[Path, Manifest]]) -> dict[Path, tuple[str, ...]]:
    """Find captures during which another process had the same role and rank. Return their problems by manifest path.

    If two such processes ran at the same time and captured the same step, both captures have a problem, even if the
    captures did not overlap.

    Args:
        manifests: the manifests of a run and their paths.
    """
    ranks: dict[tuple[object, ...], list[tuple[Path, Manifest]]] = defaultdict(list)
    for file, manifest in manifests:
        if manifest.target is None:
            ranks[_identity(manifest)].append((file, manifest))
    problems: dict[Path, tuple[str, ...]] = {}
    for group in ranks.values():
        if len({manifest.process for _, manifest in group}) > 1:
            problems.update(_find_conflicts_of_rank(group))
    return problems


def _find_conflicts_of_rank(group: list[tuple[Path, Manifest]]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    claims: dict[ProcessId, _Claim] = {}
    manifests: dict[ProcessId, Manifest] = {}
    steps: dict[ProcessId, set[tuple[int, str | None]]] = defaultdict(set)
    for _, manifest in group:
        process = manifest.process
        claims[process] = _Claim.from_manifest(manifest).extended(claims.get(process))
        manifests.setdefault(process, manifest)
        steps[process].add((manifest.first_step, manifest.stage))
    for file, manifest in group:
        capture = attrs.evolve(_Claim.from_manifest(manifest), start_ns=manifest.started_ns)
        texts = [
            describe_conflict(other)
            for process, other in manifests.items()
            if claims[manifest.process].conflicts_with(claims[process])
            and ((manifest.first_step, manifest.stage) in steps[process] or capture.conflicts_with(claims[process]))
        ]
        if texts:
            yield file, tuple(texts)


def is_conflict(manifest: Manifest, earlier: Manifest) -> bool:
    """Return whether another process with the same role and rank as the new manifest is still active.

    A training process keeps its rank until it exits; an engine process keeps it only while it handles the request.

    Args:
        manifest: the new manifest.
        earlier: the existing manifest, written by the other process.
    """
    if manifest.target is not None or _identity(manifest) != _identity(earlier):
        return False
    now_ns = time.time_ns()
    other = _Claim.from_manifest(earlier)
    if earlier.request is None and earlier.process.alive:
        other = attrs.evolve(other, end_ns=now_ns)
    return attrs.evolve(_Claim.from_manifest(manifest), end_ns=now_ns).conflicts_with(other)


def describe_conflict(other: Manifest) -> str:
    """Return the problem caused by another process having recorded a capture under the same rank."""
    return (
        f"Process {other.pid} on {other.host}{f' ({other.process_name})' if other.process_name else ''} is also "
        f"{other.role_and_replica} rank {other.rank}. Start the processes with a launcher that sets ranks, or "
        "give each process its own Identity, and each engine its own role or replica."
    )


def _identity(manifest: Manifest) -> tuple[object, ...]:
    """Return the role, replica, rank and engine request. Each request to an engine is a separate capture."""
    return manifest.role, manifest.replica, manifest.rank, manifest.request
