"""Launches of device work.

Kineto writes the same ``correlation`` to a launch and its kernel, or to a graph launch and all kernels of the graph.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.columns import DEVICE_CATEGORIES, DEVICE_PROCESSES, RUNTIMES
from profdeck_traces.reading.events import Events


def launch_rows(events: Events) -> NDArray[np.int32]:
    """Return the row of the runtime call that launched each complete event, or -1.

    If several calls have the same ``correlation``, the first call is used.
    """
    launch = np.full(events.complete, -1, np.int32)
    correlation = events.arg("correlation")
    work = np.flatnonzero(events.has_category(DEVICE_CATEGORIES | DEVICE_PROCESSES) & (correlation > 0))
    calls = np.flatnonzero(events.has_category(RUNTIMES) & (correlation > 0))
    if not len(calls):
        return launch
    calls = calls[np.lexsort((events.start_ns[calls], correlation[calls]))]
    keys = correlation[calls]
    index = np.minimum(np.searchsorted(keys, correlation[work]), len(calls) - 1)
    matches = keys[index] == correlation[work]
    launch[work[matches]] = calls[index[matches]]
    return launch
