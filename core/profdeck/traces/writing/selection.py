"""Which events of a trace are kept: those in a window of time, those of some categories, or those that are both.

Format: phases, ``ts`` and ``dur`` are those of "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are microseconds: numbers, or
strings that hold one, as Ascend writes them.

Times are compared as floats, a batch at once. Floats cannot tell for the few events that lie within their error of an
edge of the window: those are compared with all the digits of the file.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import stringzilla
from numpy.typing import NDArray

from profdeck.base.errors import TraceError
from profdeck.base.progress import Progress
from profdeck.traces.kinds import chrome_trace, kind_of
from profdeck.traces.reading.columns import ANNOTATION, DEVICE_ANNOTATION
from profdeck.traces.reading.integrity import CountingHandler, TraceCheck, check_trace

_STEP = re.compile(r"ProfilerStep#([0-9]{1,18})")
_MARK_NEEDLES = (b'user_annotation"', b'"ProfilerStep#')
_COMPLETE, _METADATA = "X", "M"

# Numbers beyond are no times, and to make nanoseconds of them could take any amount of memory.
_MAX_TIME_US = Decimal(10) ** 40
_MAX_FLOAT_US = 1e39
# Four times what rounding can make of a start, a duration, their sum and an edge.
_FLOAT_ERROR = 2.0**-50
# Nothing raises: what is no number becomes NaN. A hundred digits hold the sum of any two times of a profiler exactly.
_EXACT = Context(prec=100, traps=[])

Bool = NDArray[np.bool_]
Float = NDArray[np.float64]
_Text = bytes | msgspec.Raw


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
        batch = _Batch.of(array)
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

    def _chosen(self, batch: _Batch, candidates: Bool) -> Bool:
        pairs = _pairs(batch)
        chosen = candidates
        if self.categories is not None:
            verdicts = _Verdicts(self.categories)
            chosen = chosen & np.array([verdicts[event.cat] for event in batch.events], dtype=np.bool_)
            chosen[pairs.closes] = chosen[pairs.opens]
        if self.begin_ns is not None or self.end_ns is not None:
            chosen = chosen & self._in_window(batch, pairs, chosen)
        chosen[pairs.halves] = True
        return chosen

    def _in_window(self, batch: _Batch, pairs: _Pairs, wanted: Bool) -> Bool:
        """Tell which events overlap the window; the answer is right for those that are ``wanted``."""
        start, stop, size = _spans(batch, pairs)
        inside, outside = np.ones(len(start), dtype=np.bool_), np.zeros(len(start), dtype=np.bool_)
        if self.begin_ns is not None:
            edge = float(_microseconds(self.begin_ns))
            error = (size + abs(edge)) * _FLOAT_ERROR
            inside &= stop - error > edge
            outside |= stop + error < edge
        if self.end_ns is not None:
            edge = float(_microseconds(self.end_ns))
            error = (size + abs(edge)) * _FLOAT_ERROR
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
        if self.end_ns is not None and start >= _microseconds(self.end_ns):
            return False
        begin = None if self.begin_ns is None else _microseconds(self.begin_ns)
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


@attrs.frozen
class Extent:
    """What there is to select from in a trace."""

    begin_ns: int | None
    """The start of the earliest complete event, on the clock of the ``ts``, rounded down; ``None`` without any."""
    duration_s: float
    """From there to the end of the latest one; approximate."""
    categories: tuple[str, ...]
    """Of all events, sorted."""
    check: TraceCheck


def read_extent(path: Path, *, on_progress: Progress | None = None) -> Extent:
    """Read a trace for what can be selected; of a damaged one, what is readable.

    Args:
        path: A Chrome trace, plain or gzip, or an artifact that has one, which
            counts.
        on_progress: Called with the bytes of the file read so far and its size, from the reading thread.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    handler = _ExtentHandler()
    check = check_trace(chrome_trace(path), handler, on_progress=on_progress)
    begin = handler.earliest
    return Extent(
        begin_ns=None if begin is None else _nanoseconds(begin, ROUND_FLOOR),
        duration_s=0.0 if begin is None else (handler.latest_us - float(begin)) / 1e6,
        categories=tuple(sorted(handler.categories)),
        check=check,
    )


def time_window(
    path: Path, begin_ns: int | None, end_ns: int | None, *, on_progress: Progress | None = None
) -> Selection:
    """Find the window between two times that count from the earliest complete event of a trace.

    Args:
        path: As for `read_extent`.
        begin_ns: ``None``: no bound.
        end_ns: ``None``: no bound.
        on_progress: As for `read_extent`.

    Raises:
        TraceError: The file cannot be read, or has no complete event.
    """
    extent = read_extent(path, on_progress=on_progress)
    origin_ns = extent.begin_ns
    if origin_ns is None:
        problem = f" {extent.check.problem}" if extent.check.problem else ""
        raise TraceError(f"{path} has no complete event from which time could be counted.{problem}")
    return Selection(
        begin_ns=None if begin_ns is None else origin_ns + begin_ns,
        end_ns=None if end_ns is None else origin_ns + end_ns,
    )


def step_window(path: Path, steps: range, *, on_progress: Progress | None = None) -> Selection:
    """Find the window of steps, by their ``ProfilerStep#N`` annotations.

    It reaches from the start of the first to the end of the last, on the host and on the devices: what a step launched
    is in it, though it runs later. Kineto shows on a device where the kernels lie that were launched in an annotation,
    the innermost one; so a step's are those of all annotations that began in it, which the ``External id`` tells. In a
    directory of torch_npu, ``kernel_details.csv`` tells the kernels of a step.

    Args:
        path: As for `read_extent`.
        steps: Not empty, and without gaps.
        on_progress: As for `read_extent`.

    Raises:
        TraceError: The file cannot be read, or one of the steps is not in it.
    """
    handler = _MarkHandler()
    check = check_trace(chrome_trace(path), handler, on_progress=on_progress)
    handler.marks += _steps_on_devices(path)
    step_of = {mark: int(found[1]) for mark in handler.marks if (found := _STEP.fullmatch(mark.name))}
    there = set(step_of.values())
    if sum(step in steps for step in there) < steps.stop - steps.start:
        raise _not_there(path, "step", steps, there, check)
    return _window([mark for mark, step in step_of.items() if step in steps], handler.marks)


def iteration_window(
    path: Path, iterations: range, is_iteration: Callable[[str], bool], *, on_progress: Progress | None = None
) -> Selection:
    """Find the window of iterations of an engine; as in `step_window`.

    They are the annotations of the host whose names are accepted, counted from 0 in the order of their starts; one
    inside another on the same thread is the same iteration.

    Args:
        path: As for `read_extent`.
        iterations: Not empty, and without gaps.
        is_iteration: Tells by its name whether an annotation is an iteration.
        on_progress: As for `read_extent`.

    Raises:
        TraceError: The file cannot be read, or one of the iterations is not in it.
    """
    handler = _MarkHandler()
    check = check_trace(chrome_trace(path), handler, on_progress=on_progress)
    accepted = [mark for mark in handler.marks if mark.category == ANNOTATION and is_iteration(mark.name)]
    counted = _outermost(accepted)
    if iterations.stop > len(counted):
        raise _not_there(path, "iteration", iterations, range(len(counted)), check)
    return _window(counted[iterations.start : iterations.stop], handler.marks)


@attrs.frozen(eq=False)
class _Mark:
    """A complete event that marks a part of the trace."""

    name: str
    category: str
    track: tuple[str, str]
    external_id: str | None
    """The same for an annotation and what shows it on devices."""
    start: Decimal
    stop: Decimal


class _MarkHandler(CountingHandler):
    """Collects annotations, of host and devices, and steps."""

    wants_text = True

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[_Mark] = []

    def batch(self, text: memoryview) -> int | None:
        """Take events; see :meth:`profdeck.traces.reading.scanner.TraceHandler.batch`."""
        if not any(stringzilla.find(text, needle) >= 0 for needle in _MARK_NEEDLES):
            return super().batch(text)
        try:
            events = _decode_named(text)
        except _UNDECODABLE:
            count = super().batch(text)
            for event in (_split_loosely(bytes(text)) or ()) if count is not None else ():
                self._take(event[1])
            return count
        marked = [index for index, event in enumerate(events) if _may_mark(event.name, event.cat)]
        if marked:
            texts = _split_events(bytes(text))
            for index in marked:
                self._take(_members(texts[index]))
        return len(events)

    def event(self, text: bytes) -> None:
        """Take one event."""
        if any(needle in text for needle in _MARK_NEEDLES):
            for event in _split_loosely(b"[%b]" % text) or ():
                self._take(event[1])

    def _take(self, members: dict[str, Any]) -> None:
        name, category = str(members.get("name")), str(members.get("cat"))
        span = _span(members)
        if span is None or members.get("ph") != _COMPLETE or not _may_mark(name, category):
            return
        args = members.get("args")
        mark = _Mark(
            name=sys.intern(name),
            category=sys.intern(category),
            track=(sys.intern(str(members.get("pid"))), sys.intern(str(members.get("tid")))),
            external_id=args.get("External id") if isinstance(args, dict) else None,
            start=span[0],
            stop=span[1],
        )
        self.marks.append(mark)


def _steps_on_devices(path: Path) -> list[_Mark]:
    """Return where the work of each step is, as far as something other than the Chrome trace tells it."""
    kind = kind_of(path)
    return [
        _Mark(
            name=f"ProfilerStep#{step.step}",
            category=DEVICE_ANNOTATION,
            track=(str(step.device), ""),
            external_id=None,
            start=_microseconds(step.start_ns),
            stop=_microseconds(step.end_ns),
        )
        for step in (kind.steps_on_devices(path) if kind else ())
    ]


def _may_mark(name: str, category: str | None) -> bool:
    # Ascend marks its steps as operators.
    return category in {ANNOTATION, DEVICE_ANNOTATION} or name.startswith("ProfilerStep#")


def _outermost(marks: list[_Mark]) -> list[_Mark]:
    """Return the marks that lie in no other one of their thread, in the order of their starts."""
    reach: dict[tuple[str, str], Decimal] = {}
    found = []
    for mark in sorted(marks, key=lambda mark: (mark.start, -mark.stop)):
        if mark.track not in reach or mark.stop > reach[mark.track]:
            reach[mark.track] = mark.stop
            found.append(mark)
    return found


def _window(chosen: list[_Mark], marks: list[_Mark]) -> Selection:
    """Return from the start of the first to the end of the last mark, and of the work that was launched in them."""
    on_host = [mark for mark in chosen if mark.category != DEVICE_ANNOTATION] or chosen
    begin, end = min(mark.start for mark in on_host), max(mark.stop for mark in on_host)
    ids = {
        (mark.name, mark.external_id)
        for mark in marks
        if mark.category == ANNOTATION and mark.external_id is not None and begin <= mark.start < end
    }
    launched = [mark for mark in marks if mark.category == DEVICE_ANNOTATION and (mark.name, mark.external_id) in ids]
    begin_ns = _nanoseconds(min(mark.start for mark in (*chosen, *launched)), ROUND_FLOOR)
    end_ns = _nanoseconds(max(mark.stop for mark in (*chosen, *launched)), ROUND_CEILING)
    return Selection(begin_ns=begin_ns, end_ns=max(end_ns, begin_ns + 1))


def _not_there(path: Path, what: str, wanted: range, there: Iterable[int], check: TraceCheck) -> TraceError:
    runs: list[tuple[int, int]] = []
    for number in sorted(there):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    has = f"it has {', '.join(itertools.starmap(_run, runs))}" if runs else f"no {what} is marked in it"
    plural = "s" if wanted.stop - wanted.start > 1 else ""
    damage = "" if check.whole else f" It is damaged: {check.problem}"
    return TraceError(f"{path} does not have the {what}{plural} {_run(wanted.start, wanted.stop - 1)}: {has}.{damage}")


def _run(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"


class _ExtentHandler(CountingHandler):
    """Finds the first and last times, and the categories."""

    wants_text = True

    def __init__(self) -> None:
        super().__init__()
        self.earliest: Decimal | None = None
        self.latest_us = -math.inf
        self.categories: set[str] = set()

    def batch(self, text: memoryview) -> int | None:
        """Take events; see :meth:`profdeck.traces.reading.scanner.TraceHandler.batch`."""
        batch = _Batch.of(text)
        if batch is None:
            return None
        self._take(batch)
        return batch.with_phase

    def event(self, text: bytes) -> None:
        """Take one event."""
        batch = _Batch.of(b"[%b]" % text)
        if batch is not None:
            self._take(batch)

    def _take(self, batch: _Batch) -> None:
        self.categories.update(event.cat for event in batch.events if event.cat)
        complete = batch.of_phase(_COMPLETE)
        if not complete.any():
            return
        start, stop, size = _spans(batch, _Pairs())
        self.latest_us = float(np.fmax.reduce(stop[complete], initial=self.latest_us))
        error = size * _FLOAT_ERROR
        least = np.fmin.reduce((start + error)[complete], initial=math.inf)
        bound = least if self.earliest is None else min(least, float(self.earliest))
        for index in np.flatnonzero(complete & ~(start - error > bound)).tolist():
            span = batch.span(index)
            if span is not None and (self.earliest is None or span[0] < self.earliest):
                self.earliest = span[0]


class _Event(msgspec.Struct, gc=False):
    ph: str
    cat: str | None = None
    ts: float | str | None = None
    dur: float | str | None = None


class _NamedEvent(msgspec.Struct, gc=False):
    ph: str
    name: str = ""
    cat: str | None = None


_decode_named = msgspec.json.Decoder(list[_NamedEvent]).decode
_decode_events = msgspec.json.Decoder(list[_Event]).decode
_split_events = msgspec.json.Decoder(list[msgspec.Raw]).decode
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# All numbers stay text: Python refuses to read integers of more than 4,300 digits, and floats lose digits.
_loose = json.JSONDecoder(parse_float=str, parse_int=str)
_skip_space = re.compile(r"[ \t\n\r]*").match
_find_between = re.compile(rb"\}([ \t\n\r]*,[ \t\n\r]*)\{").finditer
_MAX_TRIES = 16


class _Batch:
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
    def of(cls, array: memoryview | bytes) -> _Batch | None:
        """Take an array; ``None`` if it is none, or nested too deeply."""
        try:
            events = _decode_events(array)
        except _UNDECODABLE:
            objects = _split_loosely(bytes(array))
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
        return _split_events(bytes(self._array)) if self._texts is None else self._texts

    @functools.cached_property
    def between(self) -> bytes | None:
        """The first comma between two events, and the white space around it."""
        for found in itertools.islice(_find_between(self._array), _MAX_TRIES):
            if _split_loosely(bytes(self._array[: found.start() + 1]) + b"]") is not None:  # not inside an event
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
        return _span(_members(self.texts[begin]), None if end is None else _members(self.texts[end]))


def _split_loosely(array: bytes) -> list[tuple[_Text, dict[str, Any]]] | None:
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


def _members(event: _Text) -> dict[str, Any]:
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
class _Pairs:
    """Duration events, as indices."""

    opens: list[int] = attrs.field(factory=list)
    closes: list[int] = attrs.field(factory=list)
    """The end of each of ``opens``."""
    halves: list[int] = attrs.field(factory=list)
    """Those whose partner is not there."""


def _pairs(batch: _Batch) -> _Pairs:
    """Find the pairs of each thread, which are nested and in the order of time, as the format demands."""
    pairs = _Pairs()
    stacks: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for index in np.flatnonzero(batch.of_phase("B") | batch.of_phase("E")).tolist():
        members = _members(batch.texts[index])
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


def _spans(batch: _Batch, pairs: _Pairs) -> tuple[Float, Float, Float]:
    """Return start and stop of each event, in microseconds, and what their error is in proportion to.

    The last is NaN for an event whose times floats cannot hold.
    """
    start = _floats([event.ts for event in batch.events])
    duration = _floats([event.dur for event in batch.events])
    with np.errstate(invalid="ignore"):
        stop = start + np.where(batch.of_phase(_COMPLETE), np.fmax(duration, 0), 0)
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


def _span(members: dict[str, Any], end: dict[str, Any] | None = None) -> tuple[Decimal, Decimal] | None:
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
    elif members.get("ph") == _COMPLETE:
        stop = _EXACT.add(start, _time(members.get("dur")) or Decimal(0))
    return start, start if stop is None else max(start, stop)


def _microseconds(time_ns: int) -> Decimal:
    return Decimal(time_ns).scaleb(-3, _EXACT)


def _nanoseconds(time_us: Decimal, rounding: str) -> int:
    return int(time_us.scaleb(3, _EXACT).to_integral_value(rounding, _EXACT))
