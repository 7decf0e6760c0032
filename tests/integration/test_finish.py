"""Tests for finish tasks with real processes, some of which are killed.

A finish task runs the finish command once, after all processes have finished capturing a step.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import until
from profdeck.after_capture.finish_record import FinishRecord, FinishState, read_record
from profdeck.after_capture.work_in_progress import read_finishes
from profdeck.base.processes import process_stat
from profdeck.verification.run_report import read_run

Start = Callable[..., "subprocess.Popen[str]"]

BEGIN = """
import os, signal, sys, threading
from profdeck import Profiler
def build(role="trainer", target=None, **settings):
    return Profiler.from_config(role=role, target=target, settings={
        "output": ".", "run": "run", "steps": [1], f"{role}.backend": "tally", f"{role}.ranks": "all",
        **eval(sys.argv[1]), **settings})
def print_and_wait(text):
    print(text, flush=True)
    assert sys.stdin.readline()
profiler = build()
"""
CAPTURE = BEGIN + "profiler.start(1); print_and_wait('recording'); profiler.stop()\n"
# Appends a line to ``finished``.
COUNT = 'echo "$PROFDECK_FINISH_CAPTURE $PROFDECK_FINISH_STATUS" >> finished'
# Writes to the named pipe ``news``, and blocks until the test reads the message.
SEND_NEWS = 'echo "$PROFDECK_FINISH_CAPTURE $PROFDECK_FINISH_STATUS" > news'


def command(text: str, **settings: Any) -> str:
    return repr({"finish.command": text, **settings})


def await_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    actual = process.stdout.readline()
    assert actual == f"{line}\n", process.communicate()


def send_line(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def ended(process: subprocess.Popen[str]) -> str:
    """Let a process continue until it exits with status 0, and return its stderr without the closing message."""
    output, errors = process.communicate("go on\n", timeout=60)
    assert process.returncode == 0, errors
    assert output == "", "stdout belongs to the job"
    return without_closing_message(errors)


def without_closing_message(errors: str) -> str:
    return re.sub(r"profdeck: \d+ captures? in \S+\. Next: [^\n]+\n\Z", "", errors)


def finished(path: Path) -> list[str]:
    return (path / "finished").read_text().splitlines()


def record(path: Path, step: int = 1) -> FinishRecord:
    return read_record(path / f"run/step_{step:06d}/finish.step{step}.json")


def finish_input(path: Path, step: int = 1) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / f"run/step_{step:06d}/finish.step{step}.input.json").read_text())
    return document


def await_over(path: Path, step: int = 1) -> FinishRecord:
    """Wait until a finish task has finished, even if the job that started it has exited."""
    pause = threading.Event()
    while not (current := record(path, step)).has_ended:
        assert current.by.alive is not False or not record(path, step).has_ended
        pause.wait(0.05)
    return current


@pytest.fixture
def news(tmp_path: Path) -> Callable[[], str]:
    """Return a function that waits for the next message from the named pipe ``news`` and returns it."""
    os.mkfifo(tmp_path / "news")
    return (tmp_path / "news").read_text


# Finish tasks run once per step.


def test_concurrent_ranks_have_one_finish_task_per_step(start: Start, tmp_path: Path) -> None:
    loop = "print_and_wait('ready')\nfor step in range(1, 5):\n    with profiler.capture(step): pass\n"
    settings = command(COUNT, steps=["every 2 from 1"])
    ranks = [start(BEGIN + loop, settings, RANK=str(rank), WORLD_SIZE="3") for rank in range(3)]
    for rank in ranks:
        await_line(rank, "ready")
    for rank in ranks:
        send_line(rank)
    for rank in ranks:
        ended(rank)
    assert sorted(finished(tmp_path)) == [f"step{step} complete" for step in (1, 3)]
    (capture,) = finish_input(tmp_path, 3)["ls"]["captures"]
    assert len(capture["ranks"]) == 3


def test_job_waits_for_its_finish_task_at_exit(start: Start, tmp_path: Path) -> None:
    errors = ended(start(BEGIN + "profiler.start(1); profiler.stop()", command(f"{COUNT}; echo finished")))
    assert finished(tmp_path) == ["step1 complete"]
    assert errors == ""
    assert record(tmp_path).parts[0].output == "finished\n"


def test_capture_stopped_at_exit_has_a_finish_task(start: Start, tmp_path: Path) -> None:
    ended(start(BEGIN + "profiler.start(1)", command(COUNT)))
    assert finished(tmp_path) == ["step1 partial"]


def test_stages_of_an_unfinished_step_have_a_finish_task(start: Start, tmp_path: Path) -> None:
    ended(start(BEGIN + "profiler.start(1)\nwith profiler.stage('update'): pass", command(COUNT, mode="discrete")))
    assert finished(tmp_path) == ["step1 complete"]
    (file,) = tmp_path.glob("run/step_000001/trainer/rank_0000.step1-update.json")
    assert json.loads(file.read_text())["more_follow"] is False


def test_trainer_and_fleet_have_one_finish_task(start: Start, tmp_path: Path) -> None:
    code = """
import asyncio
from tally_backend import ToyEngine
engines = [ToyEngine(ranks=2) for _ in range(3)]
settings = {"output": ".", "run": "run", "steps": [1], "trainer.backend": "tally", "rollout.backend": "tally-engine",
            "rollout.ranks": "all", **eval(sys.argv[1])}
profiler = Profiler.from_config(settings=settings)
fleet = Profiler.from_config(role=None, settings=settings, targets={"rollout": engines})
async def main():
    async with profiler, fleet, profiler.capture(1):
        async with fleet.capture(1):
            for engine in engines:
                engine.iterate("decode", "decode")
        print(os.listdir("run/step_000001"))
        print_and_wait("the fleet has ended")
asyncio.run(main())
"""
    job = start(BEGIN.replace("profiler = build()", "") + code, command(COUNT))
    assert job.stdout is not None
    assert "finish.step1.json" in job.stdout.readline()
    await_line(job, "the fleet has ended")
    assert not (tmp_path / "finished").exists()
    ended(job)
    assert finished(tmp_path) == ["step1 complete"]
    task_input = finish_input(tmp_path)
    assert [(capture["role"], capture["replica"]) for capture in task_input["ls"]["captures"]] == [
        ("rollout", 0),
        ("rollout", 1),
        ("rollout", 2),
        ("trainer", None),
    ]
    assert len(task_input["ls"]["targets"]) == 4
    assert len(task_input["files"]) == 2 * (3 * 2 + 1) + 4


# Killed processes.


def test_rank_killed_during_its_capture_is_missing(start: Start, tmp_path: Path) -> None:
    victim, survivor = (start(CAPTURE, command(COUNT), RANK=str(rank), WORLD_SIZE="2") for rank in (0, 1))
    await_line(victim, "recording")
    await_line(survivor, "recording")
    send_line(survivor)
    until(lambda: (tmp_path / "run/step_000001/finish.step1.json").exists() and record(tmp_path).waits_for)
    victim.kill()
    victim.wait()
    survivor.communicate(timeout=60)
    assert finished(tmp_path) == ["step1 partial"]
    assert finish_input(tmp_path)["missing"] == [f"trainer rank 0 (process {victim.pid} on {record(tmp_path).by.host})"]


def test_finish_task_runs_if_the_job_is_killed_after_its_capture(
    start: Start, tmp_path: Path, news: Callable[[], str]
) -> None:
    job = start(BEGIN + "profiler.start(1); profiler.stop(); os.kill(os.getpid(), signal.SIGKILL)", command(SEND_NEWS))
    job.communicate(timeout=60)
    assert news() == "step1 complete\n"
    assert await_over(tmp_path).state is FinishState.DONE


LAUNCHER = """
import os, subprocess, sys
os.setpgid(0, 0)
command = [sys.executable, "-c", *sys.argv[1:]]
ranks = [subprocess.Popen(command, env=os.environ | {"RANK": str(rank)}) for rank in (0, 1)]
for rank in ranks: rank.wait()
"""


def test_finish_task_survives_the_launchers_process_group(
    start: Start, tmp_path: Path, news: Callable[[], str]
) -> None:
    os.mkfifo(tmp_path / "gate")
    rank = BEGIN + "import time\nprofiler.start(1); profiler.stop(); time.sleep(600)"
    launcher = start(LAUNCHER, rank, command(f"{SEND_NEWS}; read line < gate; {COUNT}"), WORLD_SIZE="2")
    assert news() == "step1 complete\n"
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.communicate(timeout=60)  # neither a rank nor the finish task holds its pipes
    assert record(tmp_path).by.alive
    (tmp_path / "gate").write_text("go on\n")
    assert await_over(tmp_path).state is FinishState.DONE
    assert finished(tmp_path) == ["step1 complete"]


def test_finish_task_runs_after_sigterm_during_a_capture(start: Start, tmp_path: Path, news: Callable[[], str]) -> None:
    job = start(CAPTURE, command(SEND_NEWS))
    await_line(job, "recording")
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == -signal.SIGTERM  # the job did not wait, because the command blocks until `news` is read
    assert news() == "step1 partial\n"
    assert await_over(tmp_path).state is FinishState.DONE


def test_finish_task_continues_after_sigterm_to_the_waiting_job(
    start: Start, tmp_path: Path, news: Callable[[], str]
) -> None:
    job = start(
        BEGIN + "import atexit; atexit.register(print_and_wait, 'ending')\nprofiler.start(1); profiler.stop()",
        command(SEND_NEWS),
    )
    await_line(job, "ending")
    send_line(job)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == -signal.SIGTERM
    assert news() == "step1 complete\n"
    assert await_over(tmp_path).state is FinishState.DONE


# Tests for finish commands that fail or hang.


def test_failed_command_is_logged(start: Start, tmp_path: Path) -> None:
    errors = ended(start(BEGIN + "profiler.start(1); profiler.stop()", command("echo no space >&2; exit 3")))
    assert errors == (
        "Finish task for step1: failed: the command failed with exit status 3 (no space). "
        f"See {tmp_path / 'run/step_000001/finish.step1.json'}\n"
    )


def start_hanging_finish(start: Start, tmp_path: Path, news: Callable[[], str]) -> tuple[subprocess.Popen[str], int]:
    """Start a job whose finish command hangs. Return the job and the PID of the command."""
    job = start(
        BEGIN + "import time\nprofiler.start(1); profiler.stop(); print_and_wait('ended')",
        command("echo $$ > news; exec sleep 600"),
    )
    await_line(job, "ended")
    return job, int(news())


def test_sigterm_to_a_finish_task_kills_its_command(start: Start, tmp_path: Path, news: Callable[[], str]) -> None:
    job, pid = start_hanging_finish(start, tmp_path, news)
    os.kill(record(tmp_path).by.pid, signal.SIGTERM)
    assert "Finish task for step1: interrupted: its process was terminated by SIGTERM" in ended(job)
    until(lambda: process_stat(pid)[:1] in ([], ["Z"]))


def test_killed_finish_task_is_rerun_by_the_command_line(start: Start, tmp_path: Path, news: Callable[[], str]) -> None:
    job, pid = start_hanging_finish(start, tmp_path, news)
    assert record(tmp_path).state is FinishState.RUNNING
    os.kill(record(tmp_path).by.pid, signal.SIGKILL)
    os.killpg(pid, signal.SIGKILL)
    assert "Finish task for step1: interrupted: its process was terminated" in ended(job)
    assert [finish.state for finish in read_finishes(read_run(tmp_path / "run"))] == [FinishState.INTERRUPTED]
    call = subprocess.Popen([sys.executable, "-m", "profdeck", "finish", "run"], cwd=tmp_path, stderr=subprocess.PIPE)
    os.kill(pid := int(news()), 0)
    call.send_signal(signal.SIGINT)
    call.communicate(timeout=60)
    assert call.returncode == 130
    assert record(tmp_path).failure_reason == "its process was terminated by SIGINT"
    until(lambda: process_stat(pid)[:1] in ([], ["Z"]))


def test_ctrl_c_stops_the_wait_but_not_the_finish_task(start: Start, tmp_path: Path, news: Callable[[], str]) -> None:
    job, pid = start_hanging_finish(start, tmp_path, news)
    assert job.stderr is not None
    send_line(job)
    assert "Waiting up to" in job.stderr.readline()
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=60)
    assert without_closing_message(errors) == "The finish task continues without this process.\n"
    assert record(tmp_path).state is FinishState.RUNNING
    os.killpg(pid, signal.SIGKILL)
    assert await_over(tmp_path).failure_reason == "the command was terminated by SIGKILL"


def test_forked_child_does_not_wait_for_the_finish_task(start: Start, tmp_path: Path) -> None:
    code = BEGIN + (
        "profiler.start(1); profiler.stop()\npid = os.fork()\nif pid == 0: sys.exit()\n"
        "assert os.waitpid(pid, 0)[1] == 0\nopen('forked', 'w').close()\n"
    )
    job = start(code, command("read line < gate; " + COUNT))
    os.mkfifo(tmp_path / "gate")
    pause = threading.Event()
    while not (tmp_path / "forked").exists():  # the child has not waited
        assert job.poll() is None
        pause.wait(0.02)
    (tmp_path / "gate").write_text("go on\n")
    ended(job)
    assert finished(tmp_path) == ["step1 complete"]


# Jobs under torchrun.

TORCH_JOB = """
import os, signal, torch
import torch.distributed as dist
from profdeck import Profiler
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
profiler = Profiler.from_config("job.yaml")
for step in range(1, 4):
    with profiler.capture(step):
        model(torch.ones(2, 16)).sum().backward()
        if step == 3:
            exec(os.environ.get("AT_STEP_3", ""))
dist.barrier()
dist.destroy_process_group()
"""


def torchrun(path: Path, **environ: str) -> tuple[int, str]:
    from launcher import launch_torchrun

    (path / "job.py").write_text(TORCH_JOB)
    (path / "job.yaml").write_text(
        f"output: .\nrun: run\nsteps: [1, 3]\nroles: {{trainer: {{backend: torch, ranks: all}}}}\n"
        f"finish: {{command: {json.dumps(COUNT)}, wait_s: 30}}\n"
    )
    with launch_torchrun(path, "job.py", **environ) as launcher:
        output, _ = launcher.communicate(timeout=120)
        return launcher.returncode, output


@pytest.mark.torch
def test_torchrun_job_has_one_finish_task_per_step(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    status, output = torchrun(tmp_path)
    assert status == 0, output
    assert sorted(finished(tmp_path)) == ["step1 complete", "step3 complete"]
    task_input = finish_input(tmp_path)
    assert sorted(Path(file).name for file in task_input["files"]) == [
        f"rank_000{rank}.step1.{end}" for rank in (0, 1) for end in ("json", "trace.json.gz")
    ]


@pytest.mark.torch
@pytest.mark.slow
def test_torchrun_job_with_a_killed_rank_has_a_finish_task(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    status, output = torchrun(tmp_path, AT_STEP_3="os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None")
    assert status != 0, output
    assert await_over(tmp_path, 3).state is FinishState.DONE
    assert sorted(finished(tmp_path)) == ["step1 complete", "step3 partial"]
    (missing,) = finish_input(tmp_path, 3)["missing"]
    assert missing.startswith("trainer rank 1 (process ")
