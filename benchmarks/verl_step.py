"""Measure the overhead of profdeck in a step of a verl job that is not captured.

python -m benchmarks.verl_step [--rounds 5]

Run it in the environment of the nox session `hosts`. The overhead consists of wrappers around verl's methods, so the
benchmark calls the profiling methods that a trainer and a worker call in each step. Processes in which verl loads
profdeck alternate with processes in which verl loads only the tests' platform plugin. A step of a real job takes
seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

_STEP_S = 0.1
"""Duration of a very short step."""
_CALLS = 5000


def _measured() -> float:
    """Return the time in seconds that the calls of one step take."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.utils.profiler.config import ProfilerConfig
    from verl.utils.profiler.profile import DistProfiler

    class Trainer(RayPPOTrainer):
        def __init__(self) -> None:
            self.config = OmegaConf.create({"global_profiler": {"tool": None, "steps": None}})
            self.global_steps = 1

    trainer, worker = Trainer(), DistProfiler(0, ProfilerConfig(tool="none", enable=False, tool_config={}))

    def step() -> None:
        trainer._start_profiling(False)  # noqa: FBT003, SLF001  # as verl calls it
        worker.start()
        worker.step()
        worker.stop()
        trainer._stop_profiling(False)  # noqa: FBT003, SLF001  # as verl calls it

    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(_CALLS):
            step()
        times.append((time.perf_counter() - began) / _CALLS)
    return statistics.median(times)


def main() -> None:
    """Run the benchmark from the command line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        sys.stdout.write(f"\n{_measured()}\n")
        return
    results: dict[str, list[float]] = {"auto": [], "cpu": []}
    for _ in range(options.rounds):
        for plugins, times in results.items():
            environ = os.environ | {"VERL_USE_EXTERNAL_PLUGINS": plugins, "VERL_ENGINE_DEVICE": "cuda"}
            command = [sys.executable, "-m", "benchmarks.verl_step", "--one"]
            done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
            times.append(float(done.stdout.split()[-1]))
    loaded, without = (statistics.median(times) for times in results.values())
    sys.stdout.write(
        f"profiling calls of a step with profdeck: {loaded * 1e6:.2f} us; without: {without * 1e6:.2f} us\n"
    )
    sys.stdout.write(f"step of {_STEP_S:g} s: {1 + (loaded - without) / _STEP_S:.6f} times the step without profdeck\n")


if __name__ == "__main__":
    main()
