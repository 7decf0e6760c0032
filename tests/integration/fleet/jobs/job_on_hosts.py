"""One rank of a job whose hosts share no directory. It trains, and rank 0 sends generation requests to a router.

Arguments: the config, the URL of the router, and a file. The job ends when the file exists.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist

from profdeck import Profiler

config, router, stop = sys.argv[1:]
client = httpx.Client(timeout=1, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def post(url: str, **body: Any) -> None:
    """Request a completion. If the host is unreachable, the request times out after one second."""
    with contextlib.suppress(httpx.HTTPError):
        client.post(url, json=body)


dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
with Profiler.from_config(config, role="trainer", targets={}) as profiler:
    for step in range(1_000_000):
        with profiler.capture(step):
            if dist.get_rank() == 0:
                post(f"{router}/v1/completions", model="tiny", prompt="hello", max_tokens=10, ignore_eos=True)
            model(torch.ones(2, 32)).sum().backward()
            told = torch.tensor([float(Path(stop).exists())])
            dist.all_reduce(told)
        if told.item():
            break
dist.barrier()  # without it, ranks that exit at different times sometimes abort, even without a profiler
dist.destroy_process_group()
