"""Training job in which rank 1 is slow. Usage: ``slow_rank_job.py DIRECTORY CAUSE STACKS``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

_FEATURES = 128


def count_tokens() -> int:
    """Run a Python loop for about 0.2 s."""
    total = 0
    deadline = time.perf_counter() + 0.2
    while time.perf_counter() < deadline:
        total += sum(range(1000))
    return total


def load_batch(rows: int, pause_s: float) -> torch.Tensor:
    """Load a batch from simulated slow storage."""
    time.sleep(pause_s)
    return torch.ones(rows, _FEATURES)


def main(directory: Path, cause: str, stacks: str) -> None:
    """Record eight steps on each rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(_FEATURES, _FEATURES) for _ in range(2)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    is_slow = rank == 1

    def trace_ready(recorder: profile) -> None:
        recorder.export_chrome_trace(str(directory / f"rank{rank}.pt.trace.json"))

    with profile(
        activities=[ProfilerActivity.CPU],
        with_stack=stacks == "stacks",
        record_shapes=True,
        with_flops=True,
        schedule=schedule(wait=1, warmup=1, active=8),
        on_trace_ready=trace_ready,
    ) as recorder:
        for _ in range(10):
            with record_function("data_loading"):
                rows = 30_000 if is_slow and cause == "batch" else 64
                batch = load_batch(rows, 0.2 if is_slow and cause == "data" else 0.0)
            if is_slow and cause == "python":
                count_tokens()
            model(batch).sum().backward()
            recorder.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
