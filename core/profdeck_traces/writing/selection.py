"""Which events of a trace are kept: those in a window of time, those of some categories, or those that are both.

Format: phases, ``ts`` and ``dur`` are those of "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are microseconds: numbers, or
strings that hold one, as Ascend writes them.

Times are compared as floats, a batch at once. Floats cannot tell for the few events that lie within their error of an
edge of the window: those are compared with all the digits of the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.columns import DEVICE_ANNOTATION, DEVICE_CATEGORIES
from profdeck_traces.writing.event_text import (
    FLOAT_ERROR,
    Bool,
    DurationPairs,
    EventBatch,
    duration_pairs,
    microseconds,
    spans_of,
)

_METADATA = "M"
_ALL_ELSE, _HOST, _WORK = range(3)  # indices into `Selection.windows`
WORK_CATEGORIES = DEVICE_CATEGORIES | {DEVICE_ANNOTATION}
"""The categories of events whose window is that of work."""


@attrs.frozen
class Picked:
    """What a selection keeps of some events."""

    text: bytes
    """The kept events, byte for byte, with commas between them; empty if there are none."""
    between: bytes | None
    """The comma between events and the white space around it; ``None`` if there are less than two events."""
    events: int
    """How many of all events have a ``ph`` member, as the scanner counts them."""
    selected: int
    """How many are kept for themselves: without metadata."""


@attrs.frozen
class TimeWindow:
    """A time, on the clock of the ``ts`` of a trace."""

    begin_ns: int | None = None
    """Its first nanosecond; ``None``: no bound."""
    end_ns: int | None = None
    """The nanosecond behind it."""


@attrs.frozen
class Selection:
    """Which events of a trace are kept. An event must fit all that is given; nothing given keeps all events.

    - Metadata (``ph`` "M") is always kept: without it a viewer shows numbers for names.
    - Complete events (X) are kept whole if they overlap the window; without a duration, if they start in it.
    - Duration events (B and E) are kept in pairs, as a complete event would be, so that what is open where the window
      begins or ends stays complete. Pairs are looked for in one array of events; a B or E that has no partner there
      is kept. Of a trace that comes in several arrays these are the few that are open where it was cut.
    - All others are kept by their ``ts``. Of an asynchronous event or an arrow (s, t, f) that crosses an edge of the
      window, one end is kept; viewers ignore an arrow with one end.

    What has no readable time is in no window. Elements of the array that are no objects are never kept.
    """

    begin_ns: int | None = None
    """The first nanosecond of the window, on the clock of the ``ts`` of the trace; ``None``: no bound."""
    end_ns: int | None = None
    """The nanosecond behind the window."""
    categories: frozenset[str] | None = None
    """The ``cat`` of events; of several with commas between them, one is enough. "" is that of events without one."""
    host: TimeWindow | None = None
    """The window of events with a category of the host, where that differs: a device works later than the host."""
    work: TimeWindow | None = None
    """The same of those with a category of a device: they must start in it, as what belongs to a step does."""

    def apply(self, array: bytes) -> bytes:
        """Return the JSON array of the kept events, byte for byte, with the array's own white space between them.

        Args:
            array: A JSON array of whole events. Anything else, or what is nested too deeply to be read, is returned
                as it is.
        """
        picked = self.pick(array.strip())
        return array if picked is None else b"[%b]" % picked.text

    def pick(self, array: memoryview | bytes) -> Picked | None:
        """Do the same, and count.

        Args:
            array: As above, without white space around it.

        Returns:
            ``None`` for anything else, or what is nested too deeply to be read.
        """
        batch = EventBatch.of(array)
        if batch is None:
            return None
        metadata = batch.of_phase(_METADATA)
        kept = metadata | self._chosen(batch, ~metadata)
        return Picked(
            text=batch.text(kept),
            between=batch.between,
            events=batch.with_phase,
            selected=int(kept.sum() - metadata.sum()),
        )

    def _chosen(self, batch: EventBatch, candidates: Bool) -> Bool:
        pairs = duration_pairs(batch)
        chosen = candidates
        if self.categories is not None:
            verdicts = _Verdicts(self.categories)
            chosen = chosen & np.array([verdicts[event.cat] for event in batch.events], dtype=np.bool_)
            chosen[pairs.closes] = chosen[pairs.opens]
        if self.windows != (TimeWindow(),) * 3:
            chosen = chosen & self._in_window(batch, pairs, chosen)
        chosen[pairs.halves] = True
        return chosen

    @property
    def windows(self) -> tuple[TimeWindow, TimeWindow, TimeWindow]:
        """That of all else, that of the host's events and that of the devices' events."""
        all_else = TimeWindow(self.begin_ns, self.end_ns)
        return all_else, self.host or all_else, self.work or all_else

    def _in_window(self, batch: EventBatch, pairs: DurationPairs, wanted: Bool) -> Bool:
        """Tell which events overlap the window; the answer is right for those that are ``wanted``."""
        windows = self.windows
        place = self._places(batch, pairs)
        by_start = (place == _WORK) if self.work else np.zeros(len(place), dtype=np.bool_)
        start, stop, size = spans_of(batch, pairs)
        stop = np.where(by_start, start, stop)
        begin = _edges([window.begin_ns for window in windows], -math.inf)[place]
        end = _edges([window.end_ns for window in windows], math.inf)[place]
        error = (size + np.where(np.isfinite(begin), np.abs(begin), 0)) * FLOAT_ERROR
        inside, outside = stop - error > begin, stop + error < begin
        error = (size + np.where(np.isfinite(end), np.abs(end), 0)) * FLOAT_ERROR
        inside &= start + error < end
        outside |= start - error > end
        unsure = np.flatnonzero(wanted & ~inside & ~outside).tolist()
        if unsure:
            begins = dict(zip(pairs.closes, pairs.opens, strict=True))
            ends = dict(zip(pairs.opens, pairs.closes, strict=True))
            for index in unsure:
                opens = begins.get(index, index)
                span = batch.span(opens, ends.get(opens))
                if span is not None and by_start[index]:
                    span = span[0], span[0]
                inside[index] = _overlaps(span, windows[place[index]])
        return inside

    def _places(self, batch: EventBatch, pairs: DurationPairs) -> NDArray[np.int8]:
        """Return which of `windows` is that of each event."""
        places = _Places()
        found = np.array([places[event.cat] for event in batch.events], dtype=np.int8)
        for arrow in "stf":  # from the host to a device
            found[batch.of_phase(arrow)] = _ALL_ELSE
        found[pairs.closes] = found[pairs.opens]
        return found


def _edges(times_ns: Sequence[int | None], without: float) -> NDArray[np.float64]:
    return np.array([without if time is None else float(microseconds(time)) for time in times_ns])


def _overlaps(span: tuple[Decimal, Decimal] | None, window: TimeWindow) -> bool:
    """Tell whether a start and a stop overlap a window; exactly."""
    if span is None:
        return False
    start, stop = span
    if window.end_ns is not None and start >= microseconds(window.end_ns):
        return False
    begin = None if window.begin_ns is None else microseconds(window.begin_ns)
    return begin is None or stop > begin or start >= begin


class _Places(dict[str | None, int]):
    """Which of `Selection.windows` is that of events with a ``cat``."""

    def __missing__(self, cat: str | None) -> int:
        place = self[cat] = _ALL_ELSE if not cat else _WORK if cat in WORK_CATEGORIES else _HOST
        return place


class _Verdicts(dict[str | None, bool]):
    """Whether events with a ``cat`` are of one of some categories."""

    def __init__(self, categories: frozenset[str]) -> None:
        super().__init__()
        self._categories = categories

    def __missing__(self, cat: str | None) -> bool:
        words = ("",) if cat is None else (cat, *map(str.strip, cat.split(",")))
        verdict = self[cat] = not self._categories.isdisjoint(words)
        return verdict
