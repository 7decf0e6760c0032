"""Matches device work to the host events that launched it.

Kineto assigns the same ``correlation`` to a launch and its kernel, or to a graph launch and all kernels in the graph.
torch_npu records a flow from the start of an operator to the start of each of its kernels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.columns import DEVICE_WORK, RUNTIMES
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.intervals import Int

_FLOWS = "async_npu"


def launch_rows(events: Events) -> NDArray[np.int32]:
    """Return, for each complete event, the row of the host event that launched it, or -1.

    The host event is a runtime call or, on Ascend, an operator. If several calls have the same ``correlation``, the
    earliest call is used.
    """
    launch = np.full(events.complete, -1, np.int32)
    correlation = events.arg("correlation")
    is_work = events.has_category(DEVICE_WORK)
    work = np.flatnonzero(is_work & (correlation > 0))
    calls = np.flatnonzero(events.has_category(RUNTIMES) & (correlation > 0))
    matches, call = _last_with_key(correlation[calls], -events.start_ns[calls], correlation[work])
    launch[work[matches]] = calls[call]
    if _FLOWS in events.categories:
        _add_flows(events, launch, is_work)
    return launch


def _add_flows(events: Events, launch: NDArray[np.int32], is_work: NDArray[np.bool_]) -> None:
    """If a flow ends at a device event, set the launch of that event to the host event at the start of the flow."""
    code = events.categories.index(_FLOWS)
    starts, ends = (rows[events.all["category"][rows] == code] for rows in map(events.rows_of, "sf"))
    ids = events.arg("@id", starts), events.arg("@id", ends)
    matches, start = _last_with_key(ids[0], np.arange(len(starts)), ids[1])
    source, target = _rows_at(events, starts[start]), _rows_at(events, ends[matches])
    is_known = (source >= 0) & (target >= 0) & is_work[target]
    launch[target[is_known]] = source[is_known]


def _rows_at(events: Events, flows: Int) -> Int:
    """Return, for each flow event, the last complete event that starts at the same time on the same track, or -1."""
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
    """Look up keys in an array that may contain duplicates.

    Args:
        keys: The array to search.
        order: Sort value of each element of `keys`. Among equal keys, the element with the largest value is used.
        wanted: Keys to find.

    Returns:
        The indices of the elements of `wanted` that were found, and the index in `keys` for each of them.
    """
    if not len(keys):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    by_key = np.lexsort((order, keys))
    index = np.searchsorted(keys[by_key], wanted, side="right") - 1
    found = np.flatnonzero((index >= 0) & (keys[by_key[index]] == wanted))
    return found, by_key[index[found]]
