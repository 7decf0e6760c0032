"""Brings into a run what servers and actors still have of its captures, long after these have ended."""

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
from profdeck.replicas.member import NOT_COMPLETE, counted
from profdeck_traces.base.errors import ConfigError, ProfdeckError, describe_error
from profdeck_traces.base.files import replace_file
from profdeck_traces.base.progress import Progress

_ANSWER_S = 120.0
_RECORDED = {Status.COMPLETE, Status.PARTIAL, Status.RECORDING}
_NOT_COMPLETE = re.compile(rf"\d+ of \d+ targets {NOT_COMPLETE}: ")


@attrs.frozen
class Collected:
    """What came of one target of which something was missing."""

    manifest: Path
    """The manifest about the target."""
    target: str
    capture: str
    role_and_replica: str
    notes: tuple[str, ...]
    """What was fetched."""
    problems: tuple[str, ...]
    """Why the capture is not complete now."""


async def collect_run(
    run: Path, *, limit_s: float, actors: Mapping[str, Actor] | None = None, on_progress: Progress | None = None
) -> list[Collected]:
    """Fetch the missing files of server captures, and update their manifests.

    A file that is here is not fetched again, so that this can be repeated as often as needed.

    Args:
        run: the run directory.
        limit_s: time limit, in seconds.
        actors: reachable actors, keyed by their names in manifests; None without a cluster.
        on_progress: called with the number of finished targets and the total number.

    Returns:
        What came of each target of which something was missing.
    """
    found, wanted = _of_targets(run.absolute())  # noqa: ASYNC240  # which asks no file system
    done = 0

    async def collect(file: Path) -> Collected:
        nonlocal done
        try:
            return await _collect(run.absolute(), file, found[file], limit_s, actors)  # noqa: ASYNC240  # as above
        finally:
            done += 1
            if on_progress is not None:
                on_progress(done, len(wanted))

    results = await fan_out(collect, wanted, timeout_s=limit_s, each_timeout_s=limit_s)
    collected = []
    for file, result in zip(wanted, results, strict=True):
        if isinstance(result, BaseException):
            if not isinstance(result, ProfdeckError | OSError | ValueError):
                raise result
            result = _about(file, found[file], (), (describe_error(result),))  # noqa: PLW2901  # a record of the error
        collected.append(result)
    for file, manifest in found.items():
        if manifest.targets:
            _tell_fleet(file, manifest, {one.manifest for one in collected})
    return collected


def _of_targets(run: Path) -> tuple[dict[Path, Manifest], list[Path]]:
    """Return the manifests of targets in a run by their files, and the files of those of which something is missing."""
    of_ranks: defaultdict[Path, list[tuple[Path, Manifest]]] = defaultdict(list)
    found: dict[Path, Manifest] = {}
    for file in sorted(filter(is_manifest, run.glob("step_*/**/*.json"))):
        manifest = _readable(file)
        if manifest is not None and manifest.target is None:
            of_ranks[file.parent].append((file, manifest))
        elif manifest is not None and not manifest.under_way:
            found[file] = manifest
    return found, [file for file, one in found.items() if not one.targets and _lacks(one, of_ranks[file.parent])]


def _readable(file: Path) -> Manifest | None:
    try:
        return read_manifest(file)
    except ProfdeckError:  # `profdeck ls` reports it
        return None


def _lacks(manifest: Manifest, of_ranks: Iterable[tuple[Path, Manifest]]) -> bool:
    """Tell whether something of a target that has recorded is not here.

    Args:
        manifest: that of the target.
        of_ranks: those of ranks beside it, with their files.
    """
    if manifest.status not in _RECORDED or manifest.request_token is None:
        return False
    there = [(path, one) for path, one in of_ranks if one.request_token == manifest.request_token]
    if set(manifest.expected_ranks) - {one.rank for _, one in there}:
        return True
    if any(is_remote_files_problem(problem) or is_settled_by_files(problem) for problem in manifest.problems):
        return True
    return any(
        not (path.parent / record.name).exists()
        for path, one in there
        if one.collected_from is not None
        for record in one.artifacts
        if record.size_bytes
    )


async def _collect(
    run: Path, file: Path, manifest: Manifest, limit_s: float, actors: Mapping[str, Actor] | None
) -> Collected:
    assert manifest.target is not None  # noqa: S101  # as the caller looked
    assert manifest.request_token is not None  # noqa: S101
    capture = CaptureRecord(
        id=manifest.capture,
        directory=file.parent,
        identity=Identity(role=manifest.role, replica=manifest.replica),
        first_step=manifest.first_step,
        current_step=manifest.last_step,
        target=manifest.target,
        expected_ranks=manifest.expected_ranks,
    )
    asked = CaptureRequest(
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
        engine = _engine(manifest.target, min(limit_s, _ANSWER_S), actors)
    except CaptureError as error:
        return _about(file, manifest, (), (str(error),))
    files = RankFiles(capture, asked)
    try:
        answer = await _last_answer(engine, asked)
        await files.collect(
            engine,
            answer,
            fetch=True,
            deadline_s=time.monotonic() + limit_s,
            timeout_message=f"The time limit of {limit_s:g} seconds has expired",
        )
    except CaptureError as error:
        return _about(file, manifest, (), (str(error),))
    finally:
        await engine.close()
    kept = [problem for problem in manifest.problems if not is_remote_files_problem(problem)]
    whole = {one.rank for one in map(read_manifest, files.manifests) if one.status is Status.COMPLETE}
    if files.complete and whole.issuperset(manifest.expected_ranks):
        kept = [problem for problem in kept if not is_settled_by_files(problem)]
    if manifest.status is Status.RECORDING:
        kept.append(f"Process {manifest.pid} on {manifest.host}, which asked for it, ended before it was over.")
    problems, notes = (*kept, *capture.problems), (*manifest.notes, *capture.notes)
    status = Status.COMPLETE if files.complete and not problems else Status.PARTIAL
    _write(file, status=status, problems=problems, notes=notes)
    return _about(file, manifest, tuple(capture.notes), problems)


def _engine(target: str, answer_s: float, actors: Mapping[str, Actor] | None) -> Engine:
    """Return the engine that can send a target's files.

    Raises:
        CaptureError: nothing can.
    """
    try:
        return HttpEngine(target, timeout_s=answer_s)
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
    return actors[target].engine(backend="", options=EngineOptions(rpc_timeout_s=answer_s))


async def _last_answer(engine: Engine, asked: CaptureRequest) -> Answer:
    """Return what the processes say of the capture, and nothing if they have recorded another one since.

    Actors are not queried, because they may be busy with their engine. The manifests of their ranks have the state.
    """
    if not isinstance(engine, HttpEngine):
        return Answer(ranks=())
    if not await engine.has_profdeck():
        raise CaptureError(f"{engine.name} has not loaded profdeck and cannot send files.")
    answer = await engine.command("status", {})
    return answer if all(reply.token == asked.token for reply in answer.ranks) else Answer(ranks=())


def _about(file: Path, manifest: Manifest, notes: tuple[str, ...], problems: tuple[str, ...]) -> Collected:
    return Collected(
        file, manifest.target or "", manifest.capture, manifest.role_and_replica, notes=notes, problems=problems
    )


def _tell_fleet(file: Path, manifest: Manifest, collected: set[Path]) -> None:
    """Write into the manifest of a fleet what its targets have now."""
    records, statuses = [], []
    for record in manifest.targets:
        own = replica_directory(file.parent, record.replica) / f"target.{record.capture}.json"
        now = _readable(own) if record.took_part else None
        if now is not None and own in collected:
            whole = now.status is Status.COMPLETE
            record = attrs.evolve(  # noqa: PLW2901  # as it is now
                record,
                outcome=Outcome.FLUSHED if whole else record.outcome,
                reason=None if whole else " ".join(now.problems) or None,
                fix=None if whole else record.fix,
            )
        records.append(record)
        statuses.append(now and now.status)
    if records == list(manifest.targets):
        return
    poor = [
        record.outcome
        for record, status in zip(records, statuses, strict=True)
        if record.took_part and status is not Status.COMPLETE
    ]
    problems = [problem for problem in manifest.problems if not _NOT_COMPLETE.match(problem)]
    problems += [counted(poor, len(records), NOT_COMPLETE)] if poor else []
    whole = manifest.status is Status.PARTIAL and not problems
    _write(
        file,
        status=Status.COMPLETE if whole else manifest.status,
        problems=problems,
        targets=[msgspec.to_builtins(record) for record in records],
    )


def _write(file: Path, **changed: Any) -> None:
    """Change some members of a manifest; those of later versions are kept."""
    document: Mapping[str, Any] = JSON_OBJECT.read(file)
    content = msgspec.json.encode({**document, **changed})
    replace_file(file, msgspec.json.format(content, indent=1), durable=True)
