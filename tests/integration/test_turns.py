"""A trainer and an engine in processes of their own on one device: they take turns, whatever becomes of them."""

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

# Each process does one line of code at a time and says when it is done.
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
def ask(count):
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
    """One process that does as it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def do(self, line: str) -> None:
        """Let it do something, and wait until it has."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n", self.process.communicate()

    def end(self, number: signal.Signals | None = None) -> int:
        """End it, by a signal or because nothing more is to be done."""
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
    """Return the manifests of the run by role."""
    files = filter(is_manifest, path.glob("run/step_000001/*/*.json"))
    return {manifest.role: manifest for manifest in map(read_manifest, files)}


def test_the_holder_is_killed(trainer: Process, engine: Process, tmp_path: Path) -> None:
    engine.do("ask(9)")
    engine.do("iterate(2)")
    trainer.do("trainer.start(1)")
    trainer.do("trainer.step(0, 'mini_batch')")
    held = f"gpu-3, held by process {engine.pid} (rollout, step1)"
    assert manifests(tmp_path)["trainer"].waits_for == held
    engine.end(signal.SIGKILL)
    trainer.do("trainer.step(1, 'mini_batch')")
    assert manifests(tmp_path)["trainer"].waits_for is None
    trainer.do("trainer.close()")
    trainer.end()
    found = manifests(tmp_path)["trainer"]
    assert (found.status, found.problems) == (Status.PARTIAL, ("The profiler was closed in mid-capture.",))
    assert f"s for {held}, and started in step 1." in found.notes[0]
    assert {one.role: one.status for one in read_run(tmp_path / "run").captures} == {
        "trainer": Status.PARTIAL,
        "rollout": Status.MISSING,
    }


def test_the_holder_is_killed_and_the_engine_waits(trainer: Process, engine: Process, tmp_path: Path) -> None:
    trainer.do("trainer.start(1)")
    engine.do("ask(2)")
    engine.do("iterate(3)")
    trainer.end(signal.SIGKILL)
    engine.do("iterate(3)")
    engine.end()
    found = manifests(tmp_path)["rollout"]
    assert (found.status, found.problems, found.artifacts[0].iterations) == (Status.COMPLETE, (), (3, 4))
    assert f"s for gpu-3, held by process {trainer.pid} (trainer, step1), and started at iteration 3." in found.notes[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("second", ["trainer", "rollout"])
def test_who_waits_is_ended(
    trainer: Process, engine: Process, tmp_path: Path, second: str, number: signal.Signals
) -> None:
    if second == "trainer":
        engine.do("ask(9)")
        trainer.do("trainer.start(1)")
        trainer.do("trainer.step(0, 'mini_batch')")
    else:
        trainer.do("trainer.start(1)")
        engine.do("ask(9)")
        engine.do("iterate(2)")
    waiting, other = (trainer, engine) if second == "trainer" else (engine, trainer)
    assert waiting.end(number) == -number
    other.end()
    found = manifests(tmp_path)[second]
    assert f"held by process {other.pid} " in (found.waits_for or "")
    (report,) = (one for one in read_run(tmp_path / "run").captures if one.role == second)
    assert report.status is Status.MISSING
    if number is signal.SIGKILL:
        assert found.status is Status.RECORDING
        assert report.ranks[0].problems[0].endswith("exited without ending the capture.")
    else:
        why = "SIGTERM in mid-capture." if number is signal.SIGTERM else "The process ended in mid-capture."
        assert (found.status, found.problems[0]) == (Status.MISSING, why)
        assert found.problems[1].startswith("The device did not become available: the capture waited ")


# With the recorder of torch.

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
    first.do("trainer.start(1)")
    second.do("trainer.start(1)")
    held = f"gpu-stub, held by process {first.pid} (trainer, step1)" if initialized else None
    second.do(f"assert trainer.active.waits_for == {held!r}, trainer.active")
    for process in (first, second):
        process.do("work(); trainer.close()")
        process.end()
    (capture,) = read_run(tmp_path / "run").captures
    expected = [Status.PARTIAL, Status.MISSING if initialized else Status.PARTIAL]  # close() interrupted the captures
    assert [found.status for found in capture.ranks] == expected
