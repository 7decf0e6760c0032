"""Selection of trace events by time window, by category, or both.

Format: phases, ``ts`` and ``dur`` follow "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Collection

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.critical_path import PATH_CATEGORY, PATH_NAME
from profdeck_traces.reading.columns import DEVICE_ANNOTATION, DEVICE_CATEGORIES
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.walking import NO_TIME

_METADATA, _FLOW = "M", "stf"
_ALL_ELSE, _HOST, _WORK = range(3)  # indices into `Selection.windows`
WORK_CATEGORIES = DEVICE_CATEGORIES | {DEVICE_ANNOTATION}
"""Categories of the events to which `Selection.work` applies."""


@attrs.frozen
class TimeWindow:
    """Time window on the ``ts`` clock of a trace."""

    begin_ns: int | None = None
    """First nanosecond of the window; ``None`` for no bound."""
    end_ns: int | None = None
    """First nanosecond after the window; ``None`` for no bound."""


@attrs.frozen
class Selection:
    """Criteria for keeping events. An event must match every criterion; without criteria, all events are kept.

    - The threads that profdeck started are dropped.
    - Metadata (``ph`` "M") is kept, because viewers would otherwise show numbers instead of names. The metadata of an
      added critical path is dropped if none of its events is kept.
    - Complete events (X) are kept if they overlap the window or, if they have no duration, start in it.
    - Duration events (B and E) are kept in pairs, like complete events. A B or E event without a partner is kept.
    - All other events are kept if their ``ts`` is in the window. If an asynchronous event or a flow (s, t, f) crosses
      an edge of the window, only one end is kept. Viewers ignore a flow with one end.

    An event without a readable time is outside every window.
    """

    begin_ns: int | None = None
    """First nanosecond of the window, on the ``ts`` clock of the trace; ``None`` for no bound."""
    end_ns: int | None = None
    """First nanosecond after the window; ``None`` for no bound."""
    categories: frozenset[str] | None = None
    """Values of ``cat`` to keep. For a comma-separated ``cat``, one match suffices. "" matches a missing ``cat``.
    The events of an added critical path match if any event matches."""
    host: TimeWindow | None = None
    """Separate window for events in host categories, because devices run work later than the host launches it."""
    work: TimeWindow | None = None
    """Separate window for events in device categories. Events must start in it, like the events of a step."""

    @property
    def windows(self) -> tuple[TimeWindow, TimeWindow, TimeWindow]:
        """Windows for uncategorized events and flows, for host events, and for device events, in this order."""
        all_else = TimeWindow(self.begin_ns, self.end_ns)
        return all_else, self.host or all_else, self.work or all_else

    @property
    def host_bounds(self) -> tuple[int | None, int | None]:
        """Bounds of the window for host events."""
        window = self.windows[_HOST]
        return window.begin_ns, window.end_ns

    def rows(self, events: Events) -> NDArray[np.bool_]:
        """Return a mask of the events to keep, in file order."""
        columns, complete = events.all, events.complete
        phase, category = columns["phase"], columns["category"]
        start, duration = columns["start_ns"], columns["duration_ns"].copy()
        duration[complete:] = 0
        is_metadata = phase == ord(_METADATA)
        kept = np.ones(len(phase), dtype=np.bool_)
        of_path = np.array([name == PATH_CATEGORY for name in events.categories], dtype=np.bool_)[category]
        if self.categories is not None:
            matches = np.array([self._matches(name) for name in events.categories], dtype=np.bool_)[category]
            kept &= matches | (of_path & matches.any())
        if self.windows != (TimeWindow(),) * 3:
            # Events without a category use their process name as the category.
            uncategorized = {"", *events.process_names.values()}
            place = np.array([_place(name, uncategorized) for name in events.categories], dtype=np.int8)[category]
            place[np.isin(phase, list(map(ord, _FLOW)))] = _ALL_ELSE
            stop = start + np.maximum(duration, 0)
            if self.work:
                stop = np.where(place == _WORK, start, stop)
            kept &= start != NO_TIME
            for number, window in enumerate(self.windows):
                inside = np.ones(len(phase), dtype=np.bool_)
                if window.begin_ns is not None:
                    inside &= (stop > window.begin_ns) | (start >= window.begin_ns)
                if window.end_ns is not None:
                    inside &= start < window.end_ns
                kept &= inside | (place != number)
        kept[complete:] |= np.isin(phase[complete:], [ord("B"), ord("E")])  # B and E events without a partner
        is_empty = np.array([events.thread_names.get(track) == PATH_NAME for track in events.tracks], dtype=np.bool_)
        is_empty[columns["track"][kept & of_path]] = False
        kept |= is_metadata
        kept &= ~(is_metadata & is_empty[columns["track"]]) & ~events.is_profiler_track[columns["track"]]
        by_row: NDArray[np.bool_] = events.in_file_order(kept)
        begins, ends = events.pairs
        by_row[ends] = by_row[begins]
        return by_row

    def _matches(self, category: str) -> bool:
        values = (category, *map(str.strip, category.split(",")))
        return self.categories is None or not self.categories.isdisjoint(values)


def _place(category: str, uncategorized: Collection[str]) -> int:
    return _ALL_ELSE if category in uncategorized else _WORK if category in WORK_CATEGORIES else _HOST
