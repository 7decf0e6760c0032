"""Launches of device work.

Kineto writes the same ``correlation`` to a launch and its kernel, or to a graph launch and all kernels of the graph.
torch_npu draws a flow from the start of an operator to the start of each of its kernels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.columns import DEVICE_CATEGORIES, DEVICE_PROCESSES, RUNTIMES
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.intervals import Int

_FLOWS = "async_npu"


def launch_rows(events: Events) -> NDArray[np.int32]:
    """Return the row of the host event that launched each complete event, or -1.

    This is a runtime call, or on Ascend the operator. If several calls have the same ``correlation``, the first call is
    used.
    """
    launch = np.full(events.complete, -1, np.int32)
    correlation = events.arg("correlation")
    is_work = events.has_category(DEVICE_CATEGORIES | DEVICE_PROCESSES)
    work = np.flatnonzero(is_work & (correlation > 0))
    calls = np.flatnonzero(events.has_category(RUNTIMES) & (correlation > 0))
    matches, call = _last_with_key(correlation[calls], -events.start_ns[calls], correlation[work])
    launch[work[matches]] = calls[call]
    if _FLOWS in events.categories:
        _add_flows(events, launch, is_work)
    return launch


def _add_flows(events: Events, launch: NDArray[np.int32], is_work: NDArray[np.bool_]) -> None:
    """Add the host events at the starts of flows that end at device events."""
    code = events.categories.index(_FLOWS)
    starts, ends = (rows[events.all["category"][rows] == code] for rows in map(events.rows_of, "sf"))
    ids = events.arg("@id", starts), events.arg("@id", ends)
    matches, start = _last_with_key(ids[0], np.arange(len(starts)), ids[1])
    source, target = _rows_at(events, starts[start]), _rows_at(events, ends[matches])
    is_known = (source >= 0) & (target >= 0) & is_work[target]
    launch[target[is_known]] = source[is_known]


def _rows_at(events: Events, flows: Int) -> Int:
    """Return the row of the last complete event that starts at the time and on the track of each flow event, or -1."""
    rows = np.full(len(flows), -1)
    track, time_ns = events.all["track"][flows], events.all["start_ns"][flows]
    for code in np.unique(track).tolist():
        first, last = np.searchsorted(events.track, [code, code + 1])
        of_track = np.flatnonzero(track == code)
        found = first + np.searchsorted(events.start_ns[first:last], time_ns[of_track], side="right") - 1
        exact = (found >= first) & (events.start_ns[found] == time_ns[of_track])
        rows[of_track[exact]] = found[exact]
    return rows


def _last_with_key(keys: Int, order: Int, wanted: Int) -> tuple[Int, Int]:
    """Match keys.

    Args:
        keys: Keys, with duplicates.
        order: Sort key. Of equal keys, the largest one is used.
        wanted: Keys to find.

    Returns:
        The indices in `wanted` that were found, and for each of them the index in `keys`.
    """
    if not len(keys):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    by_key = np.lexsort((order, keys))
    index = np.searchsorted(keys[by_key], wanted, side="right") - 1
    found = np.flatnonzero((index >= 0) & (keys[by_key[index]] == wanted))
    return found, by_key[index[found]]
