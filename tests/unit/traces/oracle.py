"""What a summary must say of a trace, worked out instant by instant with the standard library: no code is shared."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "hpu_op", "mtia_ccp_events"}
COPIES = {"gpu_memcpy", "gpu_memset"}
HOST = {"cpu_op": "operators", "user_annotation": "annotations"}
STEP = "ProfilerStep#"
Span = tuple[int, int]


def events_of(path: Path) -> list[dict[str, Any]]:
    """Return all elements of the array of events that are objects."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, parse_float=Decimal)
    events = document["traceEvents"] if isinstance(document, dict) else document
    return [event for event in events if isinstance(event, dict)]


def nanoseconds(time_us: Any) -> int:
    return round(Decimal(time_us) * 1000)


def span(event: dict[str, Any]) -> Span:
    start = nanoseconds(event["ts"])
    return start, start + nanoseconds(event.get("dur", 0))


def facts(path: Path, class_of: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """Return counts, sums, self times, busy times and steps, in nanoseconds.

    Args:
        path: A trace with categories, of which each time has a whole number of nanoseconds.
        class_of: The classes of what devices did, by category and name.
    """
    events = [event for event in events_of(path) if "ph" in event]
    complete = [event for event in events if event["ph"] == "X"]
    of_device = [event for event in complete if event.get("cat") in DEVICE]
    on_host = [event for event in complete if event.get("cat") in HOST]
    found: dict[str, Any] = {
        "events": len(events),
        "kernels": sums((event["cat"], event["name"], span(event)) for event in of_device),
        "copies": copies(of_device),
        "devices": {},
        "steps": steps(complete),
    }
    own = self_times(on_host)
    for category, section in HOST.items():
        rows = [event for event in on_host if event["cat"] == category]
        totals = sums((category, event["name"], span(event)) for event in rows)
        found[section] = {name: (*row, own[category, name]) for (_, name), row in totals.items()}
    for device in {event["pid"] for event in of_device}:
        mine = [event for event in of_device if event["pid"] == device]
        classes = [(class_of[event["cat"], event["name"]], span(event)) for event in mine]
        messages = [one for kind, one in classes if kind == "communication"]
        others = [one for kind, one in classes if kind != "communication"]
        first, last = min(start for start, _ in map(span, mine)), max(end for _, end in map(span, mine))
        busy, communication, other = covered(messages + others), covered(messages), covered(others)
        found["devices"][device] = {
            "events": len(mine),
            "span": last - first,
            "busy": busy,
            "communication": communication,
            "overlap": communication + other - busy,
            "memory": covered(one for kind, one in classes if kind in {"memory copy", "memory set"}),
        }
    return found


def sums(rows: Iterable[tuple[str, str, Span]]) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Return count, sum and largest by category and name."""
    times: dict[tuple[str, str], list[int]] = defaultdict(list)
    for category, name, (start, end) in rows:
        times[category, name].append(end - start)
    return {key: (len(found), sum(found), max(found)) for key, found in times.items()}


def copies(events: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Return names, counts and bytes of each category and name; -1 unless all say theirs."""
    sizes: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for event in events:
        if event["cat"] in COPIES:
            sizes[event["name"], event["cat"]].append(event.get("args", {}).get("bytes"))
    return sorted((name, len(found), -1 if None in found else sum(found)) for (name, _), found in sizes.items())


def covered(spans: Iterable[Span]) -> int:
    """Return the time between neighbouring edges in which something is open."""
    edges = sorted([edge for start, end in spans for edge in ((start, 1), (end, -1))])
    total, depth = 0, 0
    for (at, change), (following, _) in itertools.pairwise(edges):
        depth += change
        total += (following - at) * (depth > 0)
    return total


def self_times(events: list[dict[str, Any]]) -> dict[tuple[str, str], int]:
    """Give the time between neighbouring edges of a thread to what started last, of equal ones to what ends first."""
    own: dict[tuple[str, str], int] = defaultdict(int)
    threads: dict[Any, list[tuple[int, int, int, str, str]]] = defaultdict(list)
    for place, event in enumerate(events):
        start, end = span(event)
        threads[event.get("pid"), event.get("tid")].append((start, -end, place, event["cat"], event["name"]))
    for rows in threads.values():
        rows.sort()
        edges = sorted({edge for start, end, *_ in rows for edge in (start, -end)})
        begun = 0
        is_open: list[tuple[int, int, int, str, str]] = []
        for at, following in itertools.pairwise(edges):
            while begun < len(rows) and rows[begun][0] <= at:
                is_open.append(rows[begun])
                begun += 1
            is_open = [row for row in is_open if -row[1] > at]
            if is_open:
                own[max(is_open)[3:]] += following - at
    return own


def steps(complete: list[dict[str, Any]]) -> list[tuple[str, int, int | None]]:
    """Return name, duration and device time of the global steps, by their start.

    A step begins on a device with the first work of what began in it on the host, by the ``External id``; where
    nothing connects them, when it begins on the host. It lasts until the next one begins.
    """
    marks = sorted(
        (*span(event), event["name"])
        for event in complete
        if event.get("cat") == "user_annotation" and event["name"].startswith(STEP)
    )
    place_of_id = {
        (event["name"], event.get("args", {}).get("External id")): nanoseconds(event["ts"])
        for event in complete
        if event.get("cat") == "user_annotation"
    }
    begins: dict[int, int] = {}
    for event in complete:
        key = event["name"], event.get("args", {}).get("External id")
        if event.get("cat") != "gpu_user_annotation" or key not in place_of_id:
            continue
        earlier = [index for index, mark in enumerate(marks) if mark[0] <= place_of_id[key]]
        if earlier and place_of_id[key] <= marks[earlier[-1]][1]:
            begins[earlier[-1]] = min(begins.get(earlier[-1], 1 << 62), nanoseconds(event["ts"]))
    if not begins:
        begins = {index: mark[0] for index, mark in enumerate(marks)}
    in_order = sorted((begin, index) for index, begin in begins.items())
    work = [span(event) for event in complete if event.get("cat") in DEVICE]
    device = dict.fromkeys(range(len(marks)), 0)
    for start, end in work:
        before = [index for begin, index in in_order if begin <= start]
        if before:
            device[before[-1]] += end - start
    return [(name, end - start, device[index] if work else None) for index, (start, end, name) in enumerate(marks)]
