"""The state of the captures below some paths, by their manifests and by what reading their traces found."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from profdeck.base.errors import ProfdeckError
from profdeck.base.json_files import JSON_OBJECT
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.run_directory import RUN_FILE, run_of
from profdeck.records.status import Status
from profdeck.traces.analysis.model import RankSummary
from profdeck.traces.analysis.run_model import CaptureStatus, RecordingAbout
from profdeck.traces.kinds import files_below


def manifests_below(paths: Sequence[Path]) -> dict[Path, Manifest]:
    """Return the manifests in the directories among some paths, by their files; `profdeck ls` reports bad ones."""
    manifests: dict[Path, Manifest] = {}
    for path in paths:
        for file in sorted(files_below(path)) if path.is_dir() else ():
            if is_manifest(file):
                with contextlib.suppress(ProfdeckError):
                    manifests[file] = read_manifest(file)
    return manifests


def recordings_of(manifests: Iterable[Manifest]) -> tuple[RecordingAbout, ...]:
    """Return with what each role was recorded, each way once."""
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


def captures_below(manifests: Mapping[Path, Manifest], ranks: Sequence[RankSummary]) -> tuple[CaptureStatus, ...]:
    """Return the state of each rank of each capture that some manifests are of.

    The traces are not read again: a file is whole if its summary says so. `profdeck ls` reads them to their ends and
    compares sizes and sums, too.

    Args:
        manifests: By their files.
        ranks: The summaries of the traces that were read.
    """
    broken = {rank.path: rank.problem for rank in ranks if rank.problem}
    states = [_state(file, manifest, broken) for file, manifest in manifests.items()]
    absent = _absent(manifests)
    found = [state for state in states if state.rank is not None or state.status != Status.COMPLETE]
    return tuple(sorted([*found, *absent], key=_order))


def silent_roles(paths: Sequence[Path], captures: Sequence[CaptureStatus]) -> tuple[str, ...]:
    """Return the roles that the runs among some paths name and that recorded nothing."""
    roles: dict[str, None] = {}
    for path in paths:
        try:
            named = JSON_OBJECT.read(path / RUN_FILE).get("roles")
        except (OSError, ValueError):
            continue
        roles |= dict.fromkeys(role for role in (named if isinstance(named, list) else []) if isinstance(role, str))
    seen = {capture.role for capture in captures}
    return tuple(role for role in roles if role not in seen)


def _state(file: Path, manifest: Manifest, broken: Mapping[str, str]) -> CaptureStatus:
    traces = [file.parent / artifact.name for artifact in manifest.artifacts]
    problems = [*manifest.problems, *(artifact.problem for artifact in manifest.artifacts if artifact.problem)]
    problems += [f"{trace.name}: the file is gone" for trace in traces if not trace.exists()]
    problems += [problem for trace in traces if (problem := broken.get(str(trace)))]
    status = manifest.status
    if status is Status.RECORDING:
        if not manifest.under_way:
            status = Status.MISSING
            problems.append(f"Process {manifest.pid} on {manifest.host} ended without ending the capture.")
    elif manifest.target is None and traces and not any(_has_content(trace) for trace in traces):
        status = Status.MISSING if status is Status.COMPLETE else Status.FAILED
    elif status is Status.COMPLETE and problems:
        status = Status.PARTIAL
    return CaptureStatus(
        run=str(run_of(file, manifest.replica)),
        capture=manifest.capture,
        role=manifest.role,
        replica=manifest.replica,
        stage=manifest.stage,
        first_step=manifest.first_step,
        last_step=manifest.last_step,
        rank=manifest.rank if manifest.target is None else None,
        host=manifest.host,
        status=str(status),
        problem=" ".join(dict.fromkeys(problems)) or None,
    )


def _has_content(path: Path) -> bool:
    return path.is_dir() or (path.is_file() and path.stat().st_size > 0)


def _absent(manifests: Mapping[Path, Manifest]) -> Iterator[CaptureStatus]:
    """Yield the ranks that should have recorded and left no manifest, by those of their capture or of its target."""
    captures: dict[tuple[Path, str | None], list[Manifest]] = {}
    for file, manifest in manifests.items():
        asked = manifest.capture if manifest.target is not None else manifest.request or manifest.capture
        captures.setdefault((file.parent, asked), []).append(manifest)
    for (directory, _), group in captures.items():
        there = {manifest.rank for manifest in group if manifest.target is None}
        expected = {rank for manifest in group for rank in manifest.expected_ranks}
        yield from (_missing(directory, group[0], rank) for rank in sorted(expected - there))


def _missing(directory: Path, manifest: Manifest, rank: int) -> CaptureStatus:
    state = _state(directory / RUN_FILE, manifest, {})
    problem = "It should have recorded and left nothing: its process ended before, or never took part."
    return attrs.evolve(state, rank=rank, host=None, status=str(Status.MISSING), problem=problem)


def _order(state: CaptureStatus) -> tuple[object, ...]:
    replica = -1 if state.replica is None else state.replica
    return state.run, state.first_step, state.role, replica, state.capture, -1 if state.rank is None else state.rank
