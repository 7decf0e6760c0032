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
FULL_RECORDING = ["Init", "CreateConfig", "Start", "Stop", "DestroyConfig", "Finalize"]

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


def make_request(name, count=None, skip=0):
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


def await_files():
    recorder._job._writer.wait()
    return recorder.reply()


def in_other_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


replies = {}


def save_reply(name, reply):
    replies[name] = {"state": reply.state, "problems": reply.problems, "iterations": reply.iterations}
"""

CAPTURES = """
recorder.start(make_request("window", 2, 1))
iterate(5)
save_reply("window", await_files())

recorder.start(make_request("stopped"))
iterate(2)
in_other_thread(recorder.stop)
in_other_thread(lambda: save_reply("pending", recorder.reply()))  # on the recording thread, a reply executes the stop
iterate()
save_reply("stopped", await_files())

recorder.start(make_request("after", 1))
iterate(2)
save_reply("after", await_files())

os.environ["PROFILING_MODE"] = "dynamic"
try:
    recorder.start(make_request("no-op"))
except ProfdeckError as error:
    replies["no-op"] = str(error)
print(json.dumps(replies))
"""


@attrs.frozen
class Engine:
    """Results of a finished engine process."""

    jobs: Any
    replies: dict[str, Any]
    """Replies of the recorder."""
    calls: list[Any]

    def capture(self, run: str) -> tuple[CaptureReport, RankReport]:
        """Check all files of a run, and return its only capture and rank."""
        (capture,) = read_run(self.jobs.directory / "profiles" / run).captures
        (rank,) = capture.ranks
        return capture, rank

    def driver_calls(self, directory: Path) -> list[str]:
        """Return the driver calls of the recording in a directory."""
        names = [call.name.removeprefix("aclprof") for call in self.calls]
        starts = [index for index, call in enumerate(self.calls) if call.name == "aclprofInit"]
        (start,) = [index for index in starts if Path(self.calls[index].arguments["path"]) == directory.resolve()]
        return names[start : min((index for index in starts if index > start), default=len(names))]


@pytest.fixture(scope="module")
def engine(driver, msprof_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine process that made several captures."""
    directory = tmp_path_factory.mktemp("engine")
    with driver.jobs(directory, PATH=msprof_path, PROFDECK_LEASE_DIR=str(directory / "leases")) as jobs:
        job = jobs(ENGINE + CAPTURES)
        yield Engine(jobs, json.loads(job.stdout.splitlines()[-1]), job.calls)


def test_window_has_the_requested_iterations(engine: Engine) -> None:
    capture, rank = engine.capture("window")
    assert engine.replies["window"] == {"state": "ended", "problems": [], "iterations": 2}
    assert (capture.status, capture.backend, capture.first_step, rank.problems) == (Status.COMPLETE, "npu", 7, ())
    (artifact,) = rank.artifacts
    assert (artifact.kind, artifact.iterations, artifact.whole) == ("ascend_pt", (1, 2), True)
    assert artifact.path.name.startswith("rank_0000.window_")
    assert artifact.path.name.endswith("_ascend_pt")
    assert engine.driver_calls(artifact.path) == FULL_RECORDING


def test_stop_from_another_thread_is_deferred(engine: Engine) -> None:
    pending = engine.replies["pending"]
    assert pending["state"] == "recording"
    assert pending["problems"] == ["The stop is deferred until the engine's next iteration."]
    assert engine.replies["stopped"] == {"state": "ended", "problems": [], "iterations": 2}
    capture, rank = engine.capture("stopped")
    (artifact,) = rank.artifacts
    assert (capture.status, artifact.iterations, artifact.whole) == (Status.COMPLETE, (0, 1), True)
    assert rank.notes[0].startswith("The stop was requested in another thread")
    assert engine.driver_calls(artifact.path) == FULL_RECORDING
    # If another thread stopped a recording, torch_npu would lose the next one.
    (later,) = engine.capture("after")[1].artifacts
    assert (later.iterations, later.whole, engine.driver_calls(later.path)) == ((0, 0), True, FULL_RECORDING)


def test_driver_is_only_called_from_the_engine_thread(engine: Engine) -> None:
    assert len({call.tid for call in engine.calls}) == 1


def test_another_profiler_in_the_environment_is_rejected(engine: Engine) -> None:
    assert engine.replies["no-op"].startswith("PROFILING_MODE=dynamic indicates that msprof profiles this process")
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
    end_process = "recorder.begin(BatchKind.DECODE, 'execute')\nos.kill(os.getpid(), signal.SIGTERM)"
    result = job(f"{ENGINE}\nrecorder.start(make_request('ended'))\niterate(2)\n{end_process}", check=False)
    assert result.returncode == -signal.SIGTERM, result.stderr
    assert [call.name.removeprefix("aclprof") for call in result.calls] == FULL_RECORDING
    _, rank = Engine(job, {}, result.calls).capture("ended")
    assert (rank.status, rank.problems) == (Status.PARTIAL, ("SIGTERM in mid-capture.",))
    assert [artifact.whole for artifact in rank.artifacts] == [True]
