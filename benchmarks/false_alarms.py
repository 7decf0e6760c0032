"""How often `profdeck trend` finds a change in a job in which nothing was changed, on real captures.

python -m benchmarks.false_alarms [--jobs 200] [--json FILE]

Jobs of 40 captures each take turns in one process, so that the captures of one lie seconds apart, as those of long jobs
lie minutes apart: all steps train the same small network. A tenth as many jobs become slower by 30 % half-way, which
must be found. What the machine does beside them are changes, too, and hit all jobs at once: the same captures in an
order drawn anew have none.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from benchmarks.measure import Row, parser, report

from profdeck import Profiler
from profdeck_traces.trend.change_points import change_points

CAPTURES, EVERY, COUNT = 40, 10, 3
SLOW_FROM = EVERY * (CAPTURES // 2 + 1)
SLOWER, NEAR = 0.3, 3
HALF, OTHER_HALF = slice(None, CAPTURES // 2), slice(CAPTURES // 2, None)


@attrs.define(eq=False)
class Job:
    """One of the jobs that take turns."""

    run: Path
    changes: bool
    profiler: Profiler
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def begin(cls, run: Path, *, changes: bool) -> Job:
        """Build one that becomes slower half-way, or does not."""
        settings = {
            "output": str(run.parent),
            "run": run.name,
            "steps": [f"every {EVERY} for {COUNT}"],
            "on_demand": False,
            "trainer.backend": "torch",
            "trainer.warmup_steps": 1,
        }
        model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(24)])
        optimizer = torch.optim.SGD(model.parameters())
        return cls(run, changes, Profiler.from_config(settings=settings), model, optimizer)

    def train(self, step: int) -> None:
        """Run one step."""
        with self.profiler.capture(step):
            began_s = time.perf_counter()
            self.model(torch.rand(64, 128)).sum().backward()
            self.optimizer.step()
            if self.changes and step >= SLOW_FROM:
                until_s = time.perf_counter() + SLOWER * (time.perf_counter() - began_s)
                while time.perf_counter() < until_s:
                    pass

    def steps(self) -> dict[str, Any]:
        """Return the series of the steps that the command finds, with its changes."""
        command = [sys.executable, "-m", "profdeck", "trend", str(self.run), "--json"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        (series,) = found["series"]
        return dict(series)


def is_found(series: dict[str, Any]) -> bool:
    """Tell whether the change that was made is found, in its place."""
    return any(change["is_worse"] and abs(change["index"] - CAPTURES // 2) <= NEAR for change in series["changes"])


def row(what: str, jobs: Sequence[bool]) -> Row:
    """Say of how many jobs something is true."""
    return Row(what=what, unit=f"of {len(jobs)}", measured=sum(jobs))


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=200)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        jobs = [
            Job.begin(Path(directory) / str(number), changes=number >= chosen.jobs)
            for number in range(chosen.jobs + chosen.jobs // 10)
        ]
        for capture in range(1, CAPTURES + 1):
            for job in jobs:
                for step in range(EVERY * capture - 1, EVERY * capture + COUNT):
                    job.train(step)
        series = {job: job.steps() for job in jobs}
    even = [series[job] for job in jobs if not job.changes]
    changed = [series[job] for job in jobs if job.changes]
    values = [[point["value"] for point in one["points"]] for one in even]
    halves = [[value for one in values for value in one[half]] for half in (HALF, OTHER_HALF)]
    slower = statistics.median(halves[1]) / statistics.median(halves[0])
    rows = [
        Row(what="the machine, second half by first", unit="times", measured=slower),
        row("jobs without a change in which one is found", [bool(one["changes"]) for one in even]),
        row("the same, slower", [any(change["is_worse"] for change in one["changes"]) for one in even]),
        row("the same captures in another order", [changes_in_another_order(chance, one) for one in values]),
        row("jobs that become slower by 30 %, found", [is_found(one) for one in changed]),
    ]
    report(rows, chosen.json)


def changes_in_another_order(chance: random.Random, values: list[float]) -> bool:
    """Tell whether there is a change in values in an order drawn anew."""
    return bool(change_points(chance.sample(values, len(values))))


if __name__ == "__main__":
    main()
