"""Capture data-parallel training under torchrun: ``python -m gpu.distributed KIND``.

- ``slow``: Rank 1 is slower than rank 0. Each rank has its own lease directory, so both ranks record at the same time.
- ``nccl``: One rank uses NCCL.
- ``shared``: Two ranks share a GPU and record one after the other.
- ``host``: Two ranks use the CPU and record at the same time.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from gpu.report import CUDA, OUT, Report, compare, count, status, summarize, synchronize, traces
from profdeck import Profiler
from profdeck.verification.run_report import read_run

STEPS = ("3..5", "9..11")


def train(kind: str, rank: int) -> None:
    device = "cuda" if CUDA and kind != "host" else "cpu"
    width = 2048 if device == "cuda" else 64
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6))).to(device)
    model = torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(width if device == "cuda" else 8, width, device=device)
    settings = {"output": str(OUT), "run": kind, "steps": STEPS, "trainer.backend": "torch", "trainer.ranks": "all"}
    slow = kind == "slow" and rank == 1
    with Profiler.from_config(settings=settings, role="trainer") as profiler:
        for step in range(14):
            with profiler.capture(step):
                with profiler.stage("forward_backward"):
                    for _ in range(4 if slow else 1):
                        loss = model(x).square().mean()
                    time.sleep(0.02 * slow)
                    loss.backward()
                with profiler.stage("update"):
                    optimizer.step()
                    optimizer.zero_grad()
                if device == "cuda":
                    synchronize()


def check_run(kind: str) -> None:
    report = Report()
    if kind == "shared":
        ranks = [rank for capture in read_run(OUT / kind).captures for rank in capture.ranks]
        report.figure("ranks recorded", f"{sum(rank.status == 'complete' for rank in ranks)} of {len(ranks)}")
        reasons = [(*rank.problems, *rank.notes) for rank in ranks]
        waited = [
            rank.status == "complete" or "held by process" in str(of) for rank, of in zip(ranks, reasons, strict=True)
        ]
        report.check("incomplete ranks report the lease holder", all(waited), reasons)
        report.check("at least one rank is complete", any(rank.status == "complete" for rank in ranks))
    else:
        compare(report, kind)
    if kind == "host":
        report.check("CUDA is not initialized", not torch.cuda.is_initialized())
    if kind == "nccl":
        nccl_kernels = sum(count(path)["collectives"] for path in traces(kind))
        report.check("trace contains NCCL kernels", nccl_kernels > 0, nccl_kernels)
    if kind == "slow":
        kernels = [count(path)["kernels"] for path in traces(kind)]
        # Both captures contain the same work, so the kernel counts of a rank must be equal.
        report.check("both captures have equal kernel counts", kernels[:2] == kernels[2:], kernels)
        findings = summarize(kind)["findings"]
        texts = [f"{finding['rule']}: {finding['text']}" for finding in findings]
        report.figure("first finding", texts[0] if texts else "none")
        if CUDA:
            named = any(finding["rule"] == "straggler" and "rank 1" in finding["text"] for finding in findings)
            report.check("a finding reports rank 1", named, texts)
    report.check("backend", passed=True, detail=dist.get_backend())
    report.check("status", kind == "shared" or status(kind) == "complete", status(kind))
    report.finish()


def main() -> None:
    (kind,) = sys.argv[1:]
    rank = int(os.environ["RANK"])
    if kind == "slow":
        os.environ["PROFDECK_LEASE_DIR"] += f"-{rank}"
    if CUDA and kind != "host":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if kind == "nccl" else "gloo")
    train(kind, rank)
    dist.barrier()
    try:
        if rank == 0:
            check_run(kind)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
