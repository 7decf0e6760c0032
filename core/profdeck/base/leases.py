"""Device leases, which ensure that only one recording uses a device of this host at a time.

A lease is a POSIX record lock on one file per device. The kernel releases the lock when the process ends, even if the
process is killed. Unlike ``flock``, it is not inherited by forked processes such as data loaders.

Acquiring a lease never blocks. If a device is in use, the recording tries again at its next boundary.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs

from profdeck.base.errors import LeaseError
from profdeck_traces.base.files import user_path
from profdeck_traces.base.text import printable

DIRECTORY_VARIABLE = "PROFDECK_LEASE_DIR"

# Record locks do not conflict within one process, and closing any descriptor of the file releases the lock. Therefore,
# this table excludes recordings of the same process, and the file is opened only if the table has no entry for it.
_held: dict[Path, tuple[int, str]] = {}
"""Process ID and description of the holder, by lease file. After a fork, the parent's entries are ignored."""
_mutex = threading.RLock()  # re-entrant for signal handlers


def _reset_mutex() -> None:
    """Replace the mutex in a forked child, because another thread of the parent may have held it during the fork."""
    global _mutex  # noqa: PLW0603  # one mutex per process
    _mutex = threading.RLock()


os.register_at_fork(after_in_child=_reset_mutex)


@attrs.define
class Lease:
    """A lease on devices for one capture."""

    _files: list[tuple[Path, int]] = attrs.field(factory=list)

    def release(self) -> None:
        """Release the devices. Repeated calls do nothing."""
        while self._files:
            path, descriptor = self._files.pop()
            with _mutex:
                if _held.get(path, (0, ""))[0] == os.getpid():
                    del _held[path]
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def acquire_lease(devices: Iterable[str], *, holder: str) -> Lease:
    """Lease all devices without waiting. If one of the devices is in use, none is leased.

    Args:
        devices: names that are the same in every process of this host, such as a GPU's UUID.
        holder: description of the caller, shown to processes that wait for the devices.

    Raises:
        LeaseError: a running process holds a device. The message names the process.
        OSError: the lease directory cannot be used.
    """
    lease = Lease()
    try:
        for device in sorted(set(devices)):  # the same order in all processes prevents mutual failure
            lease._files.append(_lock(_path(device), device, holder))  # noqa: SLF001  # same module
    except BaseException:
        lease.release()
        raise
    return lease


@attrs.frozen
class LeaseWait:
    """Time that a recording waited for its devices."""

    duration_s: float
    held: tuple[str, ...]
    """Descriptions of the devices in use and their holders, without duplicates, ordered by the last failed attempt."""


class LeaseRequest:
    """A recording's request for its devices, which is retried until it succeeds.

    Waiting requests are not queued. The first request that is tried after a device is released acquires it.
    """

    def __init__(self, devices: Callable[[], Iterable[str]], holder: str) -> None:
        """Args:
        devices: returns the device names for `acquire_lease`. Called once, at the first attempt.
        holder: description of the caller; see `acquire_lease`.
        """
        self._devices = devices
        self._names: tuple[str, ...] | None = None
        self._holder = holder
        self._lease: Lease | None = None
        self._waiting_since_s: float | None = None
        self._acquired_s = 0.0
        self._held: tuple[str, ...] = ()

    @property
    def blocked_by(self) -> str | None:
        """Description of the device in use and its holder at the last attempt; None if the request is not waiting."""
        held = self._held
        return held[-1] if held and self._lease is None else None

    def try_acquire(self) -> bool:
        """Try to lease the devices without waiting. Return True if the devices are leased.

        Raises:
            OSError: the lease directory cannot be used.
        """
        if self._lease is None:
            if self._names is None:
                self._names = tuple(self._devices())
            try:
                self._lease = acquire_lease(self._names, holder=self._holder)
            except LeaseError as error:
                self.record_wait(error)
            else:
                self._acquired_s = time.monotonic()
        return self._lease is not None

    def record_wait(self, error: LeaseError) -> None:
        """Record a failed attempt. Release the devices, because the recording may be waiting for another resource."""
        self._release()
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        self._held = (*(held for held in self._held if held != error.held), error.held)

    def pop_wait(self) -> LeaseWait | None:
        """Return the wait until the devices were leased, or until now, and clear it. None if there was no wait."""
        if self._waiting_since_s is None:
            return None
        until_s = time.monotonic() if self._lease is None else self._acquired_s
        wait = LeaseWait(round(until_s - self._waiting_since_s, 6), self._held)
        self._waiting_since_s, self._held = None, ()
        return wait

    def release(self) -> None:
        """Release the devices and stop waiting for them."""
        self._release()
        self.pop_wait()

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


def _path(device: str) -> Path:
    # All users of the host share the directory. Containers share leases only if they mount the same directory.
    setting = os.environ.get(DIRECTORY_VARIABLE)
    directory = user_path(setting, DIRECTORY_VARIABLE) if setting else Path(tempfile.gettempdir(), "profdeck-leases")
    if not directory.is_dir():
        # A job may remove its directory for temporary files while other processes still use it.
        directory.mkdir(parents=bool(setting), exist_ok=True)
        with contextlib.suppress(OSError):
            directory.chmod(0o1777)
    return directory / f"{re.sub(r'[^A-Za-z0-9._-]', '_', device)}.lease"


def _lock(path: Path, device: str, holder: str) -> tuple[Path, int]:
    with _mutex:
        pid, current_holder = _held.get(path, (0, ""))
        if pid == os.getpid():
            raise _lease_error(device, f"this process ({current_holder})")
        descriptor = _open(path)
        with contextlib.suppress(OSError):  # only the file's owner may change its mode
            os.fchmod(descriptor, 0o666)  # all users share the devices, so the mode must not depend on the umask
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            try:
                if error.errno not in {errno.EACCES, errno.EAGAIN}:  # e.g. the file system does not support locks
                    raise
                record = os.read(descriptor, 4096).decode(errors="replace")
            finally:
                os.close(descriptor)
            raise _lease_error(device, _describe_holder(record)) from None
        with contextlib.suppress(OSError):  # if the disk is full, only the name of the holder is lost
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "holder": holder}).encode(), 0)
        _held[path] = (os.getpid(), holder)
        return path, descriptor


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        try:
            return os.open(path, flags | os.O_CREAT, 0o666)
        except PermissionError as error:
            # Another user may have created the file in the meantime. With fs.protected_regular, the default of most
            # distributions, the kernel rejects O_CREAT on other users' files in a sticky directory.
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, flags)
            raise error from None


def _lease_error(device: str, holder: str) -> LeaseError:
    return LeaseError(
        f"The device {device} is being recorded by {holder}. Two recordings of one device lose data. "
        "Wait until the other recording has ended, or capture the roles that share a device at different steps.",
        f"{device}, held by {holder}",
    )


def _describe_holder(record: str) -> str:
    try:
        owner = json.loads(record)
        return printable(f"process {owner['pid']} ({owner['holder']})")  # untrusted: any user can write to the file
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
