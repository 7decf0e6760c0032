"""Critical-path periods in which a process only runs Python code or waits.

During such a period, the process may be waiting for a process with another role, such as a server.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.model import OwnerKey
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.table import owners_of_segments, plain_names
from profdeck_traces.account.walk import Path
from profdeck_traces.attribution.rows import Attribution
from profdeck_traces.reading.intervals import Int

_KINDS = (OwnerKind.BETWEEN, OwnerKind.WAIT_FOR_THREAD, OwnerKind.PYTHON)
_MIN_PERIOD_NS = 5_000_000
_MIN_SEGMENT_NS = 100_000


@attrs.frozen(kw_only=True, eq=False)
class IdlePeriods:
    """Periods of at least 5 ms without operators, runtime calls or device work on the critical path, sorted by time.

    Times include the trace's base time, as in `profdeck_traces.analysis.collectives.Collectives`.
    """

    keys: Sequence[OwnerKey]
    """Keys of the segments' owners."""
    begin: Int
    end: Int
    segment_owner: Int
    """Index into `keys` for each segment of at least 100 µs, sorted by time. Shorter segments are omitted."""
    segment_begin: Int
    segment_end: Int


ARRAYS = ("begin", "end", "segment_owner", "segment_begin", "segment_end")
"""Names of the arrays in `IdlePeriods`."""
_NONE = np.zeros(0, np.int64)
NO_PERIODS = IdlePeriods(keys=(), begin=_NONE, end=_NONE, segment_owner=_NONE, segment_begin=_NONE, segment_end=_NONE)


class IdleFinder:
    """Finds the idle periods on the critical path of a trace."""

    def __init__(self, names: Attribution, kinds: NDArray[np.uint8], base_ns: int) -> None:
        """Prepare the search.

        Args:
            names: Operators, modules and lines of the events.
            kinds: `RowKind` of each event.
            base_ns: Base time to add to all times.
        """
        self._names, self._kinds, self._base_ns = names, kinds, base_ns
        self._numbers: dict[OwnerKey, int] = {}
        self._periods: list[tuple[Int, Int]] = []
        self._segments: list[tuple[Int, Int, Int]] = []

    @functools.cached_property
    def _texts(self) -> list[str]:
        return plain_names(self._names)

    def add(self, path: Path) -> None:
        """Add a window's path. A period that crosses a window boundary is split."""
        is_idle = np.isin(path.kind, _KINDS)
        follows = np.append(False, path.begin[1:] == path.end[:-1])
        first = np.flatnonzero(is_idle & ~(follows & np.append(False, is_idle[:-1])))
        last = np.flatnonzero(is_idle & ~np.append((follows & is_idle)[1:], False))
        is_long = path.end[last] - path.begin[first] >= _MIN_PERIOD_NS
        first, last = first[is_long], last[is_long]
        if not len(first):
            return
        self._periods.append((path.begin[first] + self._base_ns, path.end[last] + self._base_ns))
        is_inside = np.zeros(len(path) + 1, np.int64)
        is_inside[first] += 1
        is_inside[last + 1] -= 1
        selected = np.flatnonzero((np.cumsum(is_inside)[:-1] > 0) & (path.end - path.begin >= _MIN_SEGMENT_NS))
        if len(selected):
            part = Path(path.begin[selected], path.end[selected], path.kind[selected], path.row[selected])
            owner = owners_of_segments(part, self._names, self._texts, self._kinds, self._numbers)
            self._segments.append((owner, part.begin + self._base_ns, part.end + self._base_ns))

    def periods(self) -> IdlePeriods:
        """Return the periods found so far."""
        begin, end = map(np.concatenate, zip((_NONE, _NONE), *self._periods, strict=True))
        owner, segment_begin, segment_end = map(
            np.concatenate, zip((_NONE, _NONE, _NONE), *self._segments, strict=True)
        )
        return IdlePeriods(
            keys=tuple(self._numbers),
            begin=begin,
            end=end,
            segment_owner=owner,
            segment_begin=segment_begin,
            segment_end=segment_end,
        )
