from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from profdeck.errors import LeaseError
from profdeck.lease import acquire

HOLD = """
import sys
from profdeck.lease import acquire
lease = acquire(sys.argv[1:], holder="rollout, step3")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold():  # a function
    """Hold devices in another process."""
    held = []

    def start(*devices: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, *devices]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        held.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in held:
        process.communicate()


def test_another_process_is_named(hold) -> None:
    process = hold("gpu-1")
    with pytest.raises(LeaseError, match=rf"gpu-1 is being recorded by process {process.pid} \(rollout, step3\)"):
        acquire(["gpu-0", "gpu-1"], holder="trainer")
    acquire(["gpu-0"], holder="trainer").release()  # all or none


def test_a_dead_process_holds_nothing(hold) -> None:
    process = hold("gpu-1")
    process.send_signal(signal.SIGKILL)
    process.wait()
    acquire(["gpu-1"], holder="trainer").release()


def test_within_a_process_it_excludes_too_and_is_given_back() -> None:
    lease = acquire(["gpu-1", "gpu-1"], holder="one")
    with pytest.raises(LeaseError, match=r"this process \(one\)"):
        acquire(["gpu-1"], holder="two")
    lease.release()
    lease.release()
    acquire(["gpu-1"], holder="two").release()


def test_a_forked_child_does_not_keep_it(hold) -> None:
    lease = acquire(["gpu-1"], holder="parent")
    pipe_read, pipe_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(pipe_write)
        os.read(pipe_read, 1)  # a data loader that outlives the capture
        os._exit(0)
    os.close(pipe_read)
    lease.release()
    hold("gpu-1")
    os.close(pipe_write)
    os.waitpid(pid, 0)


def test_names_of_devices_cannot_leave_the_directory() -> None:
    acquire(["../../x/gpu 1"], holder="one").release()
