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
# What leaves nothing of a capture to complain of, and what does, though the job goes on.
HARMLESS = {"quiet", "threads_of_work", "fork", "fork_exit", "fork_goes_on", "changes_directory", "no_collector"}


@attrs.frozen
class Job:
    """What a job said of itself, and how it ended."""

    seed: int
    said: list[list[str]]
    end: str
    code: int
    log: str
    report: RunReport | None

    @property
    def host(self) -> str:
        return self.said[0][1]

    @property
    def at(self) -> int:
        return int(self.said[0][2])

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The steps that are selected, from the first to the last of each capture."""
        found = [tuple(map(int, text.split(".."))) for text in self.said[0][3:]]
        return [(span[0], span[-1]) for span in found]

    def has(self, *words: object) -> bool:
        return [str(word) for word in words] in self.said


def read(directory: Path) -> Job:
    said = directory / "said"
    lines = [line.split() for line in said.read_text().splitlines()] if said.exists() else []
    end = json.loads((directory / "end.json").read_text())
    run = directory / "run"
    report = read_run(run) if (run / "run.json").exists() else None
    return Job(int(directory.name), lines, end["end"], end["code"], (directory / "log").read_text(), report)


def marks(trace: Path) -> list[int]:
    """Return the steps of a trace, read by the standard library."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    return sorted(int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#"))


def lies(job: Job) -> list[str]:
    """Return what is wrong with what is said of a job."""
    found = []
    if "Traceback" in job.log and job.host != "exception":
        found.append("a traceback")
    goes_on = job.end == "none" and job.host not in {"exception", "os_exit", "sys_exit", "abort"}
    if goes_on and (job.code, job.has("done")) != (0, True):
        found.append("profiling ended it")
    if job.code == -1:
        found.append("it hung")
    rung, seen = (sum(line[0] == word for line in job.said) for word in ("rings", "alarm"))
    if rung > seen and job.has("done") and "Exception ignored" not in job.log:
        found.append(f"{rung - seen} of {rung} timeouts of the host got lost")
    captures = {one.first_step: one for one in job.report.captures} if job.report else {}
    for first, last in job.spans if job.said else []:
        found += _lies_of(job, captures.get(first), first, last)
    asked = {step for first, last in job.spans for step in range(first, last + 1)} if job.said else set()
    return found + [f"{one}: nobody asked for it" for one in captures if one not in asked]


def _lies_of(job: Job, capture: CaptureReport | None, first: int, last: int) -> list[str]:
    disturbed = job.host not in HARMLESS and (
        job.host in {"alarms", "own_profiler_left_open"} or job.has("term") or first <= job.at <= last
    )
    ended, begun = job.has("over", last), job.has("in", first)
    if capture is None:
        return [f"{first}..{last}: it is not listed"] if begun and not disturbed else []
    status = capture.status
    if status is Status.COMPLETE:
        if not job.has("stop", last) and not disturbed:
            return [f"{first}..{last}: complete before its end"]
        return [wrong for rank in capture.ranks for one in rank.artifacts if (wrong := _wrong(one, first, last))]
    if ended and not disturbed:
        return [f"{first}..{last}: {status}, though it was over: {[rank.problems for rank in capture.ranks]}"]
    if status is Status.RECORDING:
        return [f"{first}..{last}: it is said to record, and its process is gone"]
    return []


def _wrong(artifact: Any, first: int, last: int) -> str | None:
    try:
        steps = marks(artifact.path)
    except (OSError, EOFError, ValueError) as error:
        return f"{first}..{last}: complete, and its trace is broken: {error}"
    return None if steps == list(range(first, last + 1)) else f"{first}..{last}: complete, and has the steps {steps}"


@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_said_of_jobs_that_end_at_any_moment_is_true(tmp_path: Path, part: int) -> None:
    count = JOBS // PARTS
    arguments = [str(tmp_path), str(FIRST_SEED + part * count), str(count)]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    jobs = [read(directory) for directory in sorted(tmp_path.iterdir(), key=lambda one: int(one.name))]
    assert len(jobs) == count
    wrong = {job.seed: (found, job.end, job.code, job.said[:1], job.log[-900:]) for job in jobs if (found := lies(job))}
    assert wrong == {}
