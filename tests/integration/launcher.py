"""Starts jobs of two ranks under torchrun."""

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
def launched(cwd: Path, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Start torchrun in a process group of its own, of which nothing is left at the end, nor of its workers."""
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
        launcher.terminate()  # it ends its workers, which have sessions of their own
        with suppress(subprocess.TimeoutExpired):
            launcher.communicate(timeout=60)
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()
