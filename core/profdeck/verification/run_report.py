"""Determines the state of each rank in a run's captures from manifests and the files that they list."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from profdeck.base.json_files import JSON_OBJECT
from profdeck.config.model import Mode
from profdeck.config.schedule import Schedule
from profdeck.records.manifest import ArtifactRecord, Manifest, is_manifest, read_manifest
from profdeck.records.pruned import PrunedStep, read_pruned
from profdeck.records.run_directory import RUN_FILE, replica_directory, runs_below
from profdeck.records.status import Status
from profdeck.verification.file_checks import FileChecker, KnownChecks, TraceToCheck
from profdeck.verification.report_model import ArtifactReport, CaptureReport, RankReport, RunReport, TargetReport, worst
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.base.files import directory_size
from profdeck_traces.base.progress import Progress
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.artifact_kinds import TRACE, files_below, kind_named

_MOST_STEPS = 1000


def read_run(  # noqa: PLR0913 - all but the path have defaults
    path: Path,
    *,
    only: Callable[[Manifest], bool] | None = None,
    within: str = "step_*",
    contents: bool = True,
    cache: ResultCache | None = None,
    processes: int = 1,
    on_progress: Progress | None = None,
) -> RunReport:
    """Read all manifests of a run and check every file that they mention.

    Args:
        path: a run directory.
        only: returns True for each manifest to include; None to include all manifests. If it is given, skipped steps,
            silent roles and unlisted files are not reported.
        within: pattern for the names of the step directories to read.
        contents: whether to read files completely. If False, only their sizes are compared.
        cache: cache of check results; None to read all files. Unchanged files with a cached result are not read.
        processes: number of traces to read in parallel.
        on_progress: called with the number of bytes read so far and the total.

    Raises:
        ProfdeckError: the path is not a run directory.
    """
    about = read_about(path)
    roles = [role for role in _list(about.get("roles")) if isinstance(role, str)]
    manifests: list[tuple[Path, Manifest]] = []
    problems: list[str] = []
    errors: dict[Path, str] = {}
    listed: set[Path] = set()
    pruned = read_pruned(path)

    def unreadable(error: OSError) -> None:
        problems.append(f"{_below(error.filename, path)} cannot be read: {error.strerror}.")

    files = sorted(file for step in path.glob(within) for file in files_below(step, on_error=unreadable))
    for file in filter(is_manifest, files):
        try:
            manifest = read_manifest(file)
        except ProfdeckError as error:
            errors[file] = str(error)
            continue
        listed.update(file.parent / record.name for record in manifest.artifacts)
        if only is not None and not only(manifest):
            continue
        if not is_in_place(file, manifest, path):
            problems.append(f"{file.relative_to(path)} is a copy: it is the manifest of another rank, step or role.")
            continue
        manifests.append((file, manifest))
    checks: FileChecker | KnownChecks = KnownChecks({})
    if contents:
        total = sum(_size(file.parent / record.name) for file, manifest in manifests for record in manifest.artifacts)
        checks = FileChecker(total, cache=cache, processes=processes, on_progress=on_progress)
        checks.read_traces(
            [
                TraceToCheck(trace, record.sha256 is not None)
                for file, manifest in manifests
                for record in manifest.artifacts
                if record.kind == TRACE and not (trace := file.parent / record.name).is_symlink() and trace.is_file()
            ]
        )
    captures, asked = judge(manifests, checks)
    ranked = (rank for capture in captures for rank in capture.ranks)
    reports: tuple[RankReport | TargetReport, ...] = (*ranked, *asked)
    # A backend may give an artifact a name like a manifest's, such as rank_0000.step1.memory.json.
    problems += [
        error
        for file, error in errors.items()
        if listed.isdisjoint((file, *file.parents)) and not str(file).startswith(_begun(reports))
    ]
    if only is None:
        problems += _skipped(about, captures, asked, pruned)
        seen = {capture.role for capture in captures} | {target.role for target in asked}
        problems += [f"The role '{role}' recorded nothing." for role in roles if role not in seen]
        known = {artifact.path for report in reports for artifact in report.artifacts}
        problems += [
            f"{stray.relative_to(path)} is in no manifest."
            for stray in _strays(files, known)
            if not str(stray).startswith(_begun(reports))
        ]
    return RunReport(path=path, captures=captures, targets=asked, problems=tuple(problems), pruned=pruned)


def judge(
    manifests: Iterable[tuple[Path, Manifest]], checks: FileChecker | KnownChecks
) -> tuple[tuple[CaptureReport, ...], tuple[TargetReport, ...]]:
    """Return a report for each capture and each target of a run.

    Args:
        manifests: The manifests of the run and their paths.
        checks: Checks of the files that the manifests list.
    """
    groups: dict[tuple[int, str, int, str], list[tuple[Path, Manifest]]] = defaultdict(list)
    targets: list[tuple[Path, Manifest]] = []
    for file, manifest in manifests:
        if manifest.target is not None:
            targets.append((file, manifest))
            continue
        replica = -1 if manifest.replica is None else manifest.replica
        groups[manifest.first_step, manifest.role, replica, manifest.capture].append((file, manifest))
    ends: dict[_Place, int] = {(file.parent, manifest.capture): manifest.last_step for file, manifest in targets}
    captures = tuple(_capture(group, ends, checks) for _, group in sorted(groups.items()))
    there: dict[_Place, set[int]] = defaultdict(set)
    for file, manifest in (one for group in groups.values() for one in group):
        there[file.parent, manifest.request].add(manifest.rank)
    places: set[_Place] = {(file.parent, manifest.capture) for file, manifest in targets}
    return captures, tuple(_target(file, manifest, there, places, checks) for file, manifest in targets)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _below(file: Any, path: Path) -> str:
    return str(file).removeprefix(f"{path}/")


def is_in_place(file: Path, manifest: Manifest, run: Path) -> bool:
    """Return True if a manifest is at its original path.

    A copy at another path would count as another rank.
    """
    directory = run / f"step_{manifest.first_step:06d}" / manifest.role
    if manifest.replica is not None:
        directory = replica_directory(directory, manifest.replica)
    about = "target." if manifest.target is not None else f"rank_{manifest.rank:04d}"
    return file.parent == directory and file.name.startswith(about) and file.name.endswith(f".{manifest.capture}.json")


def _skipped(
    about: Mapping[str, Any],
    captures: Iterable[CaptureReport],
    targets: Iterable[TargetReport],
    pruned: Iterable[PrunedStep],
) -> Iterator[str]:
    """Yield the selected steps between others that were captured of which nothing is there, and was not deleted."""
    config = recorded_config(about)
    try:
        schedule = Schedule.from_list(_list(config.get("steps")))
    except (ValueError, TypeError):
        return
    if config.get("mode") != Mode.CONTINUOUS:  # a step may have no stage
        return
    there = sorted(
        {(one.first_step, one.last_step) for one in captures}
        | {(one.first_step, one.last_step) for one in pruned}
        | {(one.first_step,) * 2 for one in targets}
    )
    reached = there[0][1] if there else 0
    for first, last in there[1:]:
        gap = list(itertools.islice(schedule.steps(reached + 1, first - 1), _MOST_STEPS)) if first > reached + 1 else []
        if gap:
            which = f"Step {gap[0]} was" if len(gap) == 1 else f"Steps {gap[0]} to {gap[-1]} were"
            yield f"{which} selected, and nothing is there of it, though a later one was captured."
        reached = max(reached, last)


def read_about(path: Path) -> dict[str, Any]:
    """Return what the ``run.json`` of a run says.

    Raises:
        ProfdeckError: the path is not a run directory.
    """
    try:
        return JSON_OBJECT.read(path / RUN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        runs = [run.name for run in runs_below(path)]
        if runs:
            raise ProfdeckError(
                f"{path} holds {len(runs)} run(s): {', '.join(runs[:5])}. Name one, such as {path / runs[0]}."
            ) from None
        if path.is_file():
            raise ProfdeckError(f"{path} is a file, not the directory of a run. Try: profdeck summary {path}") from None
        what = "has no" if path.is_dir() else "does not exist, so it has no"
        raise ProfdeckError(f"{path} {what} {RUN_FILE}: it is not the directory of a run.") from None
    except (OSError, ValueError) as error:
        raise ProfdeckError(f"{path / RUN_FILE} cannot be read: {error}.") from None


def recorded_config(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in the contents of a ``run.json``, or an empty dict if it is damaged."""
    config = about.get("config")
    return config if isinstance(config, dict) else {}


def _capture(
    group: list[tuple[Path, Manifest]], ends: Mapping[_Place, int], checks: FileChecker | KnownChecks
) -> CaptureReport:
    manifest = group[0][1]
    # An engine knows no global steps. Without a window it has recorded to the end of those that its target was asked
    # for; a window may end at any of them.
    asked = [ends.get((file.parent, one.request), one.last_step) for file, one in group if one.iterations is None]
    ranks = [_rank(file, manifest, checks) for file, manifest in group]
    there = {rank.rank for rank in ranks}
    expected = {rank for _, manifest in group for rank in manifest.expected_ranks}
    ranks += [_absent(rank) for rank in expected - there]
    return CaptureReport(
        id=manifest.capture,
        role=manifest.role,
        replica=manifest.replica,
        backend=manifest.backend,
        stage=manifest.stage,
        first_step=manifest.first_step,
        last_step=max([*(one.last_step for _, one in group), *asked]),
        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
    )


_Place = tuple[Path, str | None]
"""A directory, and the id of the capture that was asked for there."""


def _target(
    file: Path,
    manifest: Manifest,
    ranks: Mapping[_Place, set[int]],
    places: set[_Place],
    checks: FileChecker | KnownChecks,
) -> TargetReport:
    artifacts = tuple(_artifact(file.parent, record, checks) for record in manifest.artifacts)
    status, problems = _judge(manifest, artifacts)
    there = ranks.get((file.parent, manifest.capture), set())
    absent = [f"Rank {rank}" for rank in manifest.expected_ranks if rank not in there]
    absent += [
        f"Replica {record.replica}"
        for record in manifest.targets
        if record.took_part and (replica_directory(file.parent, record.replica), record.capture) not in places
    ]
    if absent:
        status = worst([status, Status.MISSING])
    return TargetReport(
        id=manifest.capture,
        role=manifest.role,
        replica=manifest.replica,
        target=manifest.target or "",
        policy=manifest.policy,
        needed=manifest.needed,
        start_skew_ms=manifest.start_skew_ms,
        targets=manifest.targets,
        first_step=manifest.first_step,
        status=status,
        problems=(*problems, *(f"{who} should have recorded and left nothing." for who in absent)),
        notes=manifest.notes,
        artifacts=artifacts,
        manifest=file,
    )


def _absent(rank: int) -> RankReport:
    return RankReport(
        rank=rank,
        parallel={},
        host=None,
        status=Status.MISSING,
        problems=("It should have recorded and left nothing: its process ended before, or never took part.",),
        notes=(),
        artifacts=(),
        manifest=None,
    )


def _rank(file: Path, manifest: Manifest, checks: FileChecker | KnownChecks) -> RankReport:
    artifacts = tuple(_artifact(file.parent, record, checks) for record in manifest.artifacts)
    status, problems = _judge(manifest, artifacts)
    return RankReport(
        rank=manifest.rank,
        parallel=manifest.parallel,
        host=manifest.host,
        status=status,
        problems=problems,
        notes=(
            *manifest.notes,
            *(f"{artifact.path.name}: {note}" for artifact in artifacts for note in artifact.notes),
        ),
        artifacts=artifacts,
        manifest=file,
    )


def _judge(manifest: Manifest, artifacts: tuple[ArtifactReport, ...]) -> tuple[Status, tuple[str, ...]]:
    if manifest.status is Status.RECORDING:
        if manifest.under_way:
            does = f"waits for its turn: for {manifest.waits_for}" if manifest.waits_for else "is still recording"
            return Status.RECORDING, (f"Process {manifest.pid} {does}.",)
        return Status.MISSING, (f"Process {manifest.pid} on {manifest.host} ended without ending the capture.",)
    found = [f"{artifact.path.name}: {artifact.problem}" for artifact in artifacts if artifact.problem]
    problems = tuple(dict.fromkeys([*manifest.problems, *found]))
    # A target's own files are extras: its traces are its ranks'.
    if manifest.target is None and artifacts and not any(artifact.size_bytes for artifact in artifacts):
        return (Status.MISSING if manifest.status is Status.COMPLETE else Status.FAILED), problems
    if manifest.status is Status.COMPLETE and found:
        return Status.PARTIAL, problems
    return manifest.status, problems


def _artifact(directory: Path, record: ArtifactRecord, checks: FileChecker | KnownChecks) -> ArtifactReport:
    path = directory / record.name
    kind, size_bytes = kind_named(record.kind), _size(path)
    report = ArtifactReport(
        path=path,
        kind=record.kind,
        size_bytes=size_bytes,
        events=record.events,
        whole=record.whole,
        problem=record.problem,
        iterations=record.iterations,
    )
    if not os.path.lexists(path):
        report = attrs.evolve(report, events=None, whole=False, problem=record.problem or "the file is gone")
    elif (not path.is_file() and not (kind and path.is_dir())) or path.is_symlink():
        report = attrs.evolve(report, events=None, whole=False, problem="is not a regular file")
    else:
        report = checks.read(report, kind)
    if report.whole and size_bytes != record.size_bytes and not (kind and kind.grows):
        problem = f"has {size_bytes:,} bytes where {record.size_bytes:,} were written"
        report = attrs.evolve(report, whole=False, problem=problem)
    if report.whole and record.events is not None and report.events != record.events:
        problem = f"has {report.events:,} events where {record.events:,} were written"
        report = attrs.evolve(report, whole=False, problem=problem)
    if report.whole and record.sha256 is not None and not checks.is_original(path, record.sha256):
        report = attrs.evolve(report, whole=False, problem="is not the file that was written: its SHA-256 differs")
    return report


def _size(path: Path) -> int:
    """Return the size of a file, or of all files in a directory; 0 if there is nothing."""
    if path.is_dir() and not path.is_symlink():
        return directory_size(path)
    return path.stat().st_size if path.is_file() else 0


def _begun(reports: Iterable[RankReport | TargetReport]) -> tuple[str, ...]:
    """Return how the paths of what is still being recorded begin: its manifest names it at the end."""
    recording = [report.manifest for report in reports if report.status is Status.RECORDING and report.manifest]
    return tuple(f"{file.with_suffix('')}{after}" for file in recording for after in "_.")


def _strays(files: Iterable[Path], known: set[Path]) -> Iterator[Path]:
    for file in files:
        ours = file.name.startswith(("rank_", "target.")) and not is_manifest(file)
        if ours and file not in known and not any(parent in known for parent in file.parents):
            yield file
