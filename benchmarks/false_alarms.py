"""How often `profdeck trend` finds a change in a job in which nothing was changed: real jobs, one process each.

python -m benchmarks.false_alarms [--jobs 200] [--json FILE]

Each job trains a small network for 240 steps and captures two of every six: 40 captures. The peer are the same jobs
with every step after the 120th made a tenth slower, which must be found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import Row, parser, report

from profdeck import Profiler

STEPS, EVERY, COUNT = 240, 6, 2
SLOWER = 0.1
"""By how much of itself a step is longer in the second half of a job with a change."""


def train(output: Path, run: str, *, changes: bool) -> None:
    """Run one job."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters())
    settings = {"output": str(output), "run": run, "steps": [f"every {EVERY} for {COUNT}"], "final_step": STEPS - 1}
    with Profiler.from_config(
        settings=settings | {"trainer.backend": "torch", "trainer.warmup_steps": 1, "on_demand": False}
    ) as profiler:
        for step in range(STEPS):
            with profiler.capture(step):
                began_s = time.perf_counter()
                model(torch.rand(64, 128)).sum().backward()
                optimizer.step()
                if changes and step >= STEPS // 2:
                    until_s = time.perf_counter() + SLOWER * (time.perf_counter() - began_s)
                    while time.perf_counter() < until_s:
                        pass


def changes_in(output: Path, run: str) -> list[dict[str, Any]]:
    """Return the changes that the command finds in any series of a job."""
    command = [sys.executable, "-m", "profdeck", "trend", str(output / run), "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [change for series in found["series"] for change in series["changes"]]


def measure(output: Path, jobs: int, *, changes: bool) -> list[list[dict[str, Any]]]:
    """Run jobs one after the other, and return the changes of each."""
    found = []
    for number in range(jobs):
        run = f"{'changes' if changes else 'even'}-{number}"
        command = [sys.executable, "-m", "benchmarks.false_alarms", "--one", str(output), run]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *["--slower"] * changes], check=True, capture_output=True, env=environment)
        found.append(changes_in(output, run))
    return found


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=200)
    options.add_argument("--one", nargs=2)
    options.add_argument("--slower", action="store_true")
    chosen = options.parse_args()
    if chosen.one:
        train(Path(chosen.one[0]), chosen.one[1], changes=chosen.slower)
        return
    with tempfile.TemporaryDirectory() as output:
        even = measure(Path(output), chosen.jobs, changes=False)
        slower = measure(Path(output), chosen.jobs // 10, changes=True)
    for changes in filter(None, even):
        print(json.dumps(changes))  # so that one can tell an alarm from a machine that really became slower
    alarms, found = (sum(map(bool, jobs)) for jobs in (even, slower))
    row = Row(
        what=f"changes in {len(even)} jobs without one",
        unit="jobs",
        measured=alarms,
        peer=found,
        peer_name=f"of {len(slower)} with one",
    )
    report([row], chosen.json)


if __name__ == "__main__":
    main()
