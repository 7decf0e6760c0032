"""Base class and registry of artifact kinds, which detect, check and read recorded files.

Chrome traces, plain or gzip-compressed, are built in. Plugins register a subclass of `ArtifactKind` in the entry-point
group ``profdeck.artifact_kinds``. Every search for traces imports these modules, so they should import heavy
dependencies inside their methods.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import attrs
import msgspec

from profdeck_traces.base.entry_points import installed, load
from profdeck_traces.base.errors import ProfdeckError, TraceError
from profdeck_traces.base.files import file_size
from profdeck_traces.base.progress import Progress

logger = logging.getLogger("profdeck")

ARTIFACT_KINDS = "profdeck.artifact_kinds"
TRACE = "trace"
"""Kind of Chrome traces in manifests."""
ASIDE = ".pruned."
"""Prefix of directories that are being deleted. They are not searched."""


class FileCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Result of checking an artifact, such as a trace file."""

    whole: bool
    problem: str | None
    """Description of the damage; ``None`` if the file is intact."""
    events: int | None
    """Number of trace events; ``None`` if the file is not a trace or cannot be read."""
    notes: tuple[str, ...] = ()
    """Remarks about an intact artifact."""
    sha256: str | None = None
    """SHA-256 of the file in hexadecimal digits, if it was requested."""
    kept: bool = False
    """True if the result comes from the cache, because the file has not changed."""


@attrs.frozen
class PendingWork:
    """Work on an artifact that continues after its capture, such as the analysis of raw data."""

    what: str
    """Description, with the process and its host."""
    alive: bool | None
    """True if its process is running; ``None`` if unknown, for example on another host."""
    pid: int


@attrs.frozen
class StepOnDevice:
    """One step on one device. Times are in nanoseconds on the trace's clock."""

    step: int
    device: int | str | None
    start_ns: int
    end_ns: int


class ArtifactKind(ABC):
    """Base class for artifact kinds. All other methods are only called with paths for which `matches` returns True."""

    name: ClassVar[str]
    """Name in manifests, and name of the entry point."""
    suffix: ClassVar[str] = ""
    """Suffix of directory names of this kind; empty if artifacts are files."""
    grows: ClassVar[bool] = False
    """True if the size may change after the capture."""

    @abstractmethod
    def matches(self, path: Path) -> bool:
        """Return True if the name and file type of a path match this kind. Must not raise."""

    @abstractmethod
    def check(self, path: Path, on_progress: Progress | None = None) -> FileCheck:
        """Read the complete artifact.

        Raises:
            ProfdeckError: The artifact cannot be read.
            OSError: The artifact cannot be read.
        """

    @abstractmethod
    def size_to_read(self, path: Path) -> int:
        """Return the number of bytes that `read` reads, or 0 if there are none."""

    @abstractmethod
    def read(self, path: Path, **how: Any) -> Any:
        """Read the artifact into columns.

        Args:
            path: The artifact.
            how: The other arguments of `profdeck_traces.reading.reader.read_trace`.

        Returns:
            A `profdeck_traces.reading.trace.Trace`.

        Raises:
            TraceError: The artifact cannot be read.
        """

    def chrome_trace(self, path: Path) -> Path:
        """Return the Chrome trace in the artifact, for merging and trimming.

        Raises:
            TraceError: The artifact contains no Chrome trace.
        """
        raise TraceError(f"{path} has no Chrome trace.")

    def has_chrome_trace(self, path: Path) -> bool:
        """Return True if the artifact contains a Chrome trace. Must not raise if the artifact is incomplete."""
        del path
        return False

    def rank(self, path: Path) -> int | None:
        """Return the rank that the artifact specifies, or ``None``."""
        del path
        return None

    def tables(self, path: Path) -> Any:
        """Return the recorder's tables as `profdeck_traces.analysis.model.RecorderTables`, or None if it wrote none."""
        del path

    def steps_on_devices(self, path: Path) -> list[StepOnDevice]:
        """Return the steps on each device from other files than the Chrome trace, if there are any."""
        del path
        return []

    def pending(self, path: Path) -> PendingWork | None:
        """Return the unfinished work on the artifact, such as an analysis.

        Raises:
            TraceError: The state of the work cannot be read.
        """
        del path
        return None


@functools.cache
def kinds() -> tuple[ArtifactKind, ...]:
    """Return the kinds of installed plugins. Kinds that cannot be loaded are logged and skipped."""
    loaded: list[ArtifactKind] = []
    for name in installed(ARTIFACT_KINDS):
        try:
            loaded.append(load(ARTIFACT_KINDS, name)())
        except ProfdeckError as error:
            logger.warning("The artifact kind '%s' is skipped: %s", name, error)
    return tuple(loaded)


def kind_of(path: Path) -> ArtifactKind | None:
    """Return the kind of an artifact, or ``None`` for Chrome traces and unknown files."""
    return next((kind for kind in kinds() if kind.matches(path)), None)


def kind_named(name: str) -> ArtifactKind | None:
    """Return a kind by its name in manifests, or ``None`` for Chrome traces and kinds without an installed plugin."""
    return None if name == TRACE else next((kind for kind in kinds() if kind.name == name), None)


def files_below(path: Path, on_error: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Yield the files below a directory, unsorted. A directory that is an artifact counts as a file.

    Args:
        path: The directory. Symbolic links to directories below it are not followed.
        on_error: Called with an error for each directory that cannot be read or is a symbolic link, and for each link
            without a target.
    """
    suffixes = tuple(kind.suffix for kind in kinds() if kind.suffix)
    for name, directories, files in os.walk(path, onerror=on_error):
        directory = Path(name)
        artifacts = {child for child in directories if suffixes and child.endswith(suffixes)}
        yield from (directory / child for child in (*artifacts, *files))
        if on_error is not None:
            for child in map(directory.joinpath, set(directories) - artifacts):
                if child.is_symlink():
                    on_error(OSError(errno.ELOOP, "it is a symbolic link", str(child)))
            for child in map(directory.joinpath, files):
                if child.is_symlink() and not child.exists():
                    on_error(OSError(errno.ENOENT, "it is a symbolic link without a target", str(child)))
        directories[:] = [child for child in directories if child not in artifacts and not child.startswith(ASIDE)]


def is_trace_path(path: Path) -> bool:
    """Return True if a path is itself a trace, and False if it is a directory to search."""
    return not os.path.isdir(path) or kind_of(path) is not None  # noqa: PTH112  # never raises


def chrome_trace(path: Path) -> Path:
    """Return the path of the Chrome trace: the file itself, or the trace in an artifact of a plugin's kind.

    Raises:
        TraceError: The artifact contains no Chrome trace.
    """
    kind = kind_of(path)
    return path if kind is None else kind.chrome_trace(path)


def size_to_read(path: Path) -> int:
    """Return the number of bytes to read for an artifact, or 0 if there are none."""
    kind = kind_of(path)
    if kind is None:
        return file_size(path)
    with suppress(TraceError):  # the reader reports it
        return kind.size_to_read(path)
    return 0
