"""Detects Chrome traces, merged traces and profiles of other tools from the first bytes of a file."""

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
# VizTracer writes Chrome traces of Python functions. In them, the category "fee" means function entry and exit.
_VIZTRACER = re.compile(rb'\s*\{.*(?:"viztracer_metadata"|"cat"\s*:\s*"fee")', re.DOTALL | re.IGNORECASE)
_BY_CONTENT = (
    (re.compile(rb"SQLite format 3\0"), "an SQLite database, for example from nsys export. Open it in Nsight Systems"),
    (
        re.compile(rb'\s*\{.*"https://www\.speedscope\.app/file-format', re.DOTALL),
        "a speedscope profile. Open it at speedscope.app",
    ),
    (_VIZTRACER, "a VizTracer trace. Open it with: vizviewer FILE"),
    (re.compile(rb"\s*<svg|\s*<\?xml"), "a picture, for example from py-spy. Open it in a browser"),
    # One line per stack: function names separated by semicolons, and the number of samples.
    (
        re.compile(rb"(?:[^;\n\0]+;)+[^;\n\0]+ \d+\n"),
        "a file of folded stacks, for example from py-spy. Open it at speedscope.app",
    ),
)
_BY_SUFFIX = {
    (".pftrace", ".pftrace.gz", ".perfetto-trace"): "a Perfetto trace. Open it at https://ui.perfetto.dev",
    (".nsys-rep", ".qdrep"): "an Nsight Systems report. Run nsys stats FILE, or open it in Nsight Systems",
    (".ncu-rep",): "an Nsight Compute report. Open it in Nsight Compute",
    (".pickle", ".pkl"): "a pickle, for example a memory snapshot. Open snapshots at https://pytorch.org/memory_viz",
}
"""Formats without common first bytes, by suffix."""


class FileFormat(StrEnum):
    """File format, detected from the first bytes."""

    TRACE = "trace"
    """A Chrome trace of one rank."""
    MERGED = "merged"
    """A trace written by `profdeck merge`."""
    OTHER = "other"


def format_of(path: Path) -> FileFormat:
    """Return the format of a file from its first MiB, or `FileFormat.OTHER` if it cannot be read."""
    head = _head(path)
    if _MERGED.match(head):
        return FileFormat.MERGED
    is_trace = _EVENTS.match(head) and not _VIZTRACER.match(head)
    return FileFormat.TRACE if is_trace else FileFormat.OTHER


def is_merged(path: Path) -> bool:
    """Return True if `profdeck merge` wrote the file."""
    return _MERGED.match(_head(path, _FIRST_BYTES)) is not None


def reader_of(path: Path) -> str | None:
    """Return the format of an unsupported profile and a tool that opens it, or ``None`` for other files."""
    for suffixes, description in _BY_SUFFIX.items():
        if path.name.endswith(suffixes):
            return description
    head = _head(path)
    return next((description for pattern, description in _BY_CONTENT if pattern.match(head)), None)


def _head(path: Path, max_bytes: int = _HEAD_BYTES) -> bytes:
    with suppress(OSError):
        if path.is_file():  # not a pipe, because opening it can block
            with path.open("rb") as file:
                head = file.read(max_bytes)
            return _decompress(head, max_bytes) if head.startswith(GZIP_MAGIC) else head
    return b""


def _decompress(head: bytes, max_bytes: int) -> bytes:
    with suppress(Exception):  # from isal; the trace reader reports corrupt files
        return bytes(igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_GZIP).decompress(head, max_bytes))
    return b""
