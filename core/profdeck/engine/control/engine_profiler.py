"""Captures with an engine's own profiler: finds and validates its traces, and adds them to the run.

Used for engines whose processes have not loaded profdeck. Requests that the engine's profiler cannot fulfil are
refused, with a suggested fix.
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
"""Stop errors after which the engine may still be writing. Other errors are returned after the engine has finished."""
_POLL_S = 0.2
_QUIET_S = 30.0
"""Time without changes after which no more files are expected, in seconds. Engines reply to a stop after writing, so
this only covers the delay of network file systems.
"""


@attrs.frozen
class TraceOrigin:
    """Rank, parallel coordinates and batch kind, parsed from a trace's file name."""

    rank: int
    parallel: Mapping[str, int] = attrs.field(factory=dict)
    batch: BatchKind | None = None


RankAndKind = tuple[int, BatchKind | None]
"""A rank, and the batch kind if each kind is recorded separately."""


@attrs.frozen
class _CheckedTrace:
    path: Path
    origin: TraceOrigin
    check: TraceCheck

    @property
    def rank_and_kind(self) -> RankAndKind:
        return self.origin.rank, self.origin.batch


class OwnProfilerCapture(ABC, Generic[EngineT, OptionsT]):
    """Base class for captures with the engine's own profiler."""

    backend: ClassVar[str]
    """The name of the engine's backend."""
    title: ClassVar[str]
    """Display name of the engine."""
    glob: ClassVar[str]
    """Pattern of the traces' file names."""
    search_subdirectories: ClassVar[bool] = False
    """True if the engine's profiler writes traces to subdirectories of its trace directory."""

    def __init__(self, engine: EngineT, options: OptionsT, capture: EngineCapture, request: CaptureRequest) -> None:
        """Args:
        engine: the engine to control.
        options: the role's options.
        capture: the target's capture.
        request: the capture request.
        """
        self._engine = engine
        self._capture = capture
        self._request = request
        self._options = options
        self._directory: Path | None = None
        self._earlier_files: set[Path] = set()
        self._prefix = ""
        self._lock: int | None = None
        """Descriptor of the locked directory. It is locked if the names do not distinguish captures."""
        self._world: int | None = None
        self.manifests: list[Path] = []
        """Manifests of the ranks. Set by `stop`."""
        self.outcome = Outcome.FLUSHED
        """Result of the stop."""
        self.fix: str | None = None
        """Suggested fix for the outcome, if it is more specific than `Outcome.fix`."""

    @abstractmethod
    async def start(self) -> None:
        """Start the engine's profiler; see `profdeck.engine.control.control_backend.EngineProfiler`."""

    @abstractmethod
    async def end(self) -> None:
        """Stop the engine's profiler.

        Raises:
            CaptureError: the engine does not reply, or refuses the command.
        """

    @abstractmethod
    def parse_name(self, path: Path) -> TraceOrigin | None:
        """Parse the file name of a trace. Return None if the file was not written by a worker."""

    @property
    @abstractmethod
    def remedy(self) -> str:
        """Sentence for messages about missing traces that says where the engine logs write errors."""

    def watch(self, directory: Path, prefix: str = "", *, alone: bool = False) -> None:
        """Assign traces that appear in a directory from now on to this capture.

        Args:
            directory: the engine's trace directory.
            prefix: prefix of the file names of this capture's traces. Without a prefix, all new traces are assigned,
                and the directory is locked against other captures.
            alone: whether the directory was created for this capture only.

        Raises:
            CaptureError: another capture has locked the directory.
        """
        self._directory, self._prefix = directory, prefix
        if not (prefix or alone) and directory.is_dir():
            self._lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._unwatch()
                raise CaptureError(
                    f"Another capture is waiting for traces in {directory}, and the trace names of {self._engine.name} "
                    "are not unique per capture. Start each engine with its own trace directory, or capture the "
                    "engines one after the other."
                ) from None
        self._earlier_files = set(self._files())

    def _unwatch(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    async def stop(self) -> None:
        """Stop the engine's profiler, wait for its traces and add them to the run, with a manifest for each rank."""
        try:
            await self._stop_and_adopt()
        finally:
            self._unwatch()

    async def _stop_and_adopt(self) -> None:
        problems = self._capture.problems
        failure_outcome, fix, quiet_s = Outcome.FILES_MISSING, self.fix, _QUIET_S
        try:
            await self.end()
        except CaptureError as error:
            problems.append(str(error))
            failure = target_error(error)
            failure_outcome, fix = failure.outcome, failure.fix
            if failure_outcome in _STILL_WRITING:
                quiet_s = self._options.flush_timeout_s
        if self._directory is None or not self._directory.is_dir():
            problems.append(f"The traces cannot be added to the run: {self._directory} does not exist on this host.")
            self.outcome, self.fix = failure_outcome, fix
            return
        complete, broken = await self._wait(quiet_s)
        expected = self._expected() or tuple(broken)
        self._capture.expected_ranks = tuple(sorted({rank for rank, _ in (*expected, *complete)}))
        if not complete or not complete.keys() >= set(expected):
            self.outcome, self.fix = failure_outcome, fix
        problems += [
            f"Rank {rank} wrote no complete {f'{batch} ' if batch else ''}trace to {self._directory}"
            f"{broken.get((rank, batch), '')}. {self.remedy}"
            for rank, batch in expected
            if (rank, batch) not in complete
        ]
        if not complete and not expected:
            problems.append(f"There is no new trace in {self._directory}. {self.remedy}")
        for rank_and_kind, traces in sorted(complete.items(), key=str):
            await self._engine.call(self._adopt, rank_and_kind, traces)

    def has_all_traces(self) -> bool:
        """Return whether every expected rank and batch kind has a new file. The files may be incomplete."""
        new_files = [path for path in self._files() if path not in self._earlier_files]
        origins = [origin for path in new_files if (origin := self.parse_name(path))]
        return {(origin.rank, origin.batch) for origin in origins} >= set(self._expected())

    def _files(self) -> Iterable[Path]:
        if self._directory is None:
            return
        paths = _list_directory(self._directory)
        if self.search_subdirectories:
            paths += [path for parent in paths if parent.is_dir() for path in _list_directory(parent)]
        yield from (path for path in paths if path.name.startswith(self._prefix) and fnmatch(path.name, self.glob))

    def _expected(self) -> tuple[RankAndKind, ...]:
        if self._world is not None and self._world > MAX_RANKS:
            raise CaptureError(
                f"{self._engine.name} reports {self._world:,} ranks, more than the {MAX_RANKS:,} allowed."
            )
        if self._world is not None:
            ranks = tuple(rank for rank in range(self._world) if self._request.selects(rank))
        else:
            ranks = () if isinstance(self._request.ranks, str) else self._request.ranks
        return tuple((rank, batch) for rank in ranks for batch in self._request.batch_kinds or (None,))

    async def _wait(self, quiet_s: float) -> tuple[dict[RankAndKind, list[_CheckedTrace]], dict[RankAndKind, str]]:
        """Wait until every expected rank and batch kind has a complete new trace, or no file changes for ``quiet_s``.

        Returns:
            The complete traces, and the problems of incomplete traces. If no trace is missing, there are no problems.
        """
        started_s = changed_s = time.monotonic()
        checked: dict[tuple[Path, int], _CheckedTrace] = {}
        while True:
            previous_count = len(checked)
            for path in self._files():
                origin, size = self.parse_name(path), -1
                with contextlib.suppress(OSError):  # the file has disappeared
                    size = path.stat().st_size
                if path in self._earlier_files or origin is None or not self._request.selects(origin.rank):
                    continue
                if (path, size) in checked or size < 0:
                    continue
                with contextlib.suppress(TraceError):  # not readable yet
                    checked[path, size] = _CheckedTrace(path, origin, await self._engine.call(check_trace, path))
            complete: dict[RankAndKind, list[_CheckedTrace]] = {}
            for trace in checked.values():
                if trace.check.whole:
                    complete.setdefault(trace.rank_and_kind, []).append(trace)
            if complete and complete.keys() >= set(self._expected()):
                return complete, {}
            now_s = time.monotonic()
            changed_s = now_s if len(checked) > previous_count else changed_s
            if now_s >= changed_s + quiet_s or now_s >= started_s + self._options.flush_timeout_s:
                broken = {
                    trace.rank_and_kind: f" ({trace.path.name}: {trace.check.problem})" for trace in checked.values()
                }
                return complete, broken
            await self._engine.sleep(_POLL_S)

    def _adopt(self, rank_and_kind: RankAndKind, traces: Sequence[_CheckedTrace]) -> None:
        """Link or copy the traces into the run, and write their manifest."""
        request, (rank, batch) = self._request, rank_and_kind
        identity = Identity(
            role=request.role,
            replica=request.replica,
            rank=rank,
            world_size=max(self._world or 0, rank + 1),
            parallel=traces[0].origin.parallel,
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
        for number, trace in enumerate(traces):
            suffix = ".trace.json.gz" if trace.path.suffix == ".gz" else ".trace.json"
            path = capture.artifact_path(suffix, str(number) if number else None)
            link_or_copy(trace.path, path)
            artifacts.append(Artifact(path=path, size_bytes=trace.check.size_bytes, events=trace.check.events))
        capture.notes.append(f"Recorded by {self.title}'s own profiler in {self._directory}.")
        adopt(capture, recorder, tuple(artifacts))
        self.manifests.append(capture.manifest_path)


def _list_directory(directory: Path) -> list[Path]:
    """Return the entries of a directory, or nothing if it cannot be read, because the engine may remove it."""
    try:
        return [*directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
