"""Interface for code that displays the progress of a long operation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


class Observer:
    """Receives messages and progress. The methods of this class do nothing."""

    def note(self, text: str) -> None:
        """Receive a message."""

    def warn(self, text: str) -> None:
        """Receive a warning."""

    def phase(self, text: str) -> AbstractContextManager[Callable[[int, int], None]]:  # noqa: ARG002
        """Return a context for a phase of the operation. It yields a callback for the completed amount and the total.

        Args:
            text: Description of the phase, such as "Checking 3 servers".
        """
        return nullcontext(lambda _done, _total: None)
