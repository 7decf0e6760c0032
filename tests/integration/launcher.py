"""Starts torchrun jobs with two ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@contextmanager
def launch_torchrun(cwd: Path, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Start torchrun in a new process group. On exit, stop it and its workers."""
    launcher = subprocess.Popen(
        [*TORCHRUN, *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield launcher
    finally:
        launcher.terminate()  # torchrun stops its workers, which are in other sessions
        with suppress(subprocess.TimeoutExpired):
            launcher.communicate(timeout=60)
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()
