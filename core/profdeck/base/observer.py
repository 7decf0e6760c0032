"""Interface for displaying the progress of a long operation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


class Observer:
    """Observer of a long operation. Override its methods to display progress. By default, they do nothing."""

    def note(self, text: str) -> None:
        """Display a message."""

    def warn(self, text: str) -> None:
        """Display a warning."""

    def phase(self, text: str) -> AbstractContextManager[Callable[[int, int], None]]:  # noqa: ARG002
        """Return a context manager for one phase of the operation. It yields a callback for progress, which accepts the
        completed amount and the total.

        Args:
            text: Description of the phase, such as "Checking 3 servers".
        """
        return nullcontext(lambda _done, _total: None)
