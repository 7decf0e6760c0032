"""One rank of a training job that runs until its directory contains ``stop``. Each rank has a separate directory."""

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
        stop = torch.tensor([float((directory / "stop").exists())])
        torch.rand(32, 32).sum()
        time.sleep(0.01)
        dist.all_reduce(stop)
    if step % 20 == 0:
        (directory / "next").write_text(str(step))
        (directory / "next").replace(directory / "step")  # atomic, so that readers see a complete number
    if stop.item():
        break
dist.barrier()  # ranks that exit at different times sometimes abort, with or without a profiler
dist.destroy_process_group()
