"""Measure the false alarm rate of `profdeck trend` with real captures.

python -m benchmarks.false_alarms [--jobs 200] [--json FILE]

Jobs of 40 captures each run interleaved in one process and train the same small network. Captures of one job are
therefore seconds apart, like captures of long jobs that are minutes apart. A tenth as many additional jobs become 30 %
slower halfway, and `trend` must find these changes. Load changes of the machine affect all jobs at the same time. As a
control, the captures are also tested in random order, in which there is no change.

In addition, `--simulated` jobs with four ranks are tested. Their stages and owners vary independently. In a tenth as
many further jobs, one stage becomes 30 % slower on one rank, but the step time does not change.
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
from profdeck_traces.trend.points import RankPoint
from profdeck_traces.trend.rank_numbers import RankNumbers
from profdeck_traces.trend.trend import trend_of

CAPTURES, EVERY, COUNT = 40, 10, 3
SLOW_FROM = EVERY * (CAPTURES // 2 + 1)
SLOWER, NEAR = 0.3, 3
HALF, OTHER_HALF = slice(None, CAPTURES // 2), slice(CAPTURES // 2, None)


@attrs.define(eq=False)
class Job:
    """A job that runs interleaved with others."""

    run: Path
    changes: bool
    profiler: Profiler
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def begin(cls, run: Path, *, changes: bool) -> Job:
        """Create a job. If `changes` is true, it becomes slower halfway."""
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
        """Run one global step."""
        with self.profiler.capture(step):
            began_s = time.perf_counter()
            self.model(torch.rand(64, 128)).sum().backward()
            self.optimizer.step()
            if self.changes and step >= SLOW_FROM:
                until_s = time.perf_counter() + SLOWER * (time.perf_counter() - began_s)
                while time.perf_counter() < until_s:
                    pass

    def steps(self) -> dict[str, Any]:
        """Return the series of global steps from `profdeck trend`, with its changes."""
        command = [sys.executable, "-m", "profdeck", "trend", str(self.run), "--json"]
        document = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        (series,) = document["series"]
        return dict(series)


def is_found(series: dict[str, Any]) -> bool:
    """Return whether a change was found close to its true position."""
    return any(change["is_worse"] and abs(change["index"] - CAPTURES // 2) <= NEAR for change in series["changes"])


def row(what: str, jobs: Sequence[bool]) -> Row:
    """Return a row with the number of jobs for which a condition is true."""
    return Row(what=what, unit=f"of {len(jobs)}", measured=sum(jobs))


def main() -> None:
    """Run the benchmark from the command line."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=200)
    options.add_argument("--simulated", type=int, default=500)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    random_order = random.Random(0)
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
    steady = [series[job] for job in jobs if not job.changes]
    changed = [series[job] for job in jobs if job.changes]
    values = [[point["value"] for point in job["points"]] for job in steady]
    halves = [[value for job_values in values for value in job_values[half]] for half in (HALF, OTHER_HALF)]
    slower = statistics.median(halves[1]) / statistics.median(halves[0])
    rows = [
        Row(what="step time, second half divided by first", unit="times", measured=slower),
        row("jobs without a change, change found", [bool(job["changes"]) for job in steady]),
        row(
            "jobs without a change, slowdown found",
            [any(change["is_worse"] for change in job["changes"]) for job in steady],
        ),
        row(
            "jobs without a change, random order, change found",
            [has_change_in_random_order(random_order, job_values) for job_values in values],
        ),
        row("jobs that become 30 % slower, slowdown found", [is_found(job) for job in changed]),
        row(
            f"simulated jobs of {tested_series()} series without a change, change found",
            [bool(changed_parts(random_order, 1.0)) for _ in range(chosen.simulated)],
        ),
        row(
            "simulated jobs with a stage that becomes 30 % slower on one rank, found",
            [("stage 0", 2) in changed_parts(random_order, 1 + SLOWER) for _ in range(chosen.simulated // 10)],
        ),
    ]
    report(rows, chosen.json)


def simulated_points(generator: random.Random, factor: float) -> list[RankPoint]:
    """Return metrics for four ranks with independent 3 % noise. Halfway through, stage 0 of rank 2 takes `factor` times
    as long.
    """

    def times(kind: str, rank: int, capture: int) -> dict[str, float]:
        slow = {("stage", 0, 2): factor} if capture >= CAPTURES // 2 else {}
        return {str(name): generator.gauss(1e4, 300) * slow.get((kind, name, rank), 1) for name in range(5)}

    return [
        RankPoint(
            run="run",
            capture=str(capture),
            role="trainer",
            replica=None,
            stage=None,
            rank=rank,
            first_step=EVERY * capture,
            started_ns=capture,
            stall_s=None,
            is_machine_busy=False,
            numbers=RankNumbers(
                values={"global step": generator.gauss(1e5, 3000)},
                stages=times("stage", rank, capture),
                classes={},
                idle={},
                owners=times("owner", rank, capture),
            ),
        )
        for capture in range(CAPTURES)
        for rank in range(4)
    ]


def tested_series() -> int:
    """Return the number of series tested together for one simulated job."""
    return trend_of(simulated_points(random.Random(0), 1.0)).tested


def changed_parts(generator: random.Random, factor: float) -> set[tuple[str, int | None]]:
    """Return the name and rank of each series of a simulated job in which a change is found."""
    trend = trend_of(simulated_points(generator, factor))
    return {(series.what, series.rank) for series in trend.series if series.changes}


def has_change_in_random_order(generator: random.Random, values: list[float]) -> bool:
    """Return whether a change is found in the values in random order."""
    return bool(change_points(generator.sample(values, len(values))))


if __name__ == "__main__":
    main()
