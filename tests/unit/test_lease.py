from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from profdeck.base.errors import LeaseError
from profdeck.base.leases import DIRECTORY_VARIABLE, LeaseRequest, acquire_lease

HOLD = """
import sys
import tempfile
from profdeck.base.leases import acquire_lease
lease = acquire_lease(sys.argv[1:], holder="rollout, step3")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold_devices():  # returns a function
    """Function that leases devices in another process."""
    processes = []

    def start(*devices: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, *devices]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        process.communicate()


def test_error_names_the_process_that_holds_the_device(hold_devices) -> None:
    process = hold_devices("gpu-1")
    with pytest.raises(LeaseError, match=rf"gpu-1 is being recorded by process {process.pid} \(rollout, step3\)"):
        acquire_lease(["gpu-0", "gpu-1"], holder="trainer")
    acquire_lease(["gpu-0"], holder="trainer").release()  # leases are acquired all or nothing


def test_lease_of_a_dead_process_is_released(hold_devices) -> None:
    process = hold_devices("gpu-1")
    process.send_signal(signal.SIGKILL)
    process.wait()
    acquire_lease(["gpu-1"], holder="trainer").release()


def test_lease_excludes_recordings_of_the_same_process_until_released() -> None:
    lease = acquire_lease(["gpu-1", "gpu-1"], holder="one")
    with pytest.raises(LeaseError, match=r"this process \(one\)"):
        acquire_lease(["gpu-1"], holder="two")
    lease.release()
    lease.release()
    acquire_lease(["gpu-1"], holder="two").release()


def test_forked_child_does_not_inherit_the_lease(hold_devices) -> None:
    lease = acquire_lease(["gpu-1"], holder="parent")
    pipe_read, pipe_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(pipe_write)
        os.read(pipe_read, 1)  # a data loader that outlives the capture
        os._exit(0)
    os.close(pipe_read)
    lease.release()
    hold_devices("gpu-1")
    os.close(pipe_write)
    os.waitpid(pid, 0)


# Lease requests.


def test_request_acquires_the_devices_after_they_are_released(hold_devices) -> None:
    process = hold_devices("gpu-1")
    request = LeaseRequest(lambda: ["gpu-0", "gpu-1"], "trainer, step3")
    assert [request.try_acquire(), request.try_acquire()] == [False, False]
    held = f"gpu-1, held by process {process.pid} (rollout, step3)"
    assert request.blocked_by == held
    acquire_lease(["gpu-0"], holder="ref").release()  # a waiting request holds no lease
    process.communicate()
    assert [request.try_acquire(), request.try_acquire(), request.blocked_by] == [True, True, None]
    with pytest.raises(LeaseError, match=r"gpu-0 is being recorded by this process \(trainer, step3\)"):
        acquire_lease(["gpu-0"], holder="ref")
    wait = request.pop_wait()
    assert wait is not None
    assert (wait.held, 0 < wait.duration_s < 60, request.pop_wait()) == ((held,), True, None)
    request.release()
    acquire_lease(["gpu-0", "gpu-1"], holder="ref").release()


def test_request_acquires_the_device_after_the_holder_is_killed(hold_devices) -> None:
    process = hold_devices("gpu-1")
    request = LeaseRequest(lambda: ["gpu-1"], "trainer, step3")
    assert not request.try_acquire()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert request.try_acquire()
    request.release()


def test_wait_lists_each_holder_once() -> None:
    request = LeaseRequest(lambda: ["gpu-1"], "trainer, step3")
    for holder in ("one", "two", "two", "one"):
        lease = acquire_lease(["gpu-1"], holder=holder)
        assert not request.try_acquire()
        lease.release()
    assert request.try_acquire()
    wait = request.pop_wait()
    assert wait is not None
    assert wait.held == ("gpu-1, held by this process (two)", "gpu-1, held by this process (one)")
    request.release()


def test_request_without_a_wait() -> None:
    request = LeaseRequest(lambda: ["gpu-1"], "trainer, step3")
    assert (request.try_acquire(), request.blocked_by, request.pop_wait()) == (True, None, None)
    request.release()
    assert (LeaseRequest(list, "trainer, step3").try_acquire(), request.blocked_by) == (True, None)


def test_released_request_stops_waiting() -> None:
    lease = acquire_lease(["gpu-1"], holder="one")
    request = LeaseRequest(lambda: ["gpu-1"], "trainer, step3")
    assert not request.try_acquire()
    request.release()
    assert (request.blocked_by, request.pop_wait()) == (None, None)
    lease.release()


def test_request_that_waits_for_another_resource_releases_its_devices() -> None:
    request = LeaseRequest(lambda: ["gpu-1"], "trainer, step3")
    assert request.try_acquire()
    request.record_wait(LeaseError("The recorder is busy.", "recorder, held by this process (ref)"))
    assert request.blocked_by == "recorder, held by this process (ref)"
    acquire_lease(["gpu-1"], holder="rollout").release()
    assert request.try_acquire()
    assert request.pop_wait() is not None
    request.release()


def test_device_names_cannot_escape_the_lease_directory() -> None:
    acquire_lease(["../../x/gpu 1"], holder="one").release()


def test_lease_file_of_another_user_is_opened_without_o_creat(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fs.protected_regular, the kernel rejects O_CREAT for existing files of other users in a sticky directory."""
    acquire_lease(["gpu-0"], holder="other user").release()
    open_file = os.open

    def open_protected(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT and os.path.lexists(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_protected)
    acquire_lease(["gpu-0", "gpu-1"], holder="trainer").release()


def test_lease_file_that_another_user_creates_meanwhile_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = os.open

    def create_before(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            os.close(open_file(path, flags, *mode))
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", create_before)
    acquire_lease(["gpu-0"], holder="trainer").release()


def test_full_disk_does_not_prevent_a_lease(hold_devices, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fail)
    lease = acquire_lease(["gpu-1"], holder="one")
    with pytest.raises(LeaseError, match="this process"):
        acquire_lease(["gpu-1"], holder="two")
    lease.release()
    hold_devices("gpu-1")


def test_file_system_without_locks_is_not_reported_as_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with pytest.raises(OSError, match="No locks available"):
        acquire_lease(["gpu-1"], holder="one")


def test_missing_permission_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = os.open

    def open_or_reject(path: object, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(path, flags, *mode)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", open_or_reject)
    with pytest.raises(PermissionError):
        acquire_lease(["gpu-1"], holder="one")


@pytest.mark.parametrize(
    ("record", "holder"),
    [("[" * 4000, "another process"), ('{"pid": 1, "holder": "a\\n\\u001b[2J"}', r"process 1 \(a\\n\\x1b\[2J\)")],
)
def test_holder_in_a_foreign_file_is_untrusted(hold_devices, record: str, holder: str) -> None:
    hold_devices("gpu-1")
    Path(os.environ[DIRECTORY_VARIABLE], "gpu-1.lease").write_text(record)
    with pytest.raises(LeaseError, match=f"is being recorded by {holder}. Two"):
        acquire_lease(["gpu-1"], holder="one")


def test_removed_directory_for_temporary_files_is_not_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    removed = tmp_path / "removed"
    monkeypatch.setattr(tempfile, "tempdir", str(removed))
    with pytest.raises(OSError, match="removed"):
        acquire_lease(["gpu0"], holder="test")
    assert not removed.exists()
