"""Finds out what the ranks of an engine have left here and what on other hosts, and has the rest fetched.

The files of a rank are here if the run has its manifest, with the token of the request. So a directory that hosts share
is recognised wherever it is mounted, and what stands at the same place by chance is not taken for it.
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
from profdeck.engine.control.downloads import Downloaded, Downloader, in_time
from profdeck.engine.control.outcomes import AT_REST
from profdeck.engine.engine import RemoteFiles
from profdeck.records.capture import EngineCapture
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.request import Answer, CaptureRequest, Recorded, Reply
from profdeck.records.run_directory import RunDirectory
from profdeck.records.status import Status
from profdeck_traces.base.errors import ProfdeckError, describe_error
from profdeck_traces.base.text import plural

if TYPE_CHECKING:
    from profdeck.engine.engine import Engine

logger = logging.getLogger("profdeck")

_MOST_NAMED = 4
_ELSEWHERE = "Files of ", ", which cannot be seen from here "
_RANK = re.compile(r"rank_(\d{4,9})")


@attrs.frozen
class _Expected:
    """The manifest of a rank, or of another process of the engine."""

    who: str
    path: Path
    """Where it belongs here."""
    told: tuple[Reply, Recorded] | None = None
    """What its process says of it; None if its answers do not come to this one."""

    def is_it(self, asked: CaptureRequest, manifest: Manifest) -> bool:
        """Tell whether a manifest is the expected one."""
        if manifest.request_token is not None or self.told is None:
            return manifest.request_token == asked.token
        reply, recorded = self.told  # whose profdeck does not write the token yet
        return (manifest.capture, manifest.host, manifest.pid) == (recorded.id, reply.host, reply.pid)


@attrs.frozen
class _NotHere:
    """What is on another host, and why it is not here."""

    host: str
    directory: str
    reason: str


@attrs.define
class RankFiles:
    """What one capture has left."""

    capture: EngineCapture
    """That of the target; what is missing here is its problem."""
    asked: CaptureRequest
    manifests: list[Path] = attrs.field(factory=list, init=False)
    """Those of captures that have ended, as far as they are here."""
    _silent: set[int] = attrs.field(factory=set, init=False)
    """The ranks of which no answer has come and no file is known."""
    _left: dict[_NotHere, list[str]] = attrs.field(factory=lambda: defaultdict(list), init=False)
    """By place and reason, of whom it is."""
    _ranks: Path = attrs.field(init=False)
    """Where the manifests of ranks are."""

    def __attrs_post_init__(self) -> None:
        """Find out where the manifests of ranks are, once for all."""
        self._ranks = self._directory("")

    @property
    def complete(self) -> bool:
        """Whether nothing is known to be missing here."""
        return not self._left

    def show_writing(self, answer: Answer) -> bool:
        """Tell whether there are manifests here of all processes that were writing, and any says that it still is."""
        writing = {(place, reply.rank) for _, place, reply in self._replies(answer) if reply.state not in AT_REST}
        found = defaultdict[tuple[Path, int], set[Status]](set)
        for place in {place for place, _ in writing}:
            for manifest in self._ours(place):
                found[place, manifest.rank].add(manifest.status)
        statuses = [found[one] for one in writing]
        return all(statuses) and any(Status.RECORDING in of_process for of_process in statuses)

    def _ours(self, directory: Path) -> Iterator[Manifest]:
        """Yield the manifests in a directory that are of the request."""
        with contextlib.suppress(FileNotFoundError):
            for path in directory.iterdir():
                if f".{self.asked.id}" in path.name and _rank(path) >= 0 and is_manifest(path):
                    with contextlib.suppress(ProfdeckError):
                        manifest = read_manifest(path)
                        if manifest.request_token == self.asked.token:
                            yield manifest

    async def collect(self, engine: Engine, answer: Answer, *, fetch: bool, until: float, late: str) -> None:
        """Find out what is here, and fetch the rest if it can be fetched.

        Args:
            engine: what has recorded.
            answer: what its processes said when they had ended.
            fetch: whether anything may be fetched.
            until: when no more time is left for that, by `time.monotonic`.
            late: what to say then.
        """
        answered = {reply.rank for reply in answer.ranks if reply.host}  # without one, the asking process made it up
        self._silent = set(self.capture.expected_ranks or ()) - answered
        wanted = self._named(answer)
        here = await engine.call(self._look, wanted)
        self.manifests = [path for path, manifest in here.items() if manifest.status is not Status.RECORDING]
        self._silent -= {manifest.rank for manifest in here.values() if manifest.role == self.asked.role}
        unseen = [one for one in wanted if one.path not in here]
        shared = any(manifest.collected_from is None for manifest in here.values())
        files = engine.files(self.asked.output) if unseen or (self._silent and not shared) else None
        if files is not None and fetch:
            await self._fetch(files, unseen, until, late)
        else:
            why = "Its engine has no server that could send them" if fetch else "The option collect is off"
            self._leave(unseen, why)
        self.manifests.sort()
        self._tell(can_send=files is not None)

    def _named(self, answer: Answer) -> list[_Expected]:
        """Return the manifests that the processes name."""
        asked, wanted = self.asked, list[_Expected]()
        for who, directory, reply in self._replies(answer):
            for recorded in reply.captures if reply.token == asked.token else ():
                path = directory / PurePosixPath(recorded.manifest).name
                if is_manifest(path) and path.name.isprintable() and recorded.status is not Status.RECORDING:
                    wanted.append(_Expected(who, path, (reply, recorded)))
        return wanted

    def _replies(self, answer: Answer) -> Iterator[tuple[str, Path, Reply]]:
        """Yield who has replied, where its manifests are, and the reply."""
        for reply in answer.ranks:
            yield f"rank {reply.rank}", self._ranks, reply
        for name, reply in answer.frontends.items():
            if NAME.fullmatch(f"{self.asked.role}-{name}"):
                yield f"the {name}", self._directory(f"-{name}"), reply

    def _directory(self, frontend: str) -> Path:
        """Return where the manifests of ranks are, or that of a frontend, whose role ends so."""
        asked = self.asked
        identity = Identity(role=f"{asked.role}{frontend}", replica=asked.replica)
        return RunDirectory(asked.output, asked.run, {}).directory(asked.first_step, identity)

    def _look(self, wanted: Sequence[_Expected]) -> dict[Path, Manifest]:
        """Return the manifests that are here."""
        beside = list[Path]()
        with contextlib.suppress(FileNotFoundError):
            beside += self._ranks.iterdir()  # after that, network file systems know what is new
        looked_for = {one.path: one for one in self._others(beside)}
        looked_for |= {one.path: one for one in wanted}
        here = {}
        for path, one in looked_for.items():
            with contextlib.suppress(ProfdeckError):
                manifest = read_manifest(path)
                if one.is_it(self.asked, manifest) and _is_whole(path, manifest):
                    here[path] = manifest
        return here

    def _others(self, paths: Iterable[Path]) -> Iterator[_Expected]:
        """Choose by their names what may be manifests of ranks of which no answer has come."""
        for path in paths:
            rank = _rank(path)
            if rank in self._silent and f".{self.asked.id}" in path.name and is_manifest(path):
                yield _Expected(f"rank {rank}", path)

    async def _fetch(self, files: RemoteFiles, unseen: Sequence[_Expected], until: float, late: str) -> None:
        began = time.monotonic()
        try:
            async with in_time(until, late):
                source = await files.source()
            fetcher = Downloader(files, source, until, late)
            places = {one: self._place(one, source.output) for one in unseen}
            if self._silent:
                directory = self._ranks
                beside = [place.parent for one, place in places.items() if one.path.parent == directory]
                there = beside[0] if beside else PurePosixPath(directory.relative_to(self.asked.output))
                names = [PurePosixPath(name).name for name in await fetcher.listed(there)]
                places |= {one: there / one.path.name for one in self._others(directory / name for name in names)}
        except ProfdeckError as error:
            self._leave(unseen, describe_error(error))
            return
        logger.info("Capture %s: files of its ranks are fetched from %s.", self.capture.id, source.host)
        found = await asyncio.gather(*(self._bring(fetcher, one, place) for one, place in places.items()))
        sizes = [size for brought in found if brought is not None for size in brought.sizes_bytes]
        if sizes:
            what = f"{plural(len(sizes), 'artifact')} ({sum(sizes):,} bytes)"
            took_s = time.monotonic() - began
            self.capture.notes.append(f"Fetched {what} from {source.host} in {took_s:.1f} seconds.")
        why = (
            f"They are not on {source.host} either, where the server is: if there are any, the rank's own host has them"
        )
        for rank in sorted(self._silent):
            self._left[_NotHere("another host", source.output, why)].append(f"rank {rank}")

    def _place(self, one: _Expected, output: str) -> PurePosixPath:
        """Return where a manifest is below the server's output directory."""
        assert one.told is not None  # noqa: S101  # of others nothing is known so far
        try:
            return PurePosixPath(one.told[1].manifest).relative_to(output)
        except ValueError:  # links lead there
            return PurePosixPath(one.path.relative_to(self.asked.output))

    async def _bring(self, fetcher: Downloader, one: _Expected, place: PurePosixPath) -> Downloaded | None:
        host, directory = fetcher.source.host, str(PurePosixPath(fetcher.source.output, place.parent))
        brought, why = None, "The manifest there now is of another capture"
        try:
            brought = await fetcher.bring(place, one.path, functools.partial(one.is_it, self.asked))
        except (ProfdeckError, OSError) as error:
            why = describe_error(error)
            if one.told is None:
                self._left[_NotHere(host, directory, why)].append(one.who)
                self._silent.discard(_rank(one.path))
        if brought is None:
            self._leave([one], why)
            return None
        self.manifests.append(one.path)
        self._silent.discard(brought.manifest.rank)
        for name, reason in brought.left.items():
            self._left[_NotHere(host, directory, reason)].append(f"{one.who} ({name})")
        return brought

    def _leave(self, wanted: Sequence[_Expected], why: str) -> None:
        """Keep where the files of some manifests are, as their processes say, and why they are not here."""
        for one in wanted:
            if one.told is not None:
                reply, recorded = one.told
                self._left[_NotHere(reply.host, str(PurePosixPath(recorded.manifest).parent), why)].append(one.who)

    def _tell(self, *, can_send: bool) -> None:
        """Say in the capture what is not here."""
        if not self._left:
            return
        run = self.asked.output / self.asked.run
        fix = f"Fetch them with 'profdeck collect {run}'" if can_send else f"Copy them to {self._ranks}"
        for left, whose in self._left.items():
            more = len(whose) - _MOST_NAMED
            names = ", ".join([*whose[:_MOST_NAMED], *([f"{more} more"] if more > 0 else [])])
            self.capture.problems.append(
                f"{_ELSEWHERE[0]}{names} are on {left.host}, in {left.directory}{_ELSEWHERE[1]}"
                f"({socket.gethostname()}). {sentence(left.reason)} "
                f"{fix}, or let output be a directory that all hosts share."
            )


def is_of_files_elsewhere(problem: str) -> bool:
    """Tell whether a problem of a capture is that files are on another host."""
    return problem.startswith(_ELSEWHERE[0]) and _ELSEWHERE[1] in problem


def _rank(path: Path) -> int:
    """Read the rank in the name of a file; -1 if there is none."""
    found = _RANK.match(path.name)
    return int(found[1]) if found else -1


def _is_whole(path: Path, manifest: Manifest) -> bool:
    """Tell whether a copy has all that it names; the readers of others report that."""
    there = ((path.parent / record.name).exists() for record in manifest.artifacts if record.size_bytes or record.whole)
    return manifest.collected_from is None or all(there)
