"""How much memory was in use, from the marks of allocations in a trace."""

from __future__ import annotations

import numpy as np

from profdeck_traces.analysis.detail_model import MemoryPoint, MemorySummary
from profdeck_traces.reading.memory_fields import StatedMemory

# c10::DeviceType (torch/headeronly/core/DeviceType.h); 20 is PrivateUse1, which is an NPU with torch_npu.
_TYPES = {0: "CPU", 1: "GPU", 6: "GPU", 12: "XPU", 13: "MPS", 20: "NPU"}
_POINTS = 200
_NS_PER_US = 1000


def memory_of(stated: StatedMemory, origin_ns: int) -> tuple[MemorySummary, ...]:
    """Return the peak and the course of each device's memory.

    Args:
        stated: The marks.
        origin_ns: What ``start_us`` counts from.
    """
    found = []
    for (kind, number), rows in stated.devices():
        name = _TYPES.get(kind, f"device type {kind}")
        time_ns, allocated, reserved = rows.T
        peak = int(allocated.argmax())
        found.append(
            MemorySummary(
                device=name if number < 0 else f"{name} {number}",
                events=len(rows),
                peak_allocated_bytes=int(allocated[peak]),
                peak_us=(int(time_ns[peak]) - origin_ns) / _NS_PER_US,
                peak_reserved_bytes=int(reserved.max()),
                points=_points(rows, origin_ns),
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
