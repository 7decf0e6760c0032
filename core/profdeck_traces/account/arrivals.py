"""A rank's critical paths to its collectives, which explain its arrival time at each one."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from profdeck_traces.account.model import OwnerKey
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.row_kinds import RowKind
from profdeck_traces.account.table import owners_of_segments, plain_names
from profdeck_traces.account.walk import OnDevice, OnThread, Path, Position
from profdeck_traces.account.windows import PathWindow
from profdeck_traces.attribution.rows import Attribution
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.walking import NO_TIME

# isal's stubs declare the class as an instance.
_InflateError: type[Exception] = isal_zlib.error  # type: ignore[assignment]
_INTEGER = "<i8"
MAX_SEGMENTS = 1 << 19
"""Maximum number of stored segments per trace."""


@attrs.frozen(eq=False)
class Segments:
    """Segments of the paths to all collectives in a trace, grouped by collective and sorted by time.

    Each segment ends when the next one starts. The last segment ends when the collective starts.
    """

    begin: Int
    """Start times in nanoseconds."""
    owner: Int
    """Index into `Arrivals.keys`. For time inside another collective, ``len(keys)`` plus the index of that call."""


@attrs.frozen(kw_only=True, eq=False)
class Arrivals:
    """Paths to the collectives in a trace, in a compact form for storage.

    The path to a collective starts when the previous collective of the same process group started, because ranks that
    wait for this rank have already finished that one. Times include the trace's base time, as in
    `profdeck_traces.analysis.collectives.Collectives`.
    """

    keys: Sequence[OwnerKey]
    """Owners of the segments and calls."""
    call_key: Int
    """For each collective call, the index of its owner in `keys`; -1 if the call was not analysed."""
    counts: Int
    """Number of path segments for each collective call."""
    packed: bytes
    """The arrays in `segments`, compressed."""
    path_call: Int
    """Index of the call for each segment of the rank's own critical path that is inside a collective."""
    path_begin: Int
    path_end: Int
    is_complete: bool
    """False if there were too many segments to store. In this case, all `counts` are zero."""

    @property
    def segments(self) -> Segments:
        """Decompress the segments.

        Raises:
            ValueError: The compressed data is invalid.
        """
        count = int(self.counts.sum())
        try:
            data = isal_zlib.decompressobj().decompress(self.packed, 16 * count + 1)
        except _InflateError as error:
            raise ValueError(str(error)) from error
        if len(data) != 16 * count:
            raise ValueError("unexpected number of segments")
        begin, owner = (
            np.frombuffer(data, np.uint8).reshape(2, 8, count).transpose(0, 2, 1).copy().view(_INTEGER)[..., 0]
        )
        if count and not 0 <= owner.min() <= owner.max() < len(self.keys) + len(self.call_key):
            raise ValueError("a segment has an invalid owner")
        return Segments(np.cumsum(begin), owner)


def no_arrivals(calls: int) -> Arrivals:
    """Return arrivals without paths for a trace with `calls` collective calls."""
    none = np.zeros(0, np.int64)
    return Arrivals(
        keys=(),
        call_key=np.full(calls, -1),
        counts=np.zeros(calls, np.int64),
        packed=pack(none, none),
        path_call=none,
        path_begin=none,
        path_end=none,
        is_complete=True,
    )


def pack(begin: Int, owner: Int) -> bytes:
    """Compress the start times and owners of segments. Grouping bytes by significance saves a third."""
    values = np.stack([np.diff(begin, prepend=0), owner]).astype(_INTEGER)
    return isal_zlib.compress(values.view(np.uint8).reshape(2, -1, 8).transpose(0, 2, 1).tobytes(), 1)


class ArrivalFinder:
    """Finds the paths to the collectives in a trace."""

    def __init__(
        self, names: Attribution, kinds: NDArray[np.uint8], rows: Int, groups: NDArray[np.integer], base_ns: int
    ) -> None:
        """Prepare the search.

        Args:
            names: Operators, modules and lines of the events.
            kinds: `RowKind` of each event.
            rows: Row of each collective call; -1 for calls that do not wait for all ranks, such as messages.
            groups: Number of each call's process group.
            base_ns: Base time to add to all times.
        """
        self._names, self._kinds, self._base_ns, self._count = names, kinds, base_ns, len(rows)
        self._texts = plain_names(names) if (rows >= 0).any() else []
        # Sort by row, like the events in a window.
        self._calls = np.flatnonzero(rows >= 0)
        self._calls = self._calls[np.argsort(rows[self._calls], kind="stable")]
        self._rows = rows[self._calls]
        self._start = names.events.start_ns[self._rows]
        self._since = np.full(len(self._rows), NO_TIME)
        order = np.lexsort((self._start, groups[self._calls]))
        is_same = np.diff(groups[self._calls[order]]) == 0
        self._since[order[1:][is_same]] = self._start[order[:-1][is_same]]
        self._numbers: dict[OwnerKey, int] = {}
        none = np.zeros(0, np.int64)
        self._walked: list[tuple[Int, Int, Int]] = [(none, none, none)]
        self._own: list[tuple[Int, Int, Int]] = [(none, none, none)]

    def add(self, window: PathWindow, path: Path) -> None:
        """Add the paths in a window.

        Args:
            window: Window to search.
            path: The window's critical path within the account's steps. Its rows refer to the trace.
        """
        if not len(self._rows):
            return
        call = self._calls_of(path)
        own = np.flatnonzero(call >= 0)
        self._own.append((call[own], path.begin[own] + self._base_ns, path.end[own] + self._base_ns))
        walked, calls = self._walk(window)
        if not len(walked):
            return
        owner = owners_of_segments(walked, self._names, self._texts, self._kinds, self._numbers)
        inner = self._calls_of(walked)
        owner = np.where(inner >= 0, -1 - inner, owner)
        is_first = np.ones(len(walked), np.bool_)
        is_first[1:] = (owner[1:] != owner[:-1]) | (calls[1:] != calls[:-1])
        self._walked.append((calls[is_first], walked.begin[is_first] + self._base_ns, owner[is_first]))

    def arrivals(self) -> Arrivals:
        """Return the paths found so far."""
        call_key = np.full(self._count, -1)
        if len(self._rows):
            none = np.zeros(len(self._rows), np.int64)
            kind = np.full(len(self._rows), OwnerKind.COLLECTIVE, np.uint8)
            path = Path(none, none, kind, self._rows.astype(np.int32))
            call_key[self._calls] = owners_of_segments(path, self._names, self._texts, self._kinds, self._numbers)
        call, begin, owner = (np.concatenate(parts) for parts in zip(*self._walked, strict=True))
        is_complete = len(call) <= MAX_SEGMENTS
        order = np.argsort(call, kind="stable") if is_complete else call[:0]
        call, begin, owner = call[order], begin[order], owner[order]
        path_call, path_begin, path_end = (np.concatenate(parts) for parts in zip(*self._own, strict=True))
        return Arrivals(
            keys=tuple(self._numbers),
            call_key=call_key,
            counts=np.bincount(call, minlength=self._count),
            packed=pack(begin, np.where(owner < 0, len(self._numbers) - 1 - owner, owner)),
            path_call=path_call,
            path_begin=path_begin,
            path_end=path_end,
            is_complete=is_complete,
        )

    def _calls_of(self, path: Path) -> Int:
        """Return the call that each path segment belongs to, or -1 if there is none."""
        place = np.minimum(self._rows.searchsorted(path.row), len(self._rows) - 1)
        is_call = (path.kind == OwnerKind.COLLECTIVE) & (self._rows[place] == path.row)
        return np.where(is_call, self._calls[place], -1)

    def _walk(self, window: PathWindow) -> tuple[Path, Int]:
        """Walk from the start of each collective back to the start of the previous one in its process group.

        Returns:
            The segments grouped by call, and the call of each segment. Rows refer to the trace.
        """
        recording, work = window.recording, window.recording.work
        times = recording.borders.times
        step = times.searchsorted(self._start) - 1
        is_inside = (step >= 0) & (step < len(window.is_used))
        is_inside[is_inside] = window.is_used[step[is_inside]]
        since = np.maximum(self._since, times[0])
        place = np.flatnonzero(is_inside & (since < self._start))
        rows = self._rows[place] if window.rows is None else window.rows.searchsorted(self._rows[place])
        device = work.rows.searchsorted(rows)
        is_device = recording.kinds[rows] >= RowKind.KERNEL
        walks: list[tuple[int, int, Position]] = [
            (begin, end, OnDevice(number) if on_device else OnThread(track))
            for begin, end, number, on_device, track in zip(
                since[place].tolist(),
                self._start[place].tolist(),
                device.tolist(),
                is_device.tolist(),
                window.events.track[rows].tolist(),
                strict=True,
            )
        ]
        path, walk = recording.walk.paths(walks)
        return attrs.evolve(path, row=window.rows_of_trace(path.row)), self._calls[place[walk]]
