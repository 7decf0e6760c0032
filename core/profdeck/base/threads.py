"""Threads of profdeck in the host's process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable


def start_unsignalled(run: Callable[[], None], name: str) -> None:
    """Start a daemon thread with all signals blocked.

    The kernel delivers a signal to any thread that has not blocked it. A thread of profdeck must not receive signals
    that the host blocks in its own threads, for example to call `signal.sigwait`.

    Args:
        run: the thread's function. Processes that it starts inherit the signal mask.
        name: the name of the thread.

    Raises:
        RuntimeError: no thread can be started.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def unblock_signals() -> None:
    """Unblock all signals in the current thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
