"""Matches backward operators to the forward operators that created their graph nodes.

Autograd numbers the graph nodes that each thread creates. An operator's ``Sequence number`` is the number of the next
node, so the last forward operator with a given number created that node. A backward operator has the number of its node
and, as ``Fwd thread id``, torch's id for the thread that created the node. Since events do not contain torch's id for
their own thread, the forward thread is identified by its sequence numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.events import Events, Mask
from profdeck_traces.reading.intervals import Int

_MAX_THREADS = 256  # each thread requires a pass over all operators


def backward_operators(events: Events, is_operator: Mask) -> Mask:
    """Return a mask of the complete events that are backward operators with a sequence number."""
    backward: Mask = is_operator & (events.arg("Fwd thread id") > 0) & (events.arg("Sequence number") >= 0)
    return backward


def forward_rows(events: Events, is_operator: Mask, is_backward: Mask) -> NDArray[np.int32]:
    """Return the row of each backward operator's forward operator.

    The value is -1 for other events, and for backward operators whose forward operator is unknown.
    """
    forward = np.full(events.complete, -1, np.int32)
    number = events.arg("Sequence number")
    candidates = np.flatnonzero(is_operator & ~is_backward & (number >= 0))
    backward = np.flatnonzero(is_backward)
    thread = events.arg("Fwd thread id", backward)
    for thread_id in np.unique(thread)[:_MAX_THREADS].tolist():
        of_thread = backward[thread == thread_id]
        created = _of_thread(events, candidates, number, of_thread)
        forward[of_thread] = _last_before(events.start_ns, number, created, of_thread)
    return forward


def _of_thread(events: Events, candidates: Int, number: Int, backward: Int) -> Int:
    """Return the candidates on the thread that matches the most backward sequence numbers, or none if tied."""
    matching = candidates[np.isin(number[candidates], number[backward])]
    matching = matching[np.lexsort((number[matching], events.track[matching]))]
    track = events.track[matching]
    is_first = np.ones(len(matching), np.bool_)
    is_first[1:] = (track[1:] != track[:-1]) | (number[matching[1:]] != number[matching[:-1]])
    tracks, matched = np.unique(track[is_first], return_counts=True)
    best = tracks[matched == matched.max(initial=0)]
    return matching[track == best[0]] if len(best) == 1 else matching[:0]


def _last_before(start_ns: Int, number: Int, candidates: Int, rows: Int) -> Int:
    """Return, for each row, the last candidate that has the same number and starts before the row, or -1."""
    both = np.concatenate([candidates, rows])
    is_row = np.arange(len(both)) >= len(candidates)
    order = np.lexsort((~is_row, start_ns[both], number[both]))
    index = np.where(is_row[order], -1, np.arange(len(both)))
    last = np.maximum.accumulate(index)
    found = np.where(last >= 0, both[order][last], -1)
    found[(last >= 0) & (number[found] != number[both[order]])] = -1
    result = np.empty(len(both), np.int64)
    result[order] = found
    return result[len(candidates) :]
