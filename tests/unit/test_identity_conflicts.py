"""Tests for two processes that have the same role and rank at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from processes import ending, python_path
from profdeck import Status
from profdeck.verification.run_report import read_run

Start = Callable[..., "Rank"]

SCRIPT = """
import json, sys
from profdeck import Profiler
from profdeck.base.identity import Identity

settings, rank = json.loads(sys.argv[1]), int(sys.argv[2])
profiler = Profiler.from_config(identity=Identity(rank=rank, world_size=2), settings=settings)
print("ready", flush=True)
for line in sys.stdin:
    with profiler.capture(int(line)):
        pass
    print("captured", flush=True)
"""


class Rank:
    """A process that captures steps on command."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._wait()

    def capture(self, step: int) -> None:
        assert self.process.stdin is not None
        print(step, file=self.process.stdin, flush=True)
        self._wait()

    def end(self) -> str:
        return self.process.communicate()[1]

    def _wait(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), "the process exited"


@pytest.fixture
def start(tally_path: str, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a process in the run tmp_path/run."""
    with ending() as processes:

        def start_rank(rank: int = 0, command: tuple[str, ...] = (), **settings: Any) -> Rank:
            settings = {
                "output": str(tmp_path), "run": "run", "steps": [2, 5], "trainer.backend": "tally",
                "trainer.ranks": [0], **settings,
            }  # fmt: skip
            process = subprocess.Popen(
                [*command, sys.executable, "-c", SCRIPT, json.dumps(settings), str(rank)],
                env={**os.environ, "PYTHONPATH": python_path(tally_path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
            return Rank(process)

        yield start_rank


def read_statuses(tmp_path: Path) -> dict[str, Status]:
    report = read_run(tmp_path / "run", contents=False)
    return {capture.id: capture.status for capture in report.captures}


IN_NAMESPACE = pytest.param(
    ("unshare", "--pid", "--fork", "--mount-proc"),
    marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a PID namespace"),
)


@pytest.mark.parametrize("on_demand", [True, False])
@pytest.mark.parametrize("command", [(), IN_NAMESPACE], ids=["one host", "two containers"])
def test_rank_of_two_live_processes_is_not_complete(
    start: Start, tmp_path: Path, command: tuple[str, ...], *, on_demand: bool
) -> None:
    first, second = start(on_demand=on_demand, command=command), start(on_demand=on_demand, command=command)
    for step, order in ((2, (first, second)), (5, (second, first))):
        for rank in order:  # one after the other, so that the recordings do not overlap
            rank.capture(step)
    errors = first.end(), second.end()

    partial = Status.PARTIAL
    assert read_statuses(tmp_path) == {
        "step2": partial,
        "step2-take2": partial,
        "step5": partial,
        "step5-take2": partial,
    }
    for error in errors:
        assert "is also trainer rank 0. Start the processes with a launcher that sets ranks" in error
    report = read_run(tmp_path / "run")
    assert [len(rank.problems) for capture in report.captures for rank in capture.ranks] == [1, 1, 1, 1]


@pytest.mark.parametrize("on_demand", [True, False])
def test_process_that_joins_after_a_capture_of_its_rank_is_not_a_restart(
    start: Start, tmp_path: Path, *, on_demand: bool
) -> None:
    first = start(on_demand=on_demand)
    first.capture(2)
    second = start(on_demand=on_demand)  # the first process is still running
    second.capture(2)
    assert f"Process {first.process.pid} on" in second.end()
    first.end()
    assert read_statuses(tmp_path) == {"step2": Status.COMPLETE, "step2-take2": Status.PARTIAL}


def test_processes_of_a_rank_that_capture_different_steps_are_found(start: Start, tmp_path: Path) -> None:
    first, second = start(steps=[2]), start(steps=[5])
    first.capture(2)
    second.capture(5)
    first.end()
    second.end()
    # Step 5 is complete because the first process may have exited before then.
    assert read_statuses(tmp_path) == {"step2": Status.PARTIAL, "step5": Status.COMPLETE}


def test_each_other_process_of_a_rank_is_named_once(start: Start, tmp_path: Path) -> None:
    ranks = [start(on_demand=False) for _ in range(3)]
    for rank in ranks:
        rank.capture(2)
    for rank in ranks:
        rank.end()
    captures = read_run(tmp_path / "run").captures
    problems = [problem for capture in captures for rank in capture.ranks for problem in rank.problems]
    for rank in ranks:
        assert [f"Process {rank.process.pid} on" in problem for problem in problems].count(True) == 2
    assert len(problems) == 6


def test_second_process_of_a_rank_is_named_before_a_capture(start: Start) -> None:
    first, second = start(), start()
    assert f"Process {first.process.pid} on" in (error := second.end())
    assert "is also trainer rank 0" in error
    assert first.end() == ""


@pytest.mark.parametrize("on_demand", [True, False])
@pytest.mark.parametrize("is_killed", [True, False])
def test_restarted_process_is_not_a_conflict(start: Start, tmp_path: Path, *, on_demand: bool, is_killed: bool) -> None:
    first = start(on_demand=on_demand)
    first.capture(2)
    first.capture(5)
    if is_killed:
        first.process.kill()
    first.end()
    second = start(on_demand=on_demand)
    second.capture(2)

    assert "too" not in second.end()
    assert read_statuses(tmp_path) == dict.fromkeys(("step2", "step2-take2", "step5"), Status.COMPLETE)


def test_conflict_with_an_exited_process_of_another_host_is_found(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    first.capture(2)
    second.capture(2)
    first.end()
    second.end()
    for name, host in (("step2", "first-host"), ("step2-take2", "second-host")):
        file = tmp_path / f"run/step_000002/trainer/rank_0000.{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"host": host, "problems": [], "status": "complete"}))

    report = read_run(tmp_path / "run")

    first_problems, second_problems = (rank.problems for capture in report.captures for rank in capture.ranks)
    assert "on second-host is also trainer rank 0" in first_problems[0]
    assert "on first-host is also trainer rank 0" in second_problems[0]
