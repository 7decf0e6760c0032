"""Which traces there are below some paths, and what the manifests beside them say of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from profdeck.errors import ProfdeckError, TraceError

if TYPE_CHECKING:
    from profdeck.run import ArtifactRecord, Manifest

_NS_PER_US = 1000
_KERNEL_DETAILS = "kernel_details*.csv"
_TRACES = ("*.trace.json", "*.trace.json.gz", _KERNEL_DETAILS)


@attrs.frozen
class TraceSource:
    """One trace file of one rank."""

    path: Path
    manifest: Manifest | None = None
    """Of the rank, or of the target for a file that holds all of its ranks."""
    artifact: ArtifactRecord | None = None
    """The trace's own entry in it."""

    @property
    def size_bytes(self) -> int:
        """The size of the file, 0 if there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def is_json(self) -> bool:
        """Whether it is a Chrome trace, and not Ascend's table of kernels."""
        return not self.path.match(_KERNEL_DETAILS)

    @property
    def label(self) -> str:
        """What people know it by: "rollout/2 rank 1", or the name of the file."""
        if self.manifest is None:
            return self.path.name
        replica = "" if self.manifest.replica is None else f"/{self.manifest.replica}"
        if self.manifest.target is not None:
            return f"{self.manifest.role}{replica}"
        return f"{self.manifest.role}{replica} rank {self.manifest.rank}"

    @property
    def clock_offset_ns(self) -> int | None:
        """What to add to a time of the trace, in nanoseconds, to get Unix time by the rank's clock anchors.

        Each anchor gives one estimate; their median is taken. ``None`` without anchors.
        """
        anchors = self.artifact.anchors if self.artifact else ()
        offsets = sorted(anchor.unix_ns - round(Decimal(anchor.trace_us) * _NS_PER_US) for anchor in anchors)
        return offsets[len(offsets) // 2] if offsets else None


def find_sources(paths: Sequence[Path]) -> list[TraceSource]:
    """Find the traces below some paths, each once, in the order of the paths and then of the names.

    A file is a trace whatever its name is. Below a directory those count whose names end in ``.trace.json`` or
    ``.trace.json.gz``, those that manifests tell of, and Ascend's ``kernel_details.csv``. Files in which a target
    merged its ranks are left out there: the ranks have them.

    Raises:
        TraceError: There is no trace below a directory.
    """
    found: dict[Path, TraceSource] = {}
    for path in paths:
        told = {source.path: source for source in _told(path)}
        if not path.is_dir():
            found.setdefault(path, told.get(path, TraceSource(path)))
            continue
        below = {file for pattern in _TRACES for file in path.rglob(pattern)} | told.keys()
        sources = [told.get(file, TraceSource(file)) for file in sorted(below)]
        sources = [source for source in sources if source.manifest is None or source.manifest.target is None]
        if not sources:
            raise TraceError(f"{path}: there is no trace below this directory; their names end in .trace.json[.gz].")
        for source in sources:
            found.setdefault(source.path, source)
    return list(found.values())


def _told(path: Path) -> Iterator[TraceSource]:
    """Yield the traces that manifests beside a file, or below a directory, tell of."""
    from profdeck.run import is_manifest, read_manifest

    beside = path.rglob("*.json") if path.is_dir() else path.parent.glob("*.json")
    for file in filter(is_manifest, beside):
        try:
            manifest = read_manifest(file)
        except ProfdeckError:  # `profdeck ls` tells of it; the traces can be read without
            continue
        for artifact in manifest.artifacts:
            trace = file.parent / artifact.name
            if artifact.kind == "trace" and trace.is_file():
                yield TraceSource(trace, manifest, artifact)
