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
        clocks = {(one.request_token, one.clock.host): one.clock for _, one in manifests if one.clock is not None}
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
        captures = _captures(manifests, KnownChecks(checks))
        return RunState(
            captures=captures,
            recordings=_recordings(manifests.values()),
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


def _manifests_below(paths: Sequence[Path]) -> dict[Path, Manifest]:
    """Return the manifests below all directories in `paths`, by file. Other paths are ignored.

    Unreadable manifests are skipped, because `profdeck ls` reports them.
    """
    manifests: dict[Path, Manifest] = {}
    for path in paths:
        for file in sorted(files_below(path)) if path.is_dir() else ():
            if is_manifest(file):
                with contextlib.suppress(ProfdeckError):
                    manifests[file] = read_manifest(file)
    return manifests


def _recordings(manifests: Iterable[Manifest]) -> tuple[RecordingAbout, ...]:
    """Return the distinct combinations of role, backend, versions and options in the manifests."""
    found = {
        RecordingAbout(
            role=manifest.role,
            backend=manifest.backend,
            versions=", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())),
            options=json.dumps(manifest.options, sort_keys=True),
            profdeck=manifest.profdeck,
        ): None
        for manifest in manifests
    }
    return tuple(found)


def _captures(manifests: Mapping[Path, Manifest], checks: KnownChecks) -> tuple[CaptureStatus, ...]:
    """Return the state of every rank in every capture, and of each target that is not complete."""
    runs: dict[Path, list[tuple[Path, Manifest]]] = defaultdict(list)
    run_above = functools.cache(_run_above)
    for file, manifest in manifests.items():
        run = run_above(file.absolute().parent)
        if run is None or is_in_place(file.absolute(), manifest, run):
            runs[run_of(file, manifest.replica)].append((file, manifest))
    states = [state for run, group in runs.items() for state in _states(str(run), group, checks)]
    return tuple(sorted(states, key=_order))


def _run_above(directory: Path) -> Path | None:
    """Return the run directory that contains `directory`, or ``None`` if there is none."""
    return next((parent for parent in (directory, *directory.parents) if (parent / RUN_FILE).exists()), None)


def _states(run: str, manifests: Sequence[tuple[Path, Manifest]], checks: KnownChecks) -> Iterator[CaptureStatus]:
    captures, targets = judge(manifests, checks)
    for capture in captures:
        for rank in capture.ranks:
            yield CaptureStatus(
                run=run,
                capture=capture.id,
                role=capture.role,
                replica=capture.replica,
                stage=capture.stage,
                first_step=capture.first_step,
                last_step=capture.last_step,
                rank=rank.rank,
                host=rank.host,
                status=str(rank.status),
                problem=" ".join(rank.problems) or None,
            )
    of_file = dict(manifests)
    for target in targets:
        if target.status is not Status.COMPLETE:
            manifest = of_file[target.manifest]
            yield CaptureStatus(
                run=run,
                capture=target.id,
                role=target.role,
                replica=target.replica,
                stage=manifest.stage,
                first_step=target.first_step,
                last_step=manifest.last_step,
                rank=None,
                host=manifest.host,
                status=str(target.status),
                problem=" ".join(target.problems) or None,
            )


def _silent_roles(paths: Sequence[Path], captures: Sequence[CaptureStatus]) -> tuple[str, ...]:
    """Return the roles that are listed in a ``run.json`` but recorded nothing."""
    roles: dict[str, None] = {}
    for path in paths:
        try:
            named = JSON_OBJECT.read(path / RUN_FILE).get("roles")
        except (OSError, ValueError):
            continue
        roles |= dict.fromkeys(role for role in (named if isinstance(named, list) else []) if isinstance(role, str))
    seen = {capture.role for capture in captures}
    return tuple(role for role in roles if role not in seen)


def _order(state: CaptureStatus) -> tuple[object, ...]:
    replica = -1 if state.replica is None else state.replica
    return state.run, state.first_step, state.role, replica, state.capture, -1 if state.rank is None else state.rank
