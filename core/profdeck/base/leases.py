"""Leases of devices: two recordings of one device never run at once, across processes and plugins of a host.

A lease is a POSIX record lock on a file per device. The kernel drops it when its process ends in any way, so a
lease of a dead process is free at once; unlike ``flock`` it is not inherited by forked data loaders.

Nobody blocks for a lease. Recordings of one device take turns: who finds it held tries again at boundaries of its own.
"""

from __future__ import annotations

import contextlib
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

DIRECTORY_VARIABLE = "PROFDECK_LEASE_DIR"

# Record locks do not exclude the process that holds them, and closing any descriptor of the file drops them:
# within the process this table decides, and a file is opened only by the holder of its entry.
_held: dict[Path, tuple[int, str]] = {}
_mutex = threading.RLock()  # re-entrant for signal handlers


@attrs.define
class Lease:
    """A lease on devices for one capture."""

    _files: list[tuple[Path, int]] = attrs.field(factory=list)

    def release(self) -> None:
        """Give the devices back; a second call does nothing."""
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
        for device in sorted(set(devices)):  # one order for all, so that two processes cannot block each other
            lease._files.append(_lock(_path(device), device, holder))  # noqa: SLF001  # same module
    except BaseException:
        lease.release()
        raise
    return lease


@attrs.frozen
class Wait:
    """A wait for a turn."""

    duration_s: float
    held: tuple[str, ...]
    """What was waited for, in words that say who held it: each once, in order."""


class Turn:
    """The devices of a recording, which has them when its turn has come.

    There is no queue: of several who wait for the same devices, the first to try gets them.
    """

    def __init__(self, devices: Callable[[], Iterable[str]], holder: str) -> None:
        """Args:
        devices: names them; asked once, at the first try. See `acquire`.
        holder: who asks. See `acquire`.
        """
        self._devices = devices
        self._names: tuple[str, ...] | None = None
        self._holder = holder
        self._lease: Lease | None = None
        self._since_s: float | None = None
        self._came_s = 0.0
        self._held: tuple[str, ...] = ()

    @property
    def waits_for(self) -> str | None:
        """What the last try has found held, and by whom; None if it does not wait."""
        held = self._held
        return held[-1] if held and self._lease is None else None

    def take(self) -> bool:
        """Try to lease the devices, without waiting; tells whether they are held from now on, or already.

        Raises:
            OSError: the lease directory cannot be used.
        """
        if self._lease is None:
            if self._names is None:
                self._names = tuple(self._devices())
            try:
                self._lease = acquire_lease(self._names, holder=self._holder)
            except LeaseError as error:
                self.wait_for(error)
            else:
                self._came_s = time.monotonic()
        return self._lease is not None

    def wait_for(self, error: LeaseError) -> None:
        """Let others have the devices, as they or something that is needed besides is held."""
        self._release()
        if self._since_s is None:
            self._since_s = time.monotonic()
        self._held = (*(held for held in self._held if held != error.held), error.held)

    def waited(self) -> Wait | None:
        """Return the wait until the turn came, or until now; once, and None if there was none."""
        if self._since_s is None:
            return None
        until_s = time.monotonic() if self._lease is None else self._came_s
        wait = Wait(round(until_s - self._since_s, 6), self._held)
        self._since_s, self._held = None, ()
        return wait

    def release(self) -> None:
        """Give the devices back if they are held, and wait for them no longer."""
        self._release()
        self.waited()

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


def _path(device: str) -> Path:
    # Shared by all users of the host and by its containers when they share the directory.
    directory = Path(os.environ.get(DIRECTORY_VARIABLE) or Path(tempfile.gettempdir(), "profdeck-leases"))
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            directory.chmod(0o1777)
    return directory / f"{re.sub(r'[^A-Za-z0-9._-]', '_', device)}.lease"


def _lock(path: Path, device: str, holder: str) -> tuple[Path, int]:
    with _mutex:
        pid, words = _held.get(path, (0, ""))
        if pid == os.getpid():
            raise _held_by(device, f"this process ({words})")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        with contextlib.suppress(OSError):  # it is another user's, who has done so
            os.fchmod(descriptor, 0o666)  # all users of the machine share its devices, whatever the umask of the first
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(descriptor, 4096).decode(errors="replace")
            os.close(descriptor)
            raise _held_by(device, _owner_words(owner)) from None
        record = json.dumps({"pid": os.getpid(), "holder": holder}).encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, record, 0)
        _held[path] = (os.getpid(), holder)
        return path, descriptor


def _held_by(device: str, owner: str) -> LeaseError:
    return LeaseError(
        f"The device {device} is being recorded by {owner}. Two recordings of one device lose data: "
        "let the other one end first, or capture the roles that share a device at different steps.",
        f"{device}, held by {owner}",
    )


def _owner_words(record: str) -> str:
    try:
        owner = json.loads(record)
        return f"process {owner['pid']} ({owner['holder']})"
    except (ValueError, KeyError, TypeError):
        return "another process"
