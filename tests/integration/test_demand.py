"""Tests of on-demand captures of a torchrun job with two gloo ranks, from the command line."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from launcher import launch_torchrun  # after the skip

from profdeck import Status
from profdeck.verification.run_report import read_run

pytestmark = [pytest.mark.torch, pytest.mark.slow]

JOB = """
import os, torch
import torch.distributed as dist
from pathlib import Path
from profdeck import Profiler
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
profiler = Profiler.from_config("job.yaml")
step, stop = 0, torch.tensor(0)
while not stop:
    with profiler.capture(step):
        with profiler.stage("update"):
            model(torch.ones(2, 16)).sum().backward()
    step += 1
    stop = torch.tensor(int(Path("stop").exists()))
    dist.broadcast(stop, 0)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "job.yaml").write_text(
        "output: out\nrun: run\nroles: {trainer: {backend: torch, ranks: all, warmup_steps: 1}}\n"
    )
    return tmp_path


@contextmanager
def request_capture(job: Path, launcher: subprocess.Popen[str], *options: str) -> Iterator[subprocess.Popen[str]]:
    """Wait until both ranks have registered, then start `profdeck capture job`."""
    pause = threading.Event()
    while len(list((job / "out" / "run" / "processes").glob("*.json"))) < 2:
        assert launcher.poll() is None, launcher.communicate()
        pause.wait(0.05)
    command = subprocess.Popen(
        [sys.executable, "-m", "profdeck", "capture", "job", "out/run", "--json", *options],
        cwd=job,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield command
    finally:
        command.kill()
        command.communicate()


def read_document(command: subprocess.Popen[str]) -> dict[str, Any]:
    stdout, stderr = command.communicate(timeout=120)
    assert command.returncode == 0, stderr
    document: dict[str, Any] = json.loads(stdout)
    assert document["complete"]
    return document


def step_names(trace: Path) -> set[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event["name"].startswith("ProfilerStep#")}


def test_both_ranks_record_the_same_steps(job: Path) -> None:
    with launch_torchrun(job, "job.py") as launcher:
        documents = []
        for steps in (2, 1):
            with request_capture(job, launcher, "--steps", str(steps)) as command:
                documents.append(read_document(command))
        (job / "stop").touch()
        output, _ = launcher.communicate(timeout=120)
        assert launcher.returncode == 0, output
    report = read_run(job / "out" / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [(capture.first_step, capture.last_step, len(capture.ranks)) for capture in report.captures] == [
        (documents[0]["first_step"], documents[0]["first_step"] + 1, 2),
        (documents[1]["first_step"], documents[1]["first_step"], 2),
    ]
    for capture in report.captures:
        steps = {f"ProfilerStep#{step}" for step in range(capture.first_step, capture.last_step + 1)}
        assert [step_names(rank.artifacts[0].path) for rank in capture.ranks] == [steps, steps]
        assert [rank.notes for rank in capture.ranks] == [(), ()]  # both captures had a warm-up


def test_captures_at_time_intervals(job: Path) -> None:
    config = job / "job.yaml"
    config.write_text(f"{config.read_text()}steps: [every 2 s for 2]\non_demand: true\n")
    run, pause = job / "out" / "run", threading.Event()
    with launch_torchrun(job, "job.py") as launcher:
        while len(list(run.glob("step_*/trainer/rank_000[01].step*.gz"))) < 4:
            assert launcher.poll() is None, launcher.communicate()
            pause.wait(0.05)
        (job / "stop").touch()
        assert launcher.wait(60) == 0, launcher.communicate()
    first, second, *later = read_run(run).captures
    assert all(capture.status is Status.COMPLETE and len(capture.ranks) == 2 for capture in (first, second))
    assert [capture.last_step - capture.first_step for capture in (first, second)] == [1, 1]
    assert len(later) < 2  # the job may have stopped during a third capture
