"""One rank of a training job with 100 captures of 20 steps each. Argument: the output directory."""

import sys

import torch
import torch.distributed as dist

from profdeck import Profiler

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
settings = {"output": sys.argv[1], "run": "clocks", "steps": ["every 25 for 20"], "on_demand": False}
profiler = Profiler.from_config(
    role="trainer", settings=settings | {"trainer.backend": "torch", "trainer.ranks": "all"}
)
with profiler:
    for step in range(2525):
        with profiler.capture(step):
            model(torch.rand(8, 64)).sum().backward()
            dist.all_reduce(torch.ones(1000))
            dist.barrier()
dist.barrier()
dist.destroy_process_group()
