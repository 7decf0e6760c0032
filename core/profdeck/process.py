"""Names a process so that others can find out whether it still runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import attrs

from profdeck.run import is_running, process_started


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
