"""One Chrome trace on several cores.

Gzip is inflated from its beginning to its end, at some gigabytes a second; what follows takes five times as long and
can be divided. Each process inflates all of the file and scans it in the same way, but decodes every so-manieth group
of batches only: where batches begin and end depends on the text alone, as long as each decodes, which its owner proves.
Where one does not, and for all that is damaged, unusual or beyond a limit, one process reads the file once more.

Groups are put together in the order of the file, so that the answer is that of one process, to the last code.
"""

from __future__ import annotations

import functools
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from profdeck_traces.base.parallel import forks, map_traces
from profdeck_traces.base.progress import Progress
from profdeck_traces.reading.all_events import AllEvents
from profdeck_traces.reading.chrome import KEYS, MAX_MARKS, EventStore, trace_of
from profdeck_traces.reading.column_builder import ColumnBuilder, KnownCodes
from profdeck_traces.reading.columns import Columns, Tables, concatenated
from profdeck_traces.reading.event_fields import Stated
from profdeck_traces.reading.integrity import TraceCheck, TraceChecker, feed_chunks, file_size
from profdeck_traces.reading.stream import CHUNK_BYTES, read_chunks
from profdeck_traces.reading.time_slices import SortedRun, TimeSlices
from profdeck_traces.reading.trace import Trace

GROUP_BATCHES = 16
"""Some 60,000 events, as many as a slice of time has."""


class IrregularError(Exception):
    """The parts of a file cannot be put together; one process has to read it."""


@attrs.frozen(kw_only=True)
class HowToRead:
    """What is the same for all parts."""

    path: Path
    kind: type[AllEvents]
    categories: frozenset[str] | None
    is_step: Callable[[str], bool]
    max_json_bytes: int
    slice_events: int
    parts: int
    directory: Path = Path()
    """Where parts write their events."""
    chunk_bytes: int = CHUNK_BYTES
    group_batches: int = GROUP_BATCHES


@attrs.frozen
class Group:
    """What one group of batches holds."""

    number: int
    new: KnownCodes
    """What its process met in it for the first time."""
    runs: list[SortedRun]
    marks: Columns
    stated: Stated


@attrs.frozen
class Part:
    """What one process found."""

    check: TraceCheck
    own_events: int
    """Those of its batches."""
    groups: list[Group]
    codes: KnownCodes

    @property
    def of_all(self) -> tuple[int, int, int]:
        """What all parts of one file have in common: sizes, and the events that did not come in batches."""
        return self.check.size_bytes, self.check.json_bytes, self.check.events - self.own_events


def read_in_parts(how: HowToRead, on_progress: Progress | None, processes: int) -> Trace | None:
    """Read a trace in parts; return ``None`` if it has to be read in one instead.

    Args:
        how: How.
        on_progress: Called with the bytes of the file read so far and its size.
        processes: How many parts are read at the same time; 1 reads one after the other in this process.
    """
    if processes > 1 and not forks():  # what is asked of names is a function of this process
        return None
    size_bytes = file_size(how.path)
    with tempfile.TemporaryDirectory(prefix="profdeck-") as directory:
        how = attrs.evolve(how, directory=Path(directory))
        # All read the whole file, and one of them tells how far it is.
        sizes = [size_bytes, *[0] * (how.parts - 1)]
        numbers = range(how.parts)
        found = map_traces(
            functools.partial(read_part, how=how), numbers, sizes, processes=processes, on_progress=on_progress
        )
        parts = [part for part in found if isinstance(part, Part) and part.check.whole and part.codes.is_all]
        if len(parts) < how.parts or len({part.of_all for part in parts}) > 1:  # the file may have changed meanwhile
            return None
        return _together(how, parts)


def read_part(number: int, on_progress: Progress | None, *, how: HowToRead) -> Part | None:
    """Read one part; return ``None`` if it cannot be put together with others.

    Args:
        number: Which, from 0.
        on_progress: As of `read_in_parts`; the first part tells.
        how: As there, with the directory that it is for.
    """
    size_bytes = file_size(how.path)
    on_read = None if on_progress is None or number else lambda read: on_progress(read, size_bytes)
    with (how.directory / str(number)).open("w+b") as file:
        handler = _PartOfEvents(how, number, file)
        checker = TraceChecker(handler)
        chunks = read_chunks(how.path, how.chunk_bytes, on_read=on_read)
        try:
            damage = feed_chunks(checker.feed, chunks, size_bytes, how.max_json_bytes)
            check = checker.finish(size_bytes, damage=damage)
        except IrregularError:
            return None
        handler.end_group()
    return Part(check, handler.own_events, handler.groups, handler.codes)


class _PartOfEvents:
    """Takes every so-manieth group of batches; of the others, it takes for granted that they are sound."""

    wants_text = True

    def __init__(self, how: HowToRead, number: int, file: Any) -> None:
        self.keys = KEYS
        self._how, self._number = how, number
        self._store = EventStore(how.is_step, how.categories, slice_events=how.slice_events, file=file)
        self._events = how.kind(KEYS, self._store.tables, self._store.add)
        self.codes = self._events.collector.known()
        self._batches = 0
        self._group: int | None = None
        self.own_events = 0
        self.groups: list[Group] = []

    def batch(self, text: memoryview) -> int | None:
        """Take a batch of this part."""
        self._enter_group()
        self._batches += 1
        if not self._is_mine:
            return 0
        count = self._events.batch(text)
        if count is None:  # where the next batch begins is not what the others take it to be
            raise IrregularError
        self.own_events += count
        return count

    def event(self, text: bytes) -> None:
        """Take an event that all find, if it comes within a group of this part; as for members."""
        self._enter_group()
        if self._is_mine:
            self._events.event(text)

    def member(self, key: str, text: bytes) -> None:
        """Take a member."""
        self._enter_group()
        if self._is_mine:
            self._events.member(key, text)

    @property
    def _is_mine(self) -> bool:
        """Whether the group that is under way is one of this part."""
        return self._group is not None and self._group % self._how.parts == self._number

    def _enter_group(self) -> None:
        """End the group before, where what comes next is in another one."""
        group = self._batches // self._how.group_batches
        if group != self._group:
            self.end_group()
            self._group = group

    def end_group(self) -> None:
        """Keep what the group that is under way holds, if it is one of this part; at the end, too."""
        if self._group is None or not self._is_mine:
            return
        events = self._events
        events.flush()
        events.collector.hand_on()
        codes = events.collector.known()
        group = Group(
            self._group,
            codes.since(self.codes),
            self._store.timeline.take_runs(),
            self._store.marks.take(),
            events.stated,
        )
        self.groups.append(group)
        self.codes = codes
        events.stated = Stated()


def _together(how: HowToRead, parts: list[Part]) -> Trace | None:
    """Put the groups of all parts together, in the order of the file."""
    tables, stated = Tables(), Stated()
    builder = ColumnBuilder(tables, lambda _block: None)
    names: list[list[int]] = [[] for _ in parts]
    tracks: list[list[int]] = [[] for _ in parts]
    runs: list[tuple[int, SortedRun]] = []
    marks: list[tuple[int, Columns]] = []
    groups = [(at, group) for at, part in enumerate(parts) for group in part.groups]
    for at, group in sorted(groups, key=lambda one: one[1].number):
        of_names, of_tracks = builder.codes_of(group.new, parts[at].codes.categories)
        names[at] += of_names
        tracks[at] += of_tracks
        runs += [(at, run) for run in group.runs]
        marks.append((at, group.marks))
        if not stated.add(group.stated):
            return None
    if sum(len(block) for _, block in marks) >= MAX_MARKS:
        return None
    builder.finish(stated.process_names)
    name_maps = [np.array(codes, dtype=np.int32) for codes in names]
    track_maps = [np.array(codes, dtype=np.int32) for codes in tracks]
    files = [(how.directory / str(at)).open("rb") for at in range(len(parts))]
    timeline = TimeSlices.of_runs(
        tables,
        [attrs.evolve(run, file=files[at], names=name_maps[at], tracks=track_maps[at]) for at, run in runs],
        how.slice_events,
    )
    for file in files:
        weakref.finalize(timeline, file.close)
    of_marks = [
        Columns(tables, name_maps[at][block.name], track_maps[at][block.track], block.start_ns, block.end_ns)
        for at, block in marks
    ]
    first = parts[0]
    events = first.of_all[-1] + sum(part.own_events for part in parts)
    return trace_of(
        how.path,
        attrs.evolve(first.check, events=events),
        stated,
        tables=tables,
        timeline=timeline,
        marks=concatenated(tables, of_marks),
        devices_only=how.categories is not None,
    )
