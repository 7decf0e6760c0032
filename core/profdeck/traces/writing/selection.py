"""Which events of a trace are kept: those in a window of time, those of some categories, or those that are both.

Format: phases, ``ts`` and ``dur`` are those of "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are microseconds: numbers, or
strings that hold one, as Ascend writes them.

Times are compared as floats, a batch at once. Floats cannot tell for the few events that lie within their error of an
edge of the window: those are compared with all the digits of the file.
"""

from __future__ import annotations

from decimal import Decimal

import attrs
import numpy as np

from profdeck.traces.writing.event_text import (
    FLOAT_ERROR,
    Bool,
    DurationPairs,
    EventBatch,
    duration_pairs,
    microseconds,
    spans_of,
)

_METADATA = "M"


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
        if self.begin_ns is not None or self.end_ns is not None:
            chosen = chosen & self._in_window(batch, pairs, chosen)
        chosen[pairs.halves] = True
        return chosen

    def _in_window(self, batch: EventBatch, pairs: DurationPairs, wanted: Bool) -> Bool:
        """Tell which events overlap the window; the answer is right for those that are ``wanted``."""
        start, stop, size = spans_of(batch, pairs)
        inside, outside = np.ones(len(start), dtype=np.bool_), np.zeros(len(start), dtype=np.bool_)
        if self.begin_ns is not None:
            edge = float(microseconds(self.begin_ns))
            error = (size + abs(edge)) * FLOAT_ERROR
            inside &= stop - error > edge
            outside |= stop + error < edge
        if self.end_ns is not None:
            edge = float(microseconds(self.end_ns))
            error = (size + abs(edge)) * FLOAT_ERROR
            inside &= start + error < edge
            outside |= start - error > edge
        unsure = np.flatnonzero(wanted & ~inside & ~outside).tolist()
        if unsure:
            begins = dict(zip(pairs.closes, pairs.opens, strict=True))
            ends = dict(zip(pairs.opens, pairs.closes, strict=True))
            for index in unsure:
                begin = begins.get(index, index)
                inside[index] = self._overlaps(batch.span(begin, ends.get(begin)))
        return inside

    def _overlaps(self, span: tuple[Decimal, Decimal] | None) -> bool:
        """Tell whether a start and a stop overlap the window; exactly."""
        if span is None:
            return False
        start, stop = span
        if self.end_ns is not None and start >= microseconds(self.end_ns):
            return False
        begin = None if self.begin_ns is None else microseconds(self.begin_ns)
        return begin is None or stop > begin or start >= begin


class _Verdicts(dict[str | None, bool]):
    """Whether events with a ``cat`` are of one of some categories."""

    def __init__(self, categories: frozenset[str]) -> None:
        super().__init__()
        self._categories = categories

    def __missing__(self, cat: str | None) -> bool:
        words = ("",) if cat is None else (cat, *map(str.strip, cat.split(",")))
        verdict = self[cat] = not self._categories.isdisjoint(words)
        return verdict
