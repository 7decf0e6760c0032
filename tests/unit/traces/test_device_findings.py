"""Tests for findings from device work, in traces as Kineto writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.loading import summarise

Event = dict[str, Any]
GEMM = "nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT"
LAUNCH, STREAM = 5.0, 7


class Job:
    """A host thread that launches kernels on a stream. Times are in microseconds."""

    def __init__(self, *, queue: int = 1_000_000) -> None:
        self.queue, self.now, self.free = queue, 0.0, 0.0
        self.ends: list[float] = []
        self.events: list[Event] = []

    def add(self, category: str, name: str, begin: float, end: float, **more: Any) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": end - begin}
        self.events.append({**event, **more})

    def call(self, name: str, end: float) -> int:
        correlation = len(self.events) + 1
        self.add("cuda_runtime", name, self.now, end, args={"correlation": correlation})
        self.now = end
        return correlation

    def kernel(self, name: str, duration: float, category: str = "kernel", operator: str = "aten::mm") -> None:
        begin, oldest = self.now, self.ends[-self.queue] if len(self.ends) >= self.queue else 0.0
        self.now += LAUNCH
        copies = category == "gpu_memcpy"
        correlation = self.call("cudaMemcpyAsync" if copies else "cudaLaunchKernel", max(self.now + LAUNCH, oldest))
        start = max(self.now, self.free)
        self.free = start + duration
        self.ends.append(self.free)
        args = {"correlation": correlation, "stream": STREAM, "device": 0}
        self.add(category, name, start, self.free, pid=0, tid=STREAM, args=args)
        self.now += 1
        self.add("cpu_op", operator, begin, self.now)

    def wait(self) -> None:
        self.call("cudaStreamSynchronize", max(self.now, self.free) + 2)

    def step(self, number: int, begin: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", begin, self.now)

    def summary(self, path: Path) -> RunSummary:
        path.write_text(json.dumps({"traceEvents": self.events}))
        run, _ = summarise([path])
        return run


def rules(run: RunSummary) -> dict[str, str]:
    return {finding.rule: f"{finding.text} {finding.do}" for finding in run.findings}


@pytest.mark.parametrize("slow_step", [None, 6])
def test_run_ahead_steps_are_unsteady_only_if_their_device_work_is(tmp_path: Path, slow_step: int | None) -> None:
    job = Job(queue=100)
    for number in range(10):
        begin = job.now
        for _ in range(40):
            job.kernel(GEMM, 900 if number == slow_step else 300)
        job.step(number, begin)
    found = rules(job.summary(tmp_path / "trace.json"))
    assert ("unsteady-steps" in found) == (slow_step is not None)


def copies(job: Job) -> None:
    for _ in range(4):
        job.kernel("Memcpy DtoH (Device -> Pinned)", 500, "gpu_memcpy", "aten::copy_")
        job.wait()


def layouts(job: Job) -> None:
    for name in ("nchwToNhwcKernel", "nhwcToNchwKernel"):
        job.kernel(f"void cudnn::ops::{name}<float>(float const*)", 900, operator="aten::conv2d")


def convolutions(job: Job) -> None:
    for _ in range(4):
        job.kernel("void implicit_convolve_sgemm<float, 1024, 5>(int)", 900, operator="aten::conv2d")


def tf32(job: Job) -> None:
    for _ in range(4):
        job.kernel("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_stage4", 900)


def buffers(job: Job) -> None:
    job.wait()
    begin = job.now
    job.now += 2_000
    job.add("cpu_op", "aten::view", begin, job.now)
    job.add("overhead", "Buffer Flush", begin + 1, job.now - 1, pid=-1, tid=0)


def loading(job: Job) -> None:
    buffers(job)
    job.events[-1]["name"] = "Lazy Function Loading"


@pytest.mark.parametrize(
    ("work", "rule", "cure"),
    [
        (copies, "exposed-copies", "non_blocking"),
        (layouts, "layout-copies", "channels_last"),
        (convolutions, "fp32-gemm", "cudnn.allow_tf32"),
        (tf32, "fp32-gemm", None),
        (buffers, "profiler", "compare times only with"),
        (loading, "profiler", None),
    ],
)
def test_cause_in_each_step(tmp_path: Path, work: Any, rule: str, cure: str | None) -> None:
    job = Job()
    for number in range(6):
        begin = job.now
        for _ in range(10):
            job.kernel(GEMM, 300)
        work(job)
        job.wait()
        job.step(number, begin)
    found = rules(job.summary(tmp_path / "trace.json"))
    assert (rule in found) == (cure is not None)
    assert cure is None or cure in found[rule]


def test_initialisation_is_not_an_allocation(tmp_path: Path) -> None:
    job = Job()
    job.call("cudaFree", 900_000.0)
    job.kernel(GEMM, 300)
    job.wait()
    found = rules(job.summary(tmp_path / "trace.json"))
    assert "initialisation" in found
    assert "allocation" not in found


def test_idle_time_during_a_graph_capture_is_not_judged(tmp_path: Path) -> None:
    job = Job()
    for number in range(6):
        begin = job.now
        job.kernel(GEMM, 3)
        for _ in range(100):
            job.now += 20
            job.call("cudaLaunchKernel", job.now + LAUNCH)
        job.step(number, begin)
    run = job.summary(tmp_path / "trace.json")
    assert "host-bound" not in rules(run)
    assert [one.state for one in run.causes if one.cause == "host-bound"] == ["not_judged"]


def test_time_without_a_cause_is_reported(tmp_path: Path) -> None:
    job = Job()
    for number in range(6):
        begin = job.now
        job.kernel(GEMM, 300)
        job.free += 2_000  # the device runs work that was not recorded
        job.kernel(GEMM, 300)
        job.wait()
        job.step(number, begin)
    assert "unexplained" in rules(job.summary(tmp_path / "trace.json"))
