"""Puts the segments of all sources together."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import msgspec
from isal import isal_zlib

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import append_file, new_file, write_all
from profdeck_traces.base.parallel import map_traces
from profdeck_traces.base.progress import Progress
from profdeck_traces.inputs.artifact_kinds import size_to_read
from profdeck_traces.merge.event_texts import Event, encoded, encoded_all, labelled, metadata, text_of
from profdeck_traces.merge.rewriter import BASE, COMMON_KEYS, FIRST_KEPT_PID, FIRST_NEW_PID, SOURCE_KEYS, SegmentPlace
from profdeck_traces.merge.segment import Deflater, Segment, SegmentPiece, SegmentTask, write_segment
from profdeck_traces.merge.source import MergeSource
from profdeck_traces.reading.integrity import TraceCheck
from profdeck_traces.writing.deflate import GZIP_HEADER, gzip_trailer

_SEPARATOR = b",\n"

# Where a guess saves a second pass over a source.
_PID = re.compile(rb'"pid"[ \t\n\r]*:[ \t\n\r]*([0-9]{4,9})[ \t\n\r,}]')
_BASE = re.compile(rb'"%b"[ \t\n\r]*:[ \t\n\r]*([0-9]{1,20})[ \t\n\r,}]' % BASE.encode())


def merge_traces(  # noqa: PLR0913 - all but the first two have defaults
    sources: Sequence[MergeSource],
    destination: Path,
    *,
    gzip: bool = True,
    origin_ns: int = 0,
    processes: int = 1,
    on_progress: Progress | None = None,
) -> TraceCheck:
    """Merge Chrome traces into one file, in bounded memory.

    Events keep their members, the text of their values and their order. Changed are:

    - ``pid``: each process of each source gets its own, a number; those of host processes are kept where no source
      in front has them. Events without one get one as well.
    - ``id`` of flow and async events, ``bind_id`` and the global ``id2``: no two sources share one.
    - ``ts``: all count from the smallest ``baseTimeNanoseconds``; the difference, and the ``shift_ns`` of the source,
      are added exactly, to strings as well, and ``origin_ns`` is taken off. A trace without one counts from 0.
    - ``tid`` of events on a lane of a device that overlap without one being inside the other: Perfetto would drop
      the later one. It goes to another lane, which has the name of its own with " (overlapping)".
    - the metadata: each process has a ``process_name`` that begins with the label of its source, and one
      ``process_sort_index``, by the order of the sources and then by its own one, or 0.

    Elements of ``traceEvents`` that are no objects are left out. The object ``profdeck`` of the new file says what
    was merged: for each source its label, base, ``distributedInfo`` and ``deviceProperties``, and the pids that its
    processes had.

    The file is the same whatever the number of processes. A source is read once, and again only if what was taken to
    be known of it or of the others turns out to be wrong: where bases differ (Kineto's is the same for a quarter of a
    year, and stands behind the events), where several sources have a process of the same pid that the beginning does
    not show, and where events overlap.

    Args:
        sources: The traces. Of a damaged one, what comes before the damage is merged; if it ends before its base,
            the smallest that another trace states is assumed.
        destination: The new file, in a directory that exists. It appears when it is complete and on disk (fsync),
            or not at all. Until then a hidden directory beside it holds as much once more.
        gzip: Write one gzip member rather than plain JSON.
        origin_ns: What the times of the new file count from, beside the base of the sources; its base is that much
            later. See `profdeck_traces.merge.origin`.
        processes: How many sources are read at the same time.
        on_progress: Called with the bytes of the sources (as on disk) read so far and in all.

    Returns:
        What :func:`~profdeck_traces.reading.integrity.check_trace` returns for the new file, without reading it again:
        all text of the sources was decoded when it was read, and each change puts JSON in the place of JSON. It is
        ``whole`` only if all of the sources are; otherwise ``problem`` has a sentence for each one that is not, with
        its label.

    Raises:
        FileExistsError: There is something at ``destination``; it was left as it is.
        TraceError: No source has an event that could be read, or a process was killed.
        OSError: The new file cannot be written.
    """
    ordered = sorted(sources, key=lambda source: source.sort_index)
    with (
        new_file(destination) as file,
        tempfile.TemporaryDirectory(prefix=".profdeck-", dir=destination.parent) as directory,
    ):
        merge = _Merge(ordered, Path(directory), gzip=gzip, origin_ns=origin_ns)
        merge.write_segments(processes, on_progress)
        return merge.join(file)


@attrs.frozen
class _Known:
    """What is known of one source, or guessed from its beginning."""

    base_ns: int | None
    host_pids: frozenset[int]


def _guess(source: MergeSource) -> _Known:
    head = source.head()
    base = _BASE.search(head)
    pids = frozenset(pid for pid in map(int, set(_PID.findall(head))) if FIRST_KEPT_PID <= pid < FIRST_NEW_PID)
    return _Known(int(base[1]) if base else None, pids)


def _bases_ns(known: Sequence[_Known]) -> list[int]:
    """Return what the times of each source count from."""
    lost_ns = min((one.base_ns for one in known if one.base_ns), default=0)
    return [lost_ns if one.base_ns is None else one.base_ns for one in known]


class _Merge:
    """All sources on the way to one file.

    Args:
        sources: In their order in the viewer.
        directory: Where segments are written.
        gzip: Whether to deflate.
        origin_ns: What is taken off all times.
    """

    def __init__(self, sources: Sequence[MergeSource], directory: Path, *, gzip: bool, origin_ns: int) -> None:
        self._sources = sources
        self._parts = [directory / str(rank) for rank in range(len(sources))]
        self._gzip = gzip
        self._origin_ns = origin_ns
        self._segments: list[Segment] = []
        self._base_ns: int | None = None

    def write_segments(self, processes: int, on_progress: Progress | None) -> None:
        """Write a segment of each source, and write again what was written with wrong assumptions.

        Raises:
            TraceError: A process was killed, or a source has too many processes.
        """
        known = [_guess(source) for source in self._sources]
        assumed: dict[int, SegmentPlace] = {}
        written: dict[int, Segment] = {}
        while True:
            places = self._places(known)
            wrong = [rank for rank, place in enumerate(places) if not _fits(assumed.get(rank), place, known[rank])]
            if not wrong:
                break
            tasks = [SegmentTask(self._sources[rank], places[rank], self._parts[rank], self._gzip) for rank in wrong]
            sizes = [size_to_read(task.source.path) for task in tasks]
            found = map_traces(write_segment, tasks, sizes, processes=processes, on_progress=on_progress)
            on_progress = None  # all sources have been read
            for rank, segment in zip(wrong, found, strict=True):
                if isinstance(segment, TraceError):
                    raise segment
                assumed[rank], written[rank] = places[rank], segment
                known[rank] = _Known(segment.base_ns, segment.host_pids)
        self._segments = [written[rank] for rank in range(len(self._sources))]
        if any(one.base_ns is not None for one in known):  # otherwise no trace says, and 0 would say that it is known
            self._base_ns = min(_bases_ns(known))

    def join(self, file: BinaryIO) -> TraceCheck:
        """Write the new file.

        Raises:
            TraceError: No source has an event that could be read.
        """
        problems = [problem for source, segment in self._pairs() for problem in _problems(source, segment)]
        if not any(segment.processes for segment in self._segments):
            raise TraceError(" ".join(["There is no event to merge.", *problems]))
        output = _Output(file, gzip=self._gzip)
        output.text(b"{\n")
        for key, value in self._members().items():  # first, so that its beginning tells what the file is
            output.text(encoded({key: value})[1:-1] + _SEPARATOR)
        output.text(b'"traceEvents": [\n')
        events = processes = 0
        between = b""
        for (source, segment), part in zip(self._pairs(), self._parts, strict=True):
            if segment.piece.json_bytes:
                output.text(between and segment.between)
                output.piece(segment.piece, part)
                between = segment.between
            if added := _process_metadata(source, segment, processes):
                output.text(between and segment.between)
                output.text(encoded_all(added, segment.between, segment.inside))
                between = segment.between
            processes += len(segment.processes)
            events += segment.written + len(added)
        output.text(b"\n]\n}\n")
        size_bytes, json_bytes = output.finish()
        return TraceCheck(size_bytes, json_bytes, events, whole=not problems, problem=" ".join(problems) or None)

    def _pairs(self) -> list[tuple[MergeSource, Segment]]:
        return list(zip(self._sources, self._segments, strict=True))

    def _places(self, known: Sequence[_Known]) -> list[SegmentPlace]:
        """Return what each source has to know of the others."""
        bases_ns = _bases_ns(known)
        base_ns = min(bases_ns, default=0)
        taken: frozenset[int] = frozenset()
        places = []
        for rank, source in enumerate(self._sources):
            places.append(
                SegmentPlace(
                    rank, len(self._sources), bases_ns[rank] - base_ns + source.shift_ns - self._origin_ns, taken
                )
            )
            taken |= known[rank].host_pids
        return places

    def _members(self) -> dict[str, Any]:
        """Return the members of the top-level object beside the events; the first says that it is a merged one."""
        members: dict[str, Any] = {}
        described = []
        for source, segment in self._pairs():
            own = {key: msgspec.Raw(text) for key, text in segment.members.items()}
            for key in COMMON_KEYS:
                if key in own:
                    members.setdefault(key, own[key])
            described.append(
                {
                    "label": msgspec.Raw(encoded(source.label)),
                    BASE: segment.base_ns,
                    **({"shiftNanoseconds": source.shift_ns} if source.shift_ns else {}),
                    **{key: own[key] for key in SOURCE_KEYS if key in own},
                    "pids": {
                        str(process.pid): msgspec.Raw(process.original or b"null") for process in segment.processes
                    },
                }
            )
        if self._base_ns is not None:
            members[BASE] = self._base_ns + self._origin_ns
        return {"profdeck": {"sources": described}, **members}


def _problems(source: MergeSource, segment: Segment) -> list[str]:
    problems = []
    if segment.problem is not None:
        problems.append(segment.problem)
        if segment.processes and segment.base_ns is None:
            problems.append(f"Its {BASE} is lost: that of the other traces is assumed.")
    if segment.lost:
        problems.append(f"{source.label} ({source.path}): {segment.lost:,} events are too long or deep to be copied.")
    return problems


def _process_metadata(source: MergeSource, segment: Segment, first_sort_index: int) -> list[Event]:
    """Return the names that are missing, and where each process stands.

    Viewers hold sort indices in 32 bits, so that the original ones cannot be kept with room between the sources.
    """
    events = []
    for process in segment.processes:
        if not process.named:
            name = labelled(source.label, text_of(process.original))
            events.append(metadata("process_name", process.pid, 0, {"name": name}))
    ordered = sorted(segment.processes, key=lambda process: process.sort_index)
    for sort_index, process in enumerate(ordered, first_sort_index):
        events.append(metadata("process_sort_index", process.pid, 0, {"sort_index": sort_index}))
    return events


class _Output:
    """The new file: text, and what others have written of it."""

    def __init__(self, file: BinaryIO, *, gzip: bool) -> None:
        self._file = file
        self._gzip = gzip
        if gzip:
            write_all(file, GZIP_HEADER)
        self._deflater: Deflater | None = None
        self._crc = 0
        self._json_bytes = 0

    def text(self, text: bytes) -> None:
        """Append text."""
        if self._deflater is None:
            self._deflater = Deflater(self._file, gzip=self._gzip)
        self._deflater.write(text)

    def piece(self, piece: SegmentPiece, part: Path) -> None:
        """Append a piece that is a file of its own."""
        self._end_text(last=False)
        append_file(self._file, part)
        self._add(piece)

    def finish(self) -> tuple[int, int]:
        """End the file and return its size, and that of its text."""
        self._end_text(last=True)
        if self._gzip:
            write_all(self._file, gzip_trailer(self._crc, self._json_bytes))
        return self._file.tell(), self._json_bytes

    def _end_text(self, *, last: bool) -> None:
        if self._deflater is not None:
            self._add(self._deflater.finish(last=last))
            self._deflater = None

    def _add(self, piece: SegmentPiece) -> None:
        self._crc = isal_zlib.crc32_combine(self._crc, piece.crc, piece.json_bytes)
        self._json_bytes += piece.json_bytes


def _fits(assumed: SegmentPlace | None, place: SegmentPlace, known: _Known) -> bool:
    """Return whether what was written for one place is what would be written for another."""
    return (
        assumed is not None
        and assumed.shift_ns == place.shift_ns
        and not (assumed.taken_pids ^ place.taken_pids) & known.host_pids
    )
