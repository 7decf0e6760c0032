"""Tests of processes that exit during a capture. Traces are saved if possible, and the run reports missing ranks."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

import processes
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
    (report,) = capture.ranks
    return report


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
def test_exit_during_a_capture_keeps_a_partial_trace(start, tmp_path, ending, code, reason) -> None:
    process = start(CAPTURE + ending, "{}")
    process.communicate(timeout=60)
    assert process.returncode == code
    report = rank(tmp_path)
    assert (report.status, report.problems) == (Status.PARTIAL, (reason,))
    assert report.artifacts[0].whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_a_waiting_process_keeps_a_partial_trace(start, tmp_path: Path, number: signal.Signals) -> None:
    process = start(CAPTURE + WAIT, "{}")
    await_recording(process)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number
    assert rank(tmp_path).status is Status.PARTIAL


def test_signal_to_a_process_group_keeps_a_partial_trace(start, tmp_path: Path) -> None:
    code = """
import subprocess
def on_child_exit(*_):
    raise RuntimeError('worker is killed')  # like torch's data loader
signal.signal(signal.SIGCHLD, on_child_exit)
child = subprocess.Popen(['sleep', '60'])
numbers = {signal.SIGTERM, signal.SIGCHLD}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # both handlers become ready at the same time
child.terminate()
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
os.kill(os.getpid(), signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
"""
    process = start(CAPTURE + code, "{}")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    report = rank(tmp_path)
    assert (report.status, report.problems) == (Status.PARTIAL, ("SIGTERM in mid-capture.",))
    assert report.artifacts[0].whole


def test_signal_is_not_taken_from_a_host_that_blocks_it(start, tmp_path: Path) -> None:
    code = """
numbers = {signal.SIGUSR1, signal.SIGTERM}  # by default, both terminate a process that does not block them
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
for number in numbers:
    os.kill(os.getpid(), number)
    assert signal.sigwait(numbers) == number
"""
    process = start(CAPTURE + code, "{}")
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert rank(tmp_path).problems == ("The process ended in mid-capture.",)


def test_signal_handler_of_the_host_runs(start, tmp_path: Path) -> None:
    # os.write, because the signal can interrupt a print.
    handler = "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'checkpoint\\n'), os._exit(5)))\n"
    process = start(BEGIN + handler + "profiler.start(1)\n" + WAIT, "{}")
    await_recording(process)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "checkpoint\n"
    assert process.returncode == 5
    assert rank(tmp_path).status is Status.PARTIAL


NATIVE_WAIT = """
import ctypes
def wait_in_native_code():
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    print('recording', flush=True)
    libc.pthread_mutex_lock(mutex)  # deadlocks with the GIL released; signals do not interrupt it
"""


def await_native_wait(process: subprocess.Popen[str]) -> None:
    await_recording(process)
    processes.until(lambda: Path(f"/proc/{process.pid}/wchan").read_text(encoding="ascii").startswith("futex"))


STUCK = "SIGTERM in mid-capture; the main thread was waiting in a call and did not stop the recording within 5 seconds."


@pytest.mark.parametrize("settings", ["{}", "{'trainer.options.thread_bound': False}"])
def test_sigterm_ends_a_process_that_waits_in_native_code(start, tmp_path: Path, settings: str) -> None:
    process = start(CAPTURE + NATIVE_WAIT + "wait_in_native_code()", settings)
    await_native_wait(process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # launchers may send the signal more than once
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM
    report = rank(tmp_path)
    assert (report.status, report.problems) == (Status.FAILED, (STUCK,))


def test_sigterm_ends_an_asyncio_process_that_waits_in_native_code(start, tmp_path: Path) -> None:
    code = """
import asyncio
async def train():
    received = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, received.set)  # sets asyncio's wakeup descriptor
    profiler.start(1)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    await asyncio.wait_for(received.wait(), 30)
    wait_in_native_code()
asyncio.run(train())
"""
    process = start(BEGIN + NATIVE_WAIT + code, "{}")
    await_native_wait(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    report = rank(tmp_path)
    assert (report.status, report.problems) == (Status.FAILED, (STUCK,))


def test_second_sigterm_ends_a_stop_that_waits_in_native_code(start, tmp_path: Path) -> None:
    hang = NATIVE_WAIT + SLOW.replace("sys.stdin.readline()", "wait_in_native_code()")
    process = start(BEGIN + hang, "{}", "stop")
    await_recording(process)  # wait until the hook has started
    await_recording(process)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):  # stopping a recording may take longer
        process.wait(6)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM


RELEASED_WAIT = (
    NATIVE_WAIT
    + """
def release():
    sys.stdin.readline()
    os.write(1, b"released\\n")
    libc.pthread_mutex_unlock(mutex)
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
threading.Thread(target=release, daemon=True).start()
print('recording', flush=True)
libc.pthread_mutex_lock(mutex)
"""
)


def test_process_that_responds_late_keeps_a_partial_trace(start, tmp_path: Path) -> None:
    process = start(CAPTURE + RELEASED_WAIT, "{}")
    await_recording(process)
    process.send_signal(signal.SIGTERM)
    assert process.communicate("go on\n", timeout=20)[0] == "released\n"
    assert process.returncode == -signal.SIGTERM
    report = rank(tmp_path)
    assert (report.status, report.problems) == (Status.PARTIAL, ("SIGTERM in mid-capture.",))


def test_handler_that_the_host_sets_during_a_capture_runs_after_a_native_call(start) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'checkpoint\\n'), os._exit(5)))\n"
    process = start(CAPTURE + handler + RELEASED_WAIT, "{}")
    await_native_wait(process)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):  # the 5-second limit applies only to the default action
        process.wait(7)
    assert process.communicate("go on\n", timeout=20)[0] == "released\ncheckpoint\n"
    assert process.returncode == 5


def test_forked_child_has_the_default_signal_handler(start, tmp_path: Path) -> None:
    """SIGTERM immediately ends a child that waits in native code, without affecting its parent."""
    code = """
child = os.fork()
if not child:
    wait_in_native_code()
sys.stdin.readline()
os.kill(child, signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
try:
    threading.Event().wait(7)
finally:
    profiler.close()
print('parent continues', flush=True)
"""
    process = start(CAPTURE + NATIVE_WAIT + code, "{}")
    await_recording(process)
    out, errors = process.communicate("go on\n", timeout=30)
    assert (out, process.returncode) == ("parent continues\n", 0), errors
    assert rank(tmp_path).problems == ("The profiler was closed in mid-capture.",)


def test_wakeup_descriptor_of_the_host_is_kept(start) -> None:
    code = """
import socket
reader, writer = socket.socketpair()
writer.setblocking(False)
profiler.start(1)
profiler.close()
assert signal.set_wakeup_fd(writer.fileno()) == -1
profiler.start(2)
profiler.close()
assert signal.set_wakeup_fd(-1) == writer.fileno()
profiler.start(3)
signal.set_wakeup_fd(writer.fileno())
profiler.close()
assert signal.set_wakeup_fd(-1) == writer.fileno()
signal.set_wakeup_fd(writer.fileno())
profiler.start(4)
signal.set_wakeup_fd(-1)
profiler.close()
assert signal.set_wakeup_fd(writer.fileno()) == -1
profiler.start(5)
writer.close()
profiler.close()
assert signal.set_wakeup_fd(-1) == -1
"""
    process = start(BEGIN + code, "{}")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_signal_handlers_are_only_replaced_during_a_capture(start) -> None:
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
perform = tally_backend.TallyBackend.perform
def slow_perform(self, name, call):
    perform(self, name, call)
    if name == sys.argv[2]:
        print("recording", flush=True)  # wait until the hook has started
        sys.stdin.readline()
tally_backend.TallyBackend.perform = slow_perform
profiler.start(1)
profiler.close()
print("not reached", flush=True)
"""


@pytest.mark.parametrize(
    ("hook", "reason"),
    [("start", "SIGTERM in mid-capture."), ("stop", "The profiler was closed in mid-capture.")],
)
def test_signal_during_a_hook_is_deferred(start, tmp_path: Path, hook: str, reason: str) -> None:
    process = start(BEGIN + SLOW, "{}", hook)
    await_recording(process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate("go on\n", timeout=60)
    assert "not reached" not in out
    assert process.returncode == -signal.SIGTERM
    report = rank(tmp_path)
    assert report.artifacts[0].whole
    assert report.problems == (reason,)


def test_signal_is_delivered_after_a_failed_start(start, tmp_path: Path) -> None:
    process = start(BEGIN + SLOW, "{'trainer.options.fail_at': 'start'}", "start")
    process.communicate(timeout=60)  # the start raises before it waits
    assert process.returncode == 0
    late = "profiler.start(1)\nassert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n" + WAIT
    process = start(BEGIN + late, "{'trainer.options.fail_at': 'start', 'run': 'late'}")
    await_recording(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("how", ["kill", "_exit"])
def test_killed_rank_is_missing(start, tmp_path: Path, how: str) -> None:
    ending = "os.kill(os.getpid(), signal.SIGKILL)" if how == "kill" else "os._exit(0)"
    process = start(CAPTURE + ending, "{}")
    process.communicate(timeout=60)
    report = rank(tmp_path)
    assert (report.status, report.artifacts) == (Status.MISSING, ())
    assert f"Process {process.pid} on" in report.problems[0]


def test_killed_rank_does_not_lose_other_traces(start, tmp_path: Path) -> None:
    settings = "{'trainer.ranks': 'all'}"
    world = {"WORLD_SIZE": "2"}
    victim = start(CAPTURE + WAIT, settings, RANK="0", **world)
    survivor = start(CAPTURE + "sys.stdin.readline()\nprofiler.close()", settings, RANK="1", **world)
    await_recording(victim)
    victim.kill()
    victim.wait()
    survivor.communicate("go on\n", timeout=60)
    (capture,) = read_run(tmp_path / "run").captures
    assert [rank.status for rank in capture.ranks] == [Status.MISSING, Status.PARTIAL]
    assert capture.ranks[1].artifacts[0].whole


def test_active_recording_is_not_missing(start, tmp_path: Path) -> None:
    process = start(CAPTURE + WAIT, "{}")
    await_recording(process)
    assert rank(tmp_path).status is Status.RECORDING


def test_exit_in_an_event_loop_saves_the_capture(start, tmp_path: Path) -> None:
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


def test_lease_of_a_killed_process_can_be_acquired(start, tmp_path: Path) -> None:
    settings = "{'trainer.options.device': 'gpu-3'}"
    first = start(CAPTURE + WAIT, settings)
    await_recording(first)
    waiting = start(CAPTURE, settings.replace("}", ", 'run': 'second'}"))
    waiting.communicate(timeout=60)
    (capture,) = read_run(tmp_path / "second").captures
    assert capture.status is Status.MISSING
    assert capture.ranks[0].problems[0] == "The process ended in mid-capture."
    assert f"s for gpu-3, held by process {first.pid} (trainer, step1)." in capture.ranks[0].problems[1]
    first.kill()
    first.wait()
    successor = start(
        BEGIN + "with profiler.capture(1): pass\nprofiler.close()", settings.replace("}", ", 'run': 'third'}")
    )
    successor.communicate(timeout=60)
    assert read_run(tmp_path / "third").captures[0].ranks[0].artifacts[0].whole
