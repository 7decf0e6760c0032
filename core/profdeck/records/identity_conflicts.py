"""Detection of processes that have the same role and rank at the same time.

A restarted process also has the role and rank of its predecessor, but the two never run at the same time. The times are
read from manifests, because a process on another host cannot be checked.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
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


def find_conflicts(manifests: Iterable[tuple[Path, Manifest]]) -> dict[Path, str]:
    """Return a problem for each manifest whose capture was also recorded by another process under the same rank.

    Args:
        manifests: the manifests of a run and their paths.
    """
    claims: dict[tuple[object, ...], _Claim] = {}
    captures: dict[tuple[object, ...], list[tuple[Path, Manifest]]] = defaultdict(list)
    for file, manifest in manifests:
        if manifest.target is None:
            claim = _Claim.from_manifest(manifest)
            key = *_identity(manifest), claim.process
            claims[key] = claim.extended(claims.get(key))
            captures[*_identity(manifest), manifest.first_step, manifest.stage].append((file, manifest))
    problems: dict[Path, dict[str, None]] = defaultdict(dict)
    for group in captures.values():
        for file, manifest in group if len(group) > 1 else ():
            claim = claims[*_identity(manifest), manifest.process]
            for _, other in group:
                if claim.conflicts_with(claims[*_identity(other), other.process]):
                    problems[file][describe_conflict(other)] = None
    return {file: " ".join(texts) for file, texts in problems.items()}


def is_conflict(manifest: Manifest, earlier: Manifest) -> bool:
    """Return whether a new manifest has the same role and rank as another process that is still active.

    Args:
        manifest: the new manifest.
        earlier: the existing manifest, which the other process wrote.
    """
    if manifest.target is not None or _identity(manifest) != _identity(earlier):
        return False
    claim = attrs.evolve(_Claim.from_manifest(manifest), end_ns=time.time_ns())
    return claim.conflicts_with(_Claim.from_manifest(earlier))


def describe_conflict(other: Manifest) -> str:
    """Return the problem caused by another process having recorded a capture under the same rank."""
    return (
        f"Process {other.pid} on {other.host}{f' ({other.process_name})' if other.process_name else ''} is also "
        f"{other.role_and_replica} rank {other.rank}. Give each process its own Identity, and each engine its own role "
        "or replica."
    )


def _identity(manifest: Manifest) -> tuple[object, ...]:
    """Return the role, replica, rank and engine request. Each request to an engine is a separate capture."""
    return manifest.role, manifest.replica, manifest.rank, manifest.request
