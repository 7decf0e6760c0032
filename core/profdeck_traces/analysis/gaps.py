"""The time in which a device did nothing, between its first and its last event, and the longest parts of it."""

from __future__ import annotations

import attrs
import numpy as np

from profdeck_traces.analysis.host_states import CAUSES, HostEvent, HostSlice
from profdeck_traces.reading.columns import Columns
from profdeck_traces.reading.intervals import Int, Spans, complement
from profdeck_traces.reading.time_slices import Slice

UNKNOWN = -1
MAX_GAPS = 10


@attrs.frozen
class OpenGap:
    """A time in which a device did nothing."""

    begin_ns: int
    end_ns: int
    times: Int
    """How much of it each state of the host takes."""
    open_events: frozenset[HostEvent]
    """Those of the host that may have been open for most of it."""
    before: int = UNKNOWN
    """The name of what ran last before it."""
    after: int = UNKNOWN
    """The name of what ran first after it."""

    @property
    def duration_ns(self) -> int:
        """How long it lasts."""
        return self.end_ns - self.begin_ns

    def order(self) -> tuple[int, int]:
        """The longest first, of equal ones the earliest."""
        return -self.duration_ns, self.begin_ns


class IdleTimes:
    """The time between the first and the last event of a device in which nothing ran, and its longest parts."""

    def __init__(self) -> None:
        self.begin_ns = self.end_ns = 0
        self.times: Int = np.zeros(len(CAUSES), dtype=np.int64)
        """How much of it each state of the host takes."""
        self._has_begun = False
        self._last = UNKNOWN  # the name of what ran last before this slice
        self._closed: list[OpenGap] = []
        self._open: OpenGap | None = None  # at the last event, if that is an empty one after which nothing ran
        self._since: OpenGap | None = None  # the time since the last event: idle if another one follows

    def longest(self) -> list[OpenGap]:
        """Return the longest gaps, longest first, of equal ones the earliest."""
        found = [*self._closed, self._open] if self._open else self._closed
        return sorted(found, key=OpenGap.order)[:MAX_GAPS]

    def wait(self, part: Slice, host: HostSlice | None) -> None:
        """Take a slice without events."""
        since = _Gaps.of(np.array([part.begin_ns]), np.array([part.end_ns]), host, part.columns[:0])
        self._since = _following(self._since, self._after_last(since[0]))

    def add(self, busy: Spans, work: Columns, part: Slice, host: HostSlice | None) -> None:
        """Take a slice with events, and where something ran."""
        first_ns, last_ns = int(work.start_ns.min()), int(work.end_ns.max())
        if self._since:
            self.times += self._since.times
            self._open = _following(self._open, self._since)
        if not self._has_begun:
            self._has_begun, self.begin_ns = True, first_ns
        begin_ns, self.end_ns = max(self.begin_ns, part.begin_ns), last_ns
        idle = complement(busy, begin_ns, last_ns)
        gaps = _Gaps.of(np.append(idle[0], last_ns), np.append(idle[1], part.end_ns), host, work)
        count = len(gaps) - 1  # behind them is the time since the last event
        self.times += gaps.times[:, :count].sum(axis=1)
        inner = range(count)
        if inner and gaps.starts[0] == begin_ns:
            self._open = _following(self._open, self._after_last(gaps[0]))
            inner = inner[1:]
        if len(busy[0]):
            self._close(self._open and attrs.evolve(self._open, after=_at(work.start_ns, busy[0][0], work)))
            self._open = None
            if inner and gaps.starts[inner[-1]] == busy[1][-1]:
                self._open = gaps[inner[-1]]
                inner = inner[:-1]
        elif self._open:
            self._open = attrs.evolve(self._open, after=_at(work.start_ns, last_ns, work))
        self._close_longest(gaps, inner)
        self._since = gaps[count] if last_ns < part.end_ns else None
        self._last = _at(work.end_ns, last_ns, work)

    def _after_last(self, gap: OpenGap) -> OpenGap:
        """Return a gap at the beginning of a slice, which the last work before the slice may have ended at."""
        return attrs.evolve(gap, before=self._last) if gap.before == UNKNOWN else gap

    def _close_longest(self, gaps: _Gaps, inner: range) -> None:
        """Keep those of the gaps that may be among the longest."""
        durations = (gaps.ends - gaps.starts)[inner.start : inner.stop]
        least_ns = self._closed[-1].duration_ns if len(self._closed) == MAX_GAPS else 0
        found = np.flatnonzero(durations > least_ns)
        found = found[np.argsort(-durations[found], kind="stable")[:MAX_GAPS]]
        if len(found):
            gaps = gaps.with_host_longer_than(int(durations[found[-1]]) // 2)
            for gap in found.tolist():
                self._close(gaps[inner[gap]])

    def _close(self, gap: OpenGap | None) -> None:
        if gap:
            self._closed = sorted([*self._closed, gap], key=OpenGap.order)[:MAX_GAPS]


@attrs.frozen
class _Gaps:
    """Times of a slice in which a device did nothing, and what the host did."""

    starts: Int
    ends: Int
    times: Int
    host: HostSlice | None
    work: Columns
    """What the device did in the slice."""

    @classmethod
    def of(cls, starts: Int, ends: Int, host: HostSlice | None, work: Columns) -> _Gaps:
        times = host.times((starts, ends)) if host else np.zeros((len(CAUSES), len(starts)), dtype=np.int64)
        return cls(starts, ends, times, host, work)

    def with_host_longer_than(self, least_ns: int) -> _Gaps:
        """Return the same without the host's events that are shorter."""
        return attrs.evolve(self, host=self.host and self.host.longer_than(least_ns))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, which: int) -> OpenGap:
        begin_ns, end_ns = int(self.starts[which]), int(self.ends[which])
        open_events = self.host.open_in(begin_ns, end_ns) if self.host else frozenset()
        before, after = _at(self.work.end_ns, begin_ns, self.work), _at(self.work.start_ns, end_ns, self.work)
        return OpenGap(begin_ns, end_ns, self.times[:, which].copy(), open_events, before, after)


def _following(earlier: OpenGap | None, later: OpenGap) -> OpenGap:
    """Return both as one: the later one begins where the earlier one ends."""
    if earlier is None:
        return later
    open_events = earlier.open_events | later.open_events
    times = earlier.times + later.times
    return OpenGap(earlier.begin_ns, later.end_ns, times, open_events, earlier.before, later.after)


def _at(times_ns: Int, time_ns: int, work: Columns) -> int:
    """Return the name of an event with this time, the last one in order of start."""
    found = np.flatnonzero(times_ns == time_ns)
    return int(work.name[found[-1]]) if len(found) else UNKNOWN
