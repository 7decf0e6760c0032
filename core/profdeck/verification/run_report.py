"""Verifies a run: determines the status of each rank from its manifest and from the files that the manifest lists."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set as AbstractSet
from pathlib import Path
from typing import Any

import attrs

from profdeck.base.json_files import JSON_OBJECT
from profdeck.config.model import Mode
from profdeck.config.schedule import Schedule
from profdeck.records.identity_conflicts import find_conflicts
from profdeck.records.manifest import ArtifactRecord, Manifest, is_manifest, read_manifest
from profdeck.records.pruned import PrunedStep, read_pruned
from profdeck.records.run_directory import RUN_FILE, is_step_directory, replica_directory, runs_below
from profdeck.records.status import Status
from profdeck.verification.file_checks import FileChecker, KnownChecks, TraceToCheck
from profdeck.verification.report_model import ArtifactReport, CaptureReport, RankReport, RunReport, TargetReport, worst
from profdeck.verification.run_manifests import is_in_place
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.base.files import directory_size
from profdeck_traces.base.progress import Progress
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.base.text import plural, shell_word
from profdeck_traces.inputs.artifact_kinds import TRACE, files_below, kind_named
from profdeck_traces.inputs.result_files import is_result, trace_of

_MAX_MISSING_STEPS = 1000


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
    """Read all manifests of a run and check every file that they list.

    Args:
        path: Run directory.
        only: Returns True for each manifest to include; ``None`` to include all manifests. If it is given, missing
            steps, roles without a capture and unlisted files are not reported.
        within: Glob pattern for the names of the step directories to read.
        contents: If False, compare only the sizes of files.
        cache: Cache of check results. Unchanged files with a cached result are not read. ``None`` to read all files.
        processes: Number of traces to read in parallel.
        on_progress: Called with the number of bytes read so far and the total.

    Raises:
        ProfdeckError: The path is not a run directory.
    """
    about = read_about(path)
    roles = recorded_roles(about)
    manifests: list[tuple[Path, Manifest]] = []
    problems = (
        [] if has_valid_roles(about) else [f"{RUN_FILE}: `roles` is not a list of names; invalid values are ignored."]
    )
    errors: dict[Path, str] = {}
    listed: set[Path] = set()
    pruned = read_pruned(path)

    def report_unreadable(error: OSError) -> None:
        problems.append(f"{str(error.filename).removeprefix(f'{path}/')} cannot be read: {error.strerror}.")

    try:
        steps = sorted(step for step in path.iterdir() if step.match(within) and is_step_directory(step.name))
    except OSError as error:
        raise ProfdeckError(f"{path} cannot be read: {error.strerror}.") from None
    problems += [f"{step.name} cannot be read: it is a symbolic link." for step in steps if step.is_symlink()]
    files = sorted(
        file for step in steps if not step.is_symlink() for file in files_below(step, on_error=report_unreadable)
    )
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
            problems.append(
                f"{file.relative_to(path)} was copied or moved: its contents belong to another rank, step or role."
            )
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
    captures, targets = judge(manifests, checks)
    ranked = (rank for capture in captures for rank in capture.ranks)
    reports: tuple[RankReport | TargetReport, ...] = (*ranked, *targets)
    # An artifact may have a name like a manifest, such as rank_0000.step1.memory.json.
    problems += [
        error
        for file, error in errors.items()
        if listed.isdisjoint((file, *file.parents)) and not str(file).startswith(_unfinished_prefixes(reports))
    ]
    if only is None:
        problems += _missing_steps(about, captures, targets, pruned)
        recorded = {capture.role for capture in captures} | {target.role for target in targets}
        problems += [f"The role '{role}' recorded nothing." for role in roles if role not in recorded]
        artifacts = {artifact.path for report in reports for artifact in report.artifacts}
        problems += [
            f"{file.relative_to(path)} is not listed in any manifest."
            for file in _unlisted(files, artifacts)
            if not str(file).startswith(_unfinished_prefixes(reports))
        ]
    return RunReport(path=path, captures=captures, targets=targets, problems=tuple(problems), pruned=pruned)


def judge(
    manifests: Iterable[tuple[Path, Manifest]], checks: FileChecker | KnownChecks
) -> tuple[tuple[CaptureReport, ...], tuple[TargetReport, ...]]:
    """Return a report for each capture and each target of a run.

    Args:
        manifests: The manifests of the run and their paths.
        checks: Checks of the files that the manifests list.
    """
    manifests = [*manifests]
    conflicts = find_conflicts(manifests)
    groups: dict[tuple[int, str, int, str], list[tuple[Path, Manifest]]] = defaultdict(list)
    targets: list[tuple[Path, Manifest]] = []
    for file, manifest in manifests:
        if manifest.target is not None:
            targets.append((file, manifest))
            continue
        replica = -1 if manifest.replica is None else manifest.replica
        groups[manifest.first_step, manifest.role, replica, manifest.capture].append((file, manifest))
    last_steps: dict[_RequestKey, int] = {
        (file.parent, manifest.capture): manifest.last_step for file, manifest in targets
    }
    captures = tuple(_capture(group, last_steps, checks, conflicts) for _, group in sorted(groups.items()))
    ranks: dict[_RequestKey, set[int]] = defaultdict(set)
    for file, manifest in itertools.chain.from_iterable(groups.values()):
        ranks[file.parent, manifest.request].add(manifest.rank)
    return captures, tuple(_target(file, manifest, ranks, last_steps.keys(), checks) for file, manifest in targets)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _missing_steps(
    about: Mapping[str, Any],
    captures: Iterable[CaptureReport],
    targets: Iterable[TargetReport],
    pruned: Iterable[PrunedStep],
) -> Iterator[str]:
    """Yield a problem for each gap in the schedule: steps without files although a later step was captured."""
    config = recorded_config(about)
    try:
        schedule = Schedule.from_list(_list(config.get("steps")))
    except (ValueError, TypeError):
        return
    if config.get("mode") != Mode.CONTINUOUS:  # in other modes, a step without the stage has no capture
        return
    spans = sorted(
        {(capture.first_step, capture.last_step) for capture in captures}
        | {(step.first_step, step.last_step) for step in pruned}
        | {(target.first_step, target.first_step) for target in targets}
    )
    reached = spans[0][1] if spans else 0
    for first, last in spans[1:]:
        missing: list[int] = []
        if first > reached + 1:
            missing = list(itertools.islice(schedule.steps(reached + 1, first - 1), _MAX_MISSING_STEPS))
        if missing:
            steps = f"Step {missing[0]} has" if len(missing) == 1 else f"Steps {missing[0]} to {missing[-1]} have"
            yield f"{steps} no files, although selected by the schedule and followed by a captured step."
        reached = max(reached, last)


def read_about(path: Path) -> dict[str, Any]:
    """Return the contents of a run's ``run.json``.

    Raises:
        ProfdeckError: The path is not a run directory.
    """
    try:
        return JSON_OBJECT.read(path / RUN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        runs = [run.name for run in runs_below(path)]
        if runs:
            raise ProfdeckError(
                f"{path} contains {plural(len(runs), 'run')}: {', '.join(runs[:5])}. "
                f"Pass the path of a run, such as {path / runs[0]}."
            ) from None
        if path.is_file():
            raise ProfdeckError(
                f"{path} is a file, not a run directory. Try: profdeck summary {shell_word(str(path))}"
            ) from None
        reason = f"It has no {RUN_FILE}." if path.is_dir() else "It does not exist."
        raise ProfdeckError(f"{path} is not a run directory. {reason}") from None
    except (OSError, ValueError) as error:
        raise ProfdeckError(f"{path / RUN_FILE} cannot be read: {error}.") from None


def has_valid_roles(about: Mapping[str, Any]) -> bool:
    """Return True if ``roles`` in the contents of a ``run.json`` is missing or a list of names."""
    roles = about.get("roles", [])
    return isinstance(roles, list) and all(isinstance(role, str) for role in roles)


def recorded_roles(about: Mapping[str, Any]) -> list[str]:
    """Return the valid role names in the contents of a ``run.json``."""
    return [role for role in _list(about.get("roles")) if isinstance(role, str)]


def recorded_config(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in the contents of a ``run.json``, or an empty dict if it is damaged."""
    config = about.get("config")
    return config if isinstance(config, dict) else {}


def _capture(
    group: list[tuple[Path, Manifest]],
    last_steps: Mapping[_RequestKey, int],
    checks: FileChecker | KnownChecks,
    conflicts: Mapping[Path, tuple[str, ...]],
) -> CaptureReport:
    manifest = group[0][1]
    # Ranks of engines do not count global steps, so use the last step in the manifest of the target. With a window of
    # iterations, the capture can end before that step.
    steps = [one.last_step for _, one in group]
    steps += [last_steps.get((file.parent, one.request), 0) for file, one in group if one.iterations is None]
    ranks = [_rank(file, manifest, checks, conflicts.get(file, ())) for file, manifest in group]
    expected = {rank for _, manifest in group for rank in manifest.expected_ranks}
    ranks += [_missing_rank(rank) for rank in expected - {rank.rank for rank in ranks}]
    return CaptureReport(
        id=manifest.capture,
        role=manifest.role,
        replica=manifest.replica,
        backend=manifest.backend,
        stage=manifest.stage,
        first_step=manifest.first_step,
        last_step=max(steps),
        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
    )


_RequestKey = tuple[Path, str | None]
"""Directory and capture ID of a request."""


def _target(
    file: Path,
    manifest: Manifest,
    ranks: Mapping[_RequestKey, set[int]],
    requests: AbstractSet[_RequestKey],
    checks: FileChecker | KnownChecks,
) -> TargetReport:
    artifacts = tuple(_artifact(file.parent, record, checks) for record in manifest.artifacts)
    status, problems = _judge(manifest, artifacts)
    recorded_ranks = ranks.get((file.parent, manifest.capture), set())
    missing = [f"Rank {rank}" for rank in manifest.expected_ranks if rank not in recorded_ranks]
    missing += [
        f"Replica {record.replica}"
        for record in manifest.targets
        if record.took_part and (replica_directory(file.parent, record.replica), record.capture) not in requests
    ]
    if missing:
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
        problems=(*problems, *(f"{name} was expected to record, but wrote no files." for name in missing)),
        notes=manifest.notes,
        artifacts=artifacts,
        manifest=file,
    )


def _missing_rank(rank: int) -> RankReport:
    return RankReport(
        rank=rank,
        parallel={},
        host=None,
        status=Status.MISSING,
        problems=("This rank was expected to record, but wrote no files. Its process ended earlier or never joined.",),
        notes=(),
        artifacts=(),
        manifest=None,
    )


def _rank(file: Path, manifest: Manifest, checks: FileChecker | KnownChecks, conflicts: tuple[str, ...]) -> RankReport:
    artifacts = tuple(_artifact(file.parent, record, checks) for record in manifest.artifacts)
    status, problems = _judge(manifest, artifacts)
    if conflicts:
        status = Status.PARTIAL if status is Status.COMPLETE else status
        problems = tuple(dict.fromkeys([*problems, *conflicts]))
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
            state = f"waits for {manifest.waits_for}" if manifest.waits_for else "is still recording"
            return Status.RECORDING, (f"Process {manifest.pid} {state}.",)
        process = f"Process {manifest.pid} on {manifest.host}"
        if manifest.under_way is None:
            unknown = "Its state is unknown, because it is on another host or in another PID namespace."
            return Status.RECORDING, (f"{process} has not ended the capture. {unknown}",)
        return Status.MISSING, (f"{process} exited without ending the capture.",)
    file_problems = [f"{artifact.path.name}: {artifact.problem}" for artifact in artifacts if artifact.problem]
    problems = tuple(dict.fromkeys([*manifest.problems, *file_problems]))
    # A target's own files are optional, because its ranks write the traces.
    if manifest.target is None and artifacts and not any(artifact.size_bytes for artifact in artifacts):
        return (Status.MISSING if manifest.status is Status.COMPLETE else Status.FAILED), problems
    if manifest.status is Status.COMPLETE and file_problems:
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
        report = attrs.evolve(report, events=None, whole=False, problem=record.problem or "does not exist")
    elif (not path.is_file() and not (kind and path.is_dir())) or path.is_symlink():
        report = attrs.evolve(report, events=None, whole=False, problem="is not a regular file")
    else:
        report = checks.read(report, kind)
    if report.whole and size_bytes != record.size_bytes and not (kind and kind.grows):
        problem = f"has {size_bytes:,} bytes, but {record.size_bytes:,} were written"
        report = attrs.evolve(report, whole=False, problem=problem)
    if report.whole and record.events is not None and report.events != record.events:
        problem = f"has {report.events:,} events, but {record.events:,} were written"
        report = attrs.evolve(report, whole=False, problem=problem)
    if report.whole and record.sha256 is not None and not checks.is_original(path, record.sha256):
        report = attrs.evolve(report, whole=False, problem="has changed since it was written: its SHA-256 differs")
    return report


def _size(path: Path) -> int:
    """Return the size of a file or directory in bytes, or 0 if it does not exist."""
    if path.is_dir() and not path.is_symlink():
        return directory_size(path)
    return path.stat().st_size if path.is_file() else 0


def _unfinished_prefixes(reports: Iterable[RankReport | TargetReport]) -> tuple[str, ...]:
    """Return path prefixes of files that running captures write. Their manifests list these files only at the end."""
    recording = [report.manifest for report in reports if report.status is Status.RECORDING and report.manifest]
    return tuple(f"{file.with_suffix('')}{separator}" for file in recording for separator in "_.")


def _unlisted(files: Iterable[Path], artifacts: set[Path]) -> Iterator[Path]:
    """Yield recorded files other than manifests, artifacts, files inside artifacts, and results of artifacts."""
    for file in files:
        is_recorded = file.name.startswith(("rank_", "target.")) and not is_manifest(file)
        owners = (trace_of(file) if is_result(file) else file, *file.parents)
        if is_recorded and artifacts.isdisjoint(owners):
            yield file
