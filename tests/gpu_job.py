"""Synthetic Chrome traces of a GPU job in Kineto's format, with optional performance faults.

Each step loads a batch, copies it to the device, launches the matrix products of a forward pass, and ends with an
all-reduce, which ends on all ranks at the same time. Times are in microseconds.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import attrs

Event = dict[str, Any]
MAIN, PID = 100, 4000


@attrs.frozen(kw_only=True)
class GpuJob:
    """A job in which every rank runs the same steps, except for the faults."""

    steps: int = 5
    ranks: int = 1
    products: int = 20
    """Number of matrix products per step."""
    product_us: float = 400.0
    name: str = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn"
    launch_us: float = 8.0
    """Time between two launches on the host."""
    load_us: float = 30.0
    slow_rank: int | None = None
    """Rank whose data loading takes ``slow_load_us``."""
    slow_load_us: float = 6_000.0
    uneven_us: float = 0.0
    """Extra data loading time of one rank per step. The rank changes from step to step."""
    reduce_us: float = 300.0
    """Duration of the all-reduce after the last rank has arrived."""
    items: int = 0
    """Number of device synchronizations per step, as in `.item()`, evenly spaced between the products."""
    pageable_us: float = 0.0
    """Duration of the copy from pageable memory. 0 for no copy."""
    small: int = 0
    """Number of additional kernels of 3 us per step."""
    allocate_us: float = 0.0
    """Duration of an allocation in the middle of each step, while the device is idle."""
    slow_step: int | None = None
    """A step that sleeps for five times its length before its forward pass."""
    cold_us: float = 0.0
    """Extra duration of the first operator in the first step, to simulate the start of the recorder."""
    graphs: bool = False

    def write(self, directory: Path) -> Path:
        """Write a trace for each rank."""
        directory.mkdir(parents=True, exist_ok=True)
        clocks = [1_000.0] * self.ranks
        events: list[list[Event]] = [[] for _ in range(self.ranks)]
        for step in range(self.steps):
            states = [_Rank(self, rank, step, clocks[rank], events[rank]) for rank in range(self.ranks)]
            ready = max(state.run() for state in states)
            clocks = [state.reduce(ready + self.reduce_us) for state in states]
        for rank, rank_events in enumerate(events):
            document = {
                "distributedInfo": {"rank": rank, "world_size": self.ranks},
                "deviceProperties": [{"id": 0, "name": "GPU"}],
                "baseTimeNanoseconds": 1_700_000_000 * 10**9,
                "traceEvents": rank_events,
            }
            text = json.dumps(document).encode()
            (directory / f"rank{rank}.trace.json.gz").write_bytes(gzip.compress(text, 1))
        return directory


class _Rank:
    """One rank in one step."""

    def __init__(self, job: GpuJob, rank: int, step: int, begin: float, events: list[Event]) -> None:
        self.job, self.rank, self.step, self.begin, self.events = job, rank, step, begin, events
        self.host = self.device = begin
        self.first: float | None = None

    def run(self) -> float:
        """Run the step up to the all-reduce. Return the time at which the rank is ready for the all-reduce."""
        job = self.job
        load = job.slow_load_us if self.rank == job.slow_rank else job.load_us
        load += job.uneven_us if self.step % job.ranks == self.rank else 0.0
        self._host("user_annotation", "data_loading", load)
        if job.slow_step == self.step:
            self.host += 5 * job.products * max(job.product_us, job.launch_us)
        begin = self.host
        if job.pageable_us:
            self._launch(
                "cudaMemcpyAsync", "Memcpy HtoD (Pageable -> Device)", job.pageable_us, "gpu_memcpy", waits=True
            )
        for product in range(job.products):
            cold_us = job.cold_us if product == self.step == 0 else 0.0
            self._launch("cudaLaunchKernel", job.name, job.product_us, "kernel", extra_us=cold_us)
            if job.items and product % max(1, job.products // job.items) == 0:
                self._wait("cudaStreamSynchronize", 400)
            if job.allocate_us and product == job.products // 2:
                self._wait("cudaMalloc", job.allocate_us)
        for _ in range(job.small):
            self._launch("cudaLaunchKernel", "void at::native::vectorized_elementwise_kernel<4, Add>(int)", 3, "kernel")
        self.events.append(self._event("user_annotation", "forward", begin, self.host))
        return max(self.host, self.device)

    def reduce(self, end: float) -> float:
        """Run the all-reduce, which ends at `end`. Return the start time of the next step."""
        begin = max(self.device, self.host)
        args = {
            "Collective name": "allreduce",
            "Process Group Name": "0",
            "Process Group Ranks": "[0, 1]",
            "Group size": self.job.ranks,
            "In msg nelems": 1_000_000,
            "Out msg nelems": 1_000_000,
            "dtype": "Float",
            "correlation": len(self.events),
        }
        kernel = self._event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", begin, end)
        self.events.append(kernel | {"pid": 0, "tid": 20, "args": args})
        launch = self._event("cuda_runtime", "cudaLaunchKernel", self.host, self.host + 5)
        self.events.append(launch | {"args": {"correlation": args["correlation"]}})
        self.host += 5
        self.host = max(self.host, end)
        self.events.append(self._event("user_annotation", f"ProfilerStep#{self.step}", self.begin, self.host))
        self.events.append(
            self._event("gpu_user_annotation", f"ProfilerStep#{self.step}", self.first or begin, end)
            | {"pid": 0, "tid": 7}
        )
        return self.host

    def _event(self, category: str, name: str, start: float, end: float) -> Event:
        times = {"ts": round(start, 3), "dur": round(end - start, 3)}
        return {"ph": "X", "cat": category, "name": name, "pid": PID, "tid": MAIN, **times}

    def _host(self, category: str, name: str, duration: float) -> None:
        self.events.append(self._event(category, name, self.host, self.host + duration))
        self.host += duration

    def _launch(
        self, call: str, name: str, duration: float, category: str, *, waits: bool = False, extra_us: float = 0.0
    ) -> None:
        job = self.job
        self.events.append(self._event("cpu_op", "aten::mm", self.host, self.host + extra_us + job.launch_us))
        self.host += extra_us
        correlation = {"correlation": len(self.events)}
        self.events.append(self._event("cuda_runtime", call, self.host + 1, self.host + 4) | {"args": correlation})
        begin = max(self.device, self.host + 5)
        self.first = begin if self.first is None else self.first
        self.device = begin + duration
        self.events.append(self._event(category, name, begin, self.device) | {"pid": 0, "tid": 7, "args": correlation})
        self.host = self.device if waits else self.host + job.launch_us

    def _wait(self, call: str, idle_us: float) -> None:
        """Wait for the device, then for `idle_us` more, during which the device is idle."""
        end = max(self.device, self.host) + idle_us
        self.events.append(self._event("cuda_runtime", call, self.host, end))
        self.host = end
