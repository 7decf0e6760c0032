"""Other profilers of torch in this process: torch has one recording at a time, which the next one ends.

A second ``torch.profiler.profile`` or ``autograd.profiler.profile`` takes over the session of Kineto. The export of
the first, whose result is empty then, ends the process (torch 2.13, by running it). So a capture ends before
another profiler begins.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.autograd import profiler as autograd_profiler

from profdeck.base.errors import CaptureError

_BEGINNINGS = {
    "torch.autograd.profiler": ("_prepare_profiler", "_enable_profiler"),
    "torch.autograd.profiler_legacy": ("_enable_profiler_legacy",),
}
"""What profilers of torch call to begin, by the module that looks it up. A release without one of them is no error:
`ensure_none` and the result of the recording still tell."""


_left_open: set[int] = set()
"""The threads whose recording was taken over by a profiler of another thread, which ending it would have disturbed."""


def leave_open() -> None:
    """Leave the recording of this thread open, whose session a profiler of another thread has taken over.

    Ending it now would end the other one's session, or the process where that has ended already.
    """
    _left_open.add(threading.get_ident())
    clear()


def clear() -> None:
    """End what was left open in this thread, once no other profiler records."""
    if threading.get_ident() in _left_open and not _any_records():
        # A session that is prepared and never begun: with none at all, torch 2.13 follows a null pointer here.
        autograd_profiler.profile(use_kineto=True)._prepare_trace()  # noqa: SLF001  # what torch.profiler calls
        torch.autograd._disable_profiler()  # noqa: SLF001  # the same
        _left_open.discard(threading.get_ident())


def _any_records() -> bool:
    """Tell whether the last profiler of this process that began or ended, in any thread, began."""
    return bool(getattr(autograd_profiler, "_is_profiler_enabled", False))


def ensure_none() -> None:
    """Check that no other profiler records, in any thread.

    Raises:
        CaptureError: one does.
    """
    clear()
    if torch.autograd._profiler_enabled() or _any_records():  # noqa: SLF001  # the only way to ask about this thread
        raise CaptureError(
            "A torch profiler that is not profdeck's is already active in this process; its data would be lost. "
            "Remove it, or capture other steps than it does."
        )


class Watch:
    """Says when another profiler begins while a capture records; used as a context manager."""

    def __init__(self, begins: Callable[[], None]) -> None:
        """Args:
        begins: called in the thread of the other profiler, before it begins.
        """
        self._begins = begins
        self._own: int | None = None
        self._originals: dict[tuple[str, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def __enter__(self) -> Self:
        for module, names in _BEGINNINGS.items():
            for name in names:
                original = getattr(sys.modules.get(module), name, None)
                if original is not None:
                    ours = self._announced(original)
                    self._originals[module, name] = (original, ours)
                    setattr(sys.modules[module], name, ours)
        return self

    def __exit__(self, *_: object) -> None:
        for (module, name), (original, ours) in self._originals.items():
            if getattr(sys.modules[module], name) is ours:  # else somebody put something of theirs around it
                setattr(sys.modules[module], name, original)
        self._originals.clear()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Begin and end profilers of our own inside."""
        self._own = threading.get_ident()
        try:
            yield
        finally:
            self._own = None

    def _announced(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def begin(*arguments: Any, **options: Any) -> Any:
            if self._originals and self._own != threading.get_ident():
                self._begins()
            return original(*arguments, **options)

        return begin
