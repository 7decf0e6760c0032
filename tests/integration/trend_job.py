"""One rank of a training job of 2,000 steps, in which a stage of rank 1 takes longer from step 1,200 on.

Each step generates and scores apart, and meets in an all-reduce. Arguments: the directory of the runs, and whether it
becomes slower.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from profdeck import Profiler

STEPS, SLOW_FROM = 2000, 1200
SLOWER_S = 0.013
"""More than what a busy machine adds to a step now and then, some 4 ms."""

dist.init_process_group("gloo")
torch.set_num_threads(1)
slow = sys.argv[2] == "slow" and os.environ["RANK"] == "1"
settings = {"output": sys.argv[1], "run": sys.argv[2], "steps": ["every 50 for 4"], "on_demand": False}
profiler = Profiler.from_config(
    role="trainer", settings=settings | {"trainer.backend": "torch", "trainer.ranks": "all", "trainer.warmup_steps": 1}
)
weights = torch.rand(64, 64)
with profiler:
    for step in range(STEPS):
        with profiler.capture(step):
            with profiler.stage("generate"):
                time.sleep(0.002)
                weights @ weights
            with profiler.stage("score"):
                time.sleep(SLOWER_S if slow and step >= SLOW_FROM else 0.001)
                weights @ weights
            with profiler.stage("update"):
                dist.all_reduce(torch.ones(8))
dist.barrier()
dist.destroy_process_group()
