"""Whether processes still run, how to start one that outlives its parent, and how many files this one may open."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import attrs

# A command in the background would read from /dev/null: its input is handed on by another descriptor.
_DETACH = 'exec 3<&0; "$@" <&3 3<&- >&2 & echo $!'
_START_S = 10.0


def _pid_namespace() -> str | None:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


@attrs.frozen(kw_only=True)
class ProcessId:
    """A process, as others can find out whether it still runs."""

    host: str = attrs.field(factory=socket.gethostname)
    pid: int = attrs.field(factory=os.getpid)
    process_started: str | None = attrs.field(factory=lambda: process_started(os.getpid()))
    """When it started, in the kernel's words."""
    pid_namespace: str | None = attrs.field(factory=_pid_namespace)
    """Which processes its pid is counted among: containers have their own."""

    @property
    def alive(self) -> bool | None:
        """Whether it runs; None where that cannot be known from here."""
        if self.host != socket.gethostname() or self.pid_namespace != _pid_namespace():
            return None
        return is_running(self.host, self.pid, self.process_started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def process_started(pid: int) -> str | None:
    """Return the start time of a process on this host in clock ticks since boot, or None if it is unknown.

    Source: field 22 of ``/proc/<pid>/stat`` (proc(5)).
    """
    fields = process_stat(pid)
    return fields[19] if len(fields) > 19 else None  # noqa: PLR2004  # as above, counted from the third


def is_running(host: str, pid: int, started: str | None) -> bool:
    """Return whether a process is running. Processes on other hosts are never reported as running.

    Args:
        host: the process's host name, as `socket.gethostname` returns it on that host.
        pid: the process ID.
        started: the process's start time, as returned by `process_started`. It distinguishes the process from a later
            process with the same ID.
    """
    if host != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not has_ended(process_stat(pid)) and process_started(pid) == started


def has_ended(stat: list[str]) -> bool:
    """Return whether the fields from `process_stat` describe a process that has ended (a zombie).

    A process becomes a zombie when its main thread ends, but it keeps its files and locks until its last thread ends.
    Source: fields 3 and 20 of ``/proc/<pid>/stat`` (proc(5)).
    """
    return stat[:1] in (["Z"], ["X"]) and int(stat[17]) <= 1


def process_stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` from the third field (state) on, or [] if the file is unreadable."""
    try:
        # The second is the name, in parentheses; it may have any characters.
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


@functools.lru_cache(maxsize=1)
def cached_process_started(own_pid: int) -> str | None:
    """Say when this process started, which does not change; a fleet has a manifest per target."""
    return process_started(own_pid)


def start_detached(
    module: str, *arguments: str, stderr: int | BinaryIO, stdin: int | BinaryIO = subprocess.DEVNULL
) -> int:
    """Start ``python -m module`` in a new session. The process keeps running after this process ends.

    A shell starts the process and exits immediately, so that init adopts the process. It therefore does not become
    a zombie of this process, and it survives if a worker's children are killed.

    Args:
        module: module to run with this Python interpreter.
        arguments: command-line arguments of the module.
        stderr: destination of the process's stderr.
        stdin: source of the process's stdin.

    Returns:
        The process ID.

    Raises:
        OSError: the process cannot be started.
        subprocess.SubprocessError: the shell failed, or did not exit within 10 seconds.
    """
    shell = subprocess.run(
        ["/bin/sh", "-c", _DETACH, "sh", sys.executable, "-P", "-m", module, *arguments],
        check=True,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        timeout=_START_S,
        start_new_session=True,
    )
    return int(shell.stdout)


def raise_open_file_limit(wanted: int) -> None:
    """Raise the soft limit of open files to so many, as far as that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < wanted:
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
