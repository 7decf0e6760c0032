"""Collects missing files of ended captures from servers and actors."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.base.json_files import JSON_OBJECT
from profdeck.base.outcome import Outcome
from profdeck.engine.clusters import ACTOR_PREFIX, Actor, get_cluster
from profdeck.engine.control.control_backend import is_settled_by_files
from profdeck.engine.control.rank_files import RankFiles, is_remote_files_problem
from profdeck.engine.engine import Engine
from profdeck.engine.options import EngineOptions
from profdeck.engine.transport.http_engine import HttpEngine
from profdeck.records.capture import CaptureRecord
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.request import Answer, CaptureRequest
from profdeck.records.run_directory import replica_directory
from profdeck.records.status import Status
from profdeck.replicas.fan_out import fan_out
from profdeck.replicas.member import NOT_COMPLETE, count_outcomes
from profdeck_traces.base.errors import ConfigError, ProfdeckError, describe_error
from profdeck_traces.base.files import replace_file
from profdeck_traces.base.progress import Progress

_REPLY_S = 120.0
_RECORDED = {Status.COMPLETE, Status.PARTIAL, Status.RECORDING}
_NOT_COMPLETE = re.compile(rf"\d+ of \d+ targets {NOT_COMPLETE}: ")


@attrs.frozen
class Collected:
    """Result of collecting the missing files of one target."""

    manifest: Path
    """Path of the target's manifest."""
    target: str
    capture: str
    role_and_replica: str
    notes: tuple[str, ...]
    """Notes about the fetched files."""
    problems: tuple[str, ...]
    """Reasons why the capture is still incomplete; empty if it is complete."""


async def collect_run(
    run: Path, *, limit_s: float, actors: Mapping[str, Actor] | None = None, on_progress: Progress | None = None
) -> list[Collected]:
    """Fetch the missing files of server captures, and update their manifests.

    Files that are already in the run directory are not fetched again, so a repeated call is safe.

    Args:
        run: the run directory.
        limit_s: time limit, in seconds.
        actors: reachable actors by their names in manifests; None without a cluster.
        on_progress: called with the number of finished targets and the total number.

    Returns:
        One result for each target with missing files.
    """
    run = run.absolute()  # noqa: ASYNC240  # does not access the file system
    manifests, incomplete_files = _read_targets(run)
    done = 0

    async def collect(file: Path) -> Collected:
        nonlocal done
        try:
            return await _collect(run, file, manifests[file], limit_s, actors)
        finally:
            done += 1
            if on_progress is not None:
                on_progress(done, len(incomplete_files))

    results = await fan_out(collect, incomplete_files, timeout_s=limit_s, each_timeout_s=limit_s)
    collected = []
    for file, result in zip(incomplete_files, results, strict=True):
        if isinstance(result, BaseException):
            if not isinstance(result, ProfdeckError | OSError | ValueError):
                raise result
            result = _result(file, manifests[file], (), (describe_error(result),))  # noqa: PLW2901  # replaces the error
        collected.append(result)
    collected_files = {result.manifest for result in collected}
    for file, manifest in manifests.items():
        if manifest.targets:
            _update_fleet(file, manifest, collected_files)
    return collected


def _read_targets(run: Path) -> tuple[dict[Path, Manifest], list[Path]]:
    """Read the manifests of the targets in a run.

    Returns:
        The manifests of all targets and fleets, by path, and the paths of the targets' manifests with missing files.
    """
    rank_manifests: defaultdict[Path, list[tuple[Path, Manifest]]] = defaultdict(list)
    manifests: dict[Path, Manifest] = {}
    for file in sorted(filter(is_manifest, run.glob("step_*/**/*.json"))):
        manifest = _read_if_valid(file)
        if manifest is not None and manifest.target is None:
            rank_manifests[file.parent].append((file, manifest))
        elif manifest is not None and not manifest.under_way:
            manifests[file] = manifest
    incomplete_files = [
        file
        for file, manifest in manifests.items()
        if not manifest.targets and _has_missing_files(manifest, rank_manifests[file.parent])
    ]
    return manifests, incomplete_files


def _read_if_valid(file: Path) -> Manifest | None:
    try:
        return read_manifest(file)
    except ProfdeckError:  # `profdeck ls` reports it
        return None


def _has_missing_files(manifest: Manifest, rank_manifests: Iterable[tuple[Path, Manifest]]) -> bool:
    """Return whether files of a target that has recorded are missing in the run directory.

    Args:
        manifest: manifest of the target.
        rank_manifests: paths and manifests of ranks in the same directory.
    """
    if manifest.status not in _RECORDED or manifest.request_token is None:
        return False
    ranks = [(path, rank) for path, rank in rank_manifests if rank.request_token == manifest.request_token]
    if set(manifest.expected_ranks) - {rank.rank for _, rank in ranks}:
        return True
    if any(is_remote_files_problem(problem) or is_settled_by_files(problem) for problem in manifest.problems):
        return True
    return any(
        not (path.parent / artifact.name).exists()
        for path, rank in ranks
        if rank.collected_from is not None
        for artifact in rank.artifacts
        if artifact.size_bytes
    )


async def _collect(
    run: Path, file: Path, manifest: Manifest, limit_s: float, actors: Mapping[str, Actor] | None
) -> Collected:
    """Fetch the missing files of one target, and update its manifest."""
    assert manifest.target is not None  # noqa: S101  # checked by the caller
    assert manifest.request_token is not None  # noqa: S101  # checked by the caller
    capture = CaptureRecord(
        id=manifest.capture,
        directory=file.parent,
        identity=Identity(role=manifest.role, replica=manifest.replica),
        first_step=manifest.first_step,
        current_step=manifest.last_step,
        target=manifest.target,
        expected_ranks=manifest.expected_ranks,
    )
    request = CaptureRequest(
        id=manifest.request or manifest.capture,
        output=run.parent,
        run=run.name,
        role=manifest.role,
        replica=manifest.replica,
        first_step=manifest.first_step,
        ranks="all",
        token=manifest.request_token,
    )
    try:
        engine = _engine(manifest.target, min(limit_s, _REPLY_S), actors)
    except CaptureError as error:
        return _result(file, manifest, (), (str(error),))
    files = RankFiles(capture, request)
    try:
        answer = await _query_status(engine, request)
        await files.collect(
            engine,
            answer,
            fetch=True,
            deadline_s=time.monotonic() + limit_s,
            timeout_message=f"The time limit of {limit_s:g} seconds was exceeded",
        )
    except CaptureError as error:
        return _result(file, manifest, (), (str(error),))
    finally:
        await engine.close()
    remaining = [problem for problem in manifest.problems if not is_remote_files_problem(problem)]
    complete_ranks = {rank.rank for rank in map(read_manifest, files.manifests) if rank.status is Status.COMPLETE}
    if files.complete and complete_ranks.issuperset(manifest.expected_ranks):
        remaining = [problem for problem in remaining if not is_settled_by_files(problem)]
    if manifest.status is Status.RECORDING:
        remaining.append(f"Process {manifest.pid} on {manifest.host} requested this capture but has not ended it.")
    problems, notes = (*remaining, *capture.problems), (*manifest.notes, *capture.notes)
    status = Status.COMPLETE if files.complete and not problems else Status.PARTIAL
    _update_manifest(file, status=status, problems=problems, notes=notes)
    return _result(file, manifest, tuple(capture.notes), problems)


def _engine(target: str, reply_s: float, actors: Mapping[str, Actor] | None) -> Engine:
    """Return an engine that can send the files of a target.

    Args:
        target: name of the target.
        reply_s: time limit for each reply, in seconds.
        actors: see `collect_run`.

    Raises:
        CaptureError: the target cannot send files.
    """
    try:
        return HttpEngine(target, timeout_s=reply_s)
    except ConfigError:
        if not target.startswith(ACTOR_PREFIX):
            text = f"{target} was an engine in the host's process, not a server that can send files."
            raise CaptureError(text) from None
    if actors is None:
        cluster = get_cluster(f"{target} is an actor")
        raise CaptureError(
            f"{target} is a {cluster.title} actor. To fetch its files, use --{cluster.name} on a node of its cluster."
        )
    if target not in actors:
        raise CaptureError(f"{target} has exited, or is unnamed and cannot be found.")
    return actors[target].engine(backend="", options=EngineOptions(rpc_timeout_s=reply_s))


async def _query_status(engine: Engine, request: CaptureRequest) -> Answer:
    """Return the status of a capture, or an empty answer if the processes have recorded another capture since.

    Actors are not queried, because they may be busy with their engine. The manifests of their ranks have the state.
    """
    if not isinstance(engine, HttpEngine):
        return Answer(ranks=())
    if not await engine.has_profdeck():
        raise CaptureError(f"{engine.name} has not loaded profdeck and cannot send files.")
    answer = await engine.command("status", request.key)
    return answer if all(reply.token == request.token for reply in answer.ranks) else Answer(ranks=())


def _result(file: Path, manifest: Manifest, notes: tuple[str, ...], problems: tuple[str, ...]) -> Collected:
    return Collected(
        file, manifest.target or "", manifest.capture, manifest.role_and_replica, notes=notes, problems=problems
    )


def _update_fleet(file: Path, manifest: Manifest, collected_files: set[Path]) -> None:
    """Update the outcomes of the targets in a fleet's manifest.

    Args:
        file: path of the fleet's manifest.
        manifest: the fleet's manifest.
        collected_files: paths of the targets' manifests that were updated.
    """
    records, statuses = [], []
    for record in manifest.targets:
        target_file = replica_directory(file.parent, record.replica) / f"target.{record.capture}.json"
        target = _read_if_valid(target_file) if record.took_part else None
        if target is not None and target_file in collected_files:
            complete = target.status is Status.COMPLETE
            record = attrs.evolve(  # noqa: PLW2901  # updated copy
                record,
                outcome=Outcome.FLUSHED if complete else record.outcome,
                reason=None if complete else " ".join(target.problems) or None,
                fix=None if complete else record.fix,
            )
        records.append(record)
        statuses.append(target and target.status)
    if records == list(manifest.targets):
        return
    incomplete = [
        record.outcome
        for record, status in zip(records, statuses, strict=True)
        if record.took_part and status is not Status.COMPLETE
    ]
    problems = [problem for problem in manifest.problems if not _NOT_COMPLETE.match(problem)]
    problems += [count_outcomes(incomplete, len(records), NOT_COMPLETE)] if incomplete else []
    becomes_complete = manifest.status is Status.PARTIAL and not problems
    _update_manifest(
        file,
        status=Status.COMPLETE if becomes_complete else manifest.status,
        problems=problems,
        targets=[msgspec.to_builtins(record) for record in records],
    )


def _update_manifest(file: Path, **changes: Any) -> None:
    """Change fields of a manifest. All other fields are kept, including those of later versions."""
    document: Mapping[str, Any] = JSON_OBJECT.read(file)
    content = msgspec.json.encode({**document, **changes})
    replace_file(file, msgspec.json.format(content, indent=1), durable=True)
