"""Reference implementation of trace summaries. It evaluates each instant and shares no code with profdeck."""

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
        path: A trace with categories. All times are whole numbers of nanoseconds.
        class_of: Classes of device events, keyed by category and name.
    """
    events = [event for event in events_of(path) if "ph" in event]
    complete = [event for event in events if event["ph"] == "X"]
    of_device = [event for event in complete if event.get("cat") in DEVICE]
    on_host = [event for event in complete if event.get("cat") in HOST]
    result: dict[str, Any] = {
        "events": len(events),
        "kernels": sums((event["cat"], event["name"], span(event)) for event in of_device),
        "copies": copies(of_device),
        "devices": {},
        "steps": steps(complete),
    }
    self_ns = self_times(on_host)
    for category, section in HOST.items():
        rows = [event for event in on_host if event["cat"] == category]
        totals = sums((category, event["name"], span(event)) for event in rows)
        result[section] = {name: (*row, self_ns[category, name]) for (_, name), row in totals.items()}
    for device in {event["pid"] for event in of_device}:
        device_events = [event for event in of_device if event["pid"] == device]
        classes = [(class_of[event["cat"], event["name"]], span(event)) for event in device_events]
        messages = [event_span for kind, event_span in classes if kind == "communication"]
        other_spans = [event_span for kind, event_span in classes if kind != "communication"]
        first, last = (
            min(start for start, _ in map(span, device_events)),
            max(end for _, end in map(span, device_events)),
        )
        busy_ns, communication_ns, other_ns = covered(messages + other_spans), covered(messages), covered(other_spans)
        result["devices"][device] = {
            "events": len(device_events),
            "span": last - first,
            "busy": busy_ns,
            "communication": communication_ns,
            "overlap": communication_ns + other_ns - busy_ns,
            "memory": covered(event_span for kind, event_span in classes if kind in {"memory copy", "memory set"}),
        }
    return result


def sums(rows: Iterable[tuple[str, str, Span]]) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Return count, sum and largest by category and name."""
    times: dict[tuple[str, str], list[int]] = defaultdict(list)
    for category, name, (start, end) in rows:
        times[category, name].append(end - start)
    return {key: (len(durations), sum(durations), max(durations)) for key, durations in times.items()}


def copies(events: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Return the name, count and bytes of each category and name. The bytes are -1 if an event lacks its size."""
    sizes: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for event in events:
        if event["cat"] in COPIES:
            sizes[event["name"], event["cat"]].append(event.get("args", {}).get("bytes"))
    return sorted(
        (name, len(byte_counts), -1 if None in byte_counts else sum(byte_counts))
        for (name, _), byte_counts in sizes.items()
    )


def covered(spans: Iterable[Span]) -> int:
    """Return the total length of the union of spans."""
    edges = sorted([edge for start, end in spans for edge in ((start, 1), (end, -1))])
    total, depth = 0, 0
    for (instant, change), (following, _) in itertools.pairwise(edges):
        depth += change
        total += (following - instant) * (depth > 0)
    return total


def self_times(events: list[dict[str, Any]]) -> dict[tuple[str, str], int]:
    """Return self times. Each instant belongs to the open event with the latest start, then the earliest end."""
    self_ns: dict[tuple[str, str], int] = defaultdict(int)
    threads: dict[Any, list[tuple[int, int, int, str, str]]] = defaultdict(list)
    for index, event in enumerate(events):
        start, end = span(event)
        threads[event.get("pid"), event.get("tid")].append((start, -end, index, event["cat"], event["name"]))
    for rows in threads.values():
        rows.sort()
        edges = sorted({edge for start, end, *_ in rows for edge in (start, -end)})
        begun = 0
        is_open: list[tuple[int, int, int, str, str]] = []
        for instant, following in itertools.pairwise(edges):
            while begun < len(rows) and rows[begun][0] <= instant:
                is_open.append(rows[begun])
                begun += 1
            is_open = [row for row in is_open if -row[1] > instant]
            if is_open:
                self_ns[max(is_open)[3:]] += following - instant
    return self_ns


def steps(complete: list[dict[str, Any]]) -> list[tuple[str, int, int | None]]:
    """Return the name, duration and device time of the global steps, sorted by start.

    On a device, a step begins with the first work launched in the step, according to the ``External id``. Without IDs,
    it begins at its start on the host. It lasts until the next step begins.
    """
    annotations = sorted(
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
        earlier = [index for index, annotation in enumerate(annotations) if annotation[0] <= place_of_id[key]]
        if earlier and place_of_id[key] <= annotations[earlier[-1]][1]:
            begins[earlier[-1]] = min(begins.get(earlier[-1], 1 << 62), nanoseconds(event["ts"]))
    if not begins:
        begins = {index: annotation[0] for index, annotation in enumerate(annotations)}
    in_order = sorted((begin, index) for index, begin in begins.items())
    work = [span(event) for event in complete if event.get("cat") in DEVICE]
    device = dict.fromkeys(range(len(annotations)), 0)
    for start, end in work:
        before = [index for begin, index in in_order if begin <= start]
        if before:
            device[before[-1]] += end - start
    return [
        (name, end - start, device[index] if work else None) for index, (start, end, name) in enumerate(annotations)
    ]
