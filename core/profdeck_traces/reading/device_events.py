"""The device lanes of a trace without the rest: their events are found by search, not by parsing all of the text.

Nine tenths of a trace are what the host did. In well-formed JSON a quote inside a string has a backslash before it,
so that ``"kernel"``, with its quotes, stands nowhere but as a whole string. Around each one the event is cut out, from
the boundary in front of it to its ``args``, and decoded. A wrong cut is no JSON; and a batch counts only if each
place was found in an event of its own, which has all that counts in front of its ``args``. Everything else is decoded
in full, as in :mod:`profdeck_traces.reading.all_events`: both ways give the same answer for each trace that is
well-formed. What lies between the events that were cut out is not looked at, so that damage there goes unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from profdeck_traces.base.byte_search import stringzilla
from profdeck_traces.reading.all_events import PROCESS_NAME, AllEvents, KinetoForm, named
from profdeck_traces.reading.columns import DEVICE_CATEGORIES, MARKS, Columns, Tables
from profdeck_traces.reading.kineto_events import Complete, CompleteOnDevice

_BOUNDARY = re.compile(rb'\}[ \t\n\r]*,[ \t\n\r]*\{[ \t\n\r]*"ph"')
# Ends of the categories of devices and of annotations, and the beginning of those of copies and fills.
_COPY = b'"gpu_mem'
_NEEDLES = (b'"kernel"', _COPY, b'user_annotation"', b'"hpu_op"', b'"mtia_ccp_events"')
_ARGS = re.compile(rb',[ \t\n\r]*"args"')
# A key or value may be written with escapes, and would not be found.
_ESCAPED = b"\\u00"
# Where so few bytes have a kernel of their own, most events are kernels: it takes less to decode all of them.
_DENSE_BYTES = 800
# Some recorders mark steps by operators.
_STEP = b'"ProfilerStep#'


class DeviceEvents(AllEvents):
    """Collects the events of devices and annotations only."""

    def __init__(self, keys: frozenset[str], tables: Tables, sink: Callable[[Columns], None]) -> None:
        super().__init__(keys, tables, sink)
        self._boundary = self._args = b""
        self._copies: list[int] = []  # where those of the last batch begin
        self._lanes = KinetoForm(self.collector, CompleteOnDevice)
        self._dense = KinetoForm(self.collector, Complete, DEVICE_CATEGORIES | MARKS)

    def batch(self, text: memoryview) -> int | None:
        """Process the device and annotation events in a JSON array.

        See :meth:`profdeck_traces.reading.handler.TraceHandler.batch`.
        """
        self.flush()
        names = named(bytes(text), PROCESS_NAME) if stringzilla.find(text, PROCESS_NAME) >= 0 else []
        copies: list[int] | None = None
        if names is None:
            return super().batch(text)
        if not self._take_dense(text):
            lanes = self._cut_out(text)
            if lanes is None or not self._take_lanes(lanes):
                return super().batch(text)
            copies = self._copies
        self._take_names(names)
        self.stated.collectives.add(text)
        self.stated.annotations.add(text)
        self.stated.copies.add(text, copies)
        self.stated.searched = True
        return 1  # nobody has counted them

    def _take_dense(self, text: memoryview) -> bool:
        """Take the lanes of a batch of little else."""
        if len(text) > _DENSE_BYTES * _count(text, _NEEDLES[0]):
            return False
        if stringzilla.find(text, _STEP) >= 0 or stringzilla.find(text, _ESCAPED) >= 0:
            return False
        return self._dense.take(text) is not None

    def _take_lanes(self, pieces: list[memoryview]) -> bool:
        # Another number: one reaches over the event behind it.
        return not pieces or self._lanes.take(b"[%b}]" % b"},".join(pieces), len(pieces)) is not None

    def _cut_out(self, text: memoryview) -> list[memoryview] | None:
        """Return the events in lanes, each without its args and what follows; ``None`` if they cannot be told."""
        find, rfind = stringzilla.find, stringzilla.rfind
        if find(text, _ESCAPED) >= 0 or not self._knows_layout(text):
            return None
        to_brace = self._boundary.index(b"{")
        begins: list[int] = []
        pieces: list[memoryview] = []
        for needle in _NEEDLES:
            first = len(begins)
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
            if needle == _COPY:
                self._copies = begins[first:]
        marks = _count(text, _STEP)
        if len(set(begins)) != len(begins) or (marks and marks != sum(_count(piece, _STEP) for piece in pieces)):
            return None
        return [pieces[place] for place in np.argsort(begins)]  # as the file has them

    def _knows_layout(self, text: memoryview) -> bool:
        """Learn from the first events how they are separated, and what is before their args."""
        if not self._boundary:
            boundary, args = _BOUNDARY.search(text), _ARGS.search(text)
            if boundary and args:
                self._boundary, self._args = boundary[0], args[0]
        return bool(self._boundary)


def _count(text: memoryview, needle: bytes) -> int:
    return int(stringzilla.count(text, needle))
