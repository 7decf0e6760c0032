"""Second pass over a source: writes its events, with new ids, lanes and times, as a segment of the new file."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import attrs
from isal import isal_zlib

from profdeck_traces.analysis.critical_path import critical_path
from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import write_all
from profdeck_traces.base.progress import Progress
from profdeck_traces.merge.plan import Rows
from profdeck_traces.merge.source import MergeSource
from profdeck_traces.reading.copying import copy_events
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.member_spans import member_spans
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.reading.walking import Changes
from profdeck_traces.writing.chrome_path import path_events
from profdeck_traces.writing.deflate import raw_deflater

SEPARATOR = b",\n"


@attrs.frozen
class SegmentPiece:
    """Text in the new file, either plain or deflated so that it can be concatenated with other pieces."""

    json_bytes: int
    crc: int
    """CRC-32 of the uncompressed text."""


@attrs.frozen
class SegmentTask:
    """A source to write as a segment."""

    source: MergeSource
    directory: Path
    """Directory with the source's arrays."""
    file: Path
    """The segment file to write."""
    gzip: bool
    lanes: tuple[tuple[bytes, bytes], ...]
    """As in `Changes.lanes`."""
    first_id: int
    """New id for the source's id number 0. The other new ids follow consecutively."""
    shift_ns: int
    """Added to each time."""
    processes: tuple[Id, ...]
    """Process ids of the source, in the order of ``lanes``."""

    def __str__(self) -> str:
        return str(self.source.path)


@attrs.frozen
class Segment:
    """The events of one source in the new file."""

    piece: SegmentPiece
    """The events, with separators between them."""
    events: int
    path_problem: str | None = None
    """Reason why the requested critical path is missing."""


class Deflater:
    """Appends text to an unbuffered file."""

    def __init__(self, file: BinaryIO, *, gzip: bool) -> None:
        self._file = file
        self._deflater = raw_deflater() if gzip else None
        self._crc = 0
        self._json_bytes = 0

    def write(self, text: bytes) -> None:
        """Append text."""
        self._crc = isal_zlib.crc32(text, self._crc)
        self._json_bytes += len(text)
        write_all(self._file, text if self._deflater is None else self._deflater.compress(text))

    def finish(self, *, last: bool = False) -> SegmentPiece:
        """Flush the compressor and return the written piece. If `last` is True, end the deflate stream."""
        if self._deflater is not None:
            write_all(self._file, self._deflater.flush(isal_zlib.Z_FINISH if last else isal_zlib.Z_FULL_FLUSH))
        return SegmentPiece(self._json_bytes, self._crc)


def write_segment(task: SegmentTask, on_progress: Progress | None) -> Segment:
    """Write the segment of a source.

    Args:
        task: The source.
        on_progress: Called with the number of source bytes (as on disk) read so far and the total.

    Raises:
        TraceError: The source can no longer be read.
    """
    rows = Rows.load(task.directory)
    changes = Changes(
        keep=rows.keep,
        lane=rows.lane,
        lanes=task.lanes,
        ids=rows.ids + task.first_id * (rows.ids >= 0),
        shift_ns=task.shift_ns,
        separator=SEPARATOR,
    )

    def rewrite(row: int, text: bytes) -> bytes:
        return _with_other_ids(text, rows.bind_ids.get(row), rows.global_ids.get(row), task.first_id)

    with task.file.open("wb", buffering=0) as file:
        deflater = Deflater(file, gzip=task.gzip)
        events = copy_events(task.source.file, changes, deflater.write, rewrite=rewrite, on_progress=on_progress)
        added, problem = _write_path(task, deflater, SEPARATOR if events else b"")
        return Segment(deflater.finish(), events + added, problem)


def _write_path(task: SegmentTask, deflater: Deflater, separator: bytes) -> tuple[int, str | None]:
    """Append the critical path if requested. Return the number of events added and, if the path is missing, why."""
    source = task.source
    if source.path_window is None:
        return 0, None
    try:
        path = critical_path(read_trace(source.file, is_step=StepNames.load().is_step), source.waits)
    except TraceError as error:
        return 0, str(error)
    path = path.overlapping(*source.path_window)
    process = task.processes.index(path.process) if path.process in task.processes else 0
    count = 0
    for text in path_events(path, int(task.lanes[process][0]), task.shift_ns):
        deflater.write(separator + text)
        separator = SEPARATOR
        count += 1
    return count, None


def _with_other_ids(text: bytes, bind_id: int | None, global_id: int | None, first_id: int) -> bytes:
    """Replace the ``bind_id`` and the global ``id2`` in the text of an event."""
    latin = text.decode("latin-1")
    spans = member_spans(latin)
    new: list[tuple[tuple[int, int], bytes]] = []
    if bind_id is not None:
        new.append((spans["bind_id"], b"%d" % (first_id + bind_id)))
    if global_id is not None:
        new.append((member_spans(latin, spans["id2"][0])["global"], b'"0x%x"' % (first_id + global_id)))
    for (begin, end), value in sorted(new, reverse=True):
        text = text[:begin] + value + text[end:]
    return text
