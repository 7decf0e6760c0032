from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from profdeck.base.errors import LeaseError
from profdeck.base.leases import Turn, acquire_lease

HOLD = """
import sys
from profdeck.base.leases import acquire_lease
lease = acquire_lease(sys.argv[1:], holder="rollout, step3")
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
        acquire_lease(["gpu-0", "gpu-1"], holder="trainer")
    acquire_lease(["gpu-0"], holder="trainer").release()  # leases are acquired all or nothing


def test_a_dead_process_holds_nothing(hold) -> None:
    process = hold("gpu-1")
    process.send_signal(signal.SIGKILL)
    process.wait()
    acquire_lease(["gpu-1"], holder="trainer").release()


def test_within_a_process_it_excludes_too_and_is_given_back() -> None:
    lease = acquire_lease(["gpu-1", "gpu-1"], holder="one")
    with pytest.raises(LeaseError, match=r"this process \(one\)"):
        acquire_lease(["gpu-1"], holder="two")
    lease.release()
    lease.release()
    acquire_lease(["gpu-1"], holder="two").release()


def test_a_forked_child_does_not_keep_it(hold) -> None:
    lease = acquire_lease(["gpu-1"], holder="parent")
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


# Turns.


def test_whoever_comes_second_has_the_devices_at_a_later_try(hold) -> None:
    process = hold("gpu-1")
    turn = Turn(lambda: ["gpu-0", "gpu-1"], "trainer, step3")
    assert [turn.take(), turn.take()] == [False, False]
    held = f"gpu-1, held by process {process.pid} (rollout, step3)"
    assert turn.waits_for == held
    acquire_lease(["gpu-0"], holder="ref").release()  # a waiting turn holds no lease
    process.communicate()
    assert [turn.take(), turn.take(), turn.waits_for] == [True, True, None]
    with pytest.raises(LeaseError, match=r"gpu-0 is being recorded by this process \(trainer, step3\)"):
        acquire_lease(["gpu-0"], holder="ref")
    wait = turn.waited()
    assert wait is not None
    assert (wait.held, 0 < wait.duration_s < 60, turn.waited()) == ((held,), True, None)
    turn.release()
    acquire_lease(["gpu-0", "gpu-1"], holder="ref").release()


def test_a_killed_holder_makes_room(hold) -> None:
    process = hold("gpu-1")
    turn = Turn(lambda: ["gpu-1"], "trainer, step3")
    assert not turn.take()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert turn.take()
    turn.release()


def test_a_turn_names_everybody_whom_it_waited_for() -> None:
    turn = Turn(lambda: ["gpu-1"], "trainer, step3")
    for holder in ("one", "two", "two", "one"):
        lease = acquire_lease(["gpu-1"], holder=holder)
        assert not turn.take()
        lease.release()
    assert turn.take()
    wait = turn.waited()
    assert wait is not None
    assert wait.held == ("gpu-1, held by this process (two)", "gpu-1, held by this process (one)")
    turn.release()


def test_a_turn_that_does_not_have_to_wait() -> None:
    turn = Turn(lambda: ["gpu-1"], "trainer, step3")
    assert (turn.take(), turn.waits_for, turn.waited()) == (True, None, None)
    turn.release()
    assert (Turn(list, "trainer, step3").take(), turn.waits_for) == (True, None)


def test_a_turn_that_was_given_up_waits_no_longer() -> None:
    lease = acquire_lease(["gpu-1"], holder="one")
    turn = Turn(lambda: ["gpu-1"], "trainer, step3")
    assert not turn.take()
    turn.release()
    assert (turn.waits_for, turn.waited()) == (None, None)
    lease.release()


def test_a_turn_that_lacks_something_else_holds_nothing_meanwhile() -> None:
    turn = Turn(lambda: ["gpu-1"], "trainer, step3")
    assert turn.take()
    turn.wait_for(LeaseError("The recorder is busy.", "recorder, held by this process (ref)"))
    assert turn.waits_for == "recorder, held by this process (ref)"
    acquire_lease(["gpu-1"], holder="rollout").release()
    assert turn.take()
    assert turn.waited() is not None
    turn.release()


def test_names_of_devices_cannot_leave_the_directory() -> None:
    acquire_lease(["../../x/gpu 1"], holder="one").release()
