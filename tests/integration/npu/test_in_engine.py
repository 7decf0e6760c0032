"""Tests of core's engine recorder with the NPU backend, the real torch_npu and the stub driver.

The workers of vLLM and SGLang cannot run here, because they require NPU builds.
tests/unit/test_engine_devices.py checks that their plugins request the device `npu`.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from profdeck import Status
from profdeck.verification.report_model import CaptureReport, RankReport
from profdeck.verification.run_report import read_run

# Driver calls of a capture without warm-up. Engine captures have no warm-up.
WHOLE = ["Init", "CreateConfig", "Start", "Stop", "DestroyConfig", "Finalize"]

ENGINE = """
import json, os, signal, sys, threading
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


def ask(name, count=None, skip=0):
    # Each capture has its own run, which is checked separately.
    iterations = None if count is None else Iterations(count=count, skip=skip)
    return CaptureRequest(
        id=name, output=Path("profiles"), run=name, role="rollout", first_step=7, iterations=iterations,
        options={"analyse": False},
    )


def iterate(count=1):
    for _ in range(count):
        recorder.begin(BatchKind.DECODE, "execute decode")
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
iterate(5)
say("window", whole())

recorder.start(ask("stopped"))
iterate(2)
elsewhere(recorder.stop)
elsewhere(lambda: say("pending", recorder.reply()))  # a reply on the recording thread would execute the stop
iterate()
say("stopped", whole())

recorder.start(ask("after", 1))
iterate(2)
say("after", whole())

os.environ["PROFILING_MODE"] = "dynamic"
try:
    recorder.start(ask("no-op"))
except ProfdeckError as error:
    said["no-op"] = str(error)
print(json.dumps(said))
"""


@attrs.frozen
class Engine:
    """Results of a finished engine process."""

    jobs: Any
    said: dict[str, Any]
    """Replies of the recorder."""
    calls: list[Any]

    def capture(self, run: str) -> tuple[CaptureReport, RankReport]:
        """Check all files of a run, and return its only capture and rank."""
        (capture,) = read_run(self.jobs.directory / "profiles" / run).captures
        (rank,) = capture.ranks
        return capture, rank

    def driven(self, directory: Path) -> list[str]:
        """Return the driver calls of the recording in a directory."""
        names = [call.name.removeprefix("aclprof") for call in self.calls]
        begun = [index for index, call in enumerate(self.calls) if call.name == "aclprofInit"]
        (first,) = [index for index in begun if Path(self.calls[index].arguments["path"]) == directory.resolve()]
        return names[first : min((index for index in begun if index > first), default=len(names))]


@pytest.fixture(scope="module")
def engine(driver, msprof_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine process that made several captures."""
    directory = tmp_path_factory.mktemp("engine")
    with driver.jobs(directory, PATH=msprof_path, PROFDECK_LEASE_DIR=str(directory / "leases")) as jobs:
        job = jobs(ENGINE + CAPTURES)
        yield Engine(jobs, json.loads(job.stdout.splitlines()[-1]), job.calls)


def test_window_has_the_requested_iterations(engine: Engine) -> None:
    capture, rank = engine.capture("window")
    assert engine.said["window"] == {"state": "ended", "problems": [], "iterations": 2}
    assert (capture.status, capture.backend, capture.first_step, rank.problems) == (Status.COMPLETE, "npu", 7, ())
    (artifact,) = rank.artifacts
    assert (artifact.kind, artifact.iterations, artifact.whole) == ("ascend_pt", (1, 2), True)
    assert artifact.path.name.startswith("rank_0000.window_")
    assert artifact.path.name.endswith("_ascend_pt")
    assert engine.driven(artifact.path) == WHOLE


def test_stop_from_another_thread_is_deferred(engine: Engine) -> None:
    pending = engine.said["pending"]
    assert pending["state"] == "recording"
    assert pending["problems"] == ["The end of the recording is pending until the engine's next iteration."]
    assert engine.said["stopped"] == {"state": "ended", "problems": [], "iterations": 2}
    capture, rank = engine.capture("stopped")
    (artifact,) = rank.artifacts
    assert (capture.status, artifact.iterations, artifact.whole) == (Status.COMPLETE, (0, 1), True)
    assert rank.notes[0].startswith("A stop from another thread than the one that records")
    assert engine.driven(artifact.path) == WHOLE
    # If another thread stopped a recording, torch_npu would lose the next one.
    (later,) = engine.capture("after")[1].artifacts
    assert (later.iterations, later.whole, engine.driven(later.path)) == ((0, 0), True, WHOLE)


def test_driver_is_only_called_from_the_engine_thread(engine: Engine) -> None:
    assert len({call.tid for call in engine.calls}) == 1


def test_another_profiler_in_the_environment_is_rejected(engine: Engine) -> None:
    assert engine.said["no-op"].startswith("PROFILING_MODE=dynamic indicates that msprof profiles this process")
    assert not (engine.jobs.directory / "profiles" / "no-op").exists()


def test_kernel_steps_are_the_iterations_of_the_window(engine: Engine) -> None:
    engine.jobs("from profdeck.cli import main\nmain()", "npu", "analyse", "profiles/window")
    capture, rank = engine.capture("window")
    (artifact,) = rank.artifacts
    assert (capture.status, artifact.events > 0) == (Status.COMPLETE, True)
    rows = (artifact.path / "ASCEND_PROFILER_OUTPUT" / "kernel_details.csv").read_text(encoding="utf-8").splitlines()
    column = rows[0].split(",").index("Step Id")
    assert {row.split(",")[column] for row in rows[1:]} == {"1", "2"}
    trace = json.loads((artifact.path / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text(encoding="utf-8"))
    names = [event["name"] for event in trace]
    assert {"ProfilerStep#1", "ProfilerStep#2"} <= set(names)
    assert names.count("execute decode") == 2


def test_engine_exit_during_an_iteration_keeps_the_recording(job) -> None:
    ending = "recorder.begin(BatchKind.DECODE, 'execute')\nos.kill(os.getpid(), signal.SIGTERM)"
    done = job(f"{ENGINE}\nrecorder.start(ask('ended'))\niterate(2)\n{ending}", check=False)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert [call.name.removeprefix("aclprof") for call in done.calls] == WHOLE
    _, rank = Engine(job, {}, done.calls).capture("ended")
    assert (rank.status, rank.problems) == (Status.PARTIAL, ("SIGTERM in mid-capture.",))
    assert [artifact.whole for artifact in rank.artifacts] == [True]
