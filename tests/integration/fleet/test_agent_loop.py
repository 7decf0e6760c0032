"""Tests of `examples/agent_loop` with the commands of its README. It starts a Ray cluster on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
from fleet.clusters import session_of

from profdeck import Status
from profdeck.base.outcome import Outcome
from profdeck.verification.report_model import RunReport
from profdeck.verification.run_report import read_run

pytestmark = pytest.mark.fleet

EXAMPLE = Path(__file__).parents[3] / "examples" / "agent_loop" / "agent_loop.py"
LIMIT_S = 400
"""Time limit of a job. Its two engines take a minute to start on an idle machine."""
ENDING_S = 30


def end_session(leader: int) -> None:
    """Kill a job. Its session includes Ray's processes, actors and engines."""
    for pid in session_of(leader):
        with suppress(ProcessLookupError):  # the process has just exited
            os.kill(pid, signal.SIGKILL)


@attrs.define
class Job:
    """A process that runs the example in its own directory."""

    process: subprocess.Popen[str]
    run: Path
    scratch: Path
    log: list[str] = attrs.field(factory=list)

    def read_until(self, pattern: str) -> re.Match[str]:
        """Read the output until a line matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if match := re.match(pattern, line):
                return match
        raise AssertionError("".join(self.log))

    def finish(self) -> str:
        """Wait for the exit. Return the complete output."""
        assert self.process.stdout is not None
        self.log += self.process.stdout
        assert self.process.wait(ENDING_S) == 0, "".join(self.log)
        return "".join(self.log)

    def report(self) -> RunReport:
        return read_run(self.run)

    def assert_nothing_is_left(self) -> None:
        """Assert that all processes exit, for which Ray does not wait, and that no temporary file remains."""
        deadline = time.monotonic() + ENDING_S
        while session_of(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)  # the processes are not children of this process, so it cannot wait for them
        assert session_of(self.process.pid) == []
        assert list(self.scratch.iterdir()) == []


@contextmanager
def started(cwd: Path, *arguments: str) -> Iterator[Job]:
    """Start the example, and kill it on exit."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PROFDECK", "VLLM_", "RAY_"))}
    with tempfile.TemporaryDirectory(prefix="al") as scratch:  # contains sockets, so the path must be short
        process = subprocess.Popen(
            [sys.executable, EXAMPLE, *arguments],
            cwd=cwd,
            # If the environment has a token, Ray does not write one to the home directory.
            env=kept
            | {
                "HOME": scratch,
                "TMPDIR": scratch,
                "RAY_AUTH_TOKEN": os.urandom(16).hex(),
                "KINETO_LOG_LEVEL": "6",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(LIMIT_S, end_session, [process.pid])
        timer.start()
        try:
            yield Job(process, cwd / "profiles" / "agent_loop", Path(scratch))
        finally:
            timer.cancel()
            end_session(process.pid)
            process.communicate()


def profdeck(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "profdeck", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def recorded(report: RunReport, first_step: int) -> dict[tuple[str, int | None, int], Status]:
    """Return the status of each rank of a capture, by role, replica and rank."""
    return {
        (capture.role, capture.replica, rank.rank): rank.status
        for capture in report.captures
        for rank in capture.ranks
        if capture.first_step == first_step
    }


EVERYTHING = dict.fromkeys(
    [("rollout", 0, 0), ("rollout", 1, 0), ("trainer", None, 0), ("trainer", None, 1)], Status.COMPLETE
)


def test_run_of_trainer_and_rollouts_is_complete(tmp_path) -> None:
    with started(tmp_path, "--steps", "160") as job:
        job.read_until("rollout 1: process")
        asked = profdeck("capture", "job", job.run, "--in", "3", "--steps", "2", "--json")
        log = job.finish()
        job.assert_nothing_is_left()
    assert asked.returncode == 0, asked.stderr
    report = job.report()
    assert report.status is Status.COMPLETE
    assert report.problems == ()
    assert recorded(report, 2) == EVERYTHING
    assert re.findall(r"^step (\d+): .* in capture step2$", log, re.MULTILINE) == ["2", "3"]
    # The other capture is the on-demand capture.
    (later,) = {capture.first_step for capture in report.captures} - {2}
    assert recorded(report, later) == EVERYTHING
    fleets = [target for target in report.targets if target.targets]
    assert [fleet.target for fleet in fleets] == ["fleet of 2"] * 2
    assert {record.outcome for fleet in fleets for record in fleet.targets} == {Outcome.FLUSHED}

    listed = profdeck("ls", job.run)
    assert listed.returncode == 0, listed.stdout
    summary = profdeck("summary", job.run, "--json")
    assert summary.returncode == 0, summary.stderr
    for trace in json.loads(summary.stdout)["ranks"]:
        assert trace["whole"]
        assert trace["events"] > 1000
        assert_waits_for_the_other_role(trace)
        marks = [step["stage"] or step["step"] for step in trace["steps"]]
        if trace["role"] == "rollout":
            # Two responses of 12 tokens in each of two steps. All tokens after the first one are decoded.
            assert marks.count("decode") + marks.count("mixed") >= 2 * 2 * 11
            assert {"prefill", "mixed"} & {*marks}
        else:
            first = int(trace["capture"].removeprefix("step"))
            assert marks == [first, first + 1]
            (update,) = (item for item in trace["annotations"] if item["name"] == "actor_update")
            assert update["count"] == 2


def assert_waits_for_the_other_role(trace: dict[str, Any]) -> None:
    """Assert that a trace's account contains waits for the other role and that its times add up to the steps."""
    account = trace["account"]
    assert sum(round(owner["time_us"] * 1000) for owner in account["owners"]) == round(account["time_us"] * 1000)
    waits = [owner for owner in account["owners"] if owner["kind"] == "wait for role"]
    if trace["role"] == "rollout":
        assert {wait["peer"] for wait in waits} == {"trainer"}
        assert {wait["awaited"] for wait in waits} >= {"actor_update"}
    else:
        assert {wait["peer"] for wait in waits} <= {"rollout/0", "rollout/1"}
        assert {wait["awaited"] for wait in waits} >= {"decode"}
    assert not [note for note in account["notes"] if note.startswith("Waits for")]


@pytest.mark.long
def test_rollout_killed_during_a_capture_affects_only_its_own_files(tmp_path) -> None:
    with started(tmp_path) as job:
        pid = int(job.read_until(r"rollout 1: process (\d+)")[1])
        job.read_until("step 2: .* in capture step2")
        os.kill(pid, signal.SIGKILL)
        log = job.finish()
        job.assert_nothing_is_left()
    assert "a rollout has died, 1 left" in log
    assert "step 5: " in log
    found = recorded(job.report(), 2)
    # Ray kills the engine's processes with the actor, even while they write files.
    assert found.pop(("rollout", 1, 0)) in {Status.MISSING, Status.PARTIAL}
    assert found == {place: status for place, status in EVERYTHING.items() if place != ("rollout", 1, 0)}
    (fleet,) = (target for target in job.report().targets if target.targets)
    assert fleet.status is Status.PARTIAL
    assert [record.outcome for record in fleet.targets] == [Outcome.FLUSHED, Outcome.UNREACHABLE]
    listed = profdeck("ls", job.run)
    assert listed.returncode == 1
    assert re.search(r"Step 2, rollout/1, Actor\(Rollout, \w+\):\s+unreachable", listed.stdout), listed.stdout
