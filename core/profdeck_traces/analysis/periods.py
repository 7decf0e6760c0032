"""Coarse work and stage periods, for comparing ranks of different roles on a common clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.detail_model import Period, TimelineMark
from profdeck_traces.reading.columns import ANNOTATION, Columns
from profdeck_traces.reading.event_names import is_weight_sync
from profdeck_traces.reading.intervals import intersection, union

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


def weight_sync_periods(events: Columns, work: Sequence[Period], origin_ns: int) -> tuple[Period, ...]:
    """Return the periods in which an engine works during the annotation of a weight sync.

    A sync without work is skipped, because it may only be waiting for the trainer.

    Args:
        events: All events of the trace.
        work: Result of `work_periods`.
        origin_ns: Time from which the start of each period is measured.
    """
    tables = events.tables
    is_sync = tables.names_of_categories(frozenset({ANNOTATION}))
    is_sync[is_sync] = [is_weight_sync(tables.names[code]) for code in np.flatnonzero(is_sync)]
    marks = events[np.flatnonzero(is_sync[events.name])]
    busy_us = np.array([(period.start_us, period.start_us + period.duration_us) for period in work]).reshape(-1, 2)
    begins, ends = np.rint(busy_us.T * _NS_PER_US).astype(np.int64) + origin_ns
    periods = []
    for name, start, end in zip(marks.name.tolist(), marks.start_ns.tolist(), marks.end_ns.tolist(), strict=True):
        spans = intersection((begins, ends), (np.array([start]), np.array([end])))
        for first, last in zip(*(times.tolist() for times in spans), strict=True):
            start_us, duration_us = (first - origin_ns) / _NS_PER_US, (last - first) / _NS_PER_US
            periods.append(Period(name=tables.names[name], start_us=start_us, duration_us=duration_us))
    return _longest(periods)


def stage_periods(marks: Sequence[TimelineMark]) -> tuple[Period, ...]:
    """Return the longest stages, sorted by start time."""
    return _longest(Period(name=mark.name, start_us=mark.start_us, duration_us=mark.duration_us) for mark in marks)


def _longest(periods: Iterable[Period]) -> tuple[Period, ...]:
    longest = sorted(periods, key=lambda period: -period.duration_us)[:_MAX_STAGES]
    return tuple(sorted(longest, key=lambda period: period.start_us))
