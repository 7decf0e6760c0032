"""Reads facts about captures and their states from manifests, for `profdeck_traces.inputs.facts`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path

from profdeck.base.json_files import JSON_OBJECT
from profdeck.records.artifact import ClockAnchor
from profdeck.records.capture import Unit
from profdeck.records.host_clock import HostClock
from profdeck.records.manifest import ArtifactRecord, Manifest, is_manifest, read_manifest
from profdeck.records.run_directory import RUN_FILE, run_of, runs_below
from profdeck.records.status import Status
from profdeck.verification.file_checks import KnownChecks
from profdeck.verification.report_model import CaptureReport, RankReport, TargetReport
from profdeck.verification.run_report import is_in_place, judge
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.inputs.artifact_kinds import TRACE, FileCheck, files_below, kind_named, kind_of
from profdeck_traces.inputs.facts import CaptureStatus, RecordingAbout, RunState, TraceFacts


class Records:
    """Implements `profdeck_traces.inputs.facts.RunRecords` by reading manifests of profdeck runs."""

    def facts(self, path: Path) -> dict[Path, TraceFacts]:
        """Return the facts about one trace, or about every trace in a directory, by trace path."""
        is_trace = not os.path.isdir(path) or kind_of(path) is not None  # noqa: PTH112  # never raises
        manifests: list[tuple[Path, Manifest]] = []
        for file in filter(is_manifest, path.parent.glob("*.json") if is_trace else files_below(path)):
            with contextlib.suppress(ProfdeckError):  # `profdeck ls` reports it; the trace can be read without it
                manifests.append((file, read_manifest(file)))
        # For engines, a host's clock is stored in the target's manifest, not in the manifests of the ranks.
        clocks = {
            (manifest.request_token, manifest.clock.host): manifest.clock
            for _, manifest in manifests
            if manifest.clock is not None
        }
        facts = {}
        for file, manifest in manifests:
            clock = clocks.get((manifest.request_token, manifest.host)) if manifest.target is None else None
            for artifact in manifest.artifacts:
                trace = file.parent / artifact.name
                kind = kind_named(artifact.kind)
                if kind.matches(trace) if kind else artifact.kind == TRACE and trace.is_file():
                    facts[trace] = _facts(file, manifest, artifact, clock)
        return facts

    def state(self, paths: Sequence[Path], checks: Mapping[str, FileCheck]) -> RunState:
        """Return the state of all captures below the given directories.

        Args:
            paths: The directories.
            checks: Results of reading the traces, by path.
        """
        manifests = _manifests_below(paths)
        known = KnownChecks(checks)
        statuses = [status for run, group in manifests.items() for status in _statuses(str(run), group, known)]
        captures = tuple(sorted(statuses, key=_sort_key))
        return RunState(
            captures=captures,
            recordings=_recordings(manifest for group in manifests.values() for _, manifest in group),
            silent_roles=_silent_roles(paths, captures),
        )

    def newest_run(self, output: Path) -> Path | None:
        """Return the newest run in an output directory, or ``None`` if it contains no run."""
        return next(iter(runs_below(output)), None)

    def is_run(self, directory: Path) -> bool:
        """Return True if a directory is a run directory."""
        return (directory / RUN_FILE).exists()


def _facts(file: Path, manifest: Manifest, artifact: ArtifactRecord, clock: HostClock | None) -> TraceFacts:
    uncertainties_ns = [anchor.uncertainty_ns for anchor in artifact.anchors]
    return TraceFacts(
        run=str(run_of(file, manifest.replica)),
        capture=manifest.capture,
        role=manifest.role,
        replica=manifest.replica,
        rank=manifest.rank if manifest.target is None else None,
        world_size=manifest.world_size,
        stage=manifest.stage,
        host=manifest.host,
        unit=str(_unit(manifest)),
        cold_first_step=bool(manifest.cold_first_step),
        first_step=manifest.first_step,
        started_ns=manifest.started_ns,
        stall_s=manifest.credible_stall_s,
        has_digest=artifact.sha256 is not None,
        clock_offset_ns=_clock_offset_ns(artifact.anchors, clock),
        base_time_ns=artifact.base_time_ns,
        clock_host=clock.reference if clock else manifest.host,
        clock_error_ns=max(uncertainties_ns) + (clock.error_ns if clock else 0) if uncertainties_ns else None,
    )


def _unit(manifest: Manifest) -> Unit:
    if manifest.target is not None or manifest.request is not None:
        return Unit.ENGINE_ITERATION
    return Unit.GLOBAL_STEP if manifest.window is None else Unit.MINI_BATCH


def _clock_offset_ns(anchors: Sequence[ClockAnchor], clock: HostClock | None) -> int | None:
    """Return the median anchor offset plus the host's clock offset, or ``None`` if there are no anchors."""
    offsets = sorted(anchor.unix_ns - round(Decimal(anchor.trace_us) * 1000) for anchor in anchors)
    return offsets[len(offsets) // 2] + (clock.offset_ns if clock else 0) if offsets else None


def _manifests_below(paths: Sequence[Path]) -> dict[Path, list[tuple[Path, Manifest]]]:
    """Return the manifests below all directories in `paths`, grouped by run. Other paths are ignored.

    As in `profdeck ls`, copies of manifests are skipped, and a run directory contains only its own captures.
    Unreadable manifests are skipped, because `profdeck ls` reports them.
    """
    manifests: dict[Path, list[tuple[Path, Manifest]]] = defaultdict(list)
    files = {file: path for path in paths if path.is_dir() for file in sorted(files_below(path)) if is_manifest(file)}
    has_run_file = functools.cache(lambda directory: (directory / RUN_FILE).exists())
    for file, path in files.items():
        try:
            manifest = read_manifest(file)
        except ProfdeckError:
            continue
        run = run_of(file, manifest.replica)
        in_place = is_in_place(file.absolute(), manifest, run.absolute())
        is_in_run = any(map(has_run_file, file.absolute().parents))
        if (in_place or not is_in_run) and (run == path or not has_run_file(path)):
            manifests[run].append((file, manifest))
    return manifests


def _recordings(manifests: Iterable[Manifest]) -> tuple[RecordingAbout, ...]:
    """Return the distinct combinations of role, backend, versions and options in the manifests."""
    recordings = {
        RecordingAbout(
            role=manifest.role,
            backend=manifest.backend,
            versions=", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())),
            options=json.dumps(manifest.options, sort_keys=True),
            profdeck=manifest.profdeck,
        ): None
        for manifest in manifests
    }
    return tuple(recordings)


def _statuses(run: str, manifests: Sequence[tuple[Path, Manifest]], checks: KnownChecks) -> Iterator[CaptureStatus]:
    """Yield the status of every rank in every capture, and of each target that is not complete."""
    captures, targets = judge(manifests, checks)
    for capture in captures:
        for rank in capture.ranks:
            yield _status(run, capture, rank, stage=capture.stage, last_step=capture.last_step, host=rank.host)
    by_file = dict(manifests)
    for target in targets:
        if target.status is not Status.COMPLETE:
            manifest = by_file[target.manifest]
            yield _status(run, target, target, stage=manifest.stage, last_step=manifest.last_step, host=manifest.host)


def _status(  # noqa: PLR0913
    run: str,
    capture: CaptureReport | TargetReport,
    part: RankReport | TargetReport,
    *,
    stage: str | None,
    last_step: int,
    host: str | None,
) -> CaptureStatus:
    return CaptureStatus(
        run=run,
        capture=capture.id,
        role=capture.role,
        replica=capture.replica,
        stage=stage,
        first_step=capture.first_step,
        last_step=last_step,
        rank=part.rank if isinstance(part, RankReport) else None,
        host=host,
        status=str(part.status),
        problem=" ".join(part.problems) or None,
    )


def _silent_roles(paths: Sequence[Path], captures: Sequence[CaptureStatus]) -> tuple[str, ...]:
    """Return the roles that are listed in a ``run.json`` but recorded nothing."""
    roles: dict[str, None] = {}
    for path in paths:
        try:
            listed = JSON_OBJECT.read(path / RUN_FILE).get("roles")
        except (OSError, ValueError):
            continue
        roles |= dict.fromkeys(role for role in (listed if isinstance(listed, list) else []) if isinstance(role, str))
    recorded = {capture.role for capture in captures}
    return tuple(role for role in roles if role not in recorded)


def _sort_key(status: CaptureStatus) -> tuple[object, ...]:
    replica = -1 if status.replica is None else status.replica
    return (
        status.run,
        status.first_step,
        status.role,
        replica,
        status.capture,
        -1 if status.rank is None else status.rank,
    )
