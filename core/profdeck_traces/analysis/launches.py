"""Launches of device work, and steps whose device work was not recorded."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.device_steps import step_kind
from profdeck_traces.analysis.host_states import CAUSES, Host
from profdeck_traces.analysis.steps import LaunchedWork, TraceSteps
from profdeck_traces.attribution.rows import Attribution, values_at
from profdeck_traces.reading.columns import DEVICE_CATEGORIES
from profdeck_traces.reading.trace import Trace

_LEAST_LINKED = 0.9
_LAUNCHING = tuple(CAUSES).index("launching")


def launched_work(trace: Trace, names: Attribution | None) -> LaunchedWork | None:
    """Return device work with its launch times, or ``None`` if less than 90 % of the work can be linked to a launch.

    Only links by ``correlation`` are used. For Ascend, a table lists the step of each kernel instead.
    """
    if trace.raw is None or names is None:
        return None
    work = trace.events[np.flatnonzero(trace.tables.names_of_categories(DEVICE_CATEGORIES)[trace.events.name])]
    launch = values_at(names.launch, work.row)
    is_launched = (launch >= 0) & (trace.arg("correlation", work.row) > 0)
    if not len(work) or is_launched.mean() < _LEAST_LINKED:
        return None
    work = work[is_launched]
    return LaunchedWork(trace.raw.start_ns[launch[is_launched]], work.start_ns, work.end_ns)


@attrs.frozen
class Launches:
    """Launches in a trace."""

    count: int
    without_work: int
    """Number of launches for which no kernel, copy or fill was recorded."""
    unrecorded_steps: NDArray[np.bool_]
    """For each step, whether it has launches but no device work, although other launches have device work."""

    @classmethod
    def of(cls, trace: Trace, host: Host | None, steps: TraceSteps) -> Launches:
        """Match launches with device work."""
        unrecorded = np.zeros(len(steps), dtype=np.bool_)
        if host is None:
            return cls(0, 0, unrecorded)
        calls = host.events[np.flatnonzero(host.state == _LAUNCHING)]
        correlation = trace.arg("correlation", calls.row)
        calls, correlation = calls[correlation >= 0], correlation[correlation >= 0]
        is_work = trace.tables.names_of_categories(DEVICE_CATEGORIES)
        work = trace.events[np.flatnonzero(is_work[trace.events.name])]
        has_work = np.isin(correlation, trace.arg("correlation", work.row))
        kind = step_kind(steps)
        if kind is not None and has_work.any():
            step = steps.host[kind].of(calls.start_ns)
            inside = step >= 0
            launched = np.bincount(step[inside], minlength=len(steps))
            worked = np.bincount(step[inside], weights=has_work[inside], minlength=len(steps))
            unrecorded = (launched > 0) & (worked == 0)
        return cls(len(calls), int((~has_work).sum()), unrecorded)
