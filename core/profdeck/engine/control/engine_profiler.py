"""Captures by an engine's own profiler: its files are found, checked, and brought into the run.

For engines whose processes have not loaded profdeck. What a capture asks for and the engine's profiler cannot do is
refused, with what to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import attrs

from profdeck.backends.recording import adopt, reserve
from profdeck.base.errors import CaptureError, target_error
from profdeck.base.identity import Identity
from profdeck.base.outcome import Outcome
from profdeck.config.structuring import unstructure
from profdeck.engine.engine import Engine
from profdeck.engine.options import EngineOptions
from profdeck.records.artifact import Artifact
from profdeck.records.capture import EngineCapture
from profdeck.records.manifest import ManifestWriter
from profdeck.records.request import MAX_RANKS, BatchKind, CaptureRequest
from profdeck.records.run_directory import RunDirectory
from profdeck_traces import TraceCheck, check_trace
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import link_or_copy

EngineT = TypeVar("EngineT", bound=Engine)
OptionsT = TypeVar("OptionsT", bound=EngineOptions)

_STILL_WRITING = {Outcome.TIMED_OUT, Outcome.UNREACHABLE}
"""Who does not answer a stop may be at work on it; an answer, also one that it failed, comes when the work is over."""
_POLL_S = 0.2
_QUIET_S = 30.0
"""Engines answer a stop when they have written, or failed to; the rest is for file systems that tell late."""


@attrs.frozen
class TraceOrigin:
    """Rank, parallel coordinates and batch kind, parsed from a trace's file name."""

    rank: int
    parallel: Mapping[str, int] = attrs.field(factory=dict)
    batch: BatchKind | None = None


RankAndKind = tuple[int, BatchKind | None]
"""A rank and the kind of batches, where kinds are recorded apart."""


@attrs.frozen
class _Found:
    path: Path
    place: TraceOrigin
    check: TraceCheck

    @property
    def part(self) -> RankAndKind:
        return self.place.rank, self.place.batch


class OwnProfilerCapture(ABC, Generic[EngineT, OptionsT]):
    """Base class for captures with the engine's own profiler."""

    backend: ClassVar[str]
    """The name of the engine's backend."""
    title: ClassVar[str]
    """The name of the engine, as it writes itself."""
    glob: ClassVar[str]
    """What the names of traces look like."""
    in_directories: ClassVar[bool] = False
    """Whether traces may be in directories that the engine makes in its own."""

    def __init__(self, engine: EngineT, options: OptionsT, capture: EngineCapture, request: CaptureRequest) -> None:
        """Args:
        engine: what records.
        options: the role's options.
        capture: the capture of the target.
        request: what is asked for.
        """
        self._engine = engine
        self._capture = capture
        self._request = request
        self._options = options
        self._directory: Path | None = None
        self._before: set[Path] = set()
        self._prefix = ""
        self._lock: int | None = None
        """Of the directory, as long as its traces cannot be told from those of others."""
        self._world: int | None = None
        self.manifests: list[Path] = []
        """Of the ranks, once it has been stopped."""
        self.outcome = Outcome.FLUSHED
        """How the stop came out."""
        self.fix: str | None = None
        """What to do about that, where more is known than `Outcome.fix` says."""

    @abstractmethod
    async def start(self) -> None:
        """Start it; see `profdeck.engine.control.control_backend.EngineProfiler`."""

    @abstractmethod
    async def end(self) -> None:
        """Ask the engine to end it.

        Raises:
            CaptureError: it does not answer, or refuses.
        """

    @abstractmethod
    def place(self, path: Path) -> TraceOrigin | None:
        """Read the name of a trace; None if no worker wrote it."""

    @property
    @abstractmethod
    def remedy(self) -> str:
        """Where the engine tells what it failed to write."""

    def watch(self, directory: Path, prefix: str = "", *, alone: bool = False) -> None:
        """Take traces as the capture's that come into a directory from now on.

        Args:
            directory: where the engine writes.
            prefix: how the names of this capture's traces begin. Without one every new trace counts, so that no other
                capture may watch the directory meanwhile.
            alone: whether the directory was made for this capture.

        Raises:
            CaptureError: another capture watches it.
        """
        self._directory, self._prefix = directory, prefix
        if not (prefix or alone) and directory.is_dir():
            self._lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._unwatch()
                raise CaptureError(
                    f"Another capture waits for traces in {directory}, and {self._engine.name} cannot be told to name "
                    "its own: they could not be told apart. Launch each engine with a directory of its own, or capture "
                    "one after the other."
                ) from None
        self._before = set(self._files())

    def _unwatch(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    async def stop(self) -> None:
        """Stop it, wait for the files and bring them into the run, with a manifest for each rank."""
        try:
            await self._bring_in()
        finally:
            self._unwatch()

    async def _bring_in(self) -> None:
        problems = self._capture.problems
        missing, fix, quiet_s = Outcome.FILES_MISSING, self.fix, _QUIET_S
        try:
            await self.end()
        except CaptureError as error:
            problems.append(str(error))
            failure = target_error(error)
            missing, fix = failure.outcome, failure.fix  # why nothing may have been written
            if missing in _STILL_WRITING:
                quiet_s = self._options.flush_timeout_s
        if self._directory is None or not self._directory.is_dir():
            problems.append(f"The traces cannot be brought into the run: {self._directory} is not on this host.")
            self.outcome, self.fix = missing, fix
            return
        whole, broken = await self._wait(quiet_s)
        wanted = self._wanted() or tuple(broken)
        self._capture.expected_ranks = tuple(sorted({rank for rank, _ in (*wanted, *whole)}))
        if not whole or not whole.keys() >= set(wanted):
            self.outcome, self.fix = missing, fix
        problems += [
            f"Rank {rank} left no whole {f'{batch} ' if batch else ''}file in {self._directory}"
            f"{broken.get((rank, batch), '')}. {self.remedy}"
            for rank, batch in wanted
            if (rank, batch) not in whole
        ]
        if not whole and not wanted:
            problems.append(f"There is no new trace in {self._directory}. {self.remedy}")
        for part, found in sorted(whole.items(), key=str):
            await self._engine.call(self._adopt, part, found)

    def all_there(self) -> bool:
        """Tell whether every wanted part has a new file, whole or not."""
        places = [place for path in self._files() if path not in self._before and (place := self.place(path))]
        return {(place.rank, place.batch) for place in places} >= set(self._wanted())

    def _files(self) -> Iterable[Path]:
        if self._directory is None:
            return
        found = _listed(self._directory)
        if self.in_directories:
            found += [path for one in found if one.is_dir() for path in _listed(one)]
        yield from (path for path in found if path.name.startswith(self._prefix) and fnmatch(path.name, self.glob))

    def _wanted(self) -> tuple[RankAndKind, ...]:
        if self._world is not None and self._world > MAX_RANKS:
            raise CaptureError(f"{self._engine.name} says that it has {self._world:,} ranks; no engine has.")
        if self._world is not None:
            ranks = tuple(rank for rank in range(self._world) if self._request.selects(rank))
        else:
            ranks = () if isinstance(self._request.ranks, str) else self._request.ranks
        return tuple((rank, batch) for rank in ranks for batch in self._request.batch_kinds or (None,))

    async def _wait(self, quiet_s: float) -> tuple[dict[RankAndKind, list[_Found]], dict[RankAndKind, str]]:
        """Wait until every wanted part has a new file that is whole, or none of them has changed for a while.

        Returns:
            The whole files, and what is wrong with those of the other parts.
        """
        began = changed = time.monotonic()
        checked: dict[tuple[Path, int], _Found] = {}
        while True:
            before = len(checked)
            for path in self._files():
                place, size = self.place(path), -1
                with contextlib.suppress(OSError):  # it went away
                    size = path.stat().st_size
                if path in self._before or place is None or not self._request.selects(place.rank):
                    continue
                if (path, size) in checked or size < 0:
                    continue
                with contextlib.suppress(TraceError):  # it cannot be read yet
                    checked[path, size] = _Found(path, place, await self._engine.call(check_trace, path))
            whole: dict[RankAndKind, list[_Found]] = {}
            for found in checked.values():
                if found.check.whole:
                    whole.setdefault(found.part, []).append(found)
            if whole and whole.keys() >= set(self._wanted()):
                return whole, {}
            now = time.monotonic()
            changed = now if len(checked) > before else changed
            if now >= changed + quiet_s or now >= began + self._options.flush_timeout_s:
                broken = {found.part: f" ({found.path.name}: {found.check.problem})" for found in checked.values()}
                return whole, broken
            await self._engine.sleep(_POLL_S)

    def _adopt(self, part: RankAndKind, found: Sequence[_Found]) -> None:
        request, (rank, batch) = self._request, part
        identity = Identity(
            role=request.role,
            replica=request.replica,
            rank=rank,
            world_size=max(self._world or 0, rank + 1),
            parallel=found[0].place.parallel,
        )
        run = RunDirectory(request.output, request.run, {"roles": [request.role]})
        capture = run.capture_of(request, identity, batch)
        capture.started_ns = self._capture.started_ns
        recorder = ManifestWriter(
            backend=self.backend,
            versions={},
            options=unstructure(request.options),
            expected_ranks=self._capture.expected_ranks or (),
        )
        reserve(capture, run, recorder)
        artifacts = []
        for number, item in enumerate(found):
            suffix = ".trace.json.gz" if item.path.suffix == ".gz" else ".trace.json"
            path = capture.artifact_path(suffix, str(number) if number else None)
            link_or_copy(item.path, path)
            artifacts.append(Artifact(path=path, size_bytes=item.check.size_bytes, events=item.check.events))
        capture.notes.append(f"Recorded by {self.title}'s own profiler in {self._directory}.")
        adopt(capture, recorder, tuple(artifacts))
        self.manifests.append(capture.manifest_path)


def _listed(directory: Path) -> list[Path]:
    """Return what is in a directory; nothing if it is gone or closed, as those of others may be at any time."""
    try:
        return [*directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
