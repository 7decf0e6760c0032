"""Merges traces: plans the sources, writes their segments and joins the segments."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from isal import isal_zlib

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import append_file, new_file, write_all
from profdeck_traces.base.parallel import map_traces, without_errors
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

# Keep an operating-system pid unless an earlier source already uses it. Pids below 1000 denote devices. New pids are
# larger than any thread id, because Perfetto treats a thread whose id equals its pid as the main thread.
_FIRST_KEPT_PID, _FIRST_NEW_PID, _LAST_PID = 1000, 1_000_000_000, 2**31 - 1
_MAX_PIDS_EACH, _MAX_PROCESSES = 1_000_000, 50_000
_ORIGIN_UNIT_NS = 10**12


def merge_traces(  # noqa: PLR0913 - all but the first two have defaults
    sources: Sequence[MergeSource],
    destination: Path,
    *,
    gzip: bool = True,
    origin_ns: int | None = 0,
    processes: int = 1,
    on_progress: Progress | None = None,
    on_unread: Callable[[MergeSource], None] | None = None,
    on_missing_path: Callable[[str], None] | None = None,
) -> TraceCheck:
    """Merge Chrome traces into one file, in bounded memory.

    The events keep their order, their members and the text of their values, with these exceptions:

    - ``pid``: each process of each source gets a unique number. The pid of a host process is kept unless an earlier
      source already uses it. Events without a pid get one.
    - ``id`` of flows and async events, ``bind_id`` and the global ``id2``: each id becomes a number that is unique
      across sources. A hexadecimal string and the number it represents are the same id.
    - ``ts``: all times are relative to the smallest ``baseTimeNanoseconds`` plus `origin_ns`. The difference between
      that origin and the source's own base, and the source's ``shift_ns``, are applied exactly, in nanoseconds,
      regardless of whether a time is a number or a string. A trace without a base is treated as having base 0.
    - ``tid`` of device events that overlap without nesting: Perfetto would drop the later event, so it is moved to
      another lane that has the same name with the suffix " (overlapping)". Flows at its start move with it.
    - Metadata: each process has one ``process_name``, which starts with the label of its source, and one
      ``process_sort_index``. Processes are sorted by source, then by their original sort index (0 if missing).

    Each source with a `path_window` gets an additional thread, "critical path". The args of its events state the owner.
    Elements of ``traceEvents`` without a ``ph``, and the threads that profdeck started, are omitted. The ``profdeck``
    object in the new file describes each source: its label, base, ``distributedInfo`` and ``deviceProperties``, and the
    original pids of its processes.

    The new file does not depend on `processes`. Each source is read twice, or three times if its critical path is
    requested.

    Args:
        sources: The traces. If a trace is damaged, its readable events are merged. If it is truncated before its base
            time, the smallest base of the other traces is assumed.
        destination: The new file, in an existing directory. It appears only when it is complete and on disk (fsync).
            Until then, a hidden directory next to it uses as much space again, plus 13 bytes per event.
        gzip: Write one gzip member instead of plain JSON.
        origin_ns: Time origin of the new file, relative to the smallest base of the sources. The new file's base is
            later by this value. ``None`` selects 0, unless the times of all sources are too large for Perfetto, which
            reads microseconds as doubles. In that case, the origin is a multiple of 1,000 s before the first event.
        processes: Number of sources to read in parallel.
        on_progress: Called with the number of source bytes (as on disk) read so far and the total. Each of the two
            passes counts half.
        on_unread: Called for each damaged source that has no readable event.
        on_missing_path: Called once for each distinct reason why a requested critical path is missing.

    Returns:
        The check result for the new file, computed while it was written. ``whole`` is True only if all sources are
        intact. Otherwise, ``problem`` has a sentence for each damaged source that includes the source's label.

    Raises:
        FileExistsError: ``destination`` exists. It is not changed.
        TraceError: No source has a readable event, a source has too many processes, or a worker process was killed.
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
        if on_missing_path is not None:
            for reason in merge.missing_paths():
                on_missing_path(reason)
        return merge.join(file)


class _Merge:
    """Merge of several sources into one new file.

    Args:
        sources: The sources, in the order in which viewers show them.
        directory: Temporary directory for arrays and segments.
        gzip: Compress the segments.
        processes: Number of sources to read in parallel.
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
        """Plan all sources.

        Raises:
            TraceError: No source has an event, a source has too many processes, or a worker process was killed.
        """
        tasks = [PlanTask(source, self._directory / f"{rank}.rows") for rank, source in enumerate(self._sources)]
        results = map_traces(plan_source, tasks, self._sizes, processes=self._processes, on_progress=on_progress)
        plans = self._plans = without_errors(results)
        if not any(plan.processes for plan in plans):
            problems = [plan.problem for plan in plans if plan.problem]
            raise TraceError(" ".join(["There is no event to merge.", *problems]))
        self._pids = _new_pids(plans)
        self._base_ns = min(
            (plan.base_ns for plan in plans if plan.processes and plan.base_ns is not None), default=None
        )
        self._origin_ns = _far_origin_ns(plans) if origin_ns is None else origin_ns

    def unread_sources(self) -> list[MergeSource]:
        """Return the damaged sources that have no readable event."""
        return [
            source
            for source, plan in zip(self._sources, self._plans, strict=True)
            if plan.problem and not plan.processes
        ]

    def write_segments(self, on_progress: Progress | None) -> None:
        """Write the segments of all sources that have events.

        Raises:
            TraceError: A source can no longer be read, or a worker process was killed.
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
                    tuple(process.pid for process in plan.processes),
                )
            first_id += plan.id_count
        sizes = [self._sizes[rank] for rank in tasks]
        results = map_traces(
            write_segment, list(tasks.values()), sizes, processes=self._processes, on_progress=on_progress
        )
        self._segments = dict(zip(tasks, without_errors(results), strict=True))

    def missing_paths(self) -> list[str]:
        """Return the distinct reasons why requested critical paths are missing."""
        problems = (segment.path_problem for segment in self._segments.values())
        return list(dict.fromkeys(problem for problem in problems if problem))

    def join(self, file: BinaryIO) -> TraceCheck:
        """Join the segments into the new file."""
        problems = [plan.problem for plan in self._plans if plan.problem]
        output = _Output(file, gzip=self._gzip)
        output.text(b"{\n")
        for key, value in self._members().items():  # before the events, so that the start of the file identifies it
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
        """Return the top-level members other than ``traceEvents``. The first member identifies a merged file."""
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
        """Return metadata events for a source: the names of new lanes, and the names and sort indices of processes.

        Processes are numbered consecutively across sources. Viewers store sort indices in 32 bits, which leaves no room
        for adding an offset per source to the original indices.
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


def _new_pids(plans: Sequence[SourcePlan]) -> list[list[int]]:
    """Return the new pids for the processes of each source.

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
    """Return the time origin to subtract so that times fit in a double, or 0 if the times of any source already fit.

    Perfetto reads times as microseconds in a double. Traces without ``baseTimeNanoseconds`` count from 1970, and
    doubles of that size have a resolution of only 250 ns. Rounded to that resolution, nested events could overlap, and
    Perfetto would drop them.
    """
    first_ns = [plan.first_large_ns for plan in plans if plan.processes]
    large_ns = [time_ns for time_ns in first_ns if time_ns is not None]
    return (min(large_ns) // _ORIGIN_UNIT_NS - 1) * _ORIGIN_UNIT_NS if len(large_ns) == len(first_ns) else 0


class _Output:
    """Writes the new file from text and segment files."""

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
        """Append a segment file."""
        self._end_text(last=False)
        append_file(self._file, path)
        self._add(piece)

    def finish(self) -> tuple[int, int]:
        """Finish the file. Return its size and the size of the uncompressed JSON."""
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
