"""Measure the peak rates of matrix multiplications and copies on the GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from gpu.report import CUDA, Report


def time_ms(work: Callable[[], object], count: int = 10) -> float:
    """Return the median device time of one call, in milliseconds."""
    for _ in range(3):
        work()
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    report = Report()
    activities = ", ".join(sorted(activity.name for activity in torch.profiler.supported_activities()))
    report.figure("torch.profiler activities", activities)
    report.check("torch.profiler supports CUDA", passed=not CUDA or "CUDA" in activities, detail=activities)
    if not CUDA:
        report.finish()
    for name, dtype, size, tf32 in (
        ("bf16", torch.bfloat16, 8192, False),
        ("fp32", torch.float32, 4096, False),
        ("tf32", torch.float32, 4096, True),
    ):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        left, right = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        rate = 2 * size**3 / time_ms(lambda left=left, right=right: left @ right) / 1e9
        report.figure(f"{name} TFLOP/s", round(rate, 1))
    target, source = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    report.figure("device copy GB/s (read + write)", round(2**31 / time_ms(lambda: target.copy_(source)) / 1e6))
    host = torch.empty(2**28, dtype=torch.uint8)
    pinned, part = host.pin_memory(), target[: 2**28]
    report.figure("pageable copy GB/s", round(2**28 / time_ms(lambda: part.copy_(host), 4) / 1e6, 1))
    rate = 2**28 / time_ms(lambda: part.copy_(pinned, non_blocking=True)) / 1e6
    report.figure("pinned copy GB/s", round(rate, 1))
    report.finish()


if __name__ == "__main__":
    main()
