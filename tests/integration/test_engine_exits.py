"""Tests of engine processes that exit during a capture. The trace must be complete, and its status partial."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from profdeck import Status
from profdeck.verification.report_model import RankReport
from profdeck.verification.run_report import read_run

BEGIN = """
import os, signal, sys, threading, time
from pathlib import Path
from profdeck.engine.worker.recorder import EngineRecorder
from profdeck.records.request import CaptureRequest
from profdeck.base.identity import Identity
from profdeck.config.schedule import Iterations

recorder = EngineRecorder(Identity(), "tally-device", {})
options = eval(sys.argv[1])
iterations = Iterations(count=options.pop("count", 100), skip=options.pop("skip", 0))
request = CaptureRequest(
    id="step1", output=Path("."), run="run", role="rollout", first_step=1, options=options, iterations=iterations
)

def iterate(count):
    for _ in range(count):
        recorder.begin(None, "execute")
        recorder.end()
"""
CAPTURE = BEGIN + "recorder.start(request)\niterate(2)\n"
WAIT = "print('recording', flush=True)\nthreading.Event().wait()\n"


def rank(path: Path) -> RankReport:
    (capture,) = read_run(path / "run").captures
    (report,) = capture.ranks
    return report


def await_recording(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "recording\n", process.communicate()


ENDED = "The process ended in mid-capture."
SIGTERM = "SIGTERM in mid-capture."


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("ending", "code", "reason"),
    [
        ("print('done')", 0, ENDED),
        ("sys.exit(3)", 3, ENDED),
        ("raise ValueError('boom')", 1, ENDED),
        ("recorder.begin(None, 'execute')\nraise ValueError('boom')", 1, ENDED),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, SIGTERM),
        ("recorder.begin(None, 'execute')\nos.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, SIGTERM),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, ENDED),
    ],
)
def test_exit_during_a_capture_keeps_a_partial_trace(start, tmp_path, ending, code, reason, later) -> None:
    process = start(CAPTURE + ending, f"{{'write_later': {later}}}")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    report = rank(tmp_path)
    assert (report.status, report.problems) == (Status.PARTIAL, (reason,))
    assert report.artifacts[0].whole
    assert report.artifacts[0].events >= 4


def test_exit_before_the_window_is_reported(start, tmp_path: Path) -> None:
    process = start(CAPTURE, "{'skip': 5}")
    process.communicate(timeout=60)
    report = rank(tmp_path)
    assert (process.returncode, report.status, report.problems) == (0, Status.FAILED, (ENDED,))


def test_finished_window_is_complete_after_a_signal(start, tmp_path: Path) -> None:
    code = CAPTURE + "assert not recorder.active\nos.kill(os.getpid(), signal.SIGTERM)"
    process = start(code, "{'count': 1, 'write_later': True}")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert (rank(tmp_path).status, rank(tmp_path).problems) == (Status.COMPLETE, ())


def test_signal_to_a_busy_engine_keeps_a_partial_trace(start, tmp_path: Path) -> None:
    process = start(CAPTURE + "print('recording', flush=True)\nwhile True: iterate(1)", "{'count': 10**9}")
    await_recording(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    report = rank(tmp_path)
    assert (report.status, report.problems) == (Status.PARTIAL, (SIGTERM,))
    assert report.artifacts[0].whole


def test_signal_handler_of_the_engine_runs(start, tmp_path: Path) -> None:
    handler = """
def stop(*_):
    os.write(1, b"stopped\\n")  # print is not reentrant
    raise SystemExit(5)
signal.signal(signal.SIGTERM, stop)
"""
    process = start(CAPTURE.replace("recorder.start", handler + "recorder.start") + WAIT, "{}")
    await_recording(process)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "stopped\n"
    assert process.returncode == 5
    assert rank(tmp_path).problems == (SIGTERM,)


def test_exit_of_the_main_thread_stops_a_recording_thread(start, tmp_path: Path) -> None:
    code = """
ready = threading.Event()
def engine():
    recorder.start(request)
    iterate(2)
    ready.set()
    threading.Event().wait()
threading.Thread(target=engine, daemon=True).start()
ready.wait()
"""
    process = start(BEGIN + code, "{'thread_bound': False}")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert (rank(tmp_path).status, rank(tmp_path).problems) == (Status.PARTIAL, (ENDED,))
