"""One rank of a training job with 1,000 steps. From step 600, the stage ``score`` of rank 1 takes 40 ms longer.

The ranks generate and score independently and synchronize in an all-reduce.
Arguments: the output directory and the name of the run. Only the run ``slow`` becomes slower.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from profdeck import Profiler

STEPS, SLOW_FROM = 1000, 600
SCORE_S, SLOW_SCORE_S = 0.001, 0.041  # The difference exceeds the noise of a busy machine, which is about 10 ms.

dist.init_process_group("gloo")
torch.set_num_threads(1)
slow = sys.argv[2] == "slow" and os.environ["RANK"] == "1"
settings = {"output": sys.argv[1], "run": sys.argv[2], "steps": ["every 25 for 4"], "on_demand": False}
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
                time.sleep(SLOW_SCORE_S if slow and step >= SLOW_FROM else SCORE_S)
                weights @ weights
            with profiler.stage("update"):
                dist.all_reduce(torch.ones(8))
dist.barrier()
dist.destroy_process_group()
