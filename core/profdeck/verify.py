"""Reads a run directory back and establishes what every rank of every capture is worth, by reading the files."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import attrs
import msgspec

from profdeck.capture import Status
from profdeck.errors import ProfdeckError
from profdeck.progress import Meter, Progress
from profdeck.run import RUN_FILE, ArtifactRecord, Manifest, is_manifest, process_started, read_manifest
from profdeck.traces.integrity import check_trace

# From the best to the worst; a capture or run is as good as its worst part.
_ORDER = (Status.COMPLETE, Status.RECORDING, Status.PARTIAL, Status.FAILED, Status.MISSING)


@attrs.frozen(kw_only=True)
class ArtifactReport:
    """One artifact as it stands on disk."""

    path: Path
    kind: str
    size_bytes: int
    events: int | None
    whole: bool
    problem: str | None
    iterations: tuple[int, int] | None


@attrs.frozen(kw_only=True)
class RankReport:
    """What one rank left of one capture."""

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
        """The size of all artifacts."""
        return sum(artifact.size_bytes for artifact in self.artifacts)

    @property
    def events(self) -> int:
        """The trace events in all artifacts."""
        return sum(artifact.events or 0 for artifact in self.artifacts)


@attrs.frozen(kw_only=True)
class CaptureReport:
    """One capture of one role and replica, over all of its ranks."""

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
    """What whoever asked an engine or a server for a capture says of it as a whole."""

    id: str
    role: str
    replica: int | None
    target: str
    first_step: int
    status: Status
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    artifacts: tuple[ArtifactReport, ...]
    manifest: Path


@attrs.frozen(kw_only=True)
class RunReport:
    """A whole run."""

    path: Path
    captures: tuple[CaptureReport, ...]
    targets: tuple[TargetReport, ...]
    problems: tuple[str, ...]
    """What belongs to no capture: roles that recorded nothing, files that no manifest mentions."""

    @property
    def status(self) -> Status:
        """The worst status of its captures and targets; ``missing`` for a run without any."""
        parts = [*(part.status for part in self.captures), *(part.status for part in self.targets)]
        return worst(parts) if parts else Status.MISSING


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst of some statuses; ``complete`` for none."""
    return max(statuses, key=_ORDER.index, default=Status.COMPLETE)


def read_run(path: Path, *, on_progress: Progress | None = None) -> RunReport:
    """Read all manifests of a run and check every file that they mention.

    Args:
        path: a run directory.
        on_progress: told of the bytes read, for a progress bar.

    Raises:
        ProfdeckError: the path is not a run directory.
    """
    roles = _check_is_run(path)
    manifests: dict[tuple[int, str, int, str], list[tuple[Path, Manifest]]] = defaultdict(list)
    targets: list[tuple[Path, Manifest]] = []
    problems = []
    for file in filter(is_manifest, sorted(path.glob("step_*/**/*.json"))):
        try:
            manifest = read_manifest(file)
        except ProfdeckError as error:
            problems.append(str(error))
            continue
        if manifest.target is not None:
            targets.append((file, manifest))
            continue
        replica = -1 if manifest.replica is None else manifest.replica
        manifests[manifest.first_step, manifest.role, replica, manifest.capture].append((file, manifest))
    ranks = [item for group in manifests.values() for item in group]
    everything = [(file.parent, manifest) for file, manifest in (*ranks, *targets)]
    total = sum(_size(directory / record.name) for directory, manifest in everything for record in manifest.artifacts)
    meter = Meter(total, on_progress)
    captures = tuple(_capture(group, meter) for _, group in sorted(manifests.items()))
    asked = tuple(_target(file, manifest, ranks, meter) for file, manifest in targets)
    seen = {capture.role for capture in captures} | {target.role for target in asked}
    problems += [f"The role '{role}' recorded nothing." for role in roles if role not in seen]
    reports: tuple[RankReport | TargetReport, ...] = (*(rank for capture in captures for rank in capture.ranks), *asked)
    known = {artifact.path for report in reports for artifact in report.artifacts}
    problems += [f"{stray.relative_to(path)} is in no manifest." for stray in _strays(path, known)]
    return RunReport(path=path, captures=captures, targets=asked, problems=tuple(problems))


def _check_is_run(path: Path) -> list[str]:
    """Return the roles of the run."""
    try:
        about = msgspec.json.decode((path / RUN_FILE).read_bytes())
        return list(about.get("roles", ()))
    except FileNotFoundError:
        runs = sorted(child.parent.name for child in path.glob(f"*/{RUN_FILE}"))
        if runs:
            raise ProfdeckError(
                f"{path} holds {len(runs)} run(s): {', '.join(runs[-5:])}. Name one, such as {path / runs[-1]}."
            ) from None
        what = "has no" if path.is_dir() else "does not exist, so it has no"
        raise ProfdeckError(f"{path} {what} {RUN_FILE}: it is not the directory of a run.") from None
    except (OSError, msgspec.MsgspecError, AttributeError) as error:
        raise ProfdeckError(f"{path / RUN_FILE} cannot be read: {error}.") from None


def _capture(group: list[tuple[Path, Manifest]], meter: Meter) -> CaptureReport:
    manifest = group[0][1]
    ranks = [_rank(file, manifest, meter) for file, manifest in group]
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
        last_step=max(manifest.last_step for _, manifest in group),
        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
    )


def _target(file: Path, manifest: Manifest, ranks: list[tuple[Path, Manifest]], meter: Meter) -> TargetReport:
    artifacts = tuple(_artifact(file.parent, record, meter) for record in manifest.artifacts)
    status, problems = _judge(manifest, artifacts)
    there = {rank.rank for path, rank in ranks if path.parent == file.parent and rank.request == manifest.capture}
    absent = [rank for rank in manifest.expected_ranks if rank not in there]
    if absent:
        status = worst([status, Status.MISSING])
    return TargetReport(
        id=manifest.capture,
        role=manifest.role,
        replica=manifest.replica,
        target=manifest.target or "",
        first_step=manifest.first_step,
        status=status,
        problems=(*problems, *(f"Rank {rank} should have recorded and left nothing." for rank in absent)),
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


def _rank(file: Path, manifest: Manifest, meter: Meter) -> RankReport:
    artifacts = tuple(_artifact(file.parent, record, meter) for record in manifest.artifacts)
    status, problems = _judge(manifest, artifacts)
    return RankReport(
        rank=manifest.rank,
        parallel=manifest.parallel,
        host=manifest.host,
        status=status,
        problems=problems,
        notes=manifest.notes,
        artifacts=artifacts,
        manifest=file,
    )


def _judge(manifest: Manifest, artifacts: tuple[ArtifactReport, ...]) -> tuple[Status, tuple[str, ...]]:
    if manifest.status is Status.RECORDING:
        if _alive(manifest):
            return Status.RECORDING, (f"Process {manifest.pid} is still recording.",)
        return Status.MISSING, (f"Process {manifest.pid} on {manifest.host} ended without ending the capture.",)
    found = [f"{artifact.path.name}: {artifact.problem}" for artifact in artifacts if artifact.problem]
    problems = tuple(dict.fromkeys([*manifest.problems, *found]))
    # A target's own files are extras: its traces are its ranks'.
    if manifest.target is None and artifacts and not any(artifact.size_bytes for artifact in artifacts):
        return (Status.MISSING if manifest.status is Status.COMPLETE else Status.FAILED), problems
    if manifest.status is Status.COMPLETE and found:
        return Status.PARTIAL, problems
    return manifest.status, problems


def _artifact(directory: Path, record: ArtifactRecord, meter: Meter) -> ArtifactReport:
    path = directory / record.name
    size_bytes = _size(path)
    events, whole, problem = record.events, record.whole, record.problem
    if not path.exists():
        whole, problem = False, record.problem or "the file is gone"
    elif record.kind == "trace":
        try:
            check = check_trace(path, on_progress=meter.within)
        except (OSError, ProfdeckError) as error:
            whole, problem = False, f"cannot be read: {error}"
        else:
            events, whole, problem = check.events, check.whole, check.problem
    if whole and size_bytes != record.size_bytes:
        whole, problem = False, f"has {size_bytes:,} bytes where {record.size_bytes:,} were written"
    meter.passed(size_bytes)
    return ArtifactReport(
        path=path,
        kind=record.kind,
        size_bytes=size_bytes,
        events=events,
        whole=whole,
        problem=problem,
        iterations=record.iterations,
    )


def _alive(manifest: Manifest) -> bool:
    """Tell whether the process of a manifest still runs; on another host that cannot be known, and no is said."""
    if manifest.host != socket.gethostname():
        return False
    try:
        os.kill(manifest.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return process_started(manifest.pid) == manifest.process_started


def _size(path: Path) -> int:
    """Return the size of a file, or of all files in a directory; 0 if there is nothing."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if path.exists() else 0


def _strays(path: Path, known: set[Path]) -> list[Path]:
    return [
        file
        for file in sorted({*path.glob("step_*/**/rank_*"), *path.glob("step_*/**/target.*")})
        if file.is_file()
        and file not in known
        and not any(parent in known for parent in file.parents)
        and not is_manifest(file)
    ]
