"""Finds events on one lane of a device that overlap without one being inside the other, and gives them other lanes.

Perfetto's importer takes the complete events of a thread in the order of their start, the longer first, and drops each
one that ends behind an open one (``SliceTracker`` in its ``src/trace_processor``, counted there as
``slice_drop_overlapping_complete_event``). Kernels of one stream overlap where one may start before the end of the one
in front of it, as with programmatic dependent launch.
"""

from __future__ import annotations

import itertools
import operator
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import msgspec

from profdeck_traces.base.byte_search import stringzilla
from profdeck_traces.base.errors import TraceError
from profdeck_traces.merge.event_texts import Event, members_of, metadata, number_of, text_of, value_of
from profdeck_traces.reading.phases import any_with

CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"})
"""Those of Kineto's events on devices. Ascend's have none, so that all events without one are looked at."""

# Larger than the ids of threads and streams, smaller than the new pids.
_FIRST_NEW_TID = 900_000_000
_NS_PER_US = 1000
_FEW = 1 << 16
# No stream runs so many kernels at once, and no device has so many streams; each costs time for all of its events.
_MOST_LANES, _MOST_STREAMS = 64, 100_000
_MAX_TIME_US = 2**52

# Ends of the categories, and beginnings.
_NEEDLES = (b'"kernel"', b'"gpu_')
_S = rb"[ \t\n\r]*+"
_TIME = rb"[0-9]{1,15}+\.[0-9]{3}"
_LANE = rb'"pid"%b:[^,]*,%b"tid"%b:[^,]*,%b"ts"%b:%b' % (_S, _S, _S, _S, _S, _S)
_DURATION = rb'%b,%b"dur"%b:%b(%b)' % (_S, _S, _S, _S, _TIME)
# What stands behind a needle: the rest of the category, and the members that Kineto writes next.
_match_event = re.compile(
    rb'(?:[a-z_]*+")?+%b,%b"name"%b:%b"[^"]*+"%b,%b(%b)(%b)%b%b[,}]'
    % (_S, _S, _S, _S, _S, _S, _LANE, _TIME, _DURATION, _S)
).match
_match_times = re.compile(rb"(%b)(?:%b)?%b[,}]" % (_TIME, _DURATION, _S)).match
_match_lane = re.compile(
    rb'("pid"%b:%b)([^,]*)(,%b"tid"%b:%b)([^,]*)(,%b"ts"%b:%b)' % (_S, _S, _S, _S, _S, _S, _S, _S)
).fullmatch

Lane = tuple[bytes, bytes]
"""The JSON of a pid and a tid."""
_Others = dict[tuple[int, int | None], int]


@attrs.frozen
class Overlaps:
    """Which events need another lane than their own."""

    others: dict[Lane, _Others]
    """For each lane with overlaps: by start and end in nanoseconds, the number of the other lane, from 1. Without an
    end, where a flow goes that starts or ends then."""
    texts: dict[bytes, Lane]
    """The order of pid, tid and the key of the start in events of those lanes; none if that is not known."""


class _Complete(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    cat: msgspec.Raw = msgspec.Raw(b'""')  # which may hold what is no UTF-8
    pid: msgspec.Raw = msgspec.Raw()
    tid: msgspec.Raw = msgspec.Raw()
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()


_EVENT: Any = any_with(_Complete)
_decode = msgspec.json.Decoder(list[_EVENT]).decode


class OverlappingLanes:
    """Collects when each lane of a device is busy, in 16 bytes an event; another 40 when they are compared."""

    def __init__(self) -> None:
        self._spans: defaultdict[Lane, tuple[array[int], array[int]]] = defaultdict(lambda: (array("q"), array("q")))
        self._lane_of_text: dict[bytes, Lane] = {}
        self._found_all = True

    def batch(self, data: bytes, complete: int) -> None:
        """Take events.

        Args:
            data: A JSON array of events, in which each ``"pid"`` is the key of one.
            complete: How many of them are complete events.
        """
        found = _found(data)
        if found or (found is not None and stringzilla.count(data, b'"cat"') >= complete):
            for text, start_us, duration_us in found:
                starts, ends = self._spans_of(text)
                start_ns = _whole(start_us)
                starts.extend(start_ns)
                ends.extend(map(operator.add, start_ns, _whole(duration_us)))
            return
        self._found_all = False
        for event in _decode(data):
            if type(event) is _Complete and _is_on_device(bytes(event.cat)):
                self._add(bytes(event.pid), bytes(event.tid), bytes(event.ts), bytes(event.dur))

    def event(self, event: Event) -> None:
        """Take one complete event."""
        if _is_on_device(bytes(event.get("cat", b'""'))):
            self._add(*(bytes(event.get(key, b"")) for key in ("pid", "tid", "ts", "dur")))

    def overlaps(self) -> Overlaps | None:
        """Return which events need another lane; ``None``: none does.

        Raises:
            TraceError: So many events of one lane run at once that it is none of a device.
        """
        others = {lane: found for lane, spans in self._spans.items() if (found := _overlapping(lane, *spans))}
        if not others:
            return None
        texts = {text: lane for text, lane in self._lane_of_text.items() if lane in others}
        return Overlaps(others, texts if self._found_all else {})

    def _spans_of(self, text: bytes) -> tuple[array[int], array[int]]:
        lane = self._lane_of_text.get(text)
        if lane is None:
            found = _match_lane(text)
            assert found is not None  # noqa: S101 - it was found as one
            lane = self._lane_of_text[text] = found[2].strip(), found[4].strip()
        return self._spans_on(lane)

    def _spans_on(self, lane: Lane) -> tuple[array[int], array[int]]:
        if len(self._spans) >= _MOST_STREAMS and lane not in self._spans:
            raise TraceError(f"It has more than {_MOST_STREAMS:,} streams of devices: no profiler wrote that.")
        return self._spans[lane]

    def _add(self, pid: bytes, tid: bytes, start_us: bytes, duration_us: bytes) -> None:
        start_ns, duration_ns = nanoseconds(start_us), nanoseconds(duration_us)
        if start_ns is not None and duration_ns is not None and duration_ns >= 0:
            starts, ends = self._spans_on((pid, tid))
            starts.append(start_ns)
            ends.append(start_ns + duration_ns)


def _is_on_device(category: bytes) -> bool:
    """Tell whether events of a category, as JSON, may be on a device."""
    found = value_of(category)
    return not found or (isinstance(found, str) and found in CATEGORIES)


def _found(data: bytes) -> list[tuple[bytes, Sequence[bytes], Sequence[bytes]]] | None:
    """Return starts and durations of the events on devices, by the text of their lanes.

    ``None``: there may be others.
    """
    pieces = [piece for needle in _NEEDLES for piece in itertools.islice(stringzilla.split_iter(data, needle), 1, None)]
    found: list[tuple[Any, ...]] = [event.groups() for event in map(_match_event, pieces) if event is not None]
    if len(found) != len(pieces):
        return None
    found.sort(key=operator.itemgetter(0))
    lanes: list[tuple[bytes, Sequence[bytes], Sequence[bytes]]] = []
    for text, events in itertools.groupby(found, operator.itemgetter(0)):
        _, starts, durations = zip(*events, strict=True)
        lanes.append((text, starts, durations))
    return lanes


def _whole(times_us: Sequence[bytes]) -> list[int]:
    """Return times with three decimals in nanoseconds."""
    return list(map(int, b" ".join(times_us).replace(b".", b"").split()))


def nanoseconds(time_us: bytes) -> int | None:
    """Return a time, a JSON number or a string with one, in nanoseconds; ``None`` if it is none."""
    number = number_of(time_us.strip(b'"'))
    return None if number is None or abs(number) >= _MAX_TIME_US else round(number * _NS_PER_US)


def _overlapping(of: Lane, starts: array[int], ends: array[int]) -> _Others:
    """Place the events as Perfetto does, and those that it drops on further lanes."""
    if _nested(_in_order(starts, ends)):
        return {}
    others: _Others = {}
    staying: set[int] = set()
    lanes: list[list[int]] = [[]]  # the ends of the open events on each, the innermost last
    for start, negative_end in _in_order(starts, ends):
        end = -negative_end
        number = next((number for number, lane in enumerate(lanes) if _fits(lane, start, end)), len(lanes))
        if number == _MOST_LANES:
            raise TraceError(
                f"More than {_MOST_LANES} events of stream {text_of(of[1])} of process {text_of(of[0])} overlap at "
                f"{start / _NS_PER_US:,.3f} us: no device runs that."
            )
        if number == len(lanes):
            lanes.append([])
        lanes[number].append(end)
        if number:
            others[start, end] = others[start, None] = number
        else:
            staying.add(start)
    return {(start, end): number for (start, end), number in others.items() if end is not None or start not in staying}


def _in_order(starts: array[int], ends: array[int]) -> Iterator[tuple[int, int]]:
    """Yield starts and negative ends by start, the longer first."""
    if len(starts) <= _FEW:
        yield from sorted(zip(starts, map(operator.neg, ends), strict=True))
        return
    import numpy as np  # which takes a tenth of a second to load; objects would take 200 bytes an event

    begin, negative_end = np.frombuffer(starts, np.int64), -np.frombuffer(ends, np.int64)
    order = np.lexsort((negative_end, begin))
    for at in range(0, len(order), _FEW):
        block = order[at : at + _FEW]
        yield from zip(begin[block].tolist(), negative_end[block].tolist(), strict=True)


def _nested(spans: Iterable[tuple[int, int]]) -> bool:
    """Return whether no event has to go to another lane; most often none has."""
    open_ends: list[int] = []
    for start, negative_end in spans:
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if open_ends and open_ends[-1] < -negative_end:
            return False
        open_ends.append(-negative_end)
    return True


def _fits(open_ends: list[int], start: int, end: int) -> bool:
    """Close the events that end before ``start`` and return whether this one lies within the others, if any."""
    while open_ends and open_ends[-1] <= start:
        open_ends.pop()
    return not open_ends or end <= open_ends[-1]


class OtherLanes:
    """Moves the events of one source that overlap, and the flows that begin or end in them."""

    def __init__(self, overlaps: Overlaps) -> None:
        self._overlaps = overlaps
        pairs = [(lane, number) for lane, others in overlaps.others.items() for number in sorted(set(others.values()))]
        self._tids = {pair: b"%d" % tid for tid, pair in enumerate(pairs, _FIRST_NEW_TID)}
        self._names: dict[Lane, str] = {}
        self._sort_indices: dict[Lane, msgspec.Raw] = {}

    def batch(self, data: bytes) -> bytes | None:
        """Return the text with new tids; ``None`` if the events have to be taken apart.

        Args:
            data: A JSON array of events, in which each ``"pid"`` is the key of one.
        """
        if not self._overlaps.texts or stringzilla.find(data, b'"thread_') >= 0:
            return None
        for text, lane in self._overlaps.texts.items():
            first, *rest = stringzilla.Str(data).split(text)
            if rest:
                pieces: list[Any] = [first]
                for piece in rest:
                    times = _match_times(piece)
                    if times is None:
                        return None
                    pieces += [self._moved(text, lane, *times.groups()), piece]
                data = b"".join(pieces)
        return data

    def event(self, event: Event, phase: Any) -> None:
        """Give one event its new tid, and remember the names of threads."""
        pid, tid, start_us, duration_us = (bytes(event.get(key, b"")) for key in ("pid", "tid", "ts", "dur"))
        others = self._overlaps.others.get((pid, tid))
        if others is None:
            return
        if phase == "M":
            self._keep_name(event, (pid, tid))
            return
        start_ns, duration_ns = nanoseconds(start_us), nanoseconds(duration_us)
        if start_ns is None or (phase == "X") != (duration_ns is not None):
            return
        number = others.get((start_ns, None if duration_ns is None else start_ns + duration_ns))
        if number is not None:
            event["tid"] = msgspec.Raw(self._tids[(pid, tid), number])

    def metadata(self, new_pid: Callable[[bytes], int]) -> list[Event]:
        """Return the events that name the new lanes.

        Args:
            new_pid: Returns the new pid for the JSON of an old one.
        """
        events = []
        for ((pid, tid), number), new_tid in self._tids.items():
            suffix = " (overlapping)" if number == 1 else f" (overlapping {number})"
            name = self._names.get((pid, tid), text_of(tid)) + suffix
            events.append(metadata("thread_name", new_pid(pid), int(new_tid), {"name": name}))
            if (pid, tid) in self._sort_indices:  # viewers sort those of the same one by name
                args = {"sort_index": self._sort_indices[pid, tid]}
                events.append(metadata("thread_sort_index", new_pid(pid), int(new_tid), args))
        return events

    def _moved(self, text: bytes, lane: Lane, start_us: bytes, duration_us: bytes | None) -> bytes:
        start_ns = int(start_us.replace(b".", b""))
        end_ns = None if duration_us is None else start_ns + int(duration_us.replace(b".", b""))
        number = self._overlaps.others[lane].get((start_ns, end_ns))
        if number is None:
            return text
        found = _match_lane(text)
        assert found is not None  # noqa: S101 - it was found as one
        return b"".join([*found.groups()[:3], self._tids[lane, number], found[5]])

    def _keep_name(self, event: Event, lane: Lane) -> None:
        args = members_of(event.get("args")) or {}
        kind = value_of(bytes(event.get("name", b"")))
        if kind == "thread_name" and "name" in args:
            self._names[lane] = text_of(bytes(args["name"]))
        if kind == "thread_sort_index" and "sort_index" in args:
            self._sort_indices[lane] = args["sort_index"]
