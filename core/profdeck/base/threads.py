"""Helpers for the threads that profdeck starts in the host process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable


def start_unsignalled(run: Callable[[], None], name: str) -> None:
    """Start a daemon thread with all signals blocked.

    The kernel can deliver a signal to any thread that does not block it. The host may block signals in its own threads,
    for example to wait for them with `signal.sigwait`. A profdeck thread must not receive these signals.

    Args:
        run: the function to run in the thread. Processes that it starts inherit the signal mask.
        name: the name of the thread.

    Raises:
        RuntimeError: the thread cannot be started.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def unblock_signals() -> None:
    """Unblock all signals in the current thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
