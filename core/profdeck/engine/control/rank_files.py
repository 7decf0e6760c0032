"""Finds the files that an engine's ranks wrote, and downloads files on other hosts.

A rank's files are local if the local run contains its manifest with the token of the request. This detects a shared
directory independently of its mount point, and ignores unrelated files at the same path.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import attrs

from profdeck.base.identity import NAME, Identity
from profdeck.base.text import sentence
from profdeck.engine.control.downloads import Downloaded, Downloader, time_limit
from profdeck.engine.control.outcomes import is_active
from profdeck.engine.engine import RemoteFiles
from profdeck.records.capture import EngineCapture
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.request import Answer, CaptureRequest, Recorded, Reply
from profdeck.records.run_directory import RunDirectory
from profdeck.records.status import Status
from profdeck_traces.base.errors import ProfdeckError, describe_error
from profdeck_traces.base.text import plural, shell_word

if TYPE_CHECKING:
    from profdeck.engine.engine import Engine

logger = logging.getLogger("profdeck")

_MAX_LABELS = 4
_REMOTE_FILES = "Files of "
"""Start of the message about files on another host, also used to recognise the message."""
_RANK = re.compile(r"rank_(\d{4,9})")


@attrs.frozen
class _ExpectedManifest:
    """The manifest of a rank, or of another process of the engine."""

    owner: str
    """Label of the process in messages."""
    path: Path
    """Local path of the manifest."""
    reported: tuple[Reply, Recorded] | None = None
    """The process's reply and the record of the capture in it. None if its replies do not reach this process."""

    def matches(self, request: CaptureRequest, manifest: Manifest) -> bool:
        """Return whether a manifest belongs to the request and, if `reported` is set, to the process."""
        if manifest.request_token is not None or self.reported is None:
            return manifest.request_token == request.token
        reply, recorded = self.reported  # written by a profdeck version without tokens in manifests
        return (manifest.capture, manifest.host, manifest.pid) == (recorded.id, reply.host, reply.pid)


@attrs.frozen
class _RemoteLocation:
    """Location of files on another host, and the reason why they were not downloaded."""

    host: str
    directory: str
    reason: str


@attrs.define
class RankFiles:
    """The files of one capture."""

    capture: EngineCapture
    """The target's capture. Missing files are added to its problems."""
    request: CaptureRequest
    manifests: list[Path] = attrs.field(factory=list, init=False)
    """Local manifests of captures that have ended."""
    _silent_ranks: set[int] = attrs.field(factory=set, init=False)
    """Ranks without a reply and without a known manifest."""
    _remote_files: dict[_RemoteLocation, list[str]] = attrs.field(factory=lambda: defaultdict(list), init=False)
    """Labels of the processes whose files are on another host, by location."""
    _rank_directory: Path = attrs.field(init=False)
    """Local directory of the ranks' manifests."""

    def __attrs_post_init__(self) -> None:
        self._rank_directory = self._directory("")

    @property
    def complete(self) -> bool:
        """True if no files are known to be missing."""
        return not self._remote_files

    def show_writing(self, answer: Answer) -> bool:
        """Return whether the local manifests prove that a process is still writing.

        If an active process has no local manifest, return False.
        """
        active = {
            (directory, reply.rank) for _, directory, reply in self._replies(answer) if is_active(reply, self.request)
        }
        statuses = defaultdict[tuple[Path, int], set[Status]](set)
        for directory in {directory for directory, _ in active}:
            for manifest in self._manifests_of_request(directory):
                statuses[directory, manifest.rank].add(manifest.status)
        active_statuses = [statuses[process] for process in active]
        return all(active_statuses) and any(Status.RECORDING in values for values in active_statuses)

    def _manifests_of_request(self, directory: Path) -> Iterator[Manifest]:
        with contextlib.suppress(FileNotFoundError):
            for path in directory.iterdir():
                if f".{self.request.id}" in path.name and _parse_rank(path) >= 0 and is_manifest(path):
                    with contextlib.suppress(ProfdeckError):
                        manifest = read_manifest(path)
                        if manifest.request_token == self.request.token:
                            yield manifest

    async def collect(
        self, engine: Engine, answer: Answer, *, fetch: bool, deadline_s: float, timeout_message: str
    ) -> None:
        """Find the local manifests, and download the others if possible.

        Args:
            engine: the engine that recorded the capture.
            answer: the final replies of the engine's processes.
            fetch: whether downloads are enabled.
            deadline_s: time at which downloads stop, as returned by `time.monotonic`.
            timeout_message: error message after the deadline.
        """
        # A reply without a host was not sent by the rank but created by the engine's plugin.
        replied_ranks = {reply.rank for reply in answer.ranks if reply.host}
        self._silent_ranks = set(self.capture.expected_ranks or ()) - replied_ranks
        expected = self._reported_manifests(answer)
        local = await engine.call(self._read_local_manifests, expected)
        self.manifests = [path for path, manifest in local.items() if manifest.status is not Status.RECORDING]
        self._silent_ranks -= {manifest.rank for manifest in local.values() if manifest.role == self.request.role}
        remote = [manifest for manifest in expected if manifest.path not in local]
        is_shared = any(manifest.collected_from is None for manifest in local.values())
        files = engine.files(self.request.output) if remote or (self._silent_ranks and not is_shared) else None
        if files is not None and fetch:
            await self._fetch(files, remote, deadline_s, timeout_message)
        else:
            reason = "The engine has no server that can send them" if fetch else "The option collect is off"
            self._add_remote_files(remote, reason)
        self.manifests.sort()
        self._report_remote_files(can_fetch=files is not None)

    def _reported_manifests(self, answer: Answer) -> list[_ExpectedManifest]:
        """Return the manifests listed in the replies."""
        manifests = list[_ExpectedManifest]()
        for owner, directory, reply in self._replies(answer):
            for recorded in reply.captures if reply.token == self.request.token else ():
                path = directory / PurePosixPath(recorded.manifest).name
                if is_manifest(path) and path.name.isprintable() and recorded.status is not Status.RECORDING:
                    manifests.append(_ExpectedManifest(owner, path, (reply, recorded)))
        return manifests

    def _replies(self, answer: Answer) -> Iterator[tuple[str, Path, Reply]]:
        """Yield the label of each process, the local directory of its manifests, and its reply."""
        for reply in answer.ranks:
            yield f"rank {reply.rank}", self._rank_directory, reply
        for name, reply in answer.frontends.items():
            if NAME.fullmatch(f"{self.request.role}-{name}"):
                yield f"the {name}", self._directory(f"-{name}"), reply

    def _directory(self, role_suffix: str) -> Path:
        """Return the local directory for the manifests of the ranks (empty suffix) or of a frontend."""
        request = self.request
        identity = Identity(role=f"{request.role}{role_suffix}", replica=request.replica)
        return RunDirectory(request.output, request.run, {}).directory(request.first_step, identity)

    def _read_local_manifests(self, expected: Sequence[_ExpectedManifest]) -> dict[Path, Manifest]:
        local_paths = list[Path]()
        with contextlib.suppress(FileNotFoundError):
            local_paths += self._rank_directory.iterdir()  # refreshes the directory cache of network file systems
        candidates = {candidate.path: candidate for candidate in self._manifests_of_silent_ranks(local_paths)}
        candidates |= {candidate.path: candidate for candidate in expected}
        manifests = {}
        for path, candidate in candidates.items():
            with contextlib.suppress(ProfdeckError):
                manifest = read_manifest(path)
                if candidate.matches(self.request, manifest) and _has_all_artifacts(path, manifest):
                    manifests[path] = manifest
        return manifests

    def _manifests_of_silent_ranks(self, paths: Iterable[Path]) -> Iterator[_ExpectedManifest]:
        """Select possible manifests of the silent ranks by file name."""
        for path in paths:
            rank = _parse_rank(path)
            if rank in self._silent_ranks and f".{self.request.id}" in path.name and is_manifest(path):
                yield _ExpectedManifest(f"rank {rank}", path)

    async def _fetch(
        self, files: RemoteFiles, manifests: Sequence[_ExpectedManifest], deadline_s: float, timeout_message: str
    ) -> None:
        started_s = time.monotonic()
        try:
            async with time_limit(deadline_s, timeout_message):
                source = await files.source()
            downloader = Downloader(files, source, deadline_s, timeout_message)
            source_paths = {manifest: self._source_path(manifest, source.output) for manifest in manifests}
            if self._silent_ranks:
                directory = self._rank_directory
                parents = [path.parent for manifest, path in source_paths.items() if manifest.path.parent == directory]
                parent = parents[0] if parents else PurePosixPath(directory.relative_to(self.request.output))
                names = [PurePosixPath(name).name for name in await downloader.list_manifests(parent)]
                candidates = self._manifests_of_silent_ranks(directory / name for name in names)
                source_paths |= {manifest: parent / manifest.path.name for manifest in candidates}
        except ProfdeckError as error:
            self._add_remote_files(manifests, describe_error(error))
            return
        logger.info("Capture %s: downloading files of its ranks from %s.", self.capture.id, source.host)
        results = await asyncio.gather(
            *(self._download(downloader, manifest, path) for manifest, path in source_paths.items())
        )
        sizes = [size for result in results if result is not None for size in result.sizes_bytes]
        if sizes:
            artifacts = f"{plural(len(sizes), 'artifact')} ({sum(sizes):,} bytes)"
            duration_s = time.monotonic() - started_s
            self.capture.notes.append(f"Fetched {artifacts} from {source.host} in {duration_s:.1f} seconds.")
        reason = f"They are not on {source.host}, the server's host. If the rank wrote files, they are on its own host"
        for rank in sorted(self._silent_ranks):
            self._remote_files[_RemoteLocation("another host", source.output, reason)].append(f"rank {rank}")

    def _source_path(self, manifest: _ExpectedManifest, output: str) -> PurePosixPath:
        """Return a manifest's path relative to the server's output directory."""
        assert manifest.reported is not None  # noqa: S101  # true for all manifests of `_reported_manifests`
        try:
            return PurePosixPath(manifest.reported[1].manifest).relative_to(output)
        except ValueError:  # the reported path contains a link
            return PurePosixPath(manifest.path.relative_to(self.request.output))

    async def _download(
        self, downloader: Downloader, manifest: _ExpectedManifest, source_path: PurePosixPath
    ) -> Downloaded | None:
        host, directory = downloader.source.host, str(PurePosixPath(downloader.source.output, source_path.parent))
        result, reason = None, "The manifest on that host belongs to another capture"
        try:
            result = await downloader.download(
                source_path, manifest.path, functools.partial(manifest.matches, self.request)
            )
        except (ProfdeckError, OSError) as error:
            reason = describe_error(error)
            if manifest.reported is None:
                self._remote_files[_RemoteLocation(host, directory, reason)].append(manifest.owner)
                self._silent_ranks.discard(_parse_rank(manifest.path))
        if result is None:
            self._add_remote_files([manifest], reason)
            return None
        self.manifests.append(manifest.path)
        self._silent_ranks.discard(result.manifest.rank)
        for name, error_message in result.missing.items():
            location = _RemoteLocation(host, directory, error_message)
            self._remote_files[location].append(f"{manifest.owner} ({name})")
        return result

    def _add_remote_files(self, manifests: Sequence[_ExpectedManifest], reason: str) -> None:
        """Record the reported location of manifests and the reason why they are missing on this host."""
        for manifest in manifests:
            if manifest.reported is not None:
                reply, recorded = manifest.reported
                location = _RemoteLocation(reply.host, str(PurePosixPath(recorded.manifest).parent), reason)
                self._remote_files[location].append(manifest.owner)

    def _report_remote_files(self, *, can_fetch: bool) -> None:
        """Add the files on other hosts to the capture's problems."""
        if not self._remote_files:
            return
        run = self.request.output / self.request.run
        command = f"profdeck collect {shell_word(str(run))}"
        fix = f"Fetch them with `{command}`" if can_fetch else f"Copy them to {self._rank_directory}"
        for location, labels in self._remote_files.items():
            omitted_count = len(labels) - _MAX_LABELS
            names = ", ".join([*labels[:_MAX_LABELS], *([f"{omitted_count} more"] if omitted_count > 0 else [])])
            self.capture.problems.append(
                f"{_REMOTE_FILES}{names} are on {location.host}, in {location.directory}, not accessible from this "
                f"host ({socket.gethostname()}). {sentence(location.reason)} "
                f"{fix}, or set output to a directory that all hosts share."
            )


def is_remote_files_problem(problem: str) -> bool:
    """Return whether a capture's problem is that files are on another host."""
    # Manifests of earlier versions contain another wording after the directory.
    return problem.startswith(_REMOTE_FILES) and " are on " in problem


def _parse_rank(path: Path) -> int:
    """Return the rank in a file name, or -1 if there is none."""
    match = _RANK.match(path.name)
    return int(match[1]) if match else -1


def _has_all_artifacts(path: Path, manifest: Manifest) -> bool:
    """Return whether the artifacts of a downloaded manifest exist. Other manifests are not checked."""
    written = (record for record in manifest.artifacts if record.size_bytes or record.whole)
    return manifest.collected_from is None or all((path.parent / record.name).exists() for record in written)
