"""Waits until all processes of a job have ended a capture."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import attrs

from profdeck.after_run.record import (
    RecordFile,
    finish_id,
)
from profdeck.base.processes import is_running
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.status import Status
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.inputs.artifact_kinds import files_below, kind_named

_MOST_NAMED = 20
_FIRST_POLL_S, _LAST_POLL_S = 0.05, 1.0


# Who takes part.


@attrs.frozen
class Unfinished:
    """Who has not ended."""

    open: tuple[str, ...] = ()
    """Those who may still do so."""
    lost: tuple[str, ...] = ()
    """Those who never will, as their processes are gone."""
    at_work: bool = False
    """Whether one of those who may is known to be at it: on this host, and no longer than a capture may last."""


class Participants:
    """The processes that take part in the captures of a step, by their manifests."""

    def __init__(self, directory: Path, name: str, roles: Sequence[str]) -> None:
        """Args:
        directory: of the step.
        name: of the finish.
        roles: those of the job.
        """
        self._directory = directory
        self._name = name
        self._roles = roles
        self._over: dict[Path, Manifest] = {}
        """Those that are not written any more."""

    def counts(self, manifest: Manifest) -> bool:
        """Tell whether a manifest is of one of these captures."""
        return finish_id(manifest.first_step, manifest.request or manifest.capture) == self._name

    def look(self) -> tuple[Unfinished, object]:
        """See who has not ended; also returns what is another one when something has changed."""
        manifests = sorted(self._read(), key=lambda manifest: manifest.started_ns)
        last = {_process(manifest): manifest for manifest in manifests}
        found = [
            _at_work(manifest)
            for manifest in manifests
            if manifest.status is Status.RECORDING or (manifest.more_follow and last[_process(manifest)] is manifest)
        ]
        found += self._analyses()
        found += [Unfinished((f"{who}, which has not begun",)) for who in self._absent(manifests)]
        sight = Unfinished(
            tuple(name for one in found for name in one.open),
            tuple(name for one in found for name in one.lost),
            any(one.at_work for one in found),
        )
        return sight, (sight, len(manifests), len(self._over))

    def _read(self) -> Iterator[Manifest]:
        for file in filter(is_manifest, files_below(self._directory)):
            if (manifest := self._over.get(file)) is None:
                try:
                    manifest = read_manifest(file)
                except ProfdeckError:  # the report names it
                    continue
                if manifest.status is not Status.RECORDING and not manifest.more_follow:
                    self._over[file] = manifest
            if self.counts(manifest):
                yield manifest

    def _analyses(self) -> Iterator[Unfinished]:
        """Tell of what is still made of raw data."""
        for file, manifest in self._over.items():
            for record in manifest.artifacts if self.counts(manifest) else ():
                kind = kind_named(record.kind)
                with suppress(ProfdeckError):  # as above
                    if kind is not None and (work := kind.pending(file.parent / record.name)) is not None:
                        yield (
                            Unfinished(lost=(work.what,))
                            if work.alive is False
                            else Unfinished((work.what,), at_work=bool(work.alive))
                        )

    def _absent(self, manifests: Sequence[Manifest]) -> Iterator[str]:
        """Name those who take part and have not begun."""
        # Those of an engine are known when its stop is over, and nothing comes behind.
        own = [manifest for manifest in manifests if manifest.target is None and manifest.request is None]
        there, expected = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
        for manifest in own:
            there[manifest.role_and_replica].add(manifest.rank)
            expected[manifest.role_and_replica].update(manifest.expected_ranks)
        for role, ranks in sorted(expected.items()):
            yield from (f"{role} rank {rank}" for rank in sorted(ranks - there[role]))
        roles = {manifest.role for manifest in manifests}
        yield from (f"the role {role}" for role in self._roles if role not in roles)


def _process(manifest: Manifest) -> tuple[object, ...]:
    return manifest.role_and_replica, manifest.rank, manifest.target, manifest.host, manifest.pid


def _at_work(manifest: Manifest) -> Unfinished:
    """Tell whether a process that has not ended the captures may still do so."""
    what = f"({manifest.target})" if manifest.target else f"rank {manifest.rank}"
    who = f"{manifest.role_and_replica} {what} (process {manifest.pid} on {manifest.host})"
    if manifest.host != socket.gethostname():
        return Unfinished((who,))
    if not is_running(manifest.host, manifest.pid, manifest.process_started):
        return Unfinished(lost=(who,))
    limit_s = float(manifest.options.get("max_capture_s", 0.0))
    return Unfinished((who,), at_work=time.time() < manifest.started_ns / 1e9 + limit_s)


def wait(others: Participants, desk: RecordFile) -> tuple[str, ...]:
    """Wait until all have ended, or nothing has been heard for long enough; return who is missing then."""
    before: object = None
    quiet_since_s, pause_s = time.monotonic(), _FIRST_POLL_S
    while True:
        sight, seen = others.look()
        if not sight.open:
            return named(sight.lost)
        if seen != before or sight.at_work:
            quiet_since_s = time.monotonic()
        elif time.monotonic() - quiet_since_s >= desk.record.wait_s:
            return named((*sight.lost, *sight.open))
        if (waits_for := named(sight.open)) != desk.record.waits_for:
            desk.say(waits_for=waits_for)
        pause_s = _FIRST_POLL_S if seen != before else min(pause_s * 1.5, _LAST_POLL_S)
        before = seen
        time.sleep(pause_s)


def named(names: Sequence[str]) -> tuple[str, ...]:
    """Shorten a list of names."""
    more = len(names) - _MOST_NAMED
    return (*names[:_MOST_NAMED], *([f"{more} more"] if more > 0 else []))
