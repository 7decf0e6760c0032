"""Facts about captures and their states, read from manifests for `profdeck.verification.run_records`."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path

from profdeck.base.json_files import JSON_OBJECT
from profdeck.records.capture import Unit
from profdeck.records.host_clock import HostClock
from profdeck.records.manifest import ArtifactRecord, Manifest, is_manifest, read_manifest
from profdeck.records.request import MAX_RANKS
from profdeck.records.run_directory import RUN_FILE
from profdeck.records.status import Status
from profdeck.verification.file_checks import KnownChecks
from profdeck.verification.report_model import CaptureReport, RankReport, TargetReport
from profdeck.verification.run_manifests import RunManifest, find_manifests, is_in_place
from profdeck.verification.run_report import has_valid_roles, judge, recorded_roles
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.inputs.artifact_kinds import TRACE, FileCheck, files_below, kind_named
from profdeck_traces.inputs.facts import (
    CaptureMember,
    CaptureStatus,
    RecordedTraces,
    RecordingAbout,
    RunState,
    TraceFacts,
)

_MAX_TIME_NS = 1 << 62
"""Largest valid time (in the year 2116), chosen so that the sum of two times fits into 64 bits."""


def recorded_traces(path: Path) -> RecordedTraces:
    """Return the recorded traces at a path; see `profdeck_traces.inputs.facts.RunRecords`."""
    manifests = find_manifests(path)
    # The manifest of each target stores its host's clock, which applies to all ranks on that host.
    clocks: dict[tuple[object, ...], HostClock] = {}
    for own in manifests.own:
        if (found := own.manifest.clock) is not None:
            clocks[own.manifest.request_token, found.host] = found
            clocks[own.run, own.manifest.capture, found.host] = found
    fleets: dict[Path, Manifest | None] = {}
    facts: dict[Path, TraceFacts] = {}
    for own in manifests.own:
        manifest = own.manifest
        fleet_file = own.real_file.parents[1] / f"target.{manifest.capture}.json"
        if manifest.replica is not None and fleet_file not in fleets:
            fleets[fleet_file] = _read_fleet(fleet_file)
        fleet = fleets.get(fleet_file)
        clock = None
        if manifest.target is None:
            clock = clocks.get((manifest.request_token, manifest.host))
            clock = clock or clocks.get((own.run, manifest.capture, manifest.host))
        for trace, artifact in _traces(own.file, manifest):
            facts[trace] = _facts(own, artifact, clock, fleet)
    skipped = {
        trace: (copy.directory, copy.reason)
        for copy in manifests.skipped
        for trace, _ in _traces(copy.file, copy.manifest)
    }
    return RecordedTraces(
        facts=facts,
        skipped=skipped,
        other_runs=tuple(manifests.other_runs),
        unreadable=tuple(manifests.unreadable),
    )


def _read_fleet(file: Path) -> Manifest | None:
    """Read a fleet's manifest, which may be outside the input directory. Return ``None`` if it does not exist."""
    try:
        return read_manifest(file)
    except ProfdeckError:
        return None


def capture_members(facts: TraceFacts) -> list[CaptureMember]:
    """Return the members of a trace's capture; see `profdeck_traces.inputs.facts.RunRecords`.

    The members are all ranks of each role and replica that has a manifest, the servers of each fleet, and the roles in
    ``run.json`` that recorded nothing in this step.
    """
    run = Path(facts.run)
    members: dict[CaptureMember, None] = {}
    recorded, sizes = set[str](), dict[tuple[str, int | None], int]()
    step = run / f"step_{facts.first_step:06d}"
    for file in filter(is_manifest, files_below(step)):
        try:
            manifest = read_manifest(file)
        except ProfdeckError:
            if file.name.endswith(f".{facts.capture}.json"):
                members[_member_at(file.relative_to(step))] = None
            continue
        recorded.add(manifest.role)
        if manifest.capture != facts.capture or not is_in_place(file, manifest, run):
            continue
        role, replica = manifest.role, manifest.replica
        if manifest.target is None:
            members[CaptureMember(role, replica, manifest.rank)] = None
            sizes[role, replica] = max(sizes.get((role, replica), 0), min(manifest.world_size, MAX_RANKS))
        elif manifest.targets:
            members |= dict.fromkeys(CaptureMember(role, target.replica) for target in manifest.targets)
        else:
            members[CaptureMember(role, replica)] = None
    for (role, replica), size in sizes.items():
        members |= dict.fromkeys(CaptureMember(role, replica, rank) for rank in range(size))
    roles = recorded.union(member.role for member in members)
    return [*members, *(CaptureMember(role) for role in _listed_roles(run) if role not in roles)]


def _member_at(manifest: Path) -> CaptureMember:
    """Return the member that a manifest belongs to, based on the manifest's path in its step directory."""
    role, *below = manifest.parent.parts or ("",)
    found = re.fullmatch(r"replica_(\d{3,9})", below[0]) if below else None
    return CaptureMember(role, int(found[1]) if found else None)


def _listed_roles(run: Path) -> list[str]:
    """Return the roles in a run's ``run.json``, or an empty list if the file can't be read."""
    try:
        return recorded_roles(JSON_OBJECT.read(run / RUN_FILE))
    except (OSError, ValueError):
        return []


def run_state(paths: Sequence[Path], checks: Mapping[str, FileCheck]) -> RunState:
    """Return the state of all captures below the given directories.

    Args:
        paths: The directories.
        checks: Results of reading traces, by trace path.
    """
    manifests: dict[Path, RunManifest] = {}
    unreadable: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            below = find_manifests(path)
            unreadable |= dict.fromkeys(directory for directory, _ in below.unreadable)
            for own in below.own:
                manifests.setdefault(own.real_file, own)
            if (path / RUN_FILE).exists() and not _is_readable_run_file(path):
                unreadable[path / RUN_FILE] = None
    runs: dict[Path, list[RunManifest]] = defaultdict(list)
    for own in manifests.values():
        runs[own.real_run].append(own)
    known = KnownChecks.by_path(checks)
    statuses = [status for group in runs.values() for status in _statuses(group, known)]
    return RunState(
        captures=tuple(sorted(statuses, key=_sort_key)),
        recordings=_recordings(own.manifest for own in manifests.values()),
        unreadable=tuple(map(str, unreadable)),
        silent_roles=_silent_roles({*runs, *(Path(os.path.realpath(path)) for path in paths)}, runs),
    )


def _traces(file: Path, manifest: Manifest) -> Iterator[tuple[Path, ArtifactRecord]]:
    """Yield the existing traces that a manifest lists."""
    for artifact in manifest.artifacts:
        trace = file.parent / artifact.name
        kind = kind_named(artifact.kind)
        if kind.matches(trace) if kind else artifact.kind == TRACE and trace.is_file():
            yield trace, artifact


def _facts(own: RunManifest, artifact: ArtifactRecord, clock: HostClock | None, fleet: Manifest | None) -> TraceFacts:
    manifest = own.manifest
    offsets_ns, uncertainties_ns = _anchor_offsets_ns(artifact)
    shift_ns = clock.offset_ns if clock else 0
    anchors_ns = [anchor.unix_ns + shift_ns for anchor in artifact.anchors if _is_time(anchor.unix_ns)]
    targets = fleet.targets if fleet else ()
    return TraceFacts(
        run=str(own.run),
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
        last_step=manifest.last_step,
        started_ns=manifest.started_ns,
        stall_s=manifest.credible_stall_s,
        host_load=manifest.host_load if manifest.host_load and manifest.host_load.is_plausible else None,
        unrecorded_step_s=manifest.credible_unrecorded_step_s,
        has_digest=artifact.sha256 is not None,
        recorded_from_ns=min(anchors_ns, default=None),
        recorded_until_ns=max(anchors_ns, default=None),
        worker_type=manifest.worker_type
        or next((target.worker_type for target in targets if target.replica == manifest.replica), None),
        fleet_size=None if fleet is None else fleet.found or len(targets),
        data_parallel_rank=manifest.parallel.get("dp"),
        clock_offset_ns=offsets_ns[len(offsets_ns) // 2] + shift_ns if offsets_ns else None,
        base_time_ns=artifact.base_time_ns if _is_time(artifact.base_time_ns or 0) else None,
        clock_host=clock.reference if clock else manifest.host,
        clock_error_ns=max(uncertainties_ns) + (clock.error_ns if clock else 0) if uncertainties_ns else None,
    )


def _unit(manifest: Manifest) -> Unit:
    if manifest.target is not None or manifest.request is not None:
        return Unit.ENGINE_ITERATION
    return Unit.GLOBAL_STEP if manifest.window is None else Unit.MINI_BATCH


def _anchor_offsets_ns(artifact: ArtifactRecord) -> tuple[list[int], list[int]]:
    """Return the sorted clock offsets of a trace's anchors, and the anchors' uncertainties. Ignore invalid anchors."""
    offsets_ns, uncertainties_ns = list[int](), list[int]()
    for anchor in artifact.anchors:
        trace_ns = _nanoseconds(anchor.trace_us)
        if trace_ns is None or anchor.uncertainty_ns < 0:
            continue
        if all(map(_is_time, (trace_ns, anchor.unix_ns, anchor.uncertainty_ns, artifact.base_time_ns or 0))):
            offsets_ns.append(anchor.unix_ns - trace_ns)
            uncertainties_ns.append(anchor.uncertainty_ns)
    return sorted(offsets_ns), uncertainties_ns


def _nanoseconds(trace_us: str) -> int | None:
    try:
        number = Decimal(trace_us)
    except InvalidOperation:
        return None
    # Check the range first, because arithmetic on decimals with very large exponents can raise an error.
    return round(number * 1000) if number.is_finite() and -_MAX_TIME_NS <= number <= _MAX_TIME_NS else None


def _is_time(nanoseconds: int) -> bool:
    return abs(nanoseconds) <= _MAX_TIME_NS


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


def _statuses(manifests: Sequence[RunManifest], checks: KnownChecks) -> Iterator[CaptureStatus]:
    """Yield the status of every rank in each capture of a run, and of every target that is not complete."""
    by_file = {own.file: own.manifest for own in manifests}
    captures, targets = judge(by_file.items(), checks)
    run = str(manifests[0].run)
    for capture in captures:
        for rank in capture.ranks:
            yield _status(run, capture, rank, stage=capture.stage, last_step=capture.last_step, host=rank.host)
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


def _silent_roles(directories: Iterable[Path], manifests: Mapping[Path, Sequence[RunManifest]]) -> tuple[str, ...]:
    """Return the roles that are listed in a run's ``run.json`` but have recorded nothing in that run.

    Args:
        directories: real paths of run directories. Directories without a readable ``run.json`` are ignored.
        manifests: manifests, grouped by the real path of their run.
    """
    silent: dict[str, None] = {}
    for directory in sorted(directories):
        recorded = {own.manifest.role for own in manifests.get(directory, ())}
        silent |= dict.fromkeys(role for role in _listed_roles(directory) if role not in recorded)
    return tuple(silent)


def _is_readable_run_file(run: Path) -> bool:
    try:
        return has_valid_roles(JSON_OBJECT.read(run / RUN_FILE))
    except (OSError, ValueError):
        return False


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
