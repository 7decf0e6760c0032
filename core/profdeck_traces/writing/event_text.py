"""Times, names and ids in the text of events, with every digit that the text has."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from decimal import Context, Decimal
from typing import Any

import attrs
import msgspec
import numpy as np
from numpy.typing import NDArray

# Numbers beyond are no times, and to make nanoseconds of them could take any amount of memory.
COMPLETE = "X"
_MAX_TIME_US = Decimal(10) ** 40
_MAX_FLOAT_US = 1e39
# Four times what rounding can make of a start, a duration, their sum and an edge.
FLOAT_ERROR = 2.0**-50
# Nothing raises: what is no number becomes NaN. A hundred digits hold the sum of any two times of a profiler exactly.
_EXACT = Context(prec=100, traps=[])

Bool = NDArray[np.bool_]
Float = NDArray[np.float64]
_Text = bytes | msgspec.Raw


class _Event(msgspec.Struct, gc=False):
    ph: str
    cat: str | None = None
    ts: float | str | None = None
    dur: float | str | None = None


class _NamedEvent(msgspec.Struct, gc=False):
    ph: str
    name: str = ""
    cat: str | None = None


decode_named = msgspec.json.Decoder(list[_NamedEvent]).decode
_decode_events = msgspec.json.Decoder(list[_Event]).decode
split_events = msgspec.json.Decoder(list[msgspec.Raw]).decode
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# All numbers stay text: Python refuses to read integers of more than 4,300 digits, and floats lose digits.
_loose = json.JSONDecoder(parse_float=str, parse_int=str)
_skip_space = re.compile(r"[ \t\n\r]*").match
_find_between = re.compile(rb"\}([ \t\n\r]*,[ \t\n\r]*)\{").finditer
_MAX_TRIES = 16


class EventBatch:
    """The events of one array: what is asked about them, and their texts.

    Args:
        array: The array.
        events: Its objects.
        with_phase: How many of them have a ``ph`` member.
        texts: The text of each; may be left out if all elements of the array are objects.
    """

    def __init__(
        self, array: memoryview | bytes, events: list[_Event], with_phase: int, texts: list[_Text] | None = None
    ) -> None:
        self._array = array
        self._texts = texts
        self.events = events
        self.with_phase = with_phase

    @classmethod
    def of(cls, array: memoryview | bytes) -> EventBatch | None:
        """Take an array; ``None`` if it is none, or nested too deeply."""
        try:
            events = _decode_events(array)
        except UNDECODABLE:
            objects = split_loosely(bytes(array))
            if objects is None:
                return None
            with_phase = sum("ph" in members for _, members in objects)
            return cls(array, [_normal(members) for _, members in objects], with_phase, [text for text, _ in objects])
        return cls(array, events, len(events))

    @functools.cached_property
    def _phases(self) -> NDArray[np.uint8]:
        phases = [event.ph for event in self.events]
        if not all(len(phase) == 1 and phase.isascii() for phase in set(phases)):
            phases = [phase if len(phase) == 1 and phase.isascii() else "?" for phase in phases]
        return np.frombuffer("".join(phases).encode(), dtype=np.uint8)

    def of_phase(self, phase: str) -> Bool:
        """Tell which events are of a phase."""
        return np.equal(self._phases, ord(phase))

    @functools.cached_property
    def texts(self) -> Sequence[_Text]:
        """The text of each event."""
        # Of a copy, since the texts refer to it and the array may be part of a buffer that changes.
        return split_events(bytes(self._array)) if self._texts is None else self._texts

    @functools.cached_property
    def between(self) -> bytes | None:
        """The first comma between two events, and the white space around it."""
        for found in itertools.islice(_find_between(self._array), _MAX_TRIES):
            if split_loosely(bytes(self._array[: found.start() + 1]) + b"]") is not None:  # not inside an event
                return found[1]
        return None

    def text(self, kept: Bool) -> bytes:
        """Return the text of some events, with commas between them."""
        if self._texts is None and kept.all():
            return bytes(self._array[1:-1]).strip()
        if not kept.any():
            return b""
        return (self.between or b",").join(itertools.compress(self.texts, kept.tolist()))

    def span(self, begin: int, end: int | None = None) -> tuple[Decimal, Decimal] | None:
        """Return when an event, or a pair, starts and stops, in microseconds; ``None``: it has no time."""
        return span_of(members_of_event(self.texts[begin]), None if end is None else members_of_event(self.texts[end]))


def split_loosely(array: bytes) -> list[tuple[_Text, dict[str, Any]]] | None:
    """Return the objects in an array and their members; takes ``NaN``, ``Infinity`` and lone surrogates as well."""
    try:
        text = array.decode("utf-8", "surrogatepass")
        if not isinstance(_loose.decode(text), list):
            return None
    except (ValueError, RecursionError):
        return None
    objects: list[tuple[_Text, dict[str, Any]]] = []
    at = _space(text, text.index("[") + 1)
    while text[at] != "]":
        value, end = _loose.raw_decode(text, at)
        if isinstance(value, dict):
            objects.append((text[at:end].encode("utf-8", "surrogatepass"), value))
        at = _space(text, end)
        if text[at] == ",":
            at = _space(text, at + 1)
    return objects


def _space(text: str, at: int) -> int:
    found = _skip_space(text, at)
    return found.end() if found else at


def members_of_event(event: _Text) -> dict[str, Any]:
    """Return the members of an object, with numbers as text."""
    members: dict[str, Any] = _loose.decode(bytes(event).decode("utf-8", "surrogatepass"))
    return members


def _normal(members: dict[str, Any]) -> _Event:
    """Bring an event whose members may have any type into the form that well-formed traces have."""
    ph, cat, ts, dur = (
        value if isinstance(value, str) else None for value in map(members.get, ("ph", "cat", "ts", "dur"))
    )
    return _Event(ph or "", cat, ts, dur)


@attrs.frozen
class DurationPairs:
    """Duration events, as indices."""

    opens: list[int] = attrs.field(factory=list)
    closes: list[int] = attrs.field(factory=list)
    """The end of each of ``opens``."""
    halves: list[int] = attrs.field(factory=list)
    """Those whose partner is not there."""


def duration_pairs(batch: EventBatch) -> DurationPairs:
    """Find the pairs of each thread, which are nested and in the order of time, as the format demands."""
    pairs = DurationPairs()
    stacks: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for index in np.flatnonzero(batch.of_phase("B") | batch.of_phase("E")).tolist():
        members = members_of_event(batch.texts[index])
        stack = stacks[str(members.get("pid")), str(members.get("tid"))]
        if batch.events[index].ph == "B":
            stack.append(index)
        elif stack:
            pairs.opens.append(stack.pop())
            pairs.closes.append(index)
        else:
            pairs.halves.append(index)
    pairs.halves.extend(itertools.chain.from_iterable(stacks.values()))
    return pairs


def spans_of(batch: EventBatch, pairs: DurationPairs) -> tuple[Float, Float, Float]:
    """Return start and stop of each event, in microseconds, and what their error is in proportion to.

    The last is NaN for an event whose times floats cannot hold.
    """
    start = _floats([event.ts for event in batch.events])
    duration = _floats([event.dur for event in batch.events])
    with np.errstate(invalid="ignore"):
        stop = start + np.where(batch.of_phase(COMPLETE), np.fmax(duration, 0), 0)
    begins = start[pairs.opens]
    ends = np.fmax(start[pairs.closes], begins)
    start[pairs.closes] = begins
    stop[pairs.opens] = ends
    stop[pairs.closes] = ends
    size = np.abs(start) + np.abs(stop)
    return start, stop, np.where(size < _MAX_FLOAT_US, size, np.nan)


def _floats(times: list[float | str | None]) -> Float:
    """Return NaN for what is no time."""
    try:
        return np.array(times, dtype=np.float64)
    except ValueError:  # a string that is no number
        exact = [time if isinstance(time, float) else _time(time) for time in times]
        return np.array([math.nan if time is None else float(time) for time in exact], dtype=np.float64)


def _time(value: Any) -> Decimal | None:
    """Return the microseconds that the text of a number, or a string, says."""
    number = _EXACT.create_decimal(value) if isinstance(value, str) else Decimal("NaN")
    return number if number.is_finite() and abs(number) < _MAX_TIME_US else None


def span_of(members: dict[str, Any], end: dict[str, Any] | None = None) -> tuple[Decimal, Decimal] | None:
    """Return when an event starts and stops, in microseconds; ``None``: it has no time.

    Args:
        members: Of the event, or of the begin of a pair.
        end: Of the end of the pair.
    """
    start = _time(members.get("ts"))
    if start is None:
        return None
    stop: Decimal | None = None
    if end is not None:
        stop = _time(end.get("ts"))
    elif members.get("ph") == COMPLETE:
        stop = _EXACT.add(start, _time(members.get("dur")) or Decimal(0))
    return start, start if stop is None else max(start, stop)


def microseconds(time_ns: int) -> Decimal:
    """Convert nanoseconds to exact microseconds."""
    return Decimal(time_ns).scaleb(-3, _EXACT)


def nanoseconds(time_us: Decimal, rounding: str) -> int:
    """Convert microseconds to nanoseconds."""
    return int(time_us.scaleb(3, _EXACT).to_integral_value(rounding, _EXACT))
