"""`record_function` scopes that are still open when a recording stops.

When a scope ends during a recording, torch writes the end time to the memory of the recording in which the scope
started. If that recording has already stopped, its memory has been freed, and the process crashes (observed with torch
2.13). Open scopes must therefore end before the next recording starts.
"""

from __future__ import annotations

import functools
import weakref

from torch.autograd.profiler import record_function

_scopes: dict[weakref.ref[record_function], None] = {}
"""Scopes that started during recordings, sorted by their last start. A decorator starts the same scope repeatedly."""
_enter = record_function.__enter__


# TorchScript compiles this class from its source, so the wrapper must expose the original method.
@functools.wraps(_enter)
def _enter_and_remember(self: record_function) -> record_function:
    reference = weakref.ref(self)
    _scopes.pop(reference, None)
    _scopes[reference] = None
    return _enter(self)


def watch() -> None:
    """Start tracking new scopes in all threads."""
    record_function.__enter__ = _enter_and_remember


def unwatch() -> None:
    """Stop tracking new scopes, and remove deleted scopes."""
    if record_function.__enter__ is _enter_and_remember:  # another tool may have replaced it
        record_function.__enter__ = _enter
    for reference in [*_scopes]:
        if reference() is None:
            del _scopes[reference]


def end_all() -> None:
    """End all tracked scopes, innermost first. Call this between recordings, when torch does not write events.

    Ending a scope again has no effect.
    """
    while _scopes:
        reference, _ = _scopes.popitem()
        scope = reference()
        if scope is not None and scope.record is not None:
            record_function.__exit__(scope, None, None, None)
