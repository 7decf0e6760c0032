"""What traces really say, by the standard library: slow, in memory, and with no code of profdeck's."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
FLOW_PHASES = ("s", "t", "f")
# What a merge has to change, so that two processes or two arrows stay two.
CHANGED = ("pid", "id")


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a trace, with the digits of their times."""
    return [event for event in json.loads(text, parse_float=Decimal)["traceEvents"] if "ph" in event]


def contents(text: str) -> dict[str, int]:
    """Return the figures of a trace that tools are asked for; see `benchmarks.traces.tasks` for their names."""
    events = events_of(text)
    intervals = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event.get("cat") in DEVICE_KINDS:
            start_ns, duration_ns = int(event["ts"] * 1000), int(event["dur"] * 1000)
            intervals[event["cat"], event["pid"]].append((start_ns, start_ns + duration_ns))
    kernels = [interval for (kind, _), found in intervals.items() if kind == "kernel" for interval in found]
    work = [interval for found in intervals.values() for interval in found]
    of_device: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for (_, device), found in intervals.items():
        of_device[device] += found
    return {
        "events": len(events),
        "kernels": len(kernels),
        "kernel_ns": sum(end - start for start, end in kernels),
        "device_events": len(work),
        "device_ns": sum(end - start for start, end in work),
        "busy_ns": sum(map(union_ns, of_device.values())),
    }


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the time in which at least one interval is open."""
    union, reached = 0, None
    for start, end in sorted(intervals):
        begin = start if reached is None else max(start, reached)
        union += max(0, end - begin)
        reached = end if reached is None else max(end, reached)
    return union


def late_ns(text: str) -> int:
    """Return by how much a rank is late that enters each collective of a trace later, by half of its duration."""
    durations = (event["dur"] for event in events_of(text) if event.get("cat") == "kernel" and "nccl" in event["name"])
    return sum(int(duration * 1000) // 2 for duration in durations)


def lost_in_merge(sources: list[Path], merged: Path) -> list[str]:
    """Return what a merged trace has lost of its sources, or mixed up; metadata may change."""
    events = _read(merged)
    had, has = Counter[str](), Counter(_lasting(events))
    arrows, processes = 0, 0
    for source in sources:
        found = _read(source)
        had.update(_lasting(found))
        arrows += len(_arrows(found))
        processes += len(_processes(found))
    problems = [f"{event} is there {has[event]} times instead of {had[event]}" for event in (had - has) | (has - had)]
    if len(_arrows(events)) != arrows:
        problems.append(f"{len(_arrows(events))} arrows instead of {arrows}")
    if len(_processes(events)) != processes:
        problems.append(f"{len(_processes(events))} processes instead of {processes}")
    return problems


def _read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return events_of(file.read())


def _lasting(events: list[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        if event["ph"] != "M":
            kept = {key: value for key, value in event.items() if key not in CHANGED}
            yield json.dumps(kept, sort_keys=True, default=lambda number: str(number.normalize()))


def _arrows(events: list[dict[str, Any]]) -> set[tuple[Any, Any]]:
    return {(event.get("cat"), event["id"]) for event in events if event["ph"] in FLOW_PHASES}


def _processes(events: list[dict[str, Any]]) -> set[Any]:
    return {event.get("pid") for event in events if event["ph"] != "M"}
