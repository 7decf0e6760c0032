"""Kinds of artifacts: how each is recognised, checked, sized, opened and read.

A Chrome trace, plain or gzip, is the kind that profdeck knows by itself. Plugins bring others through the entry points
``profdeck.artifact_kinds``: an entry point names a class that extends `ArtifactKind`. Its module is imported by
everything that looks for traces, so it imports what it needs in its methods.
"""

from __future__ import annotations

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
ASIDE = ".pruned."
"""Prefix of directories that are being deleted. They are not searched."""
"""What manifests call a Chrome trace."""


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
    """In words, with the process and its host."""
    alive: bool | None
    """Whether its process runs; None where that cannot be known from here."""
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
    """The kind that manifests name, and the name of the entry point."""
    suffix: ClassVar[str] = ""
    """How the name of a directory of this kind ends; empty for kinds that are files."""
    grows: ClassVar[bool] = False
    """Whether its size may change after the capture."""

    @abstractmethod
    def matches(self, path: Path) -> bool:
        """Tell by the name and the type of a path whether it is such an artifact. Never raises."""

    @abstractmethod
    def check(self, path: Path, on_progress: Progress | None = None) -> FileCheck:
        """Read the artifact to its end.

        Raises:
            ProfdeckError: it cannot be read.
            OSError: the same.
        """

    @abstractmethod
    def size_to_read(self, path: Path) -> int:
        """Return how many bytes a reader reads, 0 if there is nothing."""

    @abstractmethod
    def read(self, path: Path, *, devices_only: bool, **how: Any) -> Any:
        """Read it into columns.

        Args:
            path: the artifact.
            devices_only: whether the host's events can be left out.
            how: the other arguments of `profdeck_traces.reading.reader.read_trace`.

        Returns:
            A `profdeck_traces.reading.trace.Trace`.

        Raises:
            TraceError: it cannot be read.
        """

    def chrome_trace(self, path: Path) -> Path:
        """Return the Chrome trace in it, which merging and trimming take.

        Raises:
            TraceError: there is none.
        """
        raise TraceError(f"{path} has no Chrome trace.")

    def has_chrome_trace(self, path: Path) -> bool:
        """Tell whether there is a Chrome trace in it. Never raises for what is only unfinished."""
        del path
        return False

    def rank(self, path: Path) -> int | None:
        """Return the rank that it names, if it names one."""
        del path
        return None

    def tables(self, path: Path) -> Any:
        """Return the recorder's tables as `profdeck_traces.analysis.model.RecorderTables`, or None if it wrote none."""
        del path

    def steps_on_devices(self, path: Path) -> list[StepOnDevice]:
        """Return where the work of each step is on each device, if something other than its Chrome trace tells it."""
        del path
        return []

    def pending(self, path: Path) -> PendingWork | None:
        """Return what is still being made of it.

        Raises:
            TraceError: that cannot be told.
        """
        del path
        return None


@functools.cache
def kinds() -> tuple[ArtifactKind, ...]:
    """Return the kinds that installed plugins bring; one that cannot be loaded is logged and left out."""
    found: list[ArtifactKind] = []
    for name in installed(ARTIFACT_KINDS):
        try:
            found.append(load(ARTIFACT_KINDS, name)())
        except ProfdeckError as error:
            logger.warning("The kind of artifacts '%s' is left out: %s", name, error)
    return tuple(found)


def kind_of(path: Path) -> ArtifactKind | None:
    """Return the kind of what is at a path; None for a Chrome trace and whatever no plugin knows."""
    return next((kind for kind in kinds() if kind.matches(path)), None)


def kind_named(name: str) -> ArtifactKind | None:
    """Return the kind that a manifest names; None for Chrome traces and kinds that no installed plugin brings."""
    return None if name == TRACE else next((kind for kind in kinds() if kind.name == name), None)


def files_below(path: Path, on_error: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Yield the files below a directory, in no order; a directory that is an artifact counts as one.

    Args:
        path: the directory.
        on_error: told of directories that cannot be read.
    """
    suffixes = tuple(kind.suffix for kind in kinds() if kind.suffix)
    for name, directories, files in os.walk(path, onerror=on_error):
        directory = Path(name)
        whole = {child for child in directories if suffixes and child.endswith(suffixes)}
        yield from (directory / child for child in (*whole, *files))
        directories[:] = [child for child in directories if child not in whole and not child.startswith(ASIDE)]


def chrome_trace(path: Path) -> Path:
    """Return the Chrome trace that a path means: the file itself, or the one in an artifact of another kind.

    Raises:
        TraceError: there is none.
    """
    kind = kind_of(path)
    return path if kind is None else kind.chrome_trace(path)


def size_to_read(path: Path) -> int:
    """Return how many bytes a reader of a trace reads, 0 if there is nothing."""
    kind = kind_of(path)
    if kind is None:
        return file_size(path)
    with suppress(TraceError):  # the reader reports it
        return kind.size_to_read(path)
    return 0
