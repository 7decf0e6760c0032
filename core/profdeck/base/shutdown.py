"""Ends open captures before the process exits: at normal exit, ``sys.exit``, an exception, or SIGTERM.

SIGINT needs no handler, because Python raises KeyboardInterrupt. After SIGKILL and ``os._exit``, no exit code runs, and
the run directory shows the rank as missing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from profdeck.base import interrupts

EndCapture = Callable[[str], bool]
"""Function that ends a capture for a reason. It returns False if the capture is busy and will end later."""

_open: dict[object, EndCapture] = {}
_previous: Any = None
_installed = False
_pending_signal: int | None = None
_owner_pid = os.getpid()


def watch(token: object, end_capture: EndCapture) -> None:
    """Call ``end_capture`` if the process exits before `unwatch` is called with the same token."""
    global _owner_pid  # noqa: PLW0603  # there is one exit handler per process
    if _owner_pid != os.getpid():  # in a forked child, the open captures belong to the parent
        _open.clear()
        _owner_pid = os.getpid()
    if not _open:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        _install()
    _open[token] = end_capture


def unwatch(token: object) -> None:
    """Stop watching a capture. If a SIGTERM arrived while the capture was ending, deliver it now."""
    _open.pop(token, None)
    if not _open:
        atexit.unregister(_at_exit)
        _restore()


def _at_exit() -> None:
    _end_all("the process ended in mid-capture")


def _end_all(reason: str) -> bool:
    if _owner_pid != os.getpid():
        return True
    ended = [end_capture(reason) for end_capture in list(_open.values())]
    return all(ended)


def _install() -> None:
    global _previous, _installed  # noqa: PLW0603  # as above
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread can set signal handlers; atexit still ends the captures
    handler = signal.getsignal(signal.SIGTERM)
    if handler in (None, signal.SIG_IGN, _on_signal):
        return  # None: set by C code; SIG_IGN: the host ignores SIGTERM; _on_signal: set by another thread's capture
    if interrupts.cancels_coroutine(handler):
        return  # the coroutine is cancelled and ends its captures
    _previous = handler
    signal.signal(signal.SIGTERM, _on_signal)
    _installed = True


def _restore() -> None:
    global _previous, _installed, _pending_signal  # as above
    if not _installed or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, _previous)
    previous, _previous, _installed = _previous, None, False
    if _pending_signal is not None:
        number, _pending_signal = _pending_signal, None
        _deliver(number, previous, None)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _pending_signal  # noqa: PLW0603  # as above
    previous = _previous
    _pending_signal = number
    if _end_all(f"{signal.Signals(number).name} in mid-capture") and _pending_signal is not None:
        # `unwatch` has not delivered the signal: no capture was open, or only another thread can end the capture.
        _pending_signal = None
        _deliver(number, previous, frame)


def _deliver(number: int, handler: Any, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


_calls: deque[Callable[[], None]] = deque()


def _run_pending(_: object) -> int:
    while _calls:
        call = _calls.popleft()
        with contextlib.suppress(Exception):  # the exception would be raised at a random line of the host
            call()
    return 0


_RUN_PENDING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run_pending)


def call_in_main_thread(call: Callable[[], None]) -> None:
    """Run ``call`` in the main thread between two bytecodes, like a signal handler."""
    _calls.append(call)
    ctypes.pythonapi.Py_AddPendingCall(_RUN_PENDING, None)
