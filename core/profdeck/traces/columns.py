"""The events of a trace as columns of numbers: what a report needs of them, in a fortieth of their size as objects.

Categories are those of Kineto (``libkineto/src/ActivityType.cpp`` in pytorch/kineto). Ascend's ``trace_view.json``
has events without one; there the name of the process tells what its events are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import attrs
import msgspec
import numpy as np
import stringzilla
from numpy.typing import NDArray

from profdeck.traces.intervals import Int
from profdeck.traces.scanner import decode_leniently

OPERATOR = "cpu_op"
ANNOTATION = "user_annotation"
DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events", "hpu_op"})
"""Categories whose events are work on a device; the process of such an event is the device."""
DEVICE_PROCESSES = frozenset({"Ascend Hardware"})
"""Processes whose events without a category are work on a device; the name then stands for the category."""

_NO_CATEGORY = ""
_KEPT = DEVICE_CATEGORIES | {OPERATOR, ANNOTATION, _NO_CATEGORY}
_NS_PER_US = 1000
_MAX_TIME_US = 2**52  # 142 years; beyond it a float has no fraction and nanoseconds leave 64 bits
_MAX_EXACT_US = 2**43  # from here on floats are 2 ns apart
_LOOSE_EVENTS = 4096

Id = int | str | None
"""A process or thread id. Kineto also writes -1 and names."""


@attrs.frozen
class Columns:
    """The complete events of a trace that are operators, annotations or work on a device, in the file's order."""

    names: list[str]
    categories: list[str]
    tracks: list[tuple[Id, Id]]
    """Process and thread; of a device, device and stream."""
    name: Int
    """Index into ``names``."""
    category: Int
    """Index into ``categories``."""
    track: Int
    """Index into ``tracks``."""
    start_ns: Int
    end_ns: Int

    def of_categories(self, wanted: frozenset[str]) -> Int:
        """Return the indices of the events in these categories."""
        codes = [code for code, category in enumerate(self.categories) if category in wanted]
        return np.flatnonzero(np.isin(self.category, codes))


class _Event(msgspec.Struct, gc=False):
    ph: str
    name: str = ""
    cat: str = _NO_CATEGORY
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | str | None = None
    dur: float | str | None = None


class _ExactEvent(msgspec.Struct, gc=False):
    """The same, with every digit of the times, in a third of the speed."""

    ph: str
    name: str = ""
    cat: str = _NO_CATEGORY
    pid: int | str | None = None
    tid: int | str | None = None
    ts: Decimal | None = None
    dur: Decimal | None = None


_Time = float | str | Decimal | None


class _LostDigitsError(Exception):
    """Times were decoded as numbers too large to hold nanoseconds."""


class _Codes(dict[Any, int]):
    """Numbers keys in the order in which they come."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self)
        return code


class _Collector:
    """Turns events into numbers batch by batch."""

    def __init__(self) -> None:
        self._names, self._categories, self._tracks = _Codes(), _Codes(), _Codes()
        self._parts: list[tuple[Int, Int, Int, Int, Int]] = []

    def add(self, events: Sequence[_Event | _ExactEvent]) -> None:
        """Take events.

        Raises:
            _LostDigitsError: They must be decoded exactly; none was taken.
        """
        kept = [event for event in events if event.ph == "X" and event.cat in _KEPT and event.ts is not None]
        if not kept:
            return
        start, readable = _nanoseconds([event.ts for event in kept])
        duration, _ = _nanoseconds([event.dur for event in kept])
        columns = (
            _codes(self._names, [event.name for event in kept]),
            _codes(self._categories, [event.cat for event in kept]),
            _codes(self._tracks, [(event.pid, event.tid) for event in kept]),
            start,
            start + np.maximum(duration, 0),
        )
        name, category, track, start, end = (column[readable] for column in columns)
        self._parts.append((name, category, track, start, end))

    def columns(self, process_names: dict[Id, str]) -> Columns:
        empty = (np.empty(0, dtype=np.int64),) * 5
        name, category, track, start, end = (np.concatenate(parts) for parts in zip(empty, *self._parts, strict=True))
        uncategorised = np.flatnonzero(category == self._categories[_NO_CATEGORY])
        processes = [self._categories[process_names.get(pid, _NO_CATEGORY)] for pid, _ in self._tracks]
        category[uncategorised] = np.array(processes, dtype=np.int64)[track[uncategorised]]
        return Columns(
            names=list(self._names),
            categories=list(self._categories),
            tracks=list(self._tracks),
            name=name,
            category=category,
            track=track,
            start_ns=start,
            end_ns=end,
        )


def _codes(codes: _Codes, keys: list[Any]) -> Int:
    return np.fromiter(map(codes.__getitem__, keys), dtype=np.int64, count=len(keys))


def _nanoseconds(times_us: Sequence[_Time]) -> tuple[Int, NDArray[np.bool]]:
    """Return integers and which of them could be read; the others are 0.

    Numbers are rounded to the nanosecond, which is what profilers write; whole microseconds are split off first
    because a product with 1000 would round again.

    Raises:
        _LostDigitsError: A number has a fraction and is too large for its nanoseconds.
    """
    if not set(map(type, times_us)) <= {float}:
        exact = [_exact_nanoseconds(time_us) for time_us in times_us]
        return np.array([value or 0 for value in exact]), np.array([value is not None for value in exact])
    times = np.array(times_us, dtype=np.float64)
    readable = np.abs(times) < _MAX_TIME_US  # False for NaN
    times = np.where(readable, times, 0.0)
    whole = np.floor(times)
    fraction = times - whole
    if fraction[np.abs(times) >= _MAX_EXACT_US].any():
        raise _LostDigitsError
    return whole.astype(np.int64) * _NS_PER_US + np.rint(fraction * _NS_PER_US).astype(np.int64), readable


def _exact_nanoseconds(time_us: _Time) -> int | None:
    try:
        # repr has the fewest digits that mean this float, which are those of the file if it had no more than 15.
        number = Decimal(repr(time_us) if isinstance(time_us, float) else time_us or 0)
        if time_us is None or abs(number) >= _MAX_TIME_US:
            return None
        return round(number * _NS_PER_US)
    except InvalidOperation:
        return None


class ColumnsHandler:
    """Collects columns, and members of the trace's top-level object, from a scanner."""

    wants_text = True

    def __init__(self, keys: frozenset[str]) -> None:
        self.keys = keys
        self.members: dict[str, Any] = {}
        """The decoded values of ``keys``, of those that are there."""
        self._decode: Callable[[memoryview], Sequence[_Event | _ExactEvent]]
        self._decode = msgspec.json.Decoder(list[_Event]).decode
        self._loose: list[_ExactEvent] = []
        self._collector = _Collector()
        self._process_names: dict[Id, str] = {}

    def columns(self) -> Columns:
        """Return the columns; to be called once, at the end."""
        self._flush()
        return self._collector.columns(self._process_names)

    def batch(self, text: memoryview) -> int | None:
        """Take events; see :meth:`profdeck.traces.scanner.TraceHandler.batch`."""
        self._flush()
        try:
            events = self._decode(text)
            try:
                self._collector.add(events)
            except _LostDigitsError:
                self._decode = msgspec.json.Decoder(list[_ExactEvent]).decode
                events = self._decode(text)
                self._collector.add(events)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            decoded = decode_leniently(text)
            if decoded is None:
                return None
            objects = [event for event in decoded if isinstance(event, dict)]
            self._take(objects)
            return sum("ph" in event for event in objects)
        if stringzilla.find(text, b'"process_name"') >= 0:
            self._name_processes(decode_leniently(text) or [])
        return len(events)

    def event(self, text: bytes) -> None:
        """Take one event."""
        self._take(decode_leniently(b"[%b]" % text) or [])

    def member(self, key: str, text: bytes) -> None:
        """Keep the value."""
        decoded = decode_leniently(b"[%b]" % text)
        if decoded:
            self.members[key] = decoded[0]

    def _flush(self) -> None:
        """Bring the events that came one by one into the columns, in their place in the file."""
        self._collector.add(self._loose)
        self._loose.clear()

    def _take(self, objects: list[dict[str, Any]]) -> None:
        self._loose += map(_normal, objects)
        self._name_processes(objects)
        if len(self._loose) >= _LOOSE_EVENTS:
            self._flush()

    def _name_processes(self, objects: list[Any]) -> None:
        for event in objects:
            if isinstance(event, dict) and event.get("ph") == "M" and event.get("name") == "process_name":
                args = event.get("args")
                if isinstance(args, dict):
                    self._process_names[_id(event.get("pid"))] = str(args.get("name"))


def _normal(event: dict[str, Any]) -> _ExactEvent:
    """Bring an event whose members may have any type into the form that well-formed traces have."""
    return _ExactEvent(
        ph=str(event.get("ph")),
        name=str(event.get("name", "")),
        cat=str(event.get("cat", _NO_CATEGORY)),
        pid=_id(event.get("pid")),
        tid=_id(event.get("tid")),
        ts=_time(event.get("ts")),
        dur=_time(event.get("dur")),
    )


def _id(value: Any) -> Id:
    return value if value is None or isinstance(value, int | str) else str(value)


def _time(value: Any) -> Decimal | None:
    try:
        return Decimal(value) if isinstance(value, int | str) else None
    except InvalidOperation:
        return None
