"""Critical paths to the collectives of a recording: what a rank did before it arrived at each collective."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from profdeck_traces.account.model import OwnerKey
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.recording import RecordingPath
from profdeck_traces.account.row_kinds import RowKind
from profdeck_traces.account.table import owners_of_segments, path_of_steps, plain_names
from profdeck_traces.account.walk import OnDevice, OnThread, Path, Position
from profdeck_traces.attribution.rows import Attribution
from profdeck_traces.reading.intervals import Int

# isal's stubs declare the class as an instance.
_InflateError: type[Exception] = isal_zlib.error  # type: ignore[assignment]
_INTEGER = "<i8"
MAX_SEGMENTS = 1 << 19
"""Maximum number of stored segments per trace."""


@attrs.frozen(eq=False)
class Segments:
    """Segments of the paths to all collectives of a trace, grouped by collective and sorted by time.

    A segment ends where the next one starts, or where its collective starts.
    """

    begin: Int
    """Start times in nanoseconds."""
    owner: Int
    """Index into `Arrivals.keys`. For a collective, the number of keys plus the index of the call."""


@attrs.frozen(eq=False)
class Arrivals:
    """Paths to the collectives of a trace, in a compact form that can be stored.

    The path to a collective starts where the previous collective of the same process group started, because ranks
    that wait for this rank left that collective. Times have the base of the trace's clock, as in
    `profdeck_traces.analysis.collectives.Collectives`.
    """

    keys: Sequence[OwnerKey]
    """Owners of the segments."""
    call_key: Int
    """For each collective call, the index of its owner in `keys`; -1 if the call was not examined."""
    counts: Int
    """Number of segments before each collective call."""
    packed: bytes
    """Compressed arrays of `segments`."""
    path_call: Int
    """For each segment of the rank's own critical path inside a collective: the index of the call."""
    path_begin: Int
    path_end: Int
    is_complete: bool
    """False if there are too many segments to store. Then `counts` is zero for all calls."""

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
            raise ValueError("the number of segments is wrong")
        begin, owner = np.frombuffer(data, _INTEGER).reshape(2, count)
        if count and not 0 <= owner.min() <= owner.max() < len(self.keys) + len(self.call_key):
            raise ValueError("a segment without an owner")
        return Segments(np.cumsum(begin), owner)


def no_arrivals(calls: int) -> Arrivals:
    """Return arrivals without paths for a trace with a given number of collective calls."""
    none = np.zeros(0, np.int64)
    return Arrivals((), np.full(calls, -1), np.zeros(calls, np.int64), pack(none, none), none, none, none, True)  # noqa: FBT003


def pack(begin: Int, owner: Int) -> bytes:
    """Compress the arrays of segments."""
    return isal_zlib.compress(np.stack([np.diff(begin, prepend=0), owner]).astype(_INTEGER).tobytes(), 1)


def find_arrivals(  # noqa: PLR0913, PLR0917 - one parameter per kind of input
    recording: RecordingPath,
    names: Attribution,
    excluded: NDArray[np.bool_],
    rows: Int,
    group: Int,
    base_ns: int,
) -> Arrivals:
    """Find the paths to the collectives of a recording.

    Args:
        recording: The critical path.
        names: Operators, modules and lines of the events.
        excluded: Mask of the cold steps, with one element per step annotation.
        rows: Row of each collective call; -1 for calls that ranks do not wait for, such as messages.
        group: Process group of each call, as a number.
        base_ns: Time that is added to all times.
    """
    arrivals = no_arrivals(len(rows))
    if not len(recording.borders.times) or not (rows >= 0).any():
        return arrivals
    walked, calls = _walked(recording, names, rows, group)
    path = path_of_steps(recording, excluded)
    # Find the calls of collective segments by their row.
    order = np.argsort(rows, kind="stable")

    def calls_of(some: Path) -> Int:
        place = np.minimum(rows[order].searchsorted(some.row), len(rows) - 1)
        is_call = (some.kind == OwnerKind.COLLECTIVE) & (rows[order[place]] == some.row) & (some.row >= 0)
        return np.where(is_call, order[place], -1)

    own_call = calls_of(path)
    own = np.flatnonzero(own_call >= 0)
    with_calls = Path(
        np.append(walked.begin, np.zeros(len(rows), np.int64)),
        np.append(walked.end, np.zeros(len(rows), np.int64)),
        np.append(walked.kind, np.full(len(rows), OwnerKind.COLLECTIVE, np.uint8)),
        np.append(walked.row, rows.astype(np.int32)),
    )
    owner, keys = owners_of_segments(with_calls, names, plain_names(names), recording.kinds)
    of_segment, call_key = owner[: len(walked)], owner[len(walked) :]
    inner_call = calls_of(walked)
    of_segment = np.where(inner_call >= 0, len(keys) + inner_call, of_segment)
    is_first = np.ones(len(walked), np.bool_)
    is_first[1:] = (of_segment[1:] != of_segment[:-1]) | (calls[1:] != calls[:-1])
    counts = np.bincount(calls[is_first], minlength=len(rows))
    begin, of_segment = walked.begin[is_first] + base_ns, of_segment[is_first]
    is_complete = len(begin) <= MAX_SEGMENTS
    if not is_complete:
        begin, of_segment, counts = begin[:0], of_segment[:0], np.zeros(len(rows), np.int64)
    return Arrivals(
        keys=keys,
        call_key=np.where(rows >= 0, call_key, -1),
        counts=counts,
        packed=pack(begin, of_segment),
        path_call=own_call[own],
        path_begin=path.begin[own] + base_ns,
        path_end=path.end[own] + base_ns,
        is_complete=is_complete,
    )


def _walked(recording: RecordingPath, names: Attribution, rows: Int, group: Int) -> tuple[Path, Int]:
    """Walk from the start of each collective back to the start of the previous one in its process group.

    Returns:
        The segments, grouped by call, and the call of each segment.
    """
    events, work = names.events, recording.work
    first, last = int(recording.borders.times[0]), int(recording.borders.times[-1])
    calls = np.flatnonzero(rows >= 0)
    start = events.start_ns[rows[calls]]
    order = np.lexsort((start, group[calls]))
    calls, start = calls[order], start[order]
    since = np.full(len(calls), first)
    since[1:] = np.where(group[calls[1:]] == group[calls[:-1]], start[:-1], first)
    since = np.maximum(since, first)
    used = np.flatnonzero((start > since) & (start <= last))
    calls, start, since = calls[used], start[used], since[used]
    order = np.argsort(calls, kind="stable")
    calls, start, since = calls[order], start[order], since[order]
    is_device = recording.kinds[rows[calls]] >= RowKind.KERNEL
    by_row = np.argsort(work.rows, kind="stable")
    number = np.full(len(calls), -1)
    number[is_device] = by_row[work.rows[by_row].searchsorted(rows[calls[is_device]])]
    track = events.track[rows[calls]]
    walks: list[tuple[int, int, Position]] = [
        (begin, end, OnThread(of_thread) if index < 0 else OnDevice(index))
        for begin, end, of_thread, index in zip(since.tolist(), start.tolist(), track.tolist(), number.tolist(), strict=True)
    ]
    path, walk = recording.walk.paths(walks)
    return path, calls[walk]
