"""What profdeck adds to a step of a verl job that does not select it.

python -m benchmarks.verl_step [--rounds 5]

It needs the environment of the nox session `hosts`. What is put around verl's methods is all that a step has more: the
calls that a trainer and a worker make to profiling in each step, with profdeck loaded by verl and with its plugins but
for the tests' platform left out, in processes of their own, alternating. A step of a job takes seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

_STEP_S = 0.1
"""Of a very short step."""
_CALLS = 5000


def _measured() -> float:
    """Return how long the calls of one step take, in seconds."""
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
        trainer._stop_profiling(False)  # noqa: FBT003, SLF001  # as above

    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(_CALLS):
            step()
        times.append((time.perf_counter() - began) / _CALLS)
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.one:
        sys.stdout.write(f"\n{_measured()}\n")
        return
    found: dict[str, list[float]] = {"auto": [], "cpu": []}
    for _ in range(given.rounds):
        for plugins, times in found.items():
            environ = os.environ | {"VERL_USE_EXTERNAL_PLUGINS": plugins, "VERL_ENGINE_DEVICE": "cuda"}
            command = [sys.executable, "-m", "benchmarks.verl_step", "--one"]
            done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
            times.append(float(done.stdout.split()[-1]))
    loaded, without = (statistics.median(times) for times in found.values())
    sys.stdout.write(f"calls of a step, profdeck loaded: {loaded * 1e6:.2f} us; left out: {without * 1e6:.2f} us\n")
    sys.stdout.write(f"a step of {_STEP_S:g} s: {1 + (loaded - without) / _STEP_S:.6f} of one without\n")


if __name__ == "__main__":
    main()
