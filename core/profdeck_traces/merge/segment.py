"""One source as a part of the new file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import attrs
from isal import isal_zlib

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import write_all
from profdeck_traces.base.progress import Progress
from profdeck_traces.merge.overlaps import Overlaps
from profdeck_traces.merge.rewriter import MergedProcess, Rewriter, SegmentPlace
from profdeck_traces.merge.source import MergeSource
from profdeck_traces.reading.integrity import TraceChecker, feed_chunks, file_size
from profdeck_traces.reading.stream import Chunk, read_chunks
from profdeck_traces.writing.deflate import raw_deflater

# A chunk and the texts made of it stay in the second cache.
_CHUNK_BYTES = 1 << 18


@attrs.frozen
class SegmentPiece:
    """Text that was written, deflated so that other text can come before and after it, or plain."""

    json_bytes: int
    crc: int
    """CRC-32 of the text."""


@attrs.frozen
class SegmentTask:
    """One source to write, with what is taken to be known of the others."""

    source: MergeSource
    place: SegmentPlace
    part: Path
    """The file of its segment."""
    gzip: bool

    def __str__(self) -> str:
        return str(self.source.path)


@attrs.frozen
class Segment:
    """One source as a part of the new file, and what became of it."""

    piece: SegmentPiece
    """Its events with commas between them."""
    between: bytes
    """What it has between events."""
    inside: bytes
    """White space that it has in front of the first member of an event."""
    problem: str | None
    base_ns: int | None
    """``None`` if the trace ended before it said."""
    lost: int
    """Events that are too long or deep to be copied."""
    written: int
    """Events in the segment."""
    processes: tuple[MergedProcess, ...]
    host_pids: frozenset[int]
    """The pids in the source that the operating system gave."""
    members: dict[str, bytes]
    """By key, the JSON of members of the top-level object."""


class Deflater:
    """Appends text to an unbuffered file."""

    def __init__(self, file: BinaryIO, *, gzip: bool) -> None:
        self._file = file
        self._deflater = raw_deflater() if gzip else None
        self._crc = 0
        self.json_bytes = 0

    def write(self, text: bytes | memoryview) -> None:
        """Append."""
        self._crc = isal_zlib.crc32(text, self._crc)
        self.json_bytes += len(text)
        write_all(self._file, text if self._deflater is None else self._deflater.compress(text))

    def finish(self, *, last: bool = False) -> SegmentPiece:
        """Return what was written; only with ``last`` is it the end of a deflate stream."""
        if self._deflater is not None:
            write_all(self._file, self._deflater.flush(isal_zlib.Z_FINISH if last else isal_zlib.Z_FULL_FLUSH))
        return SegmentPiece(self.json_bytes, self._crc)


def write_segment(task: SegmentTask, on_progress: Progress | None) -> Segment:
    """Write the segment of a source, a second time if it turns out that events need other lanes.

    Args:
        task: The source.
        on_progress: Called with the bytes of the source, as on disk, read so far and in all.
    """
    segment, overlaps = _attempt(task, on_progress, None)
    if overlaps is not None:
        segment, _ = _attempt(task, None, overlaps)
    return segment


def _attempt(
    task: SegmentTask, on_progress: Progress | None, overlaps: Overlaps | None
) -> tuple[Segment, Overlaps | None]:
    with task.part.open("wb", buffering=0) as file:
        return _written(task, Deflater(file, gzip=task.gzip), on_progress, overlaps)


def _written(
    task: SegmentTask, deflater: Deflater, on_progress: Progress | None, overlaps: Overlaps | None
) -> tuple[Segment, Overlaps | None]:
    rewriter = Rewriter(task.source, task.place, overlaps)

    def write_events() -> None:
        for text in rewriter.take():
            if deflater.json_bytes:
                deflater.write(rewriter.between)
            deflater.write(text)

    problem, base_ns, events = _read(task, rewriter, write_events, on_progress)
    rewriter.complete()
    write_events()
    segment = Segment(
        piece=deflater.finish(),
        between=rewriter.between,
        inside=rewriter.inside,
        problem=problem,
        base_ns=base_ns,
        lost=events - rewriter.read,
        written=rewriter.written,
        processes=tuple(rewriter.processes.values()),
        host_pids=frozenset(rewriter.host_pids),
        members=rewriter.members,
    )
    if rewriter.lanes is None:
        return segment, None
    try:
        return segment, rewriter.lanes.overlaps()
    except TraceError as error:  # the events stay on their lanes, where viewers drop some
        found = f"{task.source.label} ({task.source.path}): {error}"
        return attrs.evolve(segment, problem=" ".join(filter(None, [segment.problem, found]))), None


def _read(
    task: SegmentTask,
    rewriter: Rewriter,
    on_events: Callable[[], None],
    on_progress: Progress | None,
) -> tuple[str | None, int | None, int]:
    """Pass a trace to the rewriter as far as it can be read.

    Args:
        task: The trace.
        rewriter: Takes it.
        on_events: Called when the rewriter may have new texts.
        on_progress: Called with the bytes on disk read so far and in all.

    Returns:
        What is wrong with it, its base and how many events there are.
    """
    label = task.source.label
    checker = TraceChecker(rewriter)
    is_array = False

    def feed(chunk: Chunk) -> None:
        nonlocal is_array
        if not checker.json_bytes:
            is_array = chunk.lstrip().startswith(b"[")
        checker.feed(chunk)
        on_events()

    try:
        path = task.source.file
        size_bytes = file_size(path)
        on_read = None if on_progress is None else lambda read_bytes: on_progress(read_bytes, size_bytes)
        damage = feed_chunks(feed, read_chunks(path, _CHUNK_BYTES, on_read=on_read), size_bytes)
    except TraceError as error:
        return f"{label}: {error}", None, rewriter.read
    check = checker.finish(size_bytes, damage=damage)
    base_ns = rewriter.base_ns()
    if base_ns is None and (check.whole or is_array):
        base_ns = 0
    return check.problem and f"{label} ({path}): {check.problem}", base_ns, check.events
