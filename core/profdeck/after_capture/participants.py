"""Waits until all participating processes have ended a capture."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from profdeck.after_capture.finish_record import finish_id
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.status import Status
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.inputs.artifact_kinds import PendingWork, files_below, kind_named

_NAMES_LIMIT = 20
_FIRST_POLL_S, _LAST_POLL_S = 0.05, 1.0

Missing = dict[str, bool | None]
"""Maps the name of each participant that has not ended the capture to its state.

True: the participant is recording or analysing. False: its process exited without ending the capture. None: the state
is unknown, or the participant has exceeded its time limit.
"""


class Participants:
    """Processes that participate in a step's captures, as listed in the step's manifests."""

    def __init__(self, directory: Path, name: str, roles: Sequence[str]) -> None:
        """Args:
        directory: the step directory.
        name: the name of the finish task, from `finish_id`.
        roles: the names of the job's roles.
        """
        self._directory = directory
        self._name = name
        self._roles = roles
        self._ended: dict[Path, Manifest] = {}
        """Manifests that will not change again."""

    def includes(self, manifest: Manifest) -> bool:
        """Return whether a manifest describes a capture that this finish task covers."""
        return finish_id(manifest.first_step, manifest.request or manifest.capture) == self._name

    def missing(self) -> tuple[Missing, object]:
        """Return the participants that have not ended the capture, and a snapshot of their progress.

        Two snapshots differ if a participant has made progress in between. Callers must poll this method, because
        shared file systems do not report changes.
        """
        manifests = sorted(self._read(), key=lambda manifest: manifest.started_ns)
        last = {_process(manifest): manifest for manifest in manifests}
        missing = dict(
            _state(manifest)
            for manifest in manifests
            if manifest.status is Status.RECORDING or (manifest.more_follow and last[_process(manifest)] is manifest)
        )
        missing.update((work.what, work.alive) for work in self._analyses())
        missing.update((f"{name}, which has not started", None) for name in self._absent(manifests))
        return missing, (missing, len(manifests), len(self._ended))

    def _read(self) -> Iterator[Manifest]:
        for file in filter(is_manifest, files_below(self._directory)):
            if (manifest := self._ended.get(file)) is None:
                try:
                    manifest = read_manifest(file)
                except ProfdeckError:  # the report lists the error
                    continue
                if manifest.status is not Status.RECORDING and not manifest.more_follow:
                    self._ended[file] = manifest
            if self.includes(manifest):
                yield manifest

    def _analyses(self) -> Iterator[PendingWork]:
        for file, manifest in self._ended.items():
            for record in manifest.artifacts if self.includes(manifest) else ():
                kind = kind_named(record.kind)
                with suppress(ProfdeckError):  # the report lists the error
                    if kind is not None and (work := kind.pending(file.parent / record.name)) is not None:
                        yield work

    def _absent(self, manifests: Sequence[Manifest]) -> Iterator[str]:
        """Yield the names of ranks and roles that have not started the capture."""
        # Engine ranks need no check here, because they write their manifests before their target's stop() returns.
        job_manifests = [manifest for manifest in manifests if manifest.target is None and manifest.request is None]
        started, expected = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
        for manifest in job_manifests:
            started[manifest.role_and_replica].add(manifest.rank)
            expected[manifest.role_and_replica].update(manifest.expected_ranks)
        for role, ranks in sorted(expected.items()):
            yield from (f"{role} rank {rank}" for rank in sorted(ranks - started[role]))
        roles = {manifest.role for manifest in manifests}
        yield from (f"the role {role}" for role in self._roles if role not in roles)


def _process(manifest: Manifest) -> tuple[object, ...]:
    return manifest.role_and_replica, manifest.rank, manifest.target, manifest.process


def _state(manifest: Manifest) -> tuple[str, bool | None]:
    """Return the name and state of a participant that has not ended the capture, as in `Missing`."""
    part = f"({manifest.target})" if manifest.target else f"rank {manifest.rank}"
    name = f"{manifest.role_and_replica} {part} (process {manifest.pid} on {manifest.host})"
    if not (alive := manifest.process.alive):
        return name, alive
    limit_s = float(manifest.options.get("max_capture_s", 0.0))
    return name, True if time.time() < manifest.started_ns / 1e9 + limit_s else None


def wait(participants: Participants, wait_s: float, on_wait: Callable[[tuple[str, ...]], None]) -> tuple[str, ...]:
    """Wait until every participant has ended the capture or exited.

    The wait times out after `wait_s` without progress, but never while a participant is known to be recording or
    analysing.

    Args:
        participants: the participants.
        wait_s: maximum time without progress, in seconds.
        on_wait: called repeatedly with the names of the participants that might still end the capture.

    Returns:
        The names of the participants that have not ended the capture.
    """
    last_snapshot: object = None
    progress_s, pause_s = time.monotonic(), _FIRST_POLL_S
    while True:
        missing, snapshot = participants.missing()
        may_end = [name for name, is_recording in missing.items() if is_recording is not False]
        if not may_end:
            return _shortened([*missing])
        if snapshot != last_snapshot or True in missing.values():
            progress_s = time.monotonic()
        elif time.monotonic() - progress_s >= wait_s:
            return _shortened([*missing])
        on_wait(_shortened(may_end))
        pause_s = _FIRST_POLL_S if snapshot != last_snapshot else min(pause_s * 1.5, _LAST_POLL_S)
        last_snapshot = snapshot
        time.sleep(pause_s)


def _shortened(names: Sequence[str]) -> tuple[str, ...]:
    more = len(names) - _NAMES_LIMIT
    return (*names[:_NAMES_LIMIT], *([f"{more} more"] if more > 0 else []))
