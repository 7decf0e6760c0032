"""One rank of a training job that steps until it is told to stop. Its directory is its own, as on a host of its own."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from profdeck import Profiler

directory = Path(sys.argv[1], f"host{os.environ['GROUP_RANK']}")
dist.init_process_group("gloo")
settings = {"output": str(directory), "run": "live", "on_demand": "tcpstore", "trainer.backend": "torch"}
profiler = Profiler.from_config(role="trainer", settings=settings | {"trainer.ranks": "all"})
for step in range(1_000_000):
    with profiler.capture(step):
        told = torch.tensor([float((directory / "stop").exists())])
        torch.rand(32, 32).sum()
        time.sleep(0.01)
        dist.all_reduce(told)
    if step % 20 == 0:
        (directory / "next").write_text(str(step))
        (directory / "next").replace(directory / "step")  # whoever reads it finds a whole number
    if told.item():
        break
dist.barrier()  # ranks that leave at different times abort at times, with or without a profiler
dist.destroy_process_group()
