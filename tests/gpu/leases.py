"""Check that a process waits for a device lease and records after the holder is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import torch

from gpu.report import CUDA, OUT, Report
from profdeck import Profiler
from profdeck.verification.run_report import read_run

# The child executes lines from stdin. It prints "done" after each line.
LOOP = """
import sys
from gpu.leases import *
profiler = build(sys.argv[1])
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


def build(run: str) -> Profiler:
    # A process takes the lease of a GPU only if it has initialized CUDA.
    torch.ones(8, device="cuda" if CUDA else "cpu").sum().item()
    settings = {"output": str(OUT), "run": run, "steps": ["1..9"], "trainer.backend": "torch"}
    return Profiler.from_config(settings=settings)


def work() -> None:
    matrix = torch.randn(256, 256, device="cuda" if CUDA else "cpu")
    (matrix @ matrix).sum().item()


class Process:
    """A child process that executes lines of code."""

    def __init__(self, run: str) -> None:
        command = [sys.executable, "-c", LOOP, run]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, line: str) -> None:
        """Execute a line in the child and wait until it returns."""
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()
        while (reply := self.popen.stdout.readline()) != "done\n":
            if not reply:
                raise RuntimeError(f"the child exited during: {line}")

    def close(self) -> None:
        """Close stdin and wait until the child exits."""
        self.popen.communicate(timeout=60)


def main() -> None:
    report = Report()
    with report.attempt("lease"):
        holder, second = Process("holder"), Process("second")
        holder.do("profiler.start(1); work()")
        second.do("profiler.start(1); work()")
        if CUDA:
            second.do(f"assert 'held by process {holder.popen.pid} ' in profiler.active.waits_for")
        os.kill(holder.popen.pid, signal.SIGKILL)
        holder.popen.wait()
        second.do("profiler.start(2); work(); profiler.close()")  # recording starts at a step boundary
        second.close()
        (rank,) = read_run(OUT / "second").captures[0].ranks
        # The status is partial, because `close` ended the capture early.
        report.check("second process recorded", rank.status == "partial", rank.problems)
        report.check("trace is complete", rank.artifacts[0].whole, rank.artifacts)
        if CUDA:
            report.check("second process waited", "held by process" in str(rank.notes), rank.notes)
    report.finish()


if __name__ == "__main__":
    main()
