"""Expected results, computed with the standard library. It is slow and in memory, and shares no code with profdeck."""

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
# Keys that a merge changes to keep processes and flow arrows distinct.
CHANGED = ("pid", "id")


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a trace. Times are decimals with all digits."""
    return [event for event in json.loads(text, parse_float=Decimal)["traceEvents"] if "ph" in event]


def contents(text: str) -> dict[str, int]:
    """Return the figures of a trace. `benchmarks.traces.tasks` describes their names."""
    events = events_of(text)
    intervals = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event.get("cat") in DEVICE_KINDS:
            start_ns, duration_ns = int(event["ts"] * 1000), int(event["dur"] * 1000)
            intervals[event["cat"], event["pid"]].append((start_ns, start_ns + duration_ns))
    kernels = [interval for (kind, _), spans in intervals.items() if kind == "kernel" for interval in spans]
    work = [interval for spans in intervals.values() for interval in spans]
    spans_by_device: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for (_, device), spans in intervals.items():
        spans_by_device[device] += spans
    return {
        "events": len(events),
        "kernels": len(kernels),
        "kernel_ns": sum(end - start for start, end in kernels),
        "device_events": len(work),
        "device_ns": sum(end - start for start, end in work),
        "busy_ns": sum(map(union_ns, spans_by_device.values())),
    }


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the total length of the union of intervals."""
    union, reached = 0, None
    for start, end in sorted(intervals):
        begin = start if reached is None else max(start, reached)
        union += max(0, end - begin)
        reached = end if reached is None else max(end, reached)
    return union


def late_ns(text: str) -> int:
    """Return the total delay of a rank that enters each collective late by half of its duration."""
    durations = (event["dur"] for event in events_of(text) if event.get("cat") == "kernel" and "nccl" in event["name"])
    return sum(int(duration * 1000) // 2 for duration in durations)


def lost_in_merge(sources: list[Path], merged: Path) -> list[str]:
    """Return descriptions of events that a merged trace lost or mixed up. Metadata may differ."""
    events = _read(merged)
    source_counts, merged_counts = Counter[str](), Counter(_comparable(events))
    arrows, processes = 0, 0
    for source in sources:
        source_events = _read(source)
        source_counts.update(_comparable(source_events))
        arrows += len(_arrows(source_events))
        processes += len(_processes(source_events))
    changed = (source_counts - merged_counts) | (merged_counts - source_counts)
    problems = [f"{event} occurs {merged_counts[event]} times instead of {source_counts[event]}" for event in changed]
    if len(_arrows(events)) != arrows:
        problems.append(f"{len(_arrows(events))} arrows instead of {arrows}")
    if len(_processes(events)) != processes:
        problems.append(f"{len(_processes(events))} processes instead of {processes}")
    return problems


def _read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return events_of(file.read())


def _comparable(events: list[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        if event["ph"] != "M":
            kept = {key: value for key, value in event.items() if key not in CHANGED}
            yield json.dumps(kept, sort_keys=True, default=lambda number: str(number.normalize()))


def _arrows(events: list[dict[str, Any]]) -> set[tuple[Any, Any]]:
    return {(event.get("cat"), event["id"]) for event in events if event["ph"] in FLOW_PHASES}


def _processes(events: list[dict[str, Any]]) -> set[Any]:
    return {event.get("pid") for event in events if event["ph"] != "M"}
