"""How much a capture of targets will write, by what one target of the role wrote in an earlier capture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from profdeck.base.blocking import run_in_thread
from profdeck.base.errors import CaptureError, ProfdeckError
from profdeck.base.structuring import unstructure
from profdeck.config.options import CommonOptions
from profdeck.config.schedule import Iterations
from profdeck.config.targets import TargetsConfig
from profdeck.records.capture import CaptureRecord
from profdeck.records.manifest import ArtifactRecord, Manifest, is_manifest, read_manifest
from profdeck.records.run_directory import runs_below, step_directories
from profdeck.records.status import Status
from profdeck.replicas.discovery import Target, spread

_MOST_RUNS = 20
_MOST_FILES = 256
"""How many manifests are read of one capture, from the first target on."""
_BYTES_PER_GB = 10**9


@attrs.frozen(kw_only=True)
class ExpectedSize:
    """How much one target writes."""

    run: Path
    """That of the captures that it was taken from."""
    targets: int
    """How many had recorded."""
    target_bytes: float
    """The mean of what each wrote, in as many iterations as are wanted now where both are known."""

    def fitting(self, budget_gb: float, targets: int) -> int:
        """Return how many of some targets a budget allows."""
        return min(targets, int(budget_gb * _BYTES_PER_GB / self.target_bytes)) if self.target_bytes else targets


def expected_size(
    output: Path, role: str, *, iterations: Iterations | None, options: CommonOptions
) -> ExpectedSize | None:
    """Return how much a target of a role will write; None if no complete capture with these options tells.

    Args:
        output: The output directory; its newest run that tells counts, and in that the last step.
        role: That of the targets.
        iterations: Those that are to be recorded; None where a stop ends the recording.
        options: Those of the backend. What the ranks have written of theirs must be the same.
    """
    for run in runs_below(output)[:_MOST_RUNS]:
        for step in reversed(_steps(run)):
            found = [*_of_targets(step / role, unstructure(options))]
            with_ranks = {one.request_token for one in found if one.target is None}
            sizes = [
                _scaled(artifact, iterations)
                for one in found
                if one.request_token in with_ranks
                for artifact in one.artifacts
            ]
            if with_ranks:
                return ExpectedSize(run=run, targets=len(with_ranks), target_bytes=sum(sizes) / len(with_ranks))
    return None


async def within_budget(
    targets: list[Target], config: TargetsConfig, capture: CaptureRecord, options: CommonOptions
) -> tuple[list[Target], list[str]]:
    """Choose as many targets as the budget of a capture allows: without any knowledge, one.

    Args:
        targets: Those that would record.
        config: Has the budget, if there is one.
        capture: That of all of them.
        options: Those of their backend.

    Returns:
        Those that record, by replica, with those that cannot be asked anyway; and what to note of that.

    Raises:
        CaptureError: A single target is more than the budget.
    """
    if config.budget_gb is None:
        return targets, []
    assert capture.request is not None  # noqa: S101  # core makes it for targets
    output, role, iterations = capture.request.output, capture.identity.role, capture.iterations
    size = await run_in_thread(lambda: expected_size(output, role, iterations=iterations, options=options))
    able = [target for target in targets if target.can_be_asked]
    if size is None:
        most, why = 1, "nothing tells yet how much one of them writes. The next capture knows"
    else:
        most = size.fitting(config.budget_gb, len(able))
        why = f"each is expected to write {size.target_bytes / _BYTES_PER_GB:.3g} GB, as in {size.run}"
        if able and not most:
            text = f"One target is more than budget_gb={config.budget_gb:g}: {why}."
            raise CaptureError(f"{text} Record fewer iterations, or raise budget_gb.")
    if most >= len(able):
        return targets, []
    left_out = {target.replica for target in able} - {target.replica for target in spread(able, most)}
    chosen = [target for target in targets if target.replica not in left_out]
    return chosen, [f"{most} of {len(targets)} targets record, by budget_gb: {config.budget_gb:g}, as {why}."]


def _steps(run: Path) -> Sequence[Path]:
    try:
        return step_directories(run)
    except OSError:
        return ()


def _of_targets(directory: Path, options: Mapping[str, Any]) -> Iterator[Manifest]:
    """Yield the complete manifests of ranks, and of targets, which have merged them, with these options."""
    files = sorted(filter(is_manifest, directory.glob("**/*.json")))
    for file in files[:_MOST_FILES]:
        try:
            one = read_manifest(file)
        except ProfdeckError:  # `profdeck ls` reports it
            continue
        same = all(options[name] == value for name, value in one.options.items() if name in options)
        if one.request_token is not None and one.status is Status.COMPLETE and same and not one.targets:
            yield one


def _scaled(artifact: ArtifactRecord, iterations: Iterations | None) -> float:
    """Return the size of an artifact if it had as many iterations as are wanted."""
    if artifact.iterations is None or iterations is None:
        return artifact.size_bytes
    first, last = artifact.iterations
    return artifact.size_bytes * iterations.count / max(1, last - first + 1)
