"""Model FLOPs utilization (MFU) of a trace and of its steps.

MFU is the time that the FLOPs would take at the device's peak rate, divided by the elapsed time (Chowdhery et al.,
PaLM, 2022, appendix B). Here, the FLOPs of all executed operators are counted, including recomputation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.device_steps import windows_on_device
from profdeck_traces.analysis.model import DeviceSummary, StepSummary
from profdeck_traces.analysis.steps import TraceSteps
from profdeck_traces.attribution.device_peaks import DevicePeaks, peaks_of
from profdeck_traces.attribution.event_work import EventWork
from profdeck_traces.attribution.model import Utilization
from profdeck_traces.reading.columns import DEVICE_ANNOTATION, DEVICE_WORK, RUNTIMES, Columns
from profdeck_traces.reading.trace import Trace

_LEAST_COVERED = 0.5
_NS_PER_US = 1000


@attrs.frozen
class CommonDevice:
    """Device model shared by all devices in a trace. The fields are ``None`` if unknown."""

    name: str | None = None
    peaks: DevicePeaks | None = None


def is_cpu_only(trace: Trace) -> bool:
    """Return True if the recorder found no devices and recorded no device runtime calls.

    Kineto lists the CUDA and HIP devices of the machine even if only CPU activity is recorded.
    """
    is_device = trace.tables.names_of_categories(DEVICE_WORK | RUNTIMES | {DEVICE_ANNOTATION})
    return trace.members.get("deviceProperties") == [] and not is_device[trace.events.name].any()


def common_device(trace: Trace) -> CommonDevice:
    """Return the device model if the trace lists only devices of one model.

    Device numbers are not compared, because on AMD the numbers in ``deviceProperties`` differ from those of kernels.
    """
    properties = trace.members.get("deviceProperties")
    models = {
        (entry.get("name"), entry.get("numSms"))
        for entry in (properties if isinstance(properties, list) else [])
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("numSms"), int | None)
    }
    name, multiprocessors = models.pop() if len(models) == 1 else (None, None)
    return CommonDevice(name, peaks_of(name, multiprocessors)) if name else CommonDevice()


def utilization_of(  # noqa: PLR0913, PLR0917 - one parameter per kind of input
    device: CommonDevice,
    work: EventWork,
    events: Columns,
    computes: NDArray[np.bool_],
    trace_steps: TraceSteps,
    steps: tuple[StepSummary, ...],
    devices: Sequence[DeviceSummary],
) -> tuple[Utilization | None, tuple[StepSummary, ...]]:
    """Compute the device utilization for a trace and for each of its steps.

    Args:
        device: Device model.
        work: Work of each device event.
        events: The device events.
        computes: Mask of the device events that are not communication, copies or fills.
        trace_steps: Steps of the trace.
        steps: Summaries of the same steps.
        devices: Summaries of the devices.

    Returns:
        The utilization of the trace, or ``None`` if no FLOPs were counted, and the step summaries, each with its own
        utilization.
    """
    if not work.flops.any():
        return None, steps
    by_dtype: Counter[str | None] = Counter()
    is_work = work.call >= 0
    kind = work.calls.kind[work.call[is_work]]
    of_works = np.bincount(kind, weights=work.flops[is_work], minlength=len(work.calls.works))
    for one, of_work in zip(work.calls.works, of_works.tolist(), strict=True):
        by_dtype[one.dtype] += round(of_work)
    dtype, of_dtype = by_dtype.most_common(1)[0]
    compute_ns = int(events.duration_ns[computes].sum())
    covered = float(work.time_ns[computes].sum()) / compute_ns if compute_ns else 0.0
    is_covered = covered >= _LEAST_COVERED
    step = windows_on_device(trace_steps).of(events.start_ns)
    inside = step >= 0
    flops, ideal_ns = (
        np.bincount(step[inside], weights=values[inside], minlength=len(steps))
        for values in (work.flops, work.compute_ns)
    )
    elapsed_ns = np.array([sum(one.duration_us for one in step.devices) * _NS_PER_US for step in steps])
    counted = elapsed_ns > 0
    used = counted & ~trace_steps.excluded
    is_followed = np.array([all(one.is_followed for one in step.devices) for step in steps], dtype=bool)
    if (used & is_followed).any():
        used &= is_followed
    if used.any():
        mfu = float(ideal_ns[used].sum() / elapsed_ns[used].sum())
    else:
        span_ns = sum(one.span_us for one in devices) * _NS_PER_US
        mfu = float(work.compute_ns.sum()) / span_ns if span_ns else math.nan
    return (
        Utilization(
            device=device.name,
            flops=round(work.flops.sum()),
            dtype=dtype,
            dtype_share=of_dtype / by_dtype.total(),
            peak_flops_per_s=None if device.peaks is None or dtype is None else device.peaks.flops_per_s(dtype),
            covered=covered,
            mfu=_known(mfu, is_covered),
        ),
        tuple(
            attrs.evolve(
                step,
                flops=round(of_step) or None,
                mfu=_known(ideal / elapsed, is_covered) if has_time and of_step else None,
            )
            for step, of_step, ideal, elapsed, has_time in zip(
                steps, flops.tolist(), ideal_ns.tolist(), elapsed_ns.tolist(), counted.tolist(), strict=True
            )
        ),
    )


def _known(mfu: float, is_covered: bool) -> float | None:  # noqa: FBT001 - a condition, not an option
    return None if math.isnan(mfu) or not is_covered else mfu
