"""Work of the operators in a trace, assigned to the device events that performed it."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.attribution.device_peaks import DevicePeaks
from profdeck_traces.attribution.operator_work import OPERATORS, OperatorWork, work_of
from profdeck_traces.attribution.rows import Attribution, values_at
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.intervals import Int, parents

Float = NDArray[np.float64]
_INPUTS = ("Input Dims", "Input type", "Concrete Inputs")
_NS_PER_S = 1e9


@attrs.frozen(eq=False)
class CountedCalls:
    """Operator calls with known work. If such calls are nested, only the innermost calls are counted."""

    row: Int
    """Row of each call in the trace's events, in ascending order."""
    kind: Int
    """Index into ``works`` for each call."""
    works: list[OperatorWork]

    def flops(self) -> Float:
        """Return the FLOPs of each call; 0 for norms and embeddings."""
        return self.per_call([work.flops or 0 for work in self.works])

    def per_call(self, values: list[float]) -> Float:
        """Return one value per call, given one value per item of ``works``."""
        return np.array(values, np.float64)[self.kind] if values else np.empty(0)


def counted_calls(events: Events, is_operator: NDArray[np.bool_]) -> CountedCalls:
    """Compute the work of all operator calls with recorded shapes.

    Args:
        events: Events of the trace.
        is_operator: Mask of the operators.
    """
    rows = np.flatnonzero(events.with_name(is_operator, OPERATORS.__contains__))
    rows = rows[events.arg("Input Dims", rows) >= 0]
    values = [events.name[rows].astype(np.int64), *(events.arg(key, rows) for key in _INPUTS)]
    kind = np.zeros(len(rows), np.int64)
    for column in values:  # no overflow: each column has fewer than 2**31 distinct values
        kind = np.unique(kind * (column.max(initial=0) + 2) + column + 1, return_inverse=True)[1]
    _, first = np.unique(kind, return_index=True)
    works: list[OperatorWork] = []
    index = np.full(len(first), -1)
    for number, place in enumerate(first.tolist()):
        name, *codes = (int(column[place]) for column in values)
        texts = (events.texts[key][code] if code >= 0 else None for key, code in zip(_INPUTS, codes, strict=True))
        work = work_of(events.names[name], *texts)
        if work is not None:
            index[number] = len(works)
            works.append(work)
    kind = index[kind]
    rows, kind = rows[kind >= 0], kind[kind >= 0]
    starts = events.start_ns[rows]
    outer = parents(events.track[rows], starts, starts + events.duration_ns[rows])
    is_inner = np.ones(len(rows), np.bool_)
    is_inner[outer[outer >= 0]] = False
    return CountedCalls(rows[is_inner], kind[is_inner], works)


@attrs.frozen(eq=False)
class EventWork:
    """Work of each device event, or of each operator if the trace has no device events.

    The arrays are parallel. Their values are 0 for events without work.
    """

    calls: CountedCalls
    call: Int
    """Index of the counted call that the event performs, or -1."""
    flops: Float
    size_bytes: Float
    """NaN if the call's traffic is unknown."""
    time_ns: Float
    """Duration of the event, including nested operators, if it performs a counted call; otherwise 0.

    Also 0 if the work may have run on a device but no device events were recorded.
    """
    compute_ns: Float
    """Minimum time for the FLOPs; NaN if the peak rate is unknown."""
    roofline_ns: Float
    """Minimum time for the FLOPs or for the bytes, whichever is longer; NaN if either is unknown."""
    is_compute_bound: NDArray[np.bool_]
    """True if the FLOPs take longer than the bytes."""


def event_work(  # noqa: PLR0913 - one parameter per kind of input
    calls: CountedCalls,
    names: Attribution,
    rows: Int,
    time_ns: Int,
    peaks: DevicePeaks | None,
    *,
    on_device: bool,
    on_cpu: bool = False,
) -> EventWork:
    """Divide the work of each call among its device events, in proportion to their durations.

    Only the events that the operator launched directly receive its work. If there are none, the work is divided among
    the events of all operators inside the call. Calls without device events are ignored.

    Args:
        calls: Calls with known work.
        names: Owners of all events in the trace.
        rows: Rows of the device events, or of the operators if there are none.
        time_ns: Duration of each device event.
        peaks: Peak rates of the device, if known.
        on_device: Whether the rows are device events.
        on_cpu: Whether all work ran on the CPU.
    """
    index = np.full(names.events.complete, -1, np.int32)
    index[calls.row] = np.arange(len(calls.row), dtype=np.int32)
    if on_device and len(calls.row):
        inside = values_at(names.innermost(index >= 0), rows)
        call = values_at(index, inside).astype(np.int64)
        is_direct = (inside >= 0) & (values_at(names.operator, rows) == inside)
        has_direct = np.zeros(len(calls.row) + 1, np.bool_)  # the last element is for index -1
        has_direct[call[is_direct]] = True
        call[(call >= 0) & ~is_direct & has_direct[call]] = -1
    else:
        call = values_at(index, rows).astype(np.int64)
        # Unless all work ran on the CPU, the operator may only have launched work on a device that was not recorded.
        time_ns = names.events.duration_ns[rows] if on_cpu else np.zeros_like(time_ns)
    used = call >= 0
    weight = np.where(used, time_ns + 1.0, 0.0)
    share = np.zeros(len(rows))
    run = call[used]
    if on_device and (is_captured := calls.row >= names.first_captured).any():
        # Each graph launch runs the captured calls again.
        launch = np.where(is_captured[run], values_at(names.launch, rows[used]), -1)
        run = np.unique(run * (names.events.complete + 1) + launch + 1, return_inverse=True)[1]
    share[used] = weight[used] / np.bincount(run, weights=weight[used])[run]

    def of_events(values: list[float]) -> Float:
        of_call = np.zeros(len(rows))
        of_call[used] = calls.per_call(values)[call[used]] * share[used]
        return of_call

    compute_s = [_compute_s(work, peaks) for work in calls.works]
    memory_s = [
        np.nan if peaks is None or work.size_bytes is None else work.size_bytes / peaks.bytes_per_s
        for work in calls.works
    ]
    is_compute_bound = [compute > memory for compute, memory in zip(compute_s, memory_s, strict=True)]
    return EventWork(
        calls=calls,
        call=call,
        flops=of_events([work.flops or 0 for work in calls.works]),
        size_bytes=of_events([np.nan if work.size_bytes is None else work.size_bytes for work in calls.works]),
        time_ns=np.where(used, time_ns, 0.0),
        compute_ns=of_events([time_s * _NS_PER_S for time_s in compute_s]),
        roofline_ns=of_events(
            [float(np.maximum(*times)) * _NS_PER_S for times in zip(compute_s, memory_s, strict=True)]
        ),
        is_compute_bound=of_events([float(value) for value in is_compute_bound]) > 0,
    )


def _compute_s(work: OperatorWork, peaks: DevicePeaks | None) -> float:
    """Return the minimum time for the FLOPs of a call in seconds; NaN if the peak rate is unknown."""
    if not work.flops:
        return 0.0
    peak = None if peaks is None or work.dtype is None else peaks.flops_per_s(work.dtype)
    return np.nan if peak is None else work.flops / peak
