"""Brute-force check of a trace's critical path. It reads the JSON and shares no code with profdeck's account.

1. The owners cover the interval without gaps or overlaps.
2. A call or kernel is open during the time that it owns.
3. A call that owns time is the innermost open call of its thread.
4. Launch latency lies between the start of a launch and the start of the launched work.
5. A device gap ends when its event starts. During the gap, no other work runs on the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import oracle

_HOST = {"python_function", "cpu_op", "cuda_runtime", "cuda_driver", "overhead", "operator", "runtime"}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
_OPEN = {"operator", "python", "runtime call", "allocation", "kernel", "copy", "collective", "profiler", "queue full"}
_INNERMOST = {"operator", "python", "runtime call", "allocation"}
_CALLS = {"cuda_runtime", "cuda_driver", "runtime"}


class Owner(NamedTuple):
    """A segment of the critical path."""

    begin: int
    end: int
    kind: str
    position: int
    """Position of the owner's event in the file; -1 if the owner has no event."""


class _Event(NamedTuple):
    begin: int
    end: int
    name: str
    lane: tuple[Any, ...]
    correlation: Any
    position: int


class _Trace:
    """Events of a trace by position and by stream or thread, and launches by correlation."""

    def __init__(self, path: Path) -> None:
        self.events: dict[int, _Event] = {}
        self.lanes: dict[tuple[Any, ...], list[_Event]] = {}
        self.launches: dict[Any, list[_Event]] = {}
        for position, event in enumerate(event for event in oracle.events_of(path) if "ph" in event):
            category = str(event.get("cat")).lower()
            if event["ph"] == "X" and category in _HOST | _DEVICE | {"user_annotation"}:
                self._add(position, event, category)

    def _add(self, position: int, event: dict[str, Any], category: str) -> None:
        start = oracle.nanoseconds(event["ts"])
        end = start + max(0, oracle.nanoseconds(event.get("dur") or 0))
        lane = category in _DEVICE, event["pid"], event["tid"]
        correlation = (event.get("args") or {}).get("correlation")
        item = _Event(start, end, event["name"], lane, correlation, position)
        self.events[position] = item
        if category != "user_annotation":
            self.lanes.setdefault(lane, []).append(item)
        if category in _CALLS:
            self.launches.setdefault(correlation, []).append(item)


def wrong_owners(path: Path, begin: int, end: int, owners: Iterable[Owner], *, every: int = 1) -> list[str]:
    """Return a message for each violation of a rule.

    Args:
        path: The trace.
        begin: Start of the interval in nanoseconds.
        end: End of the interval in nanoseconds.
        owners: Segments of the critical path.
        every: Check rules 3 and 5 only for every n-th segment.
    """
    trace = _Trace(path)
    wrong, time = [], begin
    for number, owner in enumerate(owners):
        if owner.begin != time or owner.end <= owner.begin:
            wrong.append(f"{owner.kind}: gap or overlap at {owner.begin - begin} ns")
        time = owner.end
        event = trace.events.get(owner.position)
        if event is not None:
            wrong += [f"{owner.kind}: {event.name[:40]} {problem}" for problem in _bounds(trace, owner, event)]
            if number % every == 0:
                wrong += [f"{owner.kind}: {event.name[:40]} {problem}" for problem in _others(trace, owner, event)]
    if time != end:
        wrong.append(f"the path ends {end - time} ns early")
    return wrong


def _bounds(trace: _Trace, owner: Owner, event: _Event) -> Iterator[str]:
    """Check rules 2 and 4, and that a device gap ends when its event starts."""
    if owner.kind in _OPEN and not (event.begin <= owner.begin and owner.end <= event.end):
        yield "is not open"
    if owner.kind == "launch latency":
        calls = trace.launches.get(event.correlation, [])
        if not any(call.begin <= owner.begin and owner.end <= event.begin for call in calls):
            yield "does not begin after the launch"
    if owner.kind == "device gap" and event.begin != owner.end and event.end > owner.begin:
        yield "does not begin at the end of the gap"


def _others(trace: _Trace, owner: Owner, event: _Event) -> Iterator[str]:
    """Check rules 3 and 5 against all events of the thread or stream."""
    for other in trace.lanes[event.lane] if owner.kind in _INNERMOST else ():
        is_inner = (other.begin, -other.end) > (event.begin, -event.end)
        if is_inner and max(other.begin, owner.begin) < min(other.end, owner.end):
            yield f"owns time of {other.name[:40]}"
    for other in trace.lanes[event.lane] if owner.kind == "device gap" else ():
        is_earlier = other.position != event.position and other.begin < event.begin
        if is_earlier and other.begin < owner.end and other.end > owner.begin:
            yield f"waits in a gap in which {other.name[:40]} runs"
