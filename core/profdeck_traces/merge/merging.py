"""Plans the sources, and joins their segments."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
from isal import isal_zlib

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import append_file, new_file, write_all
from profdeck_traces.base.parallel import map_traces
from profdeck_traces.base.progress import Progress, halves
from profdeck_traces.inputs.artifact_kinds import size_to_read
from profdeck_traces.merge.metadata import encoded, metadata
from profdeck_traces.merge.plan import BASE, COMMON_KEYS, SOURCE_KEYS, PlanTask, SourcePlan, plan_source
from profdeck_traces.merge.segment import SEPARATOR, Deflater, Segment, SegmentPiece, SegmentTask, write_segment
from profdeck_traces.merge.source import MergeSource
from profdeck_traces.reading.copying import strict_json
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.integrity import TraceCheck
from profdeck_traces.writing.deflate import GZIP_HEADER, gzip_trailer

# Pids of operating systems are kept if no earlier source has them. Smaller pids are devices. New pids are larger than
# any thread id: Perfetto treats a thread with the id of its process as the main thread.
_FIRST_KEPT_PID, _FIRST_NEW_PID, _LAST_PID = 1000, 1_000_000_000, 2**31 - 1
_MAX_PIDS_EACH, _MAX_PROCESSES = 1_000_000, 50_000
_ORIGIN_UNIT_NS = 10**12

R = TypeVar("R")


def merge_traces(  # noqa: PLR0913 - all but the first two have defaults
    sources: Sequence[MergeSource],
    destination: Path,
    *,
    gzip: bool = True,
    origin_ns: int | None = 0,
    processes: int = 1,
    on_progress: Progress | None = None,
    on_unread: Callable[[MergeSource], None] | None = None,
) -> TraceCheck:
    """Merge Chrome traces into one file, in bounded memory.

    Events keep their members, the text of their values and their order. The following values change:

    - ``pid``: each process of each source has its own number. Pids of host processes are kept if no earlier source
      has them. Events without a pid get one.
    - ``id`` of flows and async events, ``bind_id`` and the global ``id2``: each becomes a number that no other source
      has. A hexadecimal string equals its number.
    - ``ts``: all times count from the smallest ``baseTimeNanoseconds``, plus `origin_ns`. The difference and the
      ``shift_ns`` of the source are added exactly, in nanoseconds, to numbers and strings. A trace without a base
      counts from 0.
    - ``tid`` of events on a lane of a device that overlap without nesting: Perfetto would drop the later one. It moves
      to another lane with the same name and " (overlapping)". Flows at its start move, too.
    - Metadata: each process has one ``process_name`` that begins with the label of its source, and one
      ``process_sort_index``, by the order of the sources and then by its own index, or 0.

    Elements of ``traceEvents`` without a ``ph`` are omitted. The object ``profdeck`` of the new file describes each
    source: its label, base, ``distributedInfo`` and ``deviceProperties``, and the original pids of its processes.

    The file does not depend on the number of processes. Each source is read twice.

    Args:
        sources: The traces. Of a damaged trace, the readable events are merged. If it ends before its base, the
            smallest base of the other traces is assumed.
        destination: The new file, in an existing directory. It appears only when it is complete and on disk (fsync).
            Until then, a hidden directory next to it needs the same space again, and 13 bytes for each event.
        gzip: Write one gzip member instead of plain JSON.
        origin_ns: Origin of the new file's times, after the base of the sources. The base of the new file is later by
            this value. ``None``: 0, or a multiple of 1,000 s before the first event if the times of all sources are
            too large for doubles of microseconds, which Perfetto uses.
        processes: Number of sources that are read at the same time.
        on_progress: Called with the bytes of the sources (as on disk) read so far and in total. Each of the two
            readings counts half.
        on_unread: Called with each damaged source that has no readable event.

    Returns:
        The check of the new file, made while it was written. ``whole`` is True only if all sources are intact.
        Otherwise, ``problem`` has a sentence with the label of each damaged source.

    Raises:
        FileExistsError: ``destination`` exists. It is not changed.
        TraceError: No source has a readable event, or a process was killed.
        OSError: The new file cannot be written.
    """
    ordered = sorted(sources, key=lambda source: source.sort_index)
    with (
        new_file(destination) as file,
        tempfile.TemporaryDirectory(prefix=".profdeck-", dir=destination.parent) as directory,
    ):
        merge = _Merge(ordered, Path(directory), gzip=gzip, processes=processes)
        on_plan, on_copying = halves(on_progress)
        merge.read_plans(origin_ns, on_plan)
        if on_unread is not None:
            for source in merge.unread_sources():
                on_unread(source)
        merge.write_segments(on_copying)
        return merge.join(file)


class _Merge:
    """The sources of one new file.

    Args:
        sources: In their order in the viewer.
        directory: Directory of arrays and segments.
        gzip: Deflate the segments.
        processes: Number of sources that are read at the same time.
    """

    def __init__(self, sources: Sequence[MergeSource], directory: Path, *, gzip: bool, processes: int) -> None:
        self._sources = sources
        self._directory = directory
        self._gzip = gzip
        self._processes = processes
        self._sizes = [size_to_read(source.path) for source in sources]
        self._plans: list[SourcePlan] = []
        self._pids: list[list[int]] = []
        self._segments: dict[int, Segment] = {}
        self._base_ns: int | None = None
        self._origin_ns = 0

    def read_plans(self, origin_ns: int | None, on_progress: Progress | None) -> None:
        """Read the plans of all sources.

        Raises:
            TraceError: No source has an event, one has too many processes, or a process was killed.
        """
        tasks = [PlanTask(source, self._directory / f"{rank}.rows") for rank, source in enumerate(self._sources)]
        results = map_traces(plan_source, tasks, self._sizes, processes=self._processes, on_progress=on_progress)
        plans = self._plans = _without_errors(results)
        if not any(plan.processes for plan in plans):
            problems = [plan.problem for plan in plans if plan.problem]
            raise TraceError(" ".join(["There is no event to merge.", *problems]))
        self._pids = _new_pids(plans)
        self._base_ns = min(
            (plan.base_ns for plan in plans if plan.processes and plan.base_ns is not None), default=None
        )
        self._origin_ns = _far_origin_ns(plans) if origin_ns is None else origin_ns

    def unread_sources(self) -> list[MergeSource]:
        """Return the damaged sources without a readable event."""
        return [
            source
            for source, plan in zip(self._sources, self._plans, strict=True)
            if plan.problem and not plan.processes
        ]

    def write_segments(self, on_progress: Progress | None) -> None:
        """Write the segments of all sources that have events.

        Raises:
            TraceError: A source cannot be read any more, or a process was killed.
        """
        tasks: dict[int, SegmentTask] = {}
        assumed_ns = min((plan.base_ns for plan in self._plans if plan.processes and plan.base_ns), default=0)
        first_id = 1
        for rank, (source, plan, pids) in enumerate(zip(self._sources, self._plans, self._pids, strict=True)):
            base_ns = assumed_ns if plan.base_ns is None else plan.base_ns
            lanes = [(pid, b"") for pid in pids] + [(pids[lane.process], b"%d" % lane.tid) for lane in plan.new_lanes]
            if plan.processes:
                tasks[rank] = SegmentTask(
                    source,
                    self._directory / f"{rank}.rows",
                    self._directory / f"{rank}.segment",
                    self._gzip,
                    tuple((b"%d" % pid, tid) for pid, tid in lanes),
                    first_id,
                    base_ns - (self._base_ns or 0) + source.shift_ns - self._origin_ns,
                )
            first_id += plan.id_count
        sizes = [self._sizes[rank] for rank in tasks]
        results = map_traces(
            write_segment, list(tasks.values()), sizes, processes=self._processes, on_progress=on_progress
        )
        self._segments = dict(zip(tasks, _without_errors(results), strict=True))

    def join(self, file: BinaryIO) -> TraceCheck:
        """Write the new file."""
        problems = [plan.problem for plan in self._plans if plan.problem]
        output = _Output(file, gzip=self._gzip)
        output.text(b"{\n")
        for key, value in self._members().items():  # first, so that the beginning of the file describes it
            output.text(encoded({key: value})[1:-1] + SEPARATOR)
        output.text(b'"traceEvents": [\n')
        events = processes = 0
        between = b""
        for rank, segment in self._segments.items():
            if segment.piece.json_bytes:
                output.text(between)
                output.piece(segment.piece, self._directory / f"{rank}.segment")
                between = SEPARATOR
            added = self._metadata(rank, processes)
            output.text(between + SEPARATOR.join(added))
            between = SEPARATOR
            processes += len(self._plans[rank].processes)
            events += segment.events + len(added)
        output.text(b"\n]\n}\n")
        size_bytes, json_bytes = output.finish()
        return TraceCheck(size_bytes, json_bytes, events, whole=not problems, problem=" ".join(problems) or None)

    def _members(self) -> dict[str, Any]:
        """Return the other members of the top-level object. The first one identifies a merged file."""
        members: dict[str, Any] = {}
        described = []
        for source, plan, pids in zip(self._sources, self._plans, self._pids, strict=True):
            own = {key: msgspec.Raw(strict_json(text)) for key, text in plan.members.items()}
            for key in COMMON_KEYS:
                if key in own:
                    members.setdefault(key, own[key])
            described.append(
                {
                    "label": msgspec.Raw(encoded(source.label)),
                    BASE: plan.base_ns,
                    **({"shiftNanoseconds": source.shift_ns} if source.shift_ns else {}),
                    **{key: own[key] for key in SOURCE_KEYS if key in own},
                    "pids": {
                        str(pid): msgspec.Raw(json.dumps(process.pid).encode())
                        for pid, process in zip(pids, plan.processes, strict=True)
                    },
                }
            )
        if self._base_ns is not None:
            members[BASE] = self._base_ns + self._origin_ns
        return {"profdeck": {"sources": described}, **members}

    def _metadata(self, rank: int, first_sort_index: int) -> list[bytes]:
        """Return metadata events of a source: names of new lanes, and names and order of processes.

        Viewers store sort indices in 32 bits. Therefore the original ones cannot be kept with gaps between sources.
        """
        label, plan, pids = self._sources[rank].label, self._plans[rank], self._pids[rank]
        events = [event for lane in plan.new_lanes for event in lane.metadata(pids[lane.process])]
        for pid, process in zip(pids, plan.processes, strict=True):
            name = process.name if process.name is not None else "" if process.pid is None else str(process.pid)
            events.append(metadata("process_name", pid, 0, {"name": f"{label}: {name}" if name else label}))
        by_index = sorted(zip(plan.processes, pids, strict=True), key=lambda pair: pair[0].sort_index)
        for sort_index, (_, pid) in enumerate(by_index, first_sort_index):
            events.append(metadata("process_sort_index", pid, 0, {"sort_index": sort_index}))
        return events


def _without_errors(results: Sequence[R | TraceError]) -> list[R]:
    values: list[R] = []
    for result in results:
        if isinstance(result, TraceError):
            raise result
        values.append(result)
    return values


def _new_pids(plans: Sequence[SourcePlan]) -> list[list[int]]:
    """Return the new pids of the processes of each source.

    Raises:
        TraceError: A source has too many processes.
    """
    pids_each = min(_MAX_PIDS_EACH, (_LAST_PID - _FIRST_NEW_PID) // max(1, len(plans)))
    taken: set[Id] = set()
    pids: list[list[int]] = []
    for rank, plan in enumerate(plans):
        if len(plan.processes) > min(_MAX_PROCESSES, pids_each):
            raise TraceError(f"A trace has {len(plan.processes):,} processes: too many to merge.")
        next_pid = _FIRST_NEW_PID + rank * pids_each
        host_pids = {
            process.pid
            for process in plan.processes
            if isinstance(process.pid, int) and _FIRST_KEPT_PID <= process.pid < _FIRST_NEW_PID
        }
        kept = host_pids - taken
        own = []
        for process in plan.processes:
            if isinstance(process.pid, int) and process.pid in kept:
                own.append(process.pid)
            else:
                own.append(next_pid)
                next_pid += 1
        pids.append(own)
        taken |= host_pids
    return pids


def _far_origin_ns(plans: Sequence[SourcePlan]) -> int:
    """Return the origin that makes times fit into doubles; 0 unless the times of all sources are too large.

    Perfetto reads microseconds as doubles. Traces without ``baseTimeNanoseconds`` count from 1970, where doubles have
    steps of 250 ns: nested events would overlap, and Perfetto drops these.
    """
    first_ns = [plan.first_large_ns for plan in plans if plan.processes]
    large_ns = [time_ns for time_ns in first_ns if time_ns is not None]
    return (min(large_ns) // _ORIGIN_UNIT_NS - 1) * _ORIGIN_UNIT_NS if len(large_ns) == len(first_ns) else 0


class _Output:
    """The new file: text, and copied segments."""

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

    def piece(self, piece: SegmentPiece, path: Path) -> None:
        """Append the file of a segment."""
        self._end_text(last=False)
        append_file(self._file, path)
        self._add(piece)

    def finish(self) -> tuple[int, int]:
        """End the file and return its size, and the size of its text."""
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
