"""Core's recorder of an engine's process, on an NPU: it takes the backend of that device, which drives torch_npu.

vLLM's and SGLang's own workers cannot run here: both need their builds for the NPU. That their plugins ask for the
device `npu` is tested in tests/unit/test_engine_devices.py; from there on all is real but the driver.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from profdeck import Status
from profdeck.verification.report_model import CaptureReport, RankReport
from profdeck.verification.run_report import read_run

# What the driver is told of a capture without a warm-up, which engines have none of.
WHOLE = ["Init", "CreateConfig", "Start", "Stop", "DestroyConfig", "Finalize"]

ENGINE = """
import json, os, signal, sys, threading
from concurrent.futures import wait
from pathlib import Path

import torch
import torch_npu

from profdeck.engine.worker.recorder import EngineRecorder
from profdeck.records.request import BatchKind, CaptureRequest
from profdeck.base.errors import ProfdeckError
from profdeck.base.identity import Identity
from profdeck.config.schedule import Iterations

recorder = EngineRecorder(Identity(), "npu", {"toy-engine": "1.0"})
weights = torch.ones(4).to("npu")


def ask(name, count=None, skip=0, stages=(), **options):
    # A run of its own for each, so that each is judged by itself.
    iterations = None if count is None else Iterations(count=count, skip=skip)
    return CaptureRequest(
        id=name, output=Path("profiles"), run=name, role="rollout", first_step=7, iterations=iterations,
        batch_kinds=tuple(map(BatchKind, stages)), options={"analyse": False, **options},
    )


def iterate(*batches):
    for batch in batches or ("decode",):
        recorder.begin(BatchKind(batch), f"execute {batch}")
        _ = weights + 1
        torch.npu.synchronize()
        recorder.end()


def whole():
    recorder._job._writer.wait()
    return recorder.reply()


def elsewhere(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


said = {}


def say(name, reply):
    said[name] = {"state": reply.state, "problems": reply.problems, "iterations": reply.iterations}
"""

CAPTURES = """
recorder.start(ask("window", 2, 1))
iterate(*["decode"] * 5)
say("window", whole())

recorder.start(ask("stages", 2, stages=["prefill", "decode"]))
iterate("prefill", "prefill", "decode", "prefill", "decode")
say("stages", whole())

for name in ("first", "second"):
    recorder.start(ask(name, 1))
    iterate()
    whole()

recorder.start(ask("refuses"))
iterate()
try:
    recorder.start(ask("refused"))
except ProfdeckError as error:
    said["refused"] = str(error)
iterate()
recorder.stop()
whole()

recorder.start(ask("stopped"))
iterate("decode", "decode")
elsewhere(recorder.stop)
elsewhere(lambda: say("pending", recorder.reply()))  # a reply on the recording thread would carry out the stop
iterate()
say("stopped", whole())

recorder.start(ask("after", 1))
iterate("decode", "decode")
say("after", whole())

recorder.start(ask("idle"))
recorder.stop()
say("idle", whole())

os.environ["PROFILING_MODE"] = "dynamic"
try:
    recorder.start(ask("no-op"))
except ProfdeckError as error:
    said["no-op"] = str(error)
print(json.dumps(said))
"""


@attrs.frozen
class Engine:
    """What an engine left that has ended."""

    directory: Path
    said: dict[str, Any]
    """What its recorder answered."""
    calls: list[Any]

    def capture(self, run: str, name: str | None = None) -> tuple[CaptureReport, RankReport]:
        """Read a run back, by checking every file in it."""
        report = read_run(self.directory / "profiles" / run)
        (found,) = [capture for capture in report.captures if capture.id == (name or run)]
        (rank,) = found.ranks
        return found, rank

    def driven(self, directory: Path) -> list[str]:
        """What the driver was told while it recorded into a directory."""
        names = [call.name.removeprefix("aclprof") for call in self.calls]
        begun = [index for index, call in enumerate(self.calls) if call.name == "aclprofInit"]
        (first,) = [index for index in begun if Path(self.calls[index].arguments["path"]) == directory.resolve()]
        return names[first : min((index for index in begun if index > first), default=len(names))]


@pytest.fixture(scope="module")
def engine(driver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that was asked for one capture after the other."""
    directory = tmp_path_factory.mktemp("engine")
    with driver.jobs(directory, PROFDECK_LEASE_DIR=str(directory / "leases")) as jobs:
        job = jobs(ENGINE + CAPTURES)
        yield Engine(directory, json.loads(job.stdout.splitlines()[-1]), job.calls)


def test_a_window_is_exact(engine: Engine) -> None:
    capture, rank = engine.capture("window")
    assert engine.said["window"] == {"state": "ended", "problems": [], "iterations": 2}
    assert (capture.status, capture.backend, capture.first_step, rank.problems) == (Status.COMPLETE, "npu", 7, ())
    (artifact,) = rank.artifacts
    assert (artifact.kind, artifact.iterations, artifact.whole) == ("ascend_pt", (1, 2), True)
    assert artifact.path.name.startswith("rank_0000.window_")
    assert artifact.path.name.endswith("_ascend_pt")
    assert engine.driven(artifact.path) == WHOLE


def test_kinds_of_batches_are_recorded_apart(engine: Engine) -> None:
    assert engine.said["stages"] == {"state": "ended", "problems": [], "iterations": 4}
    # The decodes have a prefill between them, which was not wanted any more.
    for name, iterations in {"stages-prefill": (0, 1), "stages-decode": (2, 2), "stages-decode-2": (4, 4)}.items():
        capture, rank = engine.capture("stages", name)
        assert (capture.status, rank.artifacts[0].iterations) == (Status.COMPLETE, iterations)
        assert engine.driven(rank.artifacts[0].path) == WHOLE


def test_one_after_the_other_begins_anew(engine: Engine) -> None:
    paths = [engine.capture(name)[1].artifacts[0].path for name in ("first", "second")]
    assert [engine.driven(path) for path in paths] == [WHOLE, WHOLE]


def test_a_second_start_is_refused_and_the_first_goes_on(engine: Engine) -> None:
    assert engine.said["refused"].startswith("Capture refuses is recording in this engine; refused cannot start")
    capture, rank = engine.capture("refuses")
    assert (capture.status, rank.artifacts[0].iterations) == (Status.COMPLETE, (0, 1))
    assert "A second start (refused) was refused." in rank.notes
    assert not (engine.directory / "profiles" / "refused").exists()


def test_a_stop_from_another_thread_waits_for_the_next_iteration(engine: Engine) -> None:
    pending = engine.said["pending"]
    assert pending["state"] == "recording"
    assert pending["problems"] == ["The end of the recording is pending until the engine's next iteration."]
    assert engine.said["stopped"] == {"state": "ended", "problems": [], "iterations": 2}
    capture, rank = engine.capture("stopped")
    (artifact,) = rank.artifacts
    assert (capture.status, artifact.iterations, artifact.whole) == (Status.COMPLETE, (0, 1), True)
    assert rank.notes[0].startswith("A stop from another thread than the one that records")
    assert engine.driven(artifact.path) == WHOLE
    # torch_npu loses the next one where another thread ends a recording.
    (later,) = engine.capture("after")[1].artifacts
    assert (later.iterations, later.whole, engine.driven(later.path)) == ((0, 0), True, WHOLE)


def test_everything_was_done_by_the_engines_thread(engine: Engine) -> None:
    assert len({call.tid for call in engine.calls}) == 1


def test_a_stop_before_the_first_iteration_is_said(engine: Engine) -> None:
    capture, rank = engine.capture("idle")
    assert (capture.status, rank.artifacts) == (Status.FAILED, ())
    assert rank.problems == ("No engine iteration ran between start and stop.",)


def test_what_would_make_it_record_nothing_is_refused(engine: Engine) -> None:
    assert engine.said["no-op"].startswith("PROFILING_MODE=dynamic says that msprof profiles this process")
    assert not (engine.directory / "profiles" / "no-op").exists()


def test_they_are_listed_as_they_should(engine: Engine) -> None:
    command = [sys.executable, "-m", "profdeck", "ls", "profiles/window", "--json"]
    done = subprocess.run(command, check=False, cwd=engine.directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (listed,) = json.loads(done.stdout)["captures"]
    (rank,) = listed["ranks"]
    assert (listed["status"], listed["backend"]) == ("complete", "npu")
    assert [artifact["kind"] for artifact in rank["artifacts"]] == ["ascend_pt"]
    assert rank["artifacts"][0]["size_bytes"] > 0


def test_the_iterations_of_a_window_are_the_steps_of_its_kernels(job, msprof) -> None:
    code = """
recorder.start(ask("window", 2, 1))
iterate(*["decode"] * 5)
whole()
"""
    job(ENGINE + code)
    job("from profdeck.cli import main\nmain()", "npu", "analyse", "profiles/window")
    report = read_run(job.directory / "profiles" / "window")
    assert report.status is Status.COMPLETE
    (artifact,) = report.captures[0].ranks[0].artifacts
    assert artifact.events
    rows = (artifact.path / "ASCEND_PROFILER_OUTPUT" / "kernel_details.csv").read_text(encoding="utf-8").splitlines()
    column = rows[0].split(",").index("Step Id")
    assert {row.split(",")[column] for row in rows[1:]} == {"1", "2"}
    trace = json.loads((artifact.path / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text(encoding="utf-8"))
    names = [event["name"] for event in trace]
    assert {"ProfilerStep#1", "ProfilerStep#2"} <= set(names)
    assert names.count("execute decode") == 2


@pytest.mark.parametrize(
    ("ending", "code", "reason"),
    [
        ("print('done')", 0, "The process ended in mid-capture."),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "SIGTERM in mid-capture."),
        (
            "recorder.begin(BatchKind('decode'), 'execute')\nos.kill(os.getpid(), signal.SIGTERM)",
            -signal.SIGTERM,
            "SIGTERM in mid-capture.",
        ),
    ],
    ids=["end", "SIGTERM", "SIGTERM in an iteration"],
)
def test_an_engine_that_ends_in_mid_capture_leaves_what_it_recorded(job, ending: str, code: int, reason: str) -> None:
    done = job(f"{ENGINE}\nrecorder.start(ask('ended'))\niterate('decode', 'decode')\n{ending}", check=False)
    assert done.returncode == code, done.stderr
    assert [name.removeprefix("aclprof") for name in done.names] == WHOLE
    _, rank = Engine(job.directory, {}, done.calls).capture("ended")
    assert (rank.status, rank.problems) == (Status.PARTIAL, (reason,))
    assert [artifact.whole for artifact in rank.artifacts] == [True]


def test_an_engine_that_is_killed_leaves_a_manifest_that_says_so(job) -> None:
    code = (
        f"{ENGINE}\nrecorder.start(ask('killed'))\niterate()\nprint('recording', flush=True)\nthreading.Event().wait()"
    )
    process, _ = job.start(code)
    assert "recording\n" in iter(process.stdout.readline, "")  # torch_npu has something to say before
    assert read_run(job.directory / "profiles" / "killed").status is Status.RECORDING
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    report = read_run(job.directory / "profiles" / "killed")
    (rank,) = report.captures[0].ranks
    assert (rank.status, rank.artifacts) == (Status.MISSING, ())
    assert rank.problems[0].startswith(f"Process {process.pid} on ")
    # What torch_npu has on the disk by then is nothing that its analysis could read.
    (problem,) = report.problems
    assert problem.startswith(f"step_000007/rollout/rank_0000.killed_{process.pid}_")
    assert problem.endswith("_ascend_pt is in no manifest.")
