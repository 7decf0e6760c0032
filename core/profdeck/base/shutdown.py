"""Ends open captures when the process is about to end: at normal exit, ``sys.exit``, an exception, or SIGTERM.

SIGINT needs nothing here: Python turns it into KeyboardInterrupt. SIGKILL and ``os._exit`` leave no chance; the
run directory then shows that rank as missing.
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

Finish = Callable[[str], bool]
"""Ends a capture for the reason given. Returns False when the capture is busy and will end a little later."""

_open: dict[object, Finish] = {}
_previous: Any = None
_installed = False
_waiting_signal: int | None = None
_owner_pid = os.getpid()


def watch(token: object, finish: Finish) -> None:
    """Call ``finish`` if the process is about to end before `unwatch`."""
    global _owner_pid  # noqa: PLW0603  # the state of this process's one exit handler
    if _owner_pid != os.getpid():  # a forked child: what was open belongs to its parent
        _open.clear()
        _owner_pid = os.getpid()
    if not _open:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        _install()
    _open[token] = finish


def unwatch(token: object) -> None:
    """End the watch; delivers a SIGTERM that came while the capture was being ended."""
    _open.pop(token, None)
    if not _open:
        atexit.unregister(_at_exit)
        _restore()


def _at_exit() -> None:
    _finish_all("the process ended in mid-capture")


def _finish_all(reason: str) -> bool:
    if _owner_pid != os.getpid():
        return True
    finished = [finish(reason) for finish in list(_open.values())]
    return all(finished)


def _install() -> None:
    global _previous, _installed  # noqa: PLW0603  # as above
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set handlers; normal exit is still covered
    handler = signal.getsignal(signal.SIGTERM)
    if handler in (None, signal.SIG_IGN, _on_signal):
        return  # set by C code; or the host wants to survive SIGTERM; or left by a capture of another thread
    if interrupts.cancels_coroutine(handler):
        return  # the coroutine is cancelled and ends its captures
    _previous = handler
    signal.signal(signal.SIGTERM, _on_signal)
    _installed = True


def _restore() -> None:
    global _previous, _installed, _waiting_signal  # as above
    if not _installed or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, _previous)
    previous, _previous, _installed = _previous, None, False
    if _waiting_signal is not None:
        number, _waiting_signal = _waiting_signal, None
        _deliver(number, previous, None)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _waiting_signal  # noqa: PLW0603  # as above
    previous = _previous
    _waiting_signal = number
    if _finish_all(f"{signal.Signals(number).name} in mid-capture") and _waiting_signal is not None:
        # Nothing was open any more, or it belongs to another thread: the signal is due now.
        _waiting_signal = None
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
        with contextlib.suppress(Exception):  # an exception would surface at a random line of the host
            call()
    return 0


_RUN_PENDING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run_pending)


def call_in_main_thread(call: Callable[[], None]) -> None:
    """Run ``call`` in the main thread between two bytecodes, as a signal handler would be, without a signal."""
    _calls.append(call)
    ctypes.pythonapi.Py_AddPendingCall(_RUN_PENDING, None)
