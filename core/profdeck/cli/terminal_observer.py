"""Observer that prints messages and progress bars to stderr."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from profdeck.base.observer import Observer
from profdeck_traces.cli import terminal


class TerminalObserver(Observer):
    """Displays messages and progress on stderr."""

    def note(self, text: str) -> None:
        """Print a message."""
        terminal.print_stderr(text)

    def warn(self, text: str) -> None:
        """Print a warning."""
        terminal.warn(text)

    def phase(self, text: str) -> AbstractContextManager[Callable[[int, int], None]]:
        """Show a progress bar while the phase lasts."""
        return terminal.show_progress(text)
