"""Process identification and liveness, detached processes, and the limit of open files."""

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

# The shell redirects stdin of background commands to /dev/null, so stdin is passed through descriptor 3.
_DETACH = 'exec 3<&0; "$@" <&3 3<&- >&2 & echo $!'
_START_S = 10.0


def pid_namespace() -> str | None:
    """Return this process's PID namespace, or None if it is unknown.

    Process IDs can only be compared within one namespace. Containers on the same host can have the same host name, but
    each container has its own namespace.
    """
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


@attrs.frozen(kw_only=True)
class ProcessId:
    """Identification of a process that lets other processes check whether it is running."""

    host: str = attrs.field(factory=socket.gethostname)
    pid: int = attrs.field(factory=os.getpid)
    process_started: str | None = attrs.field(factory=lambda: process_started(os.getpid()))
    """Start time in clock ticks since boot; see `process_started`."""
    pid_namespace: str | None = attrs.field(factory=pid_namespace)
    """See `pid_namespace`."""

    @property
    def alive(self) -> bool | None:
        """True if the process is running; ``None`` if it is on another host or in another PID namespace."""
        return is_running(self.host, self.pid, self.process_started, self.pid_namespace)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def process_started(pid: int) -> str | None:
    """Return the start time of a process on this host in clock ticks since boot, or None if it is unknown.

    Source: field 22 of ``/proc/<pid>/stat`` (proc(5)).
    """
    fields = process_stat(pid)
    return fields[19] if len(fields) > 19 else None  # noqa: PLR2004  # the list starts at field 3


def is_running(host: str, pid: int, started: str | None, namespace: str | None = None) -> bool | None:
    """Return whether a process is running; ``None`` if it is on another host or in another PID namespace.

    Args:
        host: the process's host name, as `socket.gethostname` returns it on that host.
        pid: the process ID.
        started: the process's start time, as returned by `process_started`. It distinguishes the process from a later
            process with the same ID.
        namespace: the process's PID namespace, as returned by `pid_namespace`. Default: the namespace of this process.
    """
    if host != socket.gethostname() or namespace not in {None, pid_namespace()}:
        return None
    if pid <= 0:  # kill interprets 0 and negative numbers as process groups
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
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
        # A process in a new PID namespace may still see the old namespace's /proc, where process IDs are different.
        if str(Path("/proc/self").readlink()) != str(os.getpid()):
            return []
        # The second field is the name in parentheses, which can contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


@functools.lru_cache(maxsize=1)
def cached_process_started(own_pid: int) -> str | None:
    """Return this process's start time. It is cached because a fleet writes one manifest per target.

    Args:
        own_pid: ID of this process, which changes after a fork.
    """
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


def raise_open_file_limit(limit: int) -> None:
    """Raise the soft limit of open files to at least ``limit``, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < limit:
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
