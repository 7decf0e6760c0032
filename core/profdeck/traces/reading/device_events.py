"""The device lanes of a trace without the rest: their events are found by search, not by parsing all of the text.

Nine tenths of a trace are what the host did. In well-formed JSON a quote inside a string has a backslash before it,
so that ``"kernel"``, with its quotes, stands nowhere but as a whole string. Around each one the event is cut out, from
the boundary in front of it to its ``args``, and decoded. A wrong cut is no JSON; and a batch counts only if each place
was found in an event of its own that has that category. Everything else is decoded in full, as in
:mod:`profdeck.traces.reading.all_events`: both ways give the same answer for each trace that is well-formed. What lies
between the events that were cut out is not looked at, so that damage there goes unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import stringzilla

from profdeck.traces.reading.all_events import PROCESS_NAME, AllEvents, named
from profdeck.traces.reading.columns import Columns, Tables
from profdeck.traces.reading.times import LostDigitsError

_BOUNDARY = re.compile(rb'\}[ \t\n\r]*,[ \t\n\r]*\{[ \t\n\r]*"ph"')
# Ends of the categories of devices and of annotations, and the beginning of those of copies and fills.
_NEEDLES = (b'"kernel"', b'"gpu_mem', b'user_annotation"', b'"hpu_op"', b'"mtia_ccp_events"')
_ARGS = re.compile(rb',[ \t\n\r]*"args"')
# A key or value may be written with escapes, and would not be found.
_ESCAPED = b"\\u00"


class DeviceEvents(AllEvents):
    """Collects the events of devices and annotations only."""

    def __init__(self, keys: frozenset[str], tables: Tables, sink: Callable[[Columns], None]) -> None:
        super().__init__(keys, tables, sink)
        self._boundary = self._args = b""

    def batch(self, text: memoryview) -> int | None:
        """Take the events of the lanes; see :meth:`profdeck.traces.reading.handler.TraceHandler.batch`."""
        lanes = self._cut_out(text)
        names = named(bytes(text), PROCESS_NAME) if stringzilla.find(text, PROCESS_NAME) >= 0 else []
        if lanes is None or names is None or not self._take_lanes(*lanes):
            return super().batch(text)
        self._take_names(names)
        self.collectives.add(text)
        self.annotations.add(text)
        self.searched = True
        return 1  # nobody has counted them

    def _take_lanes(self, text: bytes, count: int) -> bool:
        if not count:
            return True
        try:
            events = self._decode_kineto(text)
            return self.collector.add_kineto(events, expected=count)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LostDigitsError):
            return False

    def _cut_out(self, text: memoryview) -> tuple[bytes, int] | None:
        """Return an array of the events in lanes, and how many there are; ``None`` if that cannot be told."""
        find, rfind = stringzilla.find, stringzilla.rfind
        if find(text, _ESCAPED) >= 0:
            return None
        if not self._boundary:
            boundary, args = _BOUNDARY.search(text), _ARGS.search(text)
            if boundary is None or args is None:
                return None
            self._boundary, self._args = boundary.group(), args.group()
        to_brace = self._boundary.index(b"{")
        begins: list[int] = []
        pieces: list[memoryview] = []
        for needle in _NEEDLES:
            at = find(text, needle)
            while at >= 0:
                boundary_at = rfind(text, self._boundary, 0, at)
                begin = boundary_at + to_brace if boundary_at >= 0 else 1
                end = find(text, self._args, at)
                if end < 0:
                    return None
                begins.append(begin)
                pieces.append(text[begin:end])
                at = find(text, needle, at + 1)
        if len(set(begins)) != len(begins):
            return None
        return b"[%b}]" % b"},".join(pieces), len(pieces)
