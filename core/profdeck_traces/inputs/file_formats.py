"""What a file is, by how its content begins: Chrome traces, merged ones, and profiles that other tools read."""

from __future__ import annotations

import re
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from isal import igzip_lib

GZIP_MAGIC = b"\x1f\x8b"
_HEAD_BYTES = 1 << 20
_FIRST_BYTES = 1 << 12
_MERGED = re.compile(rb'\s*\{\s*"profdeck"\s*:\s*\{\s*"sources"')
_EVENTS = re.compile(rb'\s*(?:\{.*"traceEvents"\s*:\s*\[|\[\s*\{.*"ph"\s*:)', re.DOTALL)
# A Chrome trace of Python functions alone; "fee" stands for function entry and exit.
_VIZTRACER = re.compile(rb'\s*\{.*(?:"viztracer_metadata"|"cat"\s*:\s*"fee")', re.DOTALL | re.IGNORECASE)
_OTHERS = (
    (re.compile(rb"SQLite format 3\0"), "an SQLite database, such as nsys export makes: open it in Nsight Systems"),
    (re.compile(rb'\s*\{.*"https://www\.speedscope\.app/file-format', re.DOTALL), "of speedscope: see speedscope.app"),
    (_VIZTRACER, "of VizTracer: vizviewer FILE"),
    (re.compile(rb"\s*<svg|\s*<\?xml"), "a picture, such as py-spy draws: open it in a browser"),
    # Stacks and how often each was seen, a line each.
    (
        re.compile(rb"(?:[^;\n\0]+;)+[^;\n\0]+ \d+\n"),
        "folded stacks, such as py-spy writes: see speedscope.app",
    ),
)
_OTHER_ENDINGS = {
    (".pftrace", ".pftrace.gz", ".perfetto-trace"): "of Perfetto: open it at https://ui.perfetto.dev",
    (".nsys-rep", ".qdrep"): "a report of Nsight Systems: nsys stats FILE, or open it there",
    (".ncu-rep",): "a report of Nsight Compute: open it there",
    (".pickle", ".pkl"): "a pickle, such as a memory snapshot: open it at https://pytorch.org/memory_viz",
}
"""By how names end, for formats that begin in many ways."""


class FileFormat(StrEnum):
    """What a file is to profdeck."""

    TRACE = "trace"
    """A Chrome trace of one rank."""
    MERGED = "merged"
    """One that `profdeck merge` made."""
    OTHER = "other"


def format_of(path: Path) -> FileFormat:
    """Tell what a file is by its first MiB; what cannot be read is `FileFormat.OTHER`."""
    head = _head(path)
    if _MERGED.match(head):
        return FileFormat.MERGED
    is_trace = _EVENTS.match(head) and not _VIZTRACER.match(head)
    return FileFormat.TRACE if is_trace else FileFormat.OTHER


def is_merged(path: Path) -> bool:
    """Tell whether a file is one that `profdeck merge` made, by how it begins."""
    return _MERGED.match(_head(path, _FIRST_BYTES)) is not None


def reader_of(path: Path) -> str | None:
    """Say whose a profile is that profdeck does not read, and what does; None for everything else."""
    for endings, what in _OTHER_ENDINGS.items():
        if path.name.endswith(endings):
            return what
    head = _head(path)
    return next((what for pattern, what in _OTHERS if pattern.match(head)), None)


def _head(path: Path, most_bytes: int = _HEAD_BYTES) -> bytes:
    with suppress(OSError):
        if path.is_file():  # neither a pipe, which would wait, nor a device
            with path.open("rb") as file:
                head = file.read(most_bytes)
            return _inflated(head, most_bytes) if head.startswith(GZIP_MAGIC) else head
    return b""


def _inflated(head: bytes, most_bytes: int) -> bytes:
    with suppress(Exception):  # of isal: it is damaged, which its reader reports
        return bytes(igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_GZIP).decompress(head, most_bytes))
    return b""
