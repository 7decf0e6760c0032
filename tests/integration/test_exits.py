"""However a process ends in mid-capture, what can be saved is saved, and the run says what is not."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from profdeck import Status
from profdeck.verification.report_model import RankReport
from profdeck.verification.run_report import read_run

BEGIN = """
import os, signal, sys, threading
from profdeck import Profiler
profiler = Profiler.from_config(settings={
    "output": ".", "run": "run", "steps": ["1..9"], "trainer.backend": "tally", **eval(sys.argv[1])})
"""
CAPTURE = BEGIN + "profiler.start(1)\n"
WAIT = "print('recording', flush=True)\nthreading.Event().wait()\n"


def rank(path: Path) -> RankReport:
    (capture,) = read_run(path / "run").captures
    (found,) = capture.ranks
    return found


def await_recording(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "recording\n", process.communicate()


@pytest.mark.parametrize(
    ("ending", "code", "reason"),
    [
        ("print('done')", 0, "The process ended in mid-capture."),
        ("sys.exit(3)", 3, "The process ended in mid-capture."),
        ("raise ValueError('boom')", 1, "The process ended in mid-capture."),
        ("with profiler.capture(2): raise ValueError('boom')", 1, "An exception ended it: ValueError: boom."),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "SIGTERM in mid-capture."),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "The process ended in mid-capture."),
    ],
)
def test_an_ending_in_mid_capture_leaves_a_partial_trace(start, tmp_path, ending, code, reason) -> None:
    process = start(CAPTURE + ending, "{}")
    process.communicate(timeout=60)
    assert process.returncode == code
    found = rank(tmp_path)
    assert (found.status, found.problems) == (Status.PARTIAL, (reason,))
    assert found.artifacts[0].whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_waiting_process(start, tmp_path: Path, number: signal.Signals) -> None:
    process = start(CAPTURE + WAIT, "{}")
    await_recording(process)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number
    assert rank(tmp_path).status is Status.PARTIAL


def test_a_handler_of_the_host_still_runs_and_decides(start, tmp_path: Path) -> None:
    # os.write: the signal may come while the process is still inside of the print that the test waits for.
    handler = "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'checkpoint\\n'), os._exit(5)))\n"
    process = start(BEGIN + handler + "profiler.start(1)\n" + WAIT, "{}")
    await_recording(process)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "checkpoint\n"
    assert process.returncode == 5
    assert rank(tmp_path).status is Status.PARTIAL


def test_handlers_are_only_ours_during_a_capture(start) -> None:
    code = """
before = signal.getsignal(signal.SIGTERM)
profiler.start(1)
assert signal.getsignal(signal.SIGTERM) is not before
profiler.close()
assert signal.getsignal(signal.SIGTERM) is before
signal.signal(signal.SIGTERM, signal.SIG_IGN)
profiler.start(2)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
profiler.close()
"""
    process = start(BEGIN + code, "{}")
    assert process.communicate(timeout=60)[1].count("Error") == 0
    assert process.returncode == 0


SLOW = """
import tally_backend
do = tally_backend.TallyBackend.perform
def slow(self, name, call):
    do(self, name, call)
    if name == sys.argv[2]:
        print("recording", flush=True)  # the hook is under way
        sys.stdin.readline()
tally_backend.TallyBackend.perform = slow
profiler.start(1)
profiler.close()
print("not reached", flush=True)
"""


@pytest.mark.parametrize(
    ("hook", "reason"),
    [("start", "SIGTERM in mid-capture."), ("stop", "The profiler was closed in mid-capture.")],
)
def test_a_signal_during_a_hook_waits_for_it(start, tmp_path: Path, hook: str, reason: str) -> None:
    process = start(BEGIN + SLOW, "{}", hook)
    await_recording(process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate("go on\n", timeout=60)
    assert "not reached" not in out
    assert process.returncode == -signal.SIGTERM
    found = rank(tmp_path)
    assert found.artifacts[0].whole
    assert found.problems == (reason,)


def test_a_signal_during_a_start_that_fails_is_delivered(start, tmp_path: Path) -> None:
    process = start(BEGIN + SLOW, "{'trainer.options.fail_at': 'start'}", "start")
    process.communicate(timeout=60)  # it raises before it waits: nothing is watched any more
    assert process.returncode == 0
    late = "profiler.start(1)\nassert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n" + WAIT
    process = start(BEGIN + late, "{'trainer.options.fail_at': 'start', 'run': 'late'}")
    await_recording(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("how", ["kill", "_exit"])
def test_a_rank_that_had_no_chance_is_missing(start, tmp_path: Path, how: str) -> None:
    ending = "os.kill(os.getpid(), signal.SIGKILL)" if how == "kill" else "os._exit(0)"
    process = start(CAPTURE + ending, "{}")
    process.communicate(timeout=60)
    found = rank(tmp_path)
    assert (found.status, found.artifacts) == (Status.MISSING, ())
    assert f"Process {process.pid} on" in found.problems[0]


def test_a_killed_rank_costs_no_other(start, tmp_path: Path) -> None:
    settings = "{'trainer.ranks': 'all'}"
    world = {"WORLD_SIZE": "2"}
    victim = start(CAPTURE + WAIT, settings, RANK="0", **world)
    other = start(CAPTURE + "sys.stdin.readline()\nprofiler.close()", settings, RANK="1", **world)
    await_recording(victim)
    victim.kill()
    victim.wait()
    other.communicate("go on\n", timeout=60)
    (capture,) = read_run(tmp_path / "run").captures
    assert [found.status for found in capture.ranks] == [Status.MISSING, Status.PARTIAL]
    assert capture.ranks[1].artifacts[0].whole


def test_a_recording_that_is_under_way_is_not_called_missing(start, tmp_path: Path) -> None:
    process = start(CAPTURE + WAIT, "{}")
    await_recording(process)
    assert rank(tmp_path).status is Status.RECORDING


def test_an_exit_inside_an_event_loop_saves_the_capture(start, tmp_path: Path) -> None:
    code = """
import asyncio
async def main():
    await profiler.astart(1)
    print('recording', flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    process = start(BEGIN + code, "{'trainer.options.wait_s': 0.01, 'trainer.options.thread_bound': False}")
    await_recording(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert rank(tmp_path).status is Status.PARTIAL


def test_a_lease_of_a_dead_recording_is_taken_over(start, tmp_path: Path) -> None:
    settings = "{'trainer.options.device': 'gpu-3'}"
    first = start(CAPTURE + WAIT, settings)
    await_recording(first)
    waited = start(CAPTURE, settings.replace("}", ", 'run': 'second'}"))
    waited.communicate(timeout=60)
    (capture,) = read_run(tmp_path / "second").captures
    assert capture.status is Status.MISSING
    assert capture.ranks[0].problems[0] == "The process ended in mid-capture."
    assert f"s for gpu-3, held by process {first.pid} (trainer, step1)." in capture.ranks[0].problems[1]
    first.kill()
    first.wait()
    taken = start(
        BEGIN + "with profiler.capture(1): pass\nprofiler.close()", settings.replace("}", ", 'run': 'third'}")
    )
    taken.communicate(timeout=60)
    assert read_run(tmp_path / "third").captures[0].ranks[0].artifacts[0].whole
