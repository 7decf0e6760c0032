"""How much memory was in use, from the marks of allocations in a trace."""

from __future__ import annotations

import numpy as np

from profdeck_traces.analysis.detail_model import MemoryPoint, MemorySummary
from profdeck_traces.reading.intervals import groups
from profdeck_traces.reading.trace import Trace
from profdeck_traces.reading.walking import NO_TIME

# c10::DeviceType (torch/headeronly/core/DeviceType.h); 20 is PrivateUse1, which is an NPU with torch_npu.
_TYPES = {0: "CPU", 1: "GPU", 6: "GPU", 12: "XPU", 13: "MPS", 20: "NPU"}
_POINTS = 200
_NS_PER_US = 1000


def memory_of(trace: Trace, origin_ns: int) -> tuple[MemorySummary, ...]:
    """Return the peak memory usage of each device, and its usage over time.

    With ``profile_memory``, torch writes an instant event ``[memory]`` for each allocation. The event contains the
    bytes allocated and reserved on the device (``export_memory_events`` in torch/csrc/autograd/profiler_kineto.cpp).

    Args:
        trace: The trace.
        origin_ns: Time to which the times in the result are relative.
    """
    if trace.raw is None:
        return ()
    found = []
    rows = trace.raw.args["Total Allocated"].row.astype(np.int64)
    is_memory = np.array([name == "[memory]" for name in trace.raw.names], dtype=bool)
    rows = rows[is_memory[trace.raw.all["name"][rows]]]
    # Missing values are NO_TIME, because the default, -1, is the CPU's device ID.
    kinds, numbers = (trace.raw.arg(key, rows, missing=NO_TIME) for key in ("Device Type", "Device Id"))
    allocated, reserved = trace.arg("Total Allocated", rows), trace.raw.arg("Total Reserved", rows, missing=0)
    time_ns = trace.raw.all["start_ns"][rows]
    is_valid = (np.minimum(kinds, numbers) != NO_TIME) & (np.minimum(allocated, reserved) >= 0) & (time_ns != NO_TIME)
    kinds, numbers = kinds[is_valid], numbers[is_valid]
    table = np.stack([time_ns, allocated, reserved], axis=1)[is_valid]
    devices, device = np.unique(np.stack([kinds, numbers], axis=1), axis=0, return_inverse=True)
    for (kind, number), mine in zip(devices.tolist(), groups(device.reshape(-1)), strict=True):
        of_device = table[mine]
        of_device = of_device[np.argsort(of_device[:, 0], kind="stable")]
        name = _TYPES.get(kind, f"device type {kind}")
        peak = int(of_device[:, 1].argmax())
        found.append(
            MemorySummary(
                device=name if number < 0 else f"{name} {number}",
                events=len(of_device),
                peak_allocated_bytes=int(of_device[peak, 1]),
                peak_us=(int(of_device[peak, 0]) - origin_ns) / _NS_PER_US,
                peak_reserved_bytes=int(of_device[:, 2].max()),
                points=_points(of_device, origin_ns),
            )
        )
    return tuple(found)


def _points(rows: np.ndarray, origin_ns: int) -> tuple[MemoryPoint, ...]:
    """Return the most of each of equal parts of the time that have marks."""
    time_ns, allocated, reserved = rows.T
    span_ns = int(time_ns[-1] - time_ns[0])
    part = (time_ns - time_ns[0]) * _POINTS // (span_ns + 1)
    first = np.flatnonzero(np.diff(part, prepend=-1))
    most_allocated, most_reserved = (np.maximum.reduceat(values, first) for values in (allocated, reserved))
    return tuple(
        MemoryPoint(start_us=(at_ns - origin_ns) / _NS_PER_US, allocated_bytes=of_first, reserved_bytes=of_second)
        for at_ns, of_first, of_second in zip(
            time_ns[first].tolist(), most_allocated.tolist(), most_reserved.tolist(), strict=True
        )
    )
