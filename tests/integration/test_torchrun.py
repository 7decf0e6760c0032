"""Tests of distributed jobs under torchrun, with two ranks and gloo."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launcher import launch_torchrun  # after the skip

from profdeck import Status
from profdeck.verification.report_model import RunReport
from profdeck.verification.run_report import read_run

pytestmark = pytest.mark.torch

JOB = """
import os, signal, sys, torch
import torch.distributed as dist
from profdeck import Profiler
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = torch.nn.Linear(16, 16)
if "ALONE" not in os.environ:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
profiler = Profiler.from_config("job.yaml")
for step in range(1, 6):
    with profiler.capture(step):
        model(torch.ones(2, 16)).sum().backward()
        if step == 3:
            exec(os.environ.get("AT_STEP_3", ""))
if dist.is_initialized():
    # Ranks that exit at different times sometimes abort ("terminate called"), with or without a profiler.
    dist.barrier()
    dist.destroy_process_group()
"""

SCRIPT = """
import sys, torch
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[sys.argv.index("--count") + 1])):
    optimizer.zero_grad()
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
"""


# On a busy machine, torch 2.13 sometimes aborts a gloo rank (once in several hundred jobs).
GLOO_ABORTED = re.compile(r"^(malloc\(\)|free\(\)|corrupted|double free|terminate called)", re.MULTILINE)


def torchrun(cwd: Path, *arguments: str, **environ: str) -> tuple[int, str]:
    """Run torchrun, and return its exit status and output. If gloo aborts the job, run it again."""
    for may_retry in (True, False):
        with launch_torchrun(cwd, *arguments, **environ) as launcher:
            output, _ = launcher.communicate(timeout=120)
        if not (may_retry and GLOO_ABORTED.search(output)):
            break
        shutil.rmtree(cwd / "out", ignore_errors=True)
    return launcher.returncode, output


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "job.yaml").write_text(
        "output: out\nsteps: [1, '3..4']\nroles: {trainer: {backend: torch, ranks: all}}\n"
    )
    return tmp_path


def only_run(cwd: Path) -> RunReport:
    (run,) = (cwd / "out").iterdir()
    return read_run(run)


def test_both_ranks_write_one_run_with_a_generated_name(job: Path) -> None:
    status, output = torchrun(job, "job.py")
    assert status == 0, output
    report = only_run(job)
    assert report.status is Status.COMPLETE
    assert [(capture.id, len(capture.ranks)) for capture in report.captures] == [("step1", 2), ("step3", 2)]
    # Each trace contains its rank.
    for rank in report.captures[1].ranks:
        trace = json.loads(gzip.decompress(rank.artifacts[0].path.read_bytes()))
        assert trace["distributedInfo"]["rank"] == rank.rank == trace["profdeck"]["rank"]


def test_killed_rank_does_not_lose_other_traces(job: Path) -> None:
    # The other rank fails in its collective, but keeps its trace.
    status, output = torchrun(job, "job.py", AT_STEP_3="os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None")
    assert status != 0, output
    first, second = only_run(job).captures
    assert first.status is Status.COMPLETE
    assert {rank.rank: rank.status for rank in second.ranks} == {0: Status.PARTIAL, 1: Status.MISSING}
    assert second.ranks[0].artifacts[0].whole


@pytest.mark.slow
def test_restarted_job_does_not_overwrite_captures(job: Path) -> None:
    # No process group: gloo's second rendezvous can read addresses that the first attempt left in the store.
    # Both ranks reach step 3 before one fails. Otherwise, the launcher could kill the other before it records step 1.
    (job / "reached").mkdir()
    wait = (
        "import os, time; open(f'reached/{rank}', 'w').close()\nwhile len(os.listdir('reached')) < 2: time.sleep(0.01)"
    )
    fail = f"{wait}\nassert attempt > 0, 'boom'"
    status, output = torchrun(job, "--max-restarts", "1", "job.py", AT_STEP_3=fail, ALONE="1")
    assert status == 0, output
    statuses = {capture.id: capture.status for capture in only_run(job).captures}
    assert statuses == {
        "step1": Status.COMPLETE,
        "step1-take2": Status.COMPLETE,
        "step3": Status.PARTIAL,
        "step3-take2": Status.COMPLETE,
    }


@pytest.mark.slow
def test_unchanged_script_is_captured_on_each_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ("--steps", "2..3", "--ranks", "all", "--output", "out")
    status, output = torchrun(tmp_path, "-m", "profdeck", "run", *options, "script.py", "--count", "5")
    assert status == 0, output
    report = only_run(tmp_path)
    assert report.status is Status.COMPLETE
    assert [(capture.first_step, capture.last_step, len(capture.ranks)) for capture in report.captures] == [(2, 3, 2)]


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_each_rank(job: Path) -> None:
    (job / "waiting").mkdir()
    wait = "open(f'waiting/{rank}', 'w').close(); import threading; threading.Event().wait()"
    with launch_torchrun(job, "job.py", AT_STEP_3=wait) as launcher:
        pause = threading.Event()
        while len(list((job / "waiting").iterdir())) < 2 and launcher.poll() is None:
            pause.wait(0.05)
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=120)
    second = only_run(job).captures[1]
    assert [rank.status for rank in second.ranks] == [Status.PARTIAL, Status.PARTIAL]
    assert all("SIGTERM in mid-capture" in rank.problems[0] for rank in second.ranks)
