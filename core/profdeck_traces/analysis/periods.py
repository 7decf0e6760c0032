"""Coarse work and stage periods, for comparing ranks of different roles on a common clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.detail_model import Period, TimelineMark
from profdeck_traces.reading.columns import Columns
from profdeck_traces.reading.intervals import union

_NS_PER_US = 1000
_MAX_GAPS = 100
"""Gaps shorter than 1/`_MAX_GAPS` of the recording count as work."""
_MAX_STAGES = 64


def work_periods(events: Columns, is_work: NDArray[np.bool_], origin_ns: int, end_ns: int) -> tuple[Period, ...]:
    """Return the periods in which any thread or device is working.

    Args:
        events: All events of the trace.
        is_work: Mask of event names, by code. True for operators and device work.
        origin_ns: Time from which the start of each period is measured.
        end_ns: End of the recording.
    """
    work = events[np.flatnonzero(is_work[events.name])]
    starts, ends = union(work.start_ns, work.end_ns)
    if not len(starts):
        return ()
    is_gap = (starts[1:] - ends[:-1]) * _MAX_GAPS > end_ns - origin_ns
    starts, ends = starts[np.append(True, is_gap)], ends[np.append(is_gap, True)]
    return tuple(
        Period(name=None, start_us=(start - origin_ns) / _NS_PER_US, duration_us=(end - start) / _NS_PER_US)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    )


def stage_periods(marks: Sequence[TimelineMark]) -> tuple[Period, ...]:
    """Return the longest stages, sorted by start time."""
    longest = sorted(marks, key=lambda mark: -mark.duration_us)[:_MAX_STAGES]
    return tuple(
        Period(name=mark.name, start_us=mark.start_us, duration_us=mark.duration_us)
        for mark in sorted(longest, key=lambda mark: mark.start_us)
    )
