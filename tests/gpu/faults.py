"""Capture steps that each have a known performance fault.

The first finding of each run must report the fault. The run `control` has no fault and must have no finding.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from gpu.report import CUDA, DEVICE, OUT, Report, summarize, synchronize
from profdeck import Profiler

Step = Callable[[], object]
SIZE = 4096 if CUDA else 128


class SlowData(torch.utils.data.Dataset):
    """A dataset that takes 20 ms to load an item."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.zeros(8)


def matmuls(count: int = 12, dtype: torch.dtype = torch.bfloat16) -> Step:
    """Return a step that runs `count` matrix multiplications."""
    matrix = torch.randn(SIZE, SIZE, device=DEVICE, dtype=dtype)

    def step() -> None:
        x = matrix
        for _ in range(count):
            x = x @ matrix * 0.01

    return step


def control() -> Step:
    """Return a step without a fault."""
    return matmuls(40)


def loader() -> Step:
    """Return a step that loads its batch in the main process."""
    work, batches = matmuls(), iter(torch.utils.data.DataLoader(SlowData(), batch_size=1))
    return lambda: (next(batches), work())


def item() -> Step:
    """Return a step that synchronizes with the device after each matrix multiplication."""
    matrix = torch.randn(SIZE, SIZE, device=DEVICE, dtype=torch.bfloat16)
    return lambda: [(matrix @ matrix).sum().item() for _ in range(12)]


def launches() -> Step:
    """Return a step that launches many small kernels."""
    x = torch.randn(64, 64, device=DEVICE)
    return lambda: [torch.sin(x) for _ in range(800)]


def pageable() -> Step:
    """Return a step that copies from pageable memory."""
    work, host = matmuls(), torch.randn(2**24 if CUDA else 1024)
    return lambda: (host.to(DEVICE), work())


def fp32() -> Step:
    """Return a step that multiplies FP32 matrices without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return matmuls(6, dtype=torch.float32)


def allocation() -> Step:
    """Return a step that allocates and frees device memory."""
    work = matmuls()

    def step() -> None:
        blocks = [torch.empty(2**28 if CUDA else 1024, dtype=torch.uint8, device=DEVICE) for _ in range(8)]
        work()
        del blocks
        if CUDA:
            torch.cuda.empty_cache()

    return step


def sleep() -> Step:
    """Return a step in which the host sleeps."""
    work = matmuls()
    return lambda: (work(), synchronize(), time.sleep(0.04))


def pointwise() -> Step:
    """Return a step that runs element-wise kernels on large tensors."""
    x = torch.randn(2**26 if CUDA else 4096, device=DEVICE)
    return lambda: [torch.tanh(x) * 1.1 + 0.1 for _ in range(30)]


PLANTED: dict[Callable[[], Step], set[str]] = {
    control: set(),
    loader: {"data-loading"},
    item: {"synchronisation"},
    launches: {"host-bound", "small-kernels"},
    pageable: {"pageable-copies"},
    fp32: {"fp32-gemm"},
    allocation: {"allocation"},
    sleep: {"host-bound", "outside-operators", "idle-stage"},
    pointwise: {"pointwise"},
}


def record(plant: Callable[[], Step]) -> None:
    step = plant()
    settings = {"output": str(OUT), "run": plant.__name__, "steps": ["3..6"], "on_error": "raise"}
    with Profiler.from_config(settings={**settings, "trainer.backend": "torch"}) as profiler:
        for number in range(8):
            with profiler.capture(number):
                step()
                synchronize()
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def main() -> None:
    report = Report()
    for plant in PLANTED:
        with report.attempt(plant.__name__):
            record(plant)
    with ThreadPoolExecutor(8 if CUDA else 2) as pool:
        summaries = [pool.submit(summarize, plant.__name__) for plant in PLANTED]
    reported = 0
    for (plant, expected), summary in zip(PLANTED.items(), summaries, strict=True):
        with report.attempt(plant.__name__):
            findings = summary.result()["findings"]
            rules = [finding["rule"] for finding in findings]
            detail = f"{', '.join(rules) or 'no finding'}; {findings[0]['text'] if findings else ''}"
            passed = bool(rules) and rules[0] in expected if expected else not rules
            reported += passed and bool(expected)
            if CUDA:  # most findings require device events
                report.check(f"{plant.__name__} expects {' or '.join(sorted(expected)) or 'none'}", passed, detail)
            else:
                report.check(f"{plant.__name__} has a summary", passed=True, detail=detail)
    if CUDA:
        report.figure("faults reported first", f"{reported} of {len(PLANTED) - 1}")
    report.finish()


if __name__ == "__main__":
    main()
