"""Tests of other torch profilers that a job starts or stops during a capture. They must continue."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from profdeck import Status
from profdeck.verification.report_model import CaptureReport
from profdeck.verification.run_report import read_run

pytestmark = [pytest.mark.torch, pytest.mark.slow]

TORCH = tuple(int(number) for number in importlib.metadata.version("torch").split(".")[:2])

BEGIN = """
import sys, threading, torch
from torch.profiler import profile
from profdeck import Profiler

settings = {"output": ".", "run": "run", "steps": ["1..2", 5], "trainer.backend": "torch"}
profiler = Profiler.from_config(settings=settings)
model = torch.nn.Linear(8, 8)

def work():
    model(torch.rand(4, 8)).sum().backward()

def loop(host):
    for step in range(8):
        with profiler.capture(step):
            work()
            host(step)
            work()
    print("the job went on")
"""
IN_ITS_THREAD = """
def host(step):
    if step == 1:
        with OTHER as other:
            work()
        other.export_chrome_trace("other.json")
loop(host)
"""
OPEN = """
other = profile()
def host(step):
    if step == 1:
        other.start()
    if step == 6:
        other.stop()
        other.export_chrome_trace("other.json")
loop(host)
"""
IN_ANOTHER_THREAD = """
begun, over = threading.Event(), threading.Event()
def record():
    with profile() as other:
        work()
        begun.set()
        over.wait()
    other.export_chrome_trace("other.json")
thread = threading.Thread(target=record)
def host(step):
    if step == BEGINS:
        thread.start()
        begun.wait()
    if step == ENDS:
        over.set()
        thread.join()
loop(host)
"""
BEGAN = "Another torch profiler started in this process"
ACTIVE = "Another torch profiler is already active in this process"


def run(start, tmp_path: Path, code: str) -> list[CaptureReport]:
    process = start(BEGIN + code)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output.strip()) == (0, "the job went on"), errors
    assert "USDT" not in errors  # a message of Kineto
    if "other.json" in code:
        assert json.loads((tmp_path / "other.json").read_text())
    return sorted(read_run(tmp_path / "run").captures, key=lambda capture: capture.first_step)


@pytest.mark.parametrize(
    "other", ["profile()", "torch.autograd.profiler.profile()", "torch.autograd.profiler_legacy.profile()"]
)
def test_capture_stops_if_a_profiler_starts_in_its_thread(start, tmp_path: Path, other: str) -> None:
    first, second = run(start, tmp_path, IN_ITS_THREAD.replace("OTHER", other))
    (rank,) = first.ranks
    assert (rank.status, len(rank.problems)) == (Status.PARTIAL, 1)
    assert rank.problems[0].startswith(BEGAN)
    assert rank.artifacts[0].whole
    assert second.status is Status.COMPLETE


def test_capture_fails_while_another_profiler_is_active(start, tmp_path: Path) -> None:
    first, second = run(start, tmp_path, OPEN)
    assert first.ranks[0].problems[0].startswith(BEGAN)
    assert (second.status, second.ranks[0].status) == (Status.FAILED, Status.FAILED)
    assert second.ranks[0].problems[0].startswith(ACTIVE)


# Torch 2.11 raises "Can't disable Kineto profiler when it's not running" in the second thread.
@pytest.mark.skipif(TORCH < (2, 13), reason="torch before 2.13 cannot start a profiler while another thread has one")
@pytest.mark.parametrize(
    ("begins", "ends", "statuses"),
    [
        (0, 0, [Status.COMPLETE, Status.COMPLETE]),  # during warm-up: the capture starts cold
        (1, 1, [Status.FAILED, Status.COMPLETE]),
        (1, 3, [Status.FAILED, Status.COMPLETE]),
        (5, 7, [Status.COMPLETE, Status.FAILED]),
        (0, 7, [Status.FAILED, Status.FAILED, Status.FAILED]),
    ],
)
def test_profiler_in_another_thread_fails_overlapping_captures(
    start, tmp_path: Path, begins: int, ends: int, statuses: list[Status]
) -> None:
    code = IN_ANOTHER_THREAD.replace("BEGINS", str(begins)).replace("ENDS", str(ends))
    captures = run(start, tmp_path, code)
    assert [capture.status for capture in captures] == statuses
    for capture in captures:
        if capture.status is Status.FAILED:
            assert capture.ranks[0].problems[0].startswith((BEGAN, ACTIVE))


THREADS = """
import threading, torch
from profdeck import Profiler

together = threading.Barrier(2)

def job(role):
    torch.set_num_threads(1)
    settings = {"output": ".", "run": "run", "steps": ["1..3"], f"{role}.backend": "torch"}
    profiler = Profiler.from_config(role=role, settings=settings)
    for step in range(6):
        together.wait()
        with profiler.capture(step):
            torch.rand(8, 8).sum()
    profiler.close()

threads = [threading.Thread(target=job, args=[role]) for role in ("actor", "critic")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("the job went on")
"""


def test_profilers_in_two_threads_take_turns(start, tmp_path: Path) -> None:
    process = start(THREADS)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output.strip()) == (0, "the job went on"), errors
    captures = read_run(tmp_path / "run").captures
    statuses = {capture.role: capture.status for capture in captures}
    assert statuses.keys() == {"actor", "critic"}
    assert sorted(statuses.values()) in ([Status.COMPLETE, Status.PARTIAL], [Status.COMPLETE, Status.MISSING])
    (late,) = [capture for capture in captures if capture.status is not Status.COMPLETE]
    was_never_started = (
        late.status is Status.MISSING
    )  # the other capture ended after the last step boundary of this capture
    problem = (
        "The device did not become available" if was_never_started else "because the capture was waiting for a device"
    )
    assert problem in late.ranks[0].problems[0]
