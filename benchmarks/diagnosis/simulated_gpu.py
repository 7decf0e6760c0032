"""Simulates GPU jobs and generates traces in Kineto's format.

Each rank has one host thread and several streams. A kernel starts after its launch, once earlier work on its stream has
finished. A collective transfers data once the last rank has reached it. Times are in microseconds. The cost of a
planted cause is the difference in simulated step time with and without the cause.
"""

from __future__ import annotations

import gzip
import json
import random
import statistics
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

MAIN_THREAD, COMPUTE, COPIES, COMMUNICATION = 4001, 7, 14, 20
_LATENCY_US, _GAP_US, _CALL_US = 6.0, 1.0, 4.0
_MAX_QUEUED = 1022
"""Maximum number of unfinished kernels and copies per stream. Further launches wait."""
GEMMS = (
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
    "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_tn",
    "ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x5_nn",
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_nt",
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t> >",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_tn_align8>(Params)",
)
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>"
)
FOREACH = (
    "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4> >(at::native::TensorList)"
)


@attrs.frozen(kw_only=True)
class Collective:
    """A collective launched by a rank. The simulation sends its end time back to the rank's program."""

    transfer_us: float
    ready_us: float
    """Start time of the kernel on this rank."""
    group: tuple[int, ...]


Program = Generator[Collective, float, None]
"""Generator that runs one step on one rank. It yields collectives and receives their end times."""


@attrs.define(eq=False)
class Gpu:
    """State of one rank: the host thread's clock, the time at which each stream becomes free, and the trace events."""

    rank: int = 0
    ranks: int = 1
    step: int = 0
    random: random.Random = attrs.field(factory=lambda: random.Random(0))
    now: float = 1000.0
    free: dict[int, float] = attrs.field(factory=dict)
    events: list[dict[str, Any]] = attrs.field(factory=list)
    slowdown: float = 1.0
    """Factor by which all kernels take longer, for example because of a low device clock."""
    sequence: int = 0
    """Next autograd sequence number."""
    _correlation: int = 1000
    _queued: dict[int, deque[float]] = attrs.field(factory=dict)
    """End times of each stream's latest kernels and copies."""

    def add(self, category: str, name: str, begin: float, end: float, tid: int = MAIN_THREAD, **args: Any) -> None:
        """Add an event to the trace."""
        pid = self.rank if category in {"kernel", "gpu_memcpy", "gpu_memset", "cuda_sync"} else 4000
        pid, tid = (-1, 0) if category == "overhead" else (pid, tid)
        times = {"ts": round(begin, 3), "dur": round(max(0.0, end - begin), 3)}
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "args": args, **times})

    @contextmanager
    def scope(self, category: str, name: str, **args: Any) -> Iterator[None]:
        """Record an event that spans the ``with`` block."""
        begin = self.now
        self.now += 0.5
        yield
        self.now += 0.5
        self.add(category, name, begin, self.now, **args)

    def mark(self, name: str) -> Any:
        """Record an annotation that spans the ``with`` block."""
        return self.scope("user_annotation", name)

    def frame(self, name: str) -> Any:
        """Record a Python frame that spans the ``with`` block."""
        return self.scope("python_function", name)

    def op(self, name: str, duration: float = 0.0, **args: Any) -> None:
        """Run an operator on the host."""
        with self.scope("cpu_op", name, **args):
            self.now += duration

    def idle(self, duration: float) -> None:
        """Advance the host clock without recording an event."""
        self.now += duration

    def launch(  # noqa: PLR0913 - one parameter per property of the kernel
        self,
        kernel: str,
        duration: float,
        *,
        op: str = "aten::linear",
        stream: int = COMPUTE,
        host: float = 7.0,
        blocks: float | None = None,
        **args: Any,
    ) -> None:
        """Run an operator that launches a kernel. By default, derive the number of blocks from its duration."""
        grid = [1 + round(duration if blocks is None else blocks), 1, 1]
        with self.scope("cpu_op", op, **args):
            self.now += host - _CALL_US
            self._enqueue("kernel", kernel, duration * self.slowdown, stream, grid=grid)

    def copy(self, name: str, duration: float, *, waits: bool = False, stream: int = COMPUTE, size: int = 0) -> None:
        """Copy memory. If `waits` is true, the call blocks until the copy finishes."""
        with self.scope("cpu_op", "aten::copy_"):
            self.now += 3
            self._enqueue("gpu_memcpy", name, duration, stream, waits=waits, bytes=size)

    def graph(self, kernels: Sequence[tuple[str, float]], *, host: float = 12.0) -> None:
        """Launch a CUDA graph that contains the given kernels."""
        correlation = self._call("cudaGraphLaunch", self.now + host)
        begin = max(self.now - _CALL_US + _LATENCY_US, self.free.get(COMPUTE, 0) + _GAP_US)
        for name, duration in kernels:
            end = begin + duration * self.slowdown
            self._device("kernel", name, (begin, end), COMPUTE, correlation=correlation)
            begin = end + 0.5

    def sync(self, stream: int | None = None) -> None:
        """Wait for one stream, or for the entire device if `stream` is None."""
        ends = [end for key, end in self.free.items() if stream in {None, key}]
        until = max([self.now + _CALL_US, *(end + 2 for end in ends)])
        name = "cudaDeviceSynchronize" if stream is None else "cudaStreamSynchronize"
        begin = self.now
        correlation = self._call(name, until)
        kind = "Context Sync" if stream is None else "Stream Sync"
        self.add(
            "cuda_sync", kind, begin, until, -1 if stream is None else stream, correlation=correlation, stream=stream
        )

    def item(self) -> None:
        """Read a tensor value on the host, as ``.item()`` does."""
        with self.scope("cpu_op", "aten::item"), self.scope("cpu_op", "aten::_local_scalar_dense"):
            self._enqueue("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 1.5, COMPUTE, bytes=4)
            self.sync(COMPUTE)

    def allocate(self, call: str, duration: float) -> None:
        """Allocate or free device memory. ``cudaFree`` waits for the device."""
        begin = max([self.now, *self.free.values()]) if call == "cudaFree" else self.now
        self._call(call, begin + duration)

    def depend(self, stream: int, on: int) -> None:
        """Make a stream wait for all work already queued on another stream."""
        for name in ("cudaEventRecord", "cudaStreamWaitEvent"):
            self._call(name, self.now + 1)
        self.free[stream] = max(self.free.get(stream, 0.0), self.free.get(on, 0.0))

    def collective(self, name: str, transfer_us: float, megabytes: float, group: tuple[int, ...] = ()) -> Program:
        """Run a collective on the communication stream. Call this method with ``yield from``."""
        group = group or tuple(range(self.ranks))
        self.depend(COMMUNICATION, COMPUTE)
        with self.scope("cpu_op", f"c10d::{name}_"):
            self.now += 6
            correlation = self._call("cudaLaunchKernel", self.now + _CALL_US)
        ready = max(self.now + _LATENCY_US, self.free.get(COMMUNICATION, 0.0) + _GAP_US)
        end = yield Collective(transfer_us=transfer_us, ready_us=ready, group=group)
        args = {
            "Collective name": name,
            "Process Group Name": "0",
            "Process Group Ranks": str(list(group)),
            "Group size": len(group),
            "In msg nelems": int(megabytes * 250_000),
            "Out msg nelems": int(megabytes * 250_000),
            "dtype": "Float",
        }
        kernel = f"ncclDevKernel_{name.title().replace('_', '')}_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self._device("kernel", kernel, (ready, end), COMMUNICATION, correlation=correlation, **args)

    def _call(self, name: str, end: float) -> int:
        self._correlation += 1
        self.add("cuda_runtime", name, self.now, end, correlation=self._correlation)
        self.now = end
        return self._correlation

    def _enqueue(
        self, category: str, name: str, duration: float, stream: int, *, waits: bool = False, **args: Any
    ) -> None:
        queue = self._queued.setdefault(stream, deque(maxlen=_MAX_QUEUED))
        oldest_end = queue[0] if len(queue) == _MAX_QUEUED else 0.0
        begin = max(self.now + _LATENCY_US, self.free.get(stream, 0.0) + _GAP_US)
        end = begin + duration
        call = "cudaLaunchKernel" if category == "kernel" else "cudaMemcpyAsync"
        correlation = self._call(call, end + 2 if waits else max(self.now + _CALL_US, oldest_end))
        queue.append(end)
        self._device(category, name, (begin, end), stream, correlation=correlation, **args)

    def _device(self, category: str, name: str, times: tuple[float, float], stream: int, **args: Any) -> None:
        self.add(category, name, *times, stream, stream=stream, device=self.rank, **args)
        self.free[stream] = times[1]


def simulate(
    program: Callable[[Gpu], Program],
    *,
    seed: int,
    ranks: int = 1,
    steps: int = 10,
    marks: bool = True,
) -> list[Gpu]:
    """Run a program for several steps on all ranks, and return the ranks with their events.

    Args:
        program: Function that returns the program for one step on one rank.
        seed: Seed for the random generator of each rank.
        ranks: Number of ranks.
        steps: Number of steps.
        marks: Whether to annotate each step. If false, the program must do so.
    """
    gpus = [Gpu(rank=rank, ranks=ranks, random=random.Random(seed)) for rank in range(ranks)]
    for step in range(steps):
        programs, begins = [], [gpu.now for gpu in gpus]
        for gpu in gpus:
            gpu.step = step
            programs.append(program(gpu))
        _run_together(programs)
        if marks:
            for gpu, begin in zip(gpus, begins, strict=True):
                gpu.add("user_annotation", f"ProfilerStep#{step}", begin, gpu.now)
        for gpu in gpus:
            gpu.now += 2
    return gpus


def _run_together(programs: Sequence[Program]) -> None:
    """Run the programs of all ranks. A collective completes once every rank in its group has reached it."""
    waiting: dict[int, Collective] = {}
    running = dict(enumerate(programs))
    ends: dict[int, float] = {}
    while running:
        for rank, program in [*running.items()]:
            if rank in waiting:
                continue
            try:
                waiting[rank] = program.send(ends.pop(rank)) if rank in ends else next(program)
            except StopIteration:
                del running[rank]
        for rank, collective in [*waiting.items()]:
            members = [waiting.get(member) for member in collective.group]
            same = [member for member in members if member and member.group == collective.group]
            if rank in waiting and len(same) == len(members):
                end = max(member.ready_us for member in same) + max(member.transfer_us for member in same)
                for member in collective.group:
                    ends[member] = end
                    del waiting[member]


def mean_step_us(gpus: Sequence[Gpu], prefix: str) -> float:
    """Return the mean step or iteration time of the slowest rank, in microseconds."""
    return max(
        statistics.fmean(event["dur"] for event in gpu.events if event["name"].startswith(prefix)) for gpu in gpus
    )


def write(gpus: Sequence[Gpu], directory: Path) -> None:
    """Write one trace file per rank."""
    directory.mkdir(parents=True, exist_ok=True)
    for gpu in gpus:
        document = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": gpu.rank, "world_size": gpu.ranks},
            "deviceProperties": [{"id": gpu.rank, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108}],
            "baseTimeNanoseconds": 1_700_000_000 * 10**9,
            "traceEvents": sorted(gpu.events, key=lambda event: (event["ts"], -event["dur"])),
        }
        path = directory / f"rank{gpu.rank}.trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
