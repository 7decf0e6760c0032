"""The events of a trace in the order of time, in pieces that fit into memory, whatever the size of the trace."""

from __future__ import annotations

import bisect
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import IO

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.columns import Columns, Tables, concatenated
from profdeck_traces.reading.intervals import Int

SLICE_EVENTS = 1 << 16
# More than any real program has open at once; of even more, those that end first count as ended with their slice.
_MAX_OPEN_EVENTS = 1 << 16
# So many starts of a slice's events are kept, to find where slices must begin.
_SAMPLES = 1 << 8
_ROW = np.dtype([("start_ns", np.int64), ("end_ns", np.int64), ("name", np.int32), ("track", np.int32)])


@attrs.frozen
class Slice:
    """All events that are open at some time in ``[begin_ns, end_ns)``, or that are empty and lie in it."""

    columns: Columns
    """In the order of their starts; ``start_ns`` and ``end_ns`` are clipped to the slice."""
    first: NDArray[np.bool_]
    """Which of them start in this slice: count those once."""
    order_ns: Int
    """Their starts before they were clipped, for the nesting of events that began before the slice."""
    whole_end_ns: Int
    """Their ends before they were clipped."""
    begin_ns: int
    end_ns: int
    """Where the next slice begins: they follow each other without a hole."""

    def whole(self, which: NDArray[np.bool_] | Int) -> Columns:
        """Return some of the events, by a mask or indices, as they were before they were clipped."""
        return attrs.evolve(self.columns, start_ns=self.order_ns, end_ns=self.whole_end_ns)[which]


@attrs.frozen(eq=False)
class SortedRun:
    """Events in the order of their starts, in a file."""

    row: int
    """Where the first one is in the file, in rows."""
    end: int
    """Where the first row after them is."""
    starts: Int
    """The starts of every so-manieth row."""
    file: IO[bytes] | None = None
    """The file; ``None`` for the one that `TimeSlices` has itself."""
    names: NDArray[np.int32] | None = None
    """What the codes of names in that file are in the tables; ``None`` if they are the same. As for tracks."""
    tracks: NDArray[np.int32] | None = None


class TimeSlices:
    """Takes events in any order; gives them back in slices of time.

    Of more events than a slice takes, sorted runs go to a temporary file without a name, 24 bytes for each event, so
    that memory is bounded by a slice and the events that are still open at its end.

    Args:
        tables: Those of the events.
        slice_events: How many events start in a slice, about.
        file: For the runs, instead of a temporary one.
    """

    def __init__(self, tables: Tables, slice_events: int = SLICE_EVENTS, file: IO[bytes] | None = None) -> None:
        self._tables = tables
        self._slice_events = slice_events
        self._sample = max(1, slice_events // _SAMPLES)
        self._blocks: list[Columns] = []
        self._held = 0
        self._file = file
        self._runs: list[SortedRun] = []
        self._rows = 0

    @classmethod
    def of_runs(cls, tables: Tables, runs: Sequence[SortedRun], slice_events: int = SLICE_EVENTS) -> TimeSlices:
        """Return those of runs that others wrote, in the order of the file that the events are from."""
        found = cls(tables, slice_events)
        found._runs = list(runs)
        found._rows = sum(run.end - run.row for run in runs)
        return found

    def take_runs(self) -> list[SortedRun]:
        """Write all events that were added since to the file, and return where."""
        if self._held:
            self._spill()
        runs, self._runs = self._runs, []
        return runs

    def __len__(self) -> int:
        return self._rows + self._held

    def add(self, block: Columns) -> None:
        """Take events.

        Raises:
            OSError: The temporary file cannot be written.
        """
        self._blocks.append(block)
        self._held += len(block)
        if self._held > self._slice_events:
            self._spill()

    def blocks(self) -> Iterator[Columns]:
        """Yield all events in blocks, in no particular order; to be called when all have been added."""
        for run in self._open_runs():
            yield self._columns(run.until(None))
        yield from self._blocks

    def slices(self) -> Iterator[Slice]:
        """Yield all events, slice by slice; to be called when all have been added."""
        if self._file is None and not self._runs:
            yield from self._only_slice()
            return
        if self._held:
            self._spill()
        yield from self._slices_of_runs()

    def _sorted(self) -> Columns:
        columns = concatenated(self._tables, self._blocks)
        self._blocks, self._held = [], 0
        return columns[np.argsort(columns.start_ns, kind="stable")]

    def _only_slice(self) -> Iterator[Slice]:
        columns = self._sorted()
        self.add(columns)  # they may be asked for again
        if len(columns):
            begin_ns = int(columns.start_ns[0])
            # An empty event at the very end lies in the slice as well.
            end_ns = max(int(columns.end_ns.max()), int(columns.start_ns[-1]) + 1)
            yield Slice(
                columns, np.ones(len(columns), dtype=np.bool_), columns.start_ns, columns.end_ns, begin_ns, end_ns
            )

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="profdeck-")  # noqa: SIM115 - it is closed with this object
            weakref.finalize(self, self._file.close)
        columns = self._sorted()
        rows = np.empty(len(columns), dtype=_ROW)
        for field, column in zip(_ROW.names or (), _arrays(columns), strict=True):
            rows[field] = column
        self._file.write(rows.data)
        end = self._rows + len(rows)
        self._runs.append(SortedRun(self._rows, end, columns.start_ns[:: self._sample].copy()))
        self._rows = end

    def _slices_of_runs(self) -> Iterator[Slice]:
        sample = np.sort(np.concatenate([run.starts for run in self._runs]))
        cuts = np.unique(sample[:: max(1, self._slice_events // self._sample)])
        readers = self._open_runs()
        open_still = concatenated(self._tables, [])
        for number, begin in enumerate(cuts.tolist()):
            is_last = number == len(cuts) - 1
            until = None if is_last else int(cuts[number + 1])
            rows = np.concatenate([reader.until(until) for reader in readers])
            fresh = self._columns(rows)
            fresh = fresh[np.argsort(fresh.start_ns, kind="stable")]
            columns = concatenated(self._tables, [open_still, fresh])
            if until is None:
                until = max(int(columns.end_ns.max()), int(columns.start_ns.max()) + 1)
            first = np.arange(len(columns)) >= len(open_still)
            clipped = attrs.evolve(
                columns, start_ns=np.maximum(columns.start_ns, begin), end_ns=np.minimum(columns.end_ns, until)
            )
            yield Slice(clipped, first, columns.start_ns, columns.end_ns, begin, until)
            open_still = columns[columns.end_ns > until]
            if len(open_still) > _MAX_OPEN_EVENTS:
                longest = np.argpartition(open_still.end_ns, -_MAX_OPEN_EVENTS)[-_MAX_OPEN_EVENTS:]
                open_still = open_still[np.sort(longest)]

    def _open_runs(self) -> list[_RunReader]:
        if self._file is not None:
            self._file.flush()
        return [_RunReader(file, run, self._sample) for run in self._runs if (file := run.file or self._file)]

    def _columns(self, rows: NDArray[np.void]) -> Columns:
        return Columns(self._tables, rows["name"], rows["track"], rows["start_ns"], rows["end_ns"])


def _arrays(columns: Columns) -> tuple[Int, Int, NDArray[np.int32], NDArray[np.int32]]:
    return columns.start_ns, columns.end_ns, columns.name, columns.track


class _RunReader:
    """Reads a sorted run from its beginning to its end."""

    def __init__(self, file: IO[bytes], run: SortedRun, sample: int) -> None:
        self._file, self._run = file, run
        self._first, self._next, self._end = run.row, run.row, run.end
        self._starts, self._sample = run.starts, sample
        self._held = np.empty(0, dtype=_ROW)

    def until(self, time_ns: int | None) -> NDArray[np.void]:
        """Return the next rows that start before a time; all that are left, without one."""
        if time_ns is None:
            return np.concatenate([self._held, self._read(self._end)])
        samples = int(np.searchsorted(self._starts, time_ns))  # the row of the next one starts later
        rows = np.concatenate([self._held, self._read(min(self._end, self._first + samples * self._sample))])
        cut = bisect.bisect_left(rows["start_ns"], time_ns)  # numpy would copy the column first
        self._held = rows[cut:].copy()
        return rows[:cut]

    def _read(self, end: int) -> NDArray[np.void]:
        count = max(0, end - self._next)
        self._file.seek(self._next * _ROW.itemsize)
        self._next += count
        rows: NDArray[np.void] = np.frombuffer(self._file.read(count * _ROW.itemsize), dtype=_ROW)
        if self._run.names is None or self._run.tracks is None:
            return rows
        rows = rows.copy()
        rows["name"] = self._run.names[rows["name"]]
        rows["track"] = self._run.tracks[rows["track"]]
        return rows
