"""Terminate jobs at random times and check that `ls` reports each run correctly.

``PROFDECK_CHAOS_JOBS`` sets the number of jobs. ``PROFDECK_TEST_SEED`` sets the seed of the first job. Failure messages
contain the seed of the job.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from profdeck.records.status import Status
from profdeck.verification.report_model import CaptureReport, RunReport
from profdeck.verification.run_report import read_run
from seeds import FIRST_SEED

pytestmark = [pytest.mark.torch, pytest.mark.slow]

JOBS = int(os.environ.get("PROFDECK_CHAOS_JOBS", "24"))
PARTS = 2
SCRIPT = Path(__file__).parent / "chaos_jobs.py"
# Host actions that do not affect captures.
HARMLESS = {"quiet", "threads_of_work", "fork", "fork_exit", "fork_goes_on", "changes_directory", "no_collector"}


@attrs.frozen
class Job:
    """Log lines of a job, and its exit."""

    seed: int
    lines: list[list[str]]
    """Fields of each line that the job wrote."""
    end: str
    code: int
    log: str
    report: RunReport | None

    @property
    def host(self) -> str:
        return self.lines[0][1]

    @property
    def action_step(self) -> int:
        """Step in which the host acts."""
        return int(self.lines[0][2])

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last step of each selected capture."""
        spans = [tuple(map(int, text.split(".."))) for text in self.lines[0][3:]]
        return [(span[0], span[-1]) for span in spans]

    def has_line(self, *fields: object) -> bool:
        return [str(field) for field in fields] in self.lines


def read_job(directory: Path) -> Job:
    path = directory / "lines"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    end = json.loads((directory / "end.json").read_text())
    run = directory / "run"
    report = read_run(run) if (run / "run.json").exists() else None
    return Job(int(directory.name), lines, end["end"], end["code"], (directory / "log").read_text(), report)


def step_numbers(trace: Path) -> list[int]:
    """Return the step numbers in a trace, read with the standard library."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    return sorted(int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#"))


def find_errors(job: Job) -> list[str]:
    """Return the errors in the report of a job."""
    errors = []
    if "Traceback" in job.log and job.host != "exception":
        errors.append("The log contains a traceback.")
    must_finish = job.end == "none" and job.host not in {"exception", "os_exit", "sys_exit", "abort"}
    if must_finish and (job.code, job.has_line("done")) != (0, True):
        errors.append("Profiling stopped the job.")
    if job.code == -1:
        errors.append("The job hung.")
    raised, caught = (sum(line[0] == event for line in job.lines) for event in ("rings", "alarm"))
    if raised > caught and job.has_line("done") and "Exception ignored" not in job.log:
        errors.append(f"{raised - caught} of {raised} alarm exceptions of the host were lost.")
    captures = {capture.first_step: capture for capture in job.report.captures} if job.report else {}
    for first, last in job.spans if job.lines else []:
        errors += _capture_errors(job, captures.get(first), first, last)
    selected = {step for first, last in job.spans for step in range(first, last + 1)} if job.lines else set()
    return errors + [f"{step}: captured, but not selected" for step in captures if step not in selected]


def _capture_errors(job: Job, capture: CaptureReport | None, first: int, last: int) -> list[str]:
    disturbed = job.host not in HARMLESS and (
        job.host in {"alarms", "own_profiler_left_open"} or job.has_line("term") or first <= job.action_step <= last
    )
    ended, begun = job.has_line("over", last), job.has_line("in", first)
    if capture is None:
        return [f"{first}..{last}: not listed"] if begun and not disturbed else []
    status = capture.status
    if status is Status.COMPLETE:
        if not job.has_line("stop", last) and not disturbed:
            return [f"{first}..{last}: complete before it ended"]
        artifacts = [artifact for rank in capture.ranks for artifact in rank.artifacts]
        return [error for artifact in artifacts if (error := _artifact_error(artifact, first, last))]
    if ended and not disturbed:
        return [f"{first}..{last}: {status}, but the capture has ended: {[rank.problems for rank in capture.ranks]}"]
    if status is Status.RECORDING:
        return [f"{first}..{last}: recording, but the process has exited"]
    return []


def _artifact_error(artifact: Any, first: int, last: int) -> str | None:
    try:
        steps = step_numbers(artifact.path)
    except (OSError, EOFError, ValueError) as error:
        return f"{first}..{last}: complete, but its trace is corrupt: {error}"
    return None if steps == list(range(first, last + 1)) else f"{first}..{last}: complete, but has the steps {steps}"


@pytest.mark.parametrize("part", range(PARTS))
def test_reports_of_terminated_jobs_are_correct(tmp_path: Path, part: int) -> None:
    count = JOBS // PARTS
    arguments = [str(tmp_path), str(FIRST_SEED + part * count), str(count)]
    result = subprocess.run([sys.executable, str(SCRIPT), *arguments], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    jobs = [read_job(directory) for directory in sorted(tmp_path.iterdir(), key=lambda directory: int(directory.name))]
    assert len(jobs) == count
    failures = {
        job.seed: (errors, job.end, job.code, job.lines[:1], job.log[-900:])
        for job in jobs
        if (errors := find_errors(job))
    }
    assert failures == {}
