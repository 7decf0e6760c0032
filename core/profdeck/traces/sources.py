"""Which traces there are below some paths, and what the manifests beside them say of each."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from profdeck.base.errors import ProfdeckError, TraceError
from profdeck.records.capture import Unit
from profdeck.traces.kinds import TRACE, files_below, kind_named, kind_of, kinds, size_to_read
from profdeck.traces.recognition import FileFormat, format_of, reader_of

if TYPE_CHECKING:
    from profdeck.records.host_clock import HostClock
    from profdeck.records.manifest import ArtifactRecord, Manifest

_NS_PER_US = 1000
_TRACES = (".trace.json", ".trace.json.gz")
_JSON = (".json", ".json.gz")
_OF_RUNS = ("rank_", "target.", ".")


@attrs.frozen
class TraceSource:
    """One trace of one rank: a file, or a directory that a plugin reads."""

    path: Path
    manifest: Manifest | None = None
    """Of the rank, or of the target for a file that holds all of its ranks."""
    artifact: ArtifactRecord | None = None
    """The trace's own entry in it."""
    run: str | None = None
    """The run directory that the manifest is of."""
    clock: HostClock | None = None
    """How the clock of its host stood to that of the process that asked for it; None if it is on the same host, or
    nothing tells."""

    @property
    def size_bytes(self) -> int:
        """The size of what is read of it, 0 if there is nothing."""
        return size_to_read(self.path)

    @property
    def is_json(self) -> bool:
        """Whether it is, or has, a Chrome trace."""
        kind = kind_of(self.path)
        return kind is None or kind.has_chrome_trace(self.path)

    @property
    def rank(self) -> int | None:
        """The rank, by the manifest, or else by what the recorder left; ``None`` if neither tells it."""
        if self.manifest is not None:
            return self.manifest.rank if self.manifest.target is None else None
        kind = kind_of(self.path)
        return None if kind is None else kind.rank(self.path)

    @property
    def unit(self) -> Unit | None:
        """What the steps of its recorder are, by the manifest."""
        if self.manifest is None:
            return None
        if self.manifest.target is not None or self.manifest.request is not None:
            return Unit.ENGINE_ITERATION
        return Unit.GLOBAL_STEP if self.manifest.window is None else Unit.MINI_BATCH

    @property
    def cold_first_step(self) -> bool:
        """True if the manifest marks the first step of the trace as cold."""
        return self.manifest is not None and bool(self.manifest.cold_first_step)

    @property
    def label(self) -> str:
        """Display name, such as "rollout/2 rank 1", or the file name."""
        if self.manifest is None:
            return self.path.name if self.rank is None else f"rank {self.rank}"
        if self.manifest.target is not None:
            return self.manifest.role_and_replica
        return f"{self.manifest.role_and_replica} rank {self.manifest.rank}"

    @property
    def clock_offset_ns(self) -> int | None:
        """What to add to a time of the trace, in nanoseconds, to get Unix time by the rank's clock anchors, on the host
        of the process that asked for it where it is known how the clocks of both stand.

        Each anchor gives one estimate; their median is taken. ``None`` without anchors.
        """
        anchors = self.artifact.anchors if self.artifact else ()
        offsets = sorted(anchor.unix_ns - round(Decimal(anchor.trace_us) * _NS_PER_US) for anchor in anchors)
        of_host = 0 if self.clock is None else self.clock.offset_ns
        return offsets[len(offsets) // 2] + of_host if offsets else None


def find_sources(paths: Sequence[Path], *, on_left_out: Callable[[Path, str], None] | None = None) -> list[TraceSource]:
    """Find the traces in the given paths, sorted by path and name, without duplicates.

    A path of a file, or of a directory that a plugin reads, is always treated as a trace. Other directories are
    searched for files whose names end in ``.trace.json`` or ``.trace.json.gz``, files that manifests list, artifacts
    that plugins read, and ``.json`` or ``.json.gz`` files that start like a trace. Merged traces are skipped in this
    search, because the traces of the ranks have the same events.

    Args:
        paths: files and directories.
        on_left_out: called with the path and the reason for each skipped path: a merged trace below a directory, a
            profile of another tool, or a directory that cannot be read.

    Raises:
        TraceError: There is no trace below a directory, or a file is a profile of another tool.
    """
    found: dict[Path, TraceSource] = {}
    for given in paths:
        # The name of "." is that of the working directory, beside which the manifest lies.
        path = Path(os.path.abspath(given)) if given.name in {"", ".."} and kind_of(given) is not None else given  # noqa: PTH100
        told = {source.path: source for source in _told(path)}
        if _is_one(path):
            if path not in told and kind_of(path) is None and (reader := reader_of(path)) is not None:
                raise TraceError(f"{path} is no Chrome trace, but {reader}.")
            found.setdefault(path, told.get(path, TraceSource(path)))
            continue
        below = set(told)
        for file in files_below(path, on_error=functools.partial(_tell_unreadable, on_left_out)):
            if file in told:
                continue
            if _is_trace(file):
                below.add(file)
            elif on_left_out is not None and (why := _why_left_out(file)) is not None:
                on_left_out(file, why)
        # Where a plugin reads the files of a directory, a trace beside them is a part of what it reads.
        of_plugins = {file.parent for file in below if kind_of(file) is not None}
        below = {file for file in below if file.parent not in of_plugins or _is_named_so(file) or file in told}
        sources = [told.get(file, TraceSource(file)) for file in sorted(below)]
        sources = [source for source in sources if source.manifest is None or source.manifest.target is None]
        if not sources:
            raise TraceError(
                f"{path}: there is no trace below this directory; their names end in {' or '.join(_endings())}."
            )
        for source in sources:
            found.setdefault(source.path, source)
    return list(found.values())


def recorded_sources(paths: Sequence[Path]) -> list[TraceSource]:
    """Find the traces of ranks below some paths that manifests name, each once; others have no place in a run.

    Raises:
        TraceError: There is none, or a path leads nowhere.
    """
    for path in paths:
        if not os.path.lexists(path):
            raise TraceError(f"{path}: there is no such file or directory.")
    told = {source.path: source for path in paths for source in _told(path)}
    found = [source for source in told.values() if source.manifest is not None and source.manifest.target is None]
    if not found:
        raise TraceError(
            f"{', '.join(map(str, paths))}: there is no trace with a manifest that says which capture it is of. Give "
            "runs that profdeck has recorded."
        )
    return found


def _is_one(path: Path) -> bool:
    """Tell whether a path means one trace, rather than those below it."""
    return not os.path.isdir(path) or kind_of(path) is not None  # noqa: PTH112 - never raises


def _is_named_so(path: Path) -> bool:
    return path.name.endswith(_TRACES) or kind_of(path) is not None


def _is_trace(path: Path) -> bool:
    if _is_named_so(path):
        return True
    return path.name.endswith(_JSON) and format_of(path) is FileFormat.TRACE


def _tell_unreadable(on_left_out: Callable[[Path, str], None] | None, error: OSError) -> None:
    if on_left_out is not None:
        on_left_out(Path(error.filename), f"cannot be read: {error.strerror}")


def _why_left_out(path: Path) -> str | None:
    if path.name.startswith(_OF_RUNS):  # what captures leave besides traces
        return None
    if path.name.endswith(_JSON) and format_of(path) is FileFormat.MERGED:
        return "holds the traces of several ranks; they count by themselves"
    reader = reader_of(path)
    return None if reader is None else f"is {reader}"


def _endings() -> list[str]:
    return [".trace.json[.gz]", *(kind.suffix for kind in kinds() if kind.suffix)]


def _told(path: Path) -> Iterator[TraceSource]:
    """Yield the traces that manifests beside a file, or below a directory, name."""
    from profdeck.records.manifest import is_manifest, read_manifest
    from profdeck.records.run_directory import run_of

    beside = path.parent.glob("*.json") if _is_one(path) else files_below(path)
    manifests: list[tuple[Path, Manifest]] = []
    for file in filter(is_manifest, beside):
        with suppress(ProfdeckError):  # `profdeck ls` reports it; the traces can be read without
            manifests.append((file, read_manifest(file)))
    # A target's manifest says it of the ranks that have recorded for it.
    clocks = {(one.request_token, one.clock.host): one.clock for _, one in manifests if one.clock is not None}
    for file, manifest in manifests:
        clock = clocks.get((manifest.request_token, manifest.host)) if manifest.target is None else None
        for artifact in manifest.artifacts:
            trace = file.parent / artifact.name
            kind = kind_named(artifact.kind)
            if kind.matches(trace) if kind else artifact.kind == TRACE and trace.is_file():
                yield TraceSource(trace, manifest, artifact, str(run_of(file, manifest.replica)), clock)
