"""Compare captures with and without background analysis of their traces (option ``analyse``).

python -m benchmarks.background_analysis [--rounds 20] [--steps 5 50] [--json FILE]

Each round makes one capture of each kind, in random order. After each capture, training steps run. To measure the exact
CPU time of the analysis, this process adopts the analysis process and waits for it to exit. After the training steps,
the analysis gets normal priority (requires root), because it might never finish on a busy machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import tempfile
import time
from pathlib import Path

import attrs
from benchmarks.captured_step import PERIOD, Body, ByProfdeck, row, training_step
from benchmarks.measure import Row, in_turns, parser, report

from profdeck import Profiler
from profdeck.base.leases import DIRECTORY_VARIABLE

MAX_STEP, MAX_CPU, MAX_STOP = 1.02, 1.1, 1.05
STEPS_AFTER = 50
WITH, WITHOUT = "with analysis", "without"
_PR_SET_CHILD_SUBREAPER = 36


@attrs.frozen
class Figures:
    """Measurements of one capture, the training steps after it, and its analysis."""

    stop_ms: float
    """Wall time from the end of the last step until the capture is complete."""
    cpu_ms: float
    """Total CPU time of the stop and the analysis."""
    step_ms: float


def profiler_of(output: Path, steps: int, rounds: int, *, analyse: bool) -> Profiler:
    """Return a profiler that captures `steps` steps per round."""
    return Profiler.from_config(
        settings={
            "output": str(output),
            "run": f"{steps}-{analyse}",
            "on_error": "raise",
            "steps": [f"{first + 1}..{first + steps}" for first in range(0, (rounds + 1) * PERIOD, PERIOD)],
            "trainer.backend": "torch",
            "trainer.warmup_steps": 1,
            "trainer.options.record_shapes": True,
            "trainer.options.analyse": analyse,
        }
    )


def run(body: Body, profiler: Profiler, first: int, steps: int) -> Figures:
    """Make a capture, run training steps after it, and wait for its analysis to finish."""
    recording = ByProfdeck(profiler, first)
    recording.begin()
    body()
    recording.record()
    for _ in range(steps - 1):
        body()
        recording.mark()
    body()
    began_s, began_cpu_s = time.perf_counter(), cpu_time_s()
    recording.end()
    stop_s, cpu_s = time.perf_counter() - began_s, cpu_time_s() - began_cpu_s
    began_s = time.perf_counter()
    for _ in range(STEPS_AFTER):
        body()
    step_s = (time.perf_counter() - began_s) / STEPS_AFTER
    return Figures(stop_s * 1e3, (cpu_s + adopted_cpu_time_s()) * 1e3, step_s * 1e3)


def cpu_time_s() -> float:
    """Return the CPU time used by this process and by the child processes that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def adopted_cpu_time_s() -> float:
    """Wait for all child processes, including adopted ones, and return their CPU time."""
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split():
        with contextlib.suppress(OSError):  # not root, or the process has exited
            os.sched_setscheduler(int(pid), os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, int(pid), 0)
            Path(f"/proc/{pid}/autogroup").write_text("0", encoding="ascii")
    total_s = 0.0
    while True:
        try:
            _, _, usage = os.wait3(0)
        except ChildProcessError:
            return total_s
        total_s += usage.ru_utime + usage.ru_stime


def measure(output: Path, body: Body, steps: int, rounds: int) -> list[Row]:
    """Compare captures of `steps` steps."""
    names = (WITH, WITHOUT)
    profilers = {name: profiler_of(output, steps, rounds, analyse=name == WITH) for name in names}
    figures = in_turns(names, rounds, lambda name, number: run(body, profilers[name], number * PERIOD, steps))
    for profiler in profilers.values():
        profiler.close()
    return [
        row(f"{steps} steps: stop", "stop_ms", figures, names, MAX_STOP),
        row(f"{steps} steps: CPU time of stop and analysis", "cpu_ms", figures, names, MAX_CPU),
        row(f"{steps} steps: step after the stop", "step_ms", figures, names, MAX_STEP),
    ]


def main() -> None:
    """Run the benchmark from the command line."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--steps", type=int, nargs="+", default=[5, 50], help="numbers of steps per capture")
    chosen = options.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopt detached processes
    body = training_step()
    with tempfile.TemporaryDirectory() as output:
        os.environ[DIRECTORY_VARIABLE] = output  # avoid waiting for analyses of other jobs
        rows = [row for steps in chosen.steps for row in measure(Path(output), body, steps, chosen.rounds)]
    report(rows, chosen.json)


if __name__ == "__main__":
    main()
