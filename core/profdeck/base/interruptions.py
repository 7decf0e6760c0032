"""Tells what a host's signal handler has raised amid our work, such as its own timeout, from what failed there."""

from __future__ import annotations

import functools
import inspect
import signal
import traceback
from types import CodeType
from typing import Any


def is_of_signal(error: BaseException) -> bool:
    """Tell whether a handler of a signal raised it: it is the host's then, and no failure of what it interrupted."""
    handlers = map(signal.getsignal, signal.valid_signals())
    # SIG_DFL and SIG_IGN are enum members: calling any enum runs the code that would be found for them.
    codes = {_code(handler) for handler in handlers if not isinstance(handler, signal.Handlers)} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def is_interruption(error: BaseException) -> bool:
    """Return whether an exception ends the host's work; False if only the code that raised it failed.

    ``CancelledError`` is an interruption only while the current task is being cancelled.
    """
    import asyncio

    if not isinstance(error, asyncio.CancelledError):
        return not isinstance(error, Exception) or is_of_signal(error)
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs on this thread
        return False
    return task is not None and task.cancelling() > 0


def raise_of_signal(error: BaseException) -> None:
    """Raise what a handler of a signal raised, if that is what an error is made of."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            raise_of_signal(one)
    elif is_of_signal(error):
        raise error


def _code(handler: object) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = type(handler).__call__
    function: Any = getattr(handler, "__func__", handler)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None
