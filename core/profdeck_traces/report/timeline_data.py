"""Interactive timeline data for the page's script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profdeck_traces.analysis.detail_model import Timeline
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.rank_labels import labels_of

_KINDS = ("global_step", "iteration", "stage")
# With more traces, show only critical paths and devices, or the busiest thread if there is no device.
_MOST_WITH_STREAMS = 16
_MOST_MARKS = 4000
"""Maximum number of events, over all traces."""


def timeline_data(ranks: Sequence[tuple[str, RankSummary]], *, shared: bool) -> dict[str, Any]:
    """Return the names and, for each trace, its windows with their lanes, annotations and events.

    Args:
        ranks: What each run is called, and the traces with their pictures.
        shared: True if all traces belong to one run and can share a time axis.
    """
    known = [rank.origin_unix_ns for _, rank in ranks if rank.origin_unix_ns is not None]
    first_ns = min(known, default=0)
    names: dict[str, int] = {}
    labels = {run: labels_of([rank for of, rank in ranks if of == run]) for run, _ in ranks}
    return {
        "shared": shared,
        "ranks": [
            {
                "label": " ".join(filter(None, [run, labels[run][rank.path]])),
                "origin": None if rank.origin_unix_ns is None else (rank.origin_unix_ns - first_ns) / 1000,
                "windows": [_window(one, names, len(ranks)) for one in rank.timelines],
            }
            for run, rank in ranks
        ],
        "names": list(names),
    }


def _window(timeline: Timeline, names: dict[str, int], ranks: int) -> dict[str, Any]:
    def code(name: str) -> int:
        return names.setdefault(name, len(names))

    has_device = any(lane.kind == "device" for lane in timeline.lanes)
    few = ranks > _MOST_WITH_STREAMS
    threads = [number for number, lane in enumerate(timeline.lanes) if lane.kind == "thread"]
    main = max(threads, key=lambda number: len(timeline.lanes[number].shares), default=None)
    shown = [
        number
        for number, lane in enumerate(timeline.lanes)
        if not few or lane.kind in {"path", "device"} or (not has_device and number == main)
    ]
    place = {number: at for at, number in enumerate(shown)}
    most = max(10, _MOST_MARKS // ranks)
    marks = sorted(timeline.marks, key=lambda mark: -mark.duration_us)[:most]
    return {
        "title": timeline.title,
        "start": round(timeline.start_us, 3),
        "duration": round(timeline.duration_us, 3),
        "lanes": [
            {
                "kind": lane.kind,
                "name": lane.name,
                "classes": lane.classes,
                "shares": lane.shares,
                "main": number == main,
            }
            for number, lane in enumerate(timeline.lanes)
            if number in place
        ],
        "marks": [
            [code(mark.name), _KINDS.index(mark.kind), round(mark.start_us, 1), round(mark.duration_us, 1)]
            for mark in sorted(marks, key=lambda mark: mark.start_us)
        ],
        "events": [
            [place[event.lane], code(event.name), round(event.start_us, 1), round(event.duration_us, 1)]
            for event in timeline.events
            if event.lane in place and not few
        ],
    }
