"""How much memory was in use, where a recorder marks each allocation: torch's ``profile_memory``.

Format: instant events ``[memory]`` of Kineto (``export_memory_events`` in torch/csrc/autograd/profiler_kineto.cpp),
each with what is allocated and reserved on its device after it.
"""

from __future__ import annotations

from array import array
from decimal import Decimal

import msgspec
import numpy as np

from profdeck_traces.base.byte_search import stringzilla
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.times import exact_nanoseconds

_MEMORY = b'"[memory]"'
_MOST_EVENTS = 1_000_000
_MOST_BYTES = 2**62


class _Args(msgspec.Struct, gc=False):
    allocated: int = msgspec.field(name="Total Allocated")
    device_id: int = msgspec.field(name="Device Id")
    device_type: int = msgspec.field(name="Device Type")
    reserved: int = msgspec.field(name="Total Reserved", default=0)


class _Event(msgspec.Struct, gc=False):
    name: str
    ts: Decimal
    args: _Args


_decode = msgspec.json.Decoder(_Event).decode


class StatedMemory:
    """What the marks of allocations say, by device. Of more than a million marks, the others are left out."""

    def __init__(self) -> None:
        self.left_out = 0
        """How many marks are not among them."""
        self._of_device: dict[tuple[int, int], array[int]] = {}
        self._count = 0

    def add(self, text: memoryview | bytes) -> None:
        """Take the marks among some events."""
        at = stringzilla.find(text, _MEMORY)
        while at >= 0:
            # Around the event, whose args stand behind its name.
            begin = stringzilla.rfind(text, b"{", 0, at)
            end = stringzilla.find(text, b"}", stringzilla.find(text, b"}", at) + 1) + 1
            self._add(text[max(0, begin) : end])
            at = stringzilla.find(text, _MEMORY, max(at + 1, end))

    def extend(self, following: StatedMemory) -> bool:
        """Take what the next part of the file says; return whether there was room for all of it."""
        for device, values in following._of_device.items():
            self._of_device.setdefault(device, array("q")).extend(values)
        self._count += following._count
        return self._count < _MOST_EVENTS and not following.left_out

    def devices(self) -> list[tuple[tuple[int, int], Int]]:
        """Return the type and id of each device, and a row for each mark in the order of time.

        The rows have the time in nanoseconds, and the bytes that are allocated and reserved: shape (marks, 3).
        """
        found = []
        for device, values in sorted(self._of_device.items()):
            rows = np.array(values).reshape(-1, 3)
            found.append((device, rows[np.argsort(rows[:, 0], kind="stable")]))
        return found

    def _add(self, event: memoryview | bytes) -> None:
        try:
            found = _decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        time_ns, args = exact_nanoseconds(found.ts), found.args
        in_range = 0 <= args.allocated < _MOST_BYTES and 0 <= args.reserved < _MOST_BYTES
        if time_ns is None or not in_range or found.name != "[memory]":
            return
        if self._count >= _MOST_EVENTS:
            self.left_out += 1
            return
        self._count += 1
        of_device = self._of_device.setdefault((args.device_type, args.device_id), array("q"))
        of_device.extend((time_ns, args.allocated, args.reserved))
