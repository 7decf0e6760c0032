"""Planted faults: the first finding of each run names its fault, and the run without a fault has no finding."""

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
    """A dataset whose items take 20 ms."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.zeros(8)


def products(count: int = 12, dtype: torch.dtype = torch.bfloat16) -> Step:
    """Return a step of matrix products."""
    matrix = torch.randn(SIZE, SIZE, device=DEVICE, dtype=dtype)

    def step() -> None:
        x = matrix
        for _ in range(count):
            x = x @ matrix * 0.01

    return step


def control() -> Step:
    """No fault."""
    return products(40)


def loader() -> Step:
    """A slow data loader without workers."""
    work, batches = products(), iter(torch.utils.data.DataLoader(SlowData(), batch_size=1))
    return lambda: (next(batches), work())


def item() -> Step:
    """A wait for the device after each product."""
    matrix = torch.randn(SIZE, SIZE, device=DEVICE, dtype=torch.bfloat16)
    return lambda: [(matrix @ matrix).sum().item() for _ in range(12)]


def launches() -> Step:
    """Many small kernels."""
    x = torch.randn(64, 64, device=DEVICE)
    return lambda: [torch.sin(x) for _ in range(800)]


def pageable() -> Step:
    """Copies from pageable memory."""
    work, host = products(), torch.randn(2**24 if CUDA else 1024)
    return lambda: (host.to(DEVICE), work())


def fp32() -> Step:
    """Matrix products in full single precision."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return products(6, dtype=torch.float32)


def allocation() -> Step:
    """Memory that is allocated anew in each step."""
    work = products()

    def step() -> None:
        blocks = [torch.empty(2**28 if CUDA else 1024, dtype=torch.uint8, device=DEVICE) for _ in range(8)]
        work()
        del blocks
        if CUDA:
            torch.cuda.empty_cache()

    return step


def sleep() -> Step:
    """A host that sleeps."""
    work = products()
    return lambda: (work(), synchronize(), time.sleep(0.04))


def pointwise() -> Step:
    """Element-wise kernels on large tensors."""
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
    sleep: {"host-bound", "long-gap"},
    pointwise: {"pointwise"},
}
# The rule reports that one kernel takes most of the time, which is true of these jobs and not a fault.
HARMLESS = {"one-kernel"}


def record(plant: Callable[[], Step]) -> None:
    """Capture four steps."""
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
    """Plant each fault, and read all runs."""
    report = Report()
    for plant in PLANTED:
        with report.attempt(plant.__name__):
            record(plant)
    with ThreadPoolExecutor(8 if CUDA else 2) as pool:
        summaries = [pool.submit(summarize, plant.__name__) for plant in PLANTED]
    named = 0
    for (plant, expected), summary in zip(PLANTED.items(), summaries, strict=True):
        with report.attempt(plant.__name__):
            findings = [finding for finding in summary.result()["findings"] if finding["rule"] not in HARMLESS]
            rules = [finding["rule"] for finding in findings]
            detail = f"{', '.join(rules) or 'no finding'}; {findings[0]['text'] if findings else ''}"
            passed = bool(rules) and rules[0] in expected if expected else not rules
            named += passed and bool(expected)
            if CUDA:  # rules about devices have nothing to find on the CPU
                report.check(f"{plant.__name__} expects {' or '.join(sorted(expected)) or 'none'}", passed, detail)
            else:
                report.check(f"{plant.__name__} is read", passed=True, detail=detail)
    if CUDA:
        report.figure("faults named first", f"{named} of {len(PLANTED) - 1}")
    report.finish()


if __name__ == "__main__":
    main()
