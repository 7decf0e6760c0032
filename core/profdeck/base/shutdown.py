"""Ends open captures before the process exits: at normal exit, ``sys.exit``, an exception, or SIGTERM.

SIGINT needs no handler, because Python raises KeyboardInterrupt. After SIGKILL and ``os._exit``, no exit code runs, and
the run directory shows the rank as missing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import attrs

from profdeck.base import interrupts, threads

logger = logging.getLogger("profdeck")

EndCapture = Callable[[str], bool]
"""Function that ends a capture for a reason. It returns False if the capture is busy and will end later."""

_GRACE_S = 5.0
"""Time limit for the main thread to run the signal handler, which cannot run while the thread waits in native code."""
_POLL_S = 0.1


@attrs.frozen
class _OpenCapture:
    end: EndCapture
    fail: EndCapture
    """Function that writes the manifest of a capture whose thread does not respond. It is called in another thread, and
    returns False if the capture is busy."""


_open: dict[object, _OpenCapture] = {}
_previous: Any = None
_installed = False
_pending_signal: int | None = None
_child_handler: Any = None
"""The host's handler of SIGCHLD while SIGTERM ends the captures."""
_signal_watch: _SignalWatch | None = None


def watch(token: object, end_capture: EndCapture, fail_capture: EndCapture) -> None:
    """Call ``end_capture`` if the process exits before `unwatch` is called with the same token.

    Args:
        token: identifies the capture.
        end_capture: function that ends the capture.
        fail_capture: function that writes the capture's manifest if the main thread does not respond to SIGTERM.
    """
    if not _open:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        _install()
    _open[token] = _OpenCapture(end_capture, fail_capture)


def unwatch(token: object) -> None:
    """Stop watching a capture. If a SIGTERM arrived while the capture was ending, deliver it now."""
    _open.pop(token, None)
    if not _open:
        atexit.unregister(_at_exit)
        _restore()


def start_signal_thread() -> None:
    """Start the thread that handles SIGTERM while the main thread waits in native code.

    Call this after the recorder has started, because recorders of Python stacks include all threads that exist when
    they start.
    """
    if _signal_watch is not None:
        _signal_watch.start()


def _at_exit() -> None:
    _end_all("the process ended in mid-capture")


def _end_all(reason: str) -> bool:
    ended = [capture.end(reason) for capture in list(_open.values())]
    return all(ended)


def _fail_all(reason: str) -> bool:
    failed = [capture.fail(reason) for capture in list(_open.values())]
    return all(failed)


def _install() -> None:
    global _previous, _installed, _signal_watch  # noqa: PLW0603  # there is one handler per process
    if threading.current_thread() is not threading.main_thread():
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            logger.info(
                "This capture was started outside the main thread, where signal handlers cannot be set. SIGTERM will "
                "terminate the process immediately, without ending the capture."
            )
        return  # the atexit handler still ends the captures
    handler = signal.getsignal(signal.SIGTERM)
    if handler in (None, signal.SIG_IGN, _on_signal):
        return  # None: set by C code; SIG_IGN: the host ignores SIGTERM; _on_signal: set by another thread's capture
    if interrupts.cancels_coroutine(handler):
        return  # the coroutine is cancelled and ends its captures
    _previous = handler
    signal.signal(signal.SIGTERM, _on_signal)
    _installed = True
    if handler is signal.SIG_DFL:  # a host's own handler could not run during native code, either
        _signal_watch = _SignalWatch.install()


def _restore() -> None:
    global _previous, _installed, _pending_signal, _signal_watch  # noqa: PLW0603  # as above
    if not _installed or threading.current_thread() is not threading.main_thread():
        return
    if _signal_watch is not None:
        _signal_watch.close()
        _signal_watch = None
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, _previous)
    previous, _previous, _installed = _previous, None, False
    _restore_child_handler()
    if _pending_signal is not None:
        number, _pending_signal = _pending_signal, None
        _deliver(number, previous, None)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _pending_signal  # noqa: PLW0603  # as above
    if _signal_watch is not None and not _signal_watch.begin_handling():
        return  # the process is about to be terminated
    previous = _previous
    _pending_signal = number
    _suspend_child_handler()
    if _end_all(f"{signal.Signals(number).name} in mid-capture") and _pending_signal is not None:
        # `unwatch` has not delivered the signal: no capture was open, or only another thread can end the capture.
        _pending_signal = None
        _restore_child_handler()
        _deliver(number, previous, frame)


def _suspend_child_handler() -> None:
    """Ignore SIGCHLD in Python while captures end.

    If SIGTERM is sent to the process group, it also ends child processes. The handler of torch's data loader then
    raises an exception, which would interrupt the end of the captures.
    """
    global _child_handler  # noqa: PLW0603  # as above
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and handler is not _ignore_child:
        _child_handler = handler
        signal.signal(signal.SIGCHLD, _ignore_child)


def _restore_child_handler() -> None:
    if signal.getsignal(signal.SIGCHLD) is _ignore_child:
        signal.signal(signal.SIGCHLD, _child_handler)


def _ignore_child(_number: int, _frame: FrameType | None) -> None:
    pass


def _deliver(number: int, handler: Any, frame: FrameType | None) -> None:
    if callable(handler):
        # A deferred signal has no frame, but `interrupts.is_interruption` recognizes handlers by their frame argument.
        handler(number, frame or sys._getframe())  # noqa: SLF001  # documented in the Python library
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class _SignalWatch:
    """Thread that terminates the process after SIGTERM if the main thread does not respond.

    Python signal handlers run in the main thread, between two bytecode instructions. While the main thread waits in
    native code, for example in a collective, only the wakeup file descriptor reports the signal. If the host has set
    its own descriptor, as asyncio does for its signal handlers, the thread forwards all signals to that descriptor.
    """

    def __init__(self, reader: socket.socket, writer: socket.socket, host_descriptor: int) -> None:
        """Args:
        reader: the socket from which the thread reads signal numbers.
        writer: the socket whose descriptor is set as the wakeup file descriptor.
        host_descriptor: the host's own wakeup file descriptor, or -1 if the host has not set one.
        """
        self._reader = reader
        self._writer = writer
        self._host_descriptor = host_descriptor
        # Duplicated because the host may close its descriptor, and the number could then be reused for another file.
        self._forward: int | None = None
        if host_descriptor != -1:
            with contextlib.suppress(OSError):  # the host has closed its descriptor
                self._forward = os.dup(host_descriptor)
        self._mutex = threading.RLock()  # re-entrant: a second signal can interrupt `begin_handling`
        self._has_thread = self._is_handled = self._terminates = False

    @classmethod
    def install(cls) -> _SignalWatch | None:
        """Set the wakeup file descriptor. Return None if signals cannot be forwarded to the host."""
        reader, writer = socket.socketpair()
        writer.settimeout(0)
        watch = cls(reader, writer, signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False))
        if watch._forward is not None and not watch.start():
            watch.close()
            return None
        return watch

    def start(self) -> bool:
        """Start the thread unless it has already been started. Return False if it cannot be started."""
        if not self._has_thread:
            with contextlib.suppress(RuntimeError):  # for example, no thread can be started at interpreter exit
                threads.start_unsignalled(self._run, "profdeck signals")
                self._has_thread = True
        return self._has_thread

    def close(self) -> None:
        """Restore the host's wakeup file descriptor and stop the thread."""
        try:
            descriptor = signal.set_wakeup_fd(self._host_descriptor)
        except (OSError, ValueError):  # the host has closed its descriptor
            descriptor = signal.set_wakeup_fd(-1)
        if descriptor != self._writer.fileno():  # the host has set another descriptor since then
            signal.set_wakeup_fd(descriptor)
        self._writer.close()
        if not self._has_thread:
            self.close_reader()

    def close_reader(self) -> None:
        """Close the thread's descriptors. Call this if the thread is not running, for example in a forked child."""
        self._reader.close()
        if self._forward is not None:
            os.close(self._forward)
            self._forward = None

    def begin_handling(self) -> bool:
        """Record that the signal handler is running. Return False if the process is already being terminated."""
        with self._mutex:
            self._is_handled = True
            return not self._terminates

    def _run(self) -> None:
        received_s = math.inf
        reader = self._reader
        try:
            while True:
                try:
                    numbers = reader.recv(4096)
                except TimeoutError:
                    numbers = None
                if numbers == b"":
                    return  # `close` has closed the other socket
                if numbers and self._forward is not None:
                    with contextlib.suppress(OSError):  # like `set_wakeup_fd`, ignore a full buffer
                        os.write(self._forward, numbers)
                is_received = signal.SIGTERM in (numbers or b"")
                waited_s = time.monotonic() - received_s
                if waited_s >= _GRACE_S and self._must_terminate(is_repeated=is_received):
                    _terminate()
                    return
                if is_received and received_s == math.inf:
                    received_s = time.monotonic()
                    reader.settimeout(_POLL_S)
        finally:
            self.close_reader()

    def _must_terminate(self, *, is_repeated: bool) -> bool:
        """Write the manifests of the open captures, and return whether to terminate the process.

        While the signal handler is running, or a capture is starting or stopping, only a repeated signal terminates
        the process. If the host has replaced the handler since the capture started, do nothing and return False.
        """
        if signal.getsignal(signal.SIGTERM) is not _on_signal:
            return False
        with self._mutex:
            if self._is_handled and not is_repeated:
                return False
            with contextlib.suppress(Exception):  # the process must end, even if a manifest cannot be written
                reason = (
                    f"SIGTERM in mid-capture; the main thread was waiting in a call and did not stop the recording "
                    f"within {_GRACE_S:g} seconds"
                )
                if not _fail_all(reason) and not is_repeated:
                    return False
            self._terminates = True
            return True


def _terminate() -> None:
    """Restore the default action of SIGTERM and send the signal again.

    This uses the C API, because `signal.signal` can only be called in the main thread.
    """
    set_action = ctypes.pythonapi.PyOS_setsig
    set_action.argtypes, set_action.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    set_action(signal.SIGTERM, None)  # SIG_DFL
    threads.unblock_signals()  # the host may block SIGTERM in its own threads
    os.kill(os.getpid(), signal.SIGTERM)


def _reset_in_child() -> None:
    """In a forked child, restore the host's signal handler and discard the open captures, which the parent owns."""
    global _pending_signal  # noqa: PLW0603  # as above
    _open.clear()
    _pending_signal = None
    if _signal_watch is not None:
        _signal_watch.close_reader()
    _restore()


os.register_at_fork(after_in_child=_reset_in_child)

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
