"""Two processes on one device: the second waits for the first, and records when the first is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import torch

from gpu.report import CUDA, OUT, Report
from profdeck import Profiler
from profdeck.verification.reading import read_run

# Each process executes one line at a time and reports when it is done.
LOOP = """
import sys
from gpu.leases import *
profiler = build(sys.argv[1])
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


def build(run: str) -> Profiler:
    """Return a profiler whose process uses the device."""
    torch.ones(8, device="cuda" if CUDA else "cpu").sum().item()
    settings = {"output": str(OUT), "run": run, "steps": ["1..9"], "trainer.backend": "torch"}
    return Profiler.from_config(settings=settings)


def work() -> None:
    """Use the device."""
    matrix = torch.randn(256, 256, device="cuda" if CUDA else "cpu")
    (matrix @ matrix).sum().item()


class Process:
    """A process that executes lines."""

    def __init__(self, run: str) -> None:
        command = [sys.executable, "-c", LOOP, run]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, line: str) -> None:
        """Execute a line and wait for its end."""
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()
        while (reply := self.popen.stdout.readline()) != "done\n":
            if not reply:
                raise RuntimeError(f"the process ended at: {line}")

    def end(self) -> None:
        """Let the process end."""
        self.popen.communicate(timeout=60)


def main() -> None:
    """Kill the holder while a second process waits."""
    report = Report()
    with report.attempt("turns"):
        holder, second = Process("holder"), Process("second")
        holder.do("profiler.start(1); work()")
        second.do("profiler.start(1); work()")
        if CUDA:
            second.do(f"assert 'held by process {holder.popen.pid} ' in profiler.active.waits_for")
        os.kill(holder.popen.pid, signal.SIGKILL)
        holder.popen.wait()
        second.do("profiler.start(2); work(); profiler.close()")  # its turn comes at a boundary
        second.end()
        (rank,) = read_run(OUT / "second").captures[0].ranks
        report.check("recorded after a killed holder", rank.status == "partial", rank.problems)  # it was closed
        report.check("whole trace", rank.artifacts[0].whole, rank.artifacts)
        if CUDA:
            report.check("waited", "held by process" in str(rank.notes), rank.notes)
    report.finish()


if __name__ == "__main__":
    main()
