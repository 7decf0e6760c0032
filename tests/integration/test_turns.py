"""Tests of a trainer and an engine on one device, in separate processes that may be killed. They record in turn."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from profdeck import Status
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.verification.run_report import read_run

# Each process executes one line of code at a time and prints a line after each.
LOOP = """
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
TRAINER = """
import os, sys
from profdeck import Profiler
trainer = Profiler.from_config(settings={
    "output": ".", "run": "run", "steps": ["1..9"], "on_demand": False,
    **{f"trainer.{key}": value for key, value in eval(sys.argv[1]).items()}})
def work(): pass
"""
ENGINE = """
import os, sys
from pathlib import Path
from profdeck.engine.worker.recorder import EngineRecorder
from profdeck.records.request import CaptureRequest
from profdeck.base.identity import Identity
from profdeck.config.schedule import Iterations

device, options = eval(sys.argv[1])
engine = EngineRecorder(Identity(), device, {})
def work(): pass
def start_capture(count):
    engine.start(CaptureRequest(
        id="step1", output=Path("."), run="run", role="rollout", first_step=1, iterations=Iterations(count=count),
        options=options))
def iterate(count):
    for _ in range(count):
        engine.begin(None, "execute")
        work()
        engine.end()
"""
TALLY = {"backend": "tally", "options.device": "gpu-3"}
TALLY_ENGINE = ("tally-device", {"device": "gpu-3"})


class Process:
    """Child process that executes lines of code."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def execute(self, line: str) -> None:
        """Execute a line of code, and wait until it has finished."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n", self.process.communicate()

    def finish(self, number: signal.Signals | None = None) -> int:
        """Send a signal, or close stdin, and return the exit status."""
        if number is not None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        assert number is not None or self.process.returncode == 0, errors
        return self.process.returncode


@pytest.fixture
def trainer(start: Callable[..., subprocess.Popen[str]]) -> Process:
    return Process(start(TRAINER + LOOP, repr(TALLY)))


@pytest.fixture
def engine(start: Callable[..., subprocess.Popen[str]]) -> Process:
    return Process(start(ENGINE + LOOP, repr(TALLY_ENGINE)))


def manifests(path: Path) -> dict[str, Manifest]:
    """Read the manifests of the run, keyed by role."""
    files = filter(is_manifest, path.glob("run/step_000001/*/*.json"))
    return {manifest.role: manifest for manifest in map(read_manifest, files)}


def test_trainer_records_after_the_engine_is_killed(trainer: Process, engine: Process, tmp_path: Path) -> None:
    engine.execute("start_capture(9)")
    engine.execute("iterate(2)")
    trainer.execute("trainer.start(1)")
    trainer.execute("trainer.step(0, 'mini_batch')")
    waits_for = f"gpu-3, held by process {engine.pid} (rollout, step1)"
    assert manifests(tmp_path)["trainer"].waits_for == waits_for
    engine.finish(signal.SIGKILL)
    trainer.execute("trainer.step(1, 'mini_batch')")
    assert manifests(tmp_path)["trainer"].waits_for is None
    trainer.execute("trainer.close()")
    trainer.finish()
    manifest = manifests(tmp_path)["trainer"]
    assert (manifest.status, manifest.problems) == (Status.PARTIAL, ("The profiler was closed in mid-capture.",))
    assert f"s for {waits_for}, and started in step 1." in manifest.notes[0]
    assert {capture.role: capture.status for capture in read_run(tmp_path / "run").captures} == {
        "trainer": Status.PARTIAL,
        "rollout": Status.MISSING,
    }


def test_engine_records_after_the_trainer_is_killed(trainer: Process, engine: Process, tmp_path: Path) -> None:
    trainer.execute("trainer.start(1)")
    engine.execute("start_capture(2)")
    engine.execute("iterate(3)")
    trainer.finish(signal.SIGKILL)
    engine.execute("iterate(3)")
    engine.finish()
    manifest = manifests(tmp_path)["rollout"]
    assert (manifest.status, manifest.problems, manifest.artifacts[0].iterations) == (Status.COMPLETE, (), (3, 4))
    assert (
        f"s for gpu-3, held by process {trainer.pid} (trainer, step1), and started at iteration 3." in manifest.notes[0]
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("second", ["trainer", "rollout"])
def test_waiting_process_that_exits_is_missing(
    trainer: Process, engine: Process, tmp_path: Path, second: str, number: signal.Signals
) -> None:
    if second == "trainer":
        engine.execute("start_capture(9)")
        trainer.execute("trainer.start(1)")
        trainer.execute("trainer.step(0, 'mini_batch')")
    else:
        trainer.execute("trainer.start(1)")
        engine.execute("start_capture(9)")
        engine.execute("iterate(2)")
    waiting, holder = (trainer, engine) if second == "trainer" else (engine, trainer)
    assert waiting.finish(number) == -number
    holder.finish()
    manifest = manifests(tmp_path)[second]
    assert f"held by process {holder.pid} " in (manifest.waits_for or "")
    (report,) = (capture for capture in read_run(tmp_path / "run").captures if capture.role == second)
    assert report.status is Status.MISSING
    if number is signal.SIGKILL:
        assert manifest.status is Status.RECORDING
        assert report.ranks[0].problems[0].endswith("exited without ending the capture.")
    else:
        reason = "SIGTERM in mid-capture." if number is signal.SIGTERM else "The process ended in mid-capture."
        assert (manifest.status, manifest.problems[0]) == (Status.MISSING, reason)
        assert manifest.problems[1].startswith("The device did not become available: the capture waited ")


# Tests with the torch recorder.

WORK = """
import torch
def work():
    with torch.no_grad():
        torch.ones(64, 64) @ torch.ones(64, 64)
"""


# Stubs `torch.cuda` for a host with one GPU.
GPU_HOST = """
import sys, torch
from types import SimpleNamespace
initialized = {initialized}
def initialize():
    raise AssertionError("CUDA was initialized.")
torch.cuda.is_available = lambda: True
torch.cuda.is_initialized = lambda: initialized
torch.cuda._lazy_init = initialize
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="stub")
torch.cuda.synchronize = lambda: initialized or initialize()
activities = {{torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}}
torch.autograd.profiler._supported_activities = lambda: activities  # as in a CUDA build of torch
"""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("initialized", [pytest.param(False, marks=pytest.mark.long), True])
def test_ranks_take_turns_on_a_gpu_only_if_they_use_it(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, initialized: bool
) -> None:
    def rank(number: int) -> Process:
        identity = f"import os\nos.environ['RANK'], os.environ['WORLD_SIZE'] = '{number}', '2'\n"
        code = identity + GPU_HOST.format(initialized=initialized) + TRAINER + WORK + LOOP
        return Process(start(code, repr({"backend": "torch", "ranks": "all"})))

    first, second = rank(0), rank(1)
    first.execute("trainer.start(1)")
    second.execute("trainer.start(1)")
    waits_for = f"gpu-stub, held by process {first.pid} (trainer, step1)" if initialized else None
    second.execute(f"assert trainer.active.waits_for == {waits_for!r}, trainer.active")
    for process in (first, second):
        process.execute("work(); trainer.close()")
        process.finish()
    (capture,) = read_run(tmp_path / "run").captures
    expected = [Status.PARTIAL, Status.MISSING if initialized else Status.PARTIAL]  # close() interrupted the captures
    assert [rank.status for rank in capture.ranks] == expected
