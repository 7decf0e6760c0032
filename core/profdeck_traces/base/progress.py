"""Progress over several files as one."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Progress callback. It receives the number of bytes read so far and the total. Any thread may call it."""


class Meter:
    """Combined progress of several files that are read one after another."""

    def __init__(self, total_bytes: int, on_progress: Progress | None) -> None:
        self._total = total_bytes
        self._on_progress = on_progress
        self._before = 0

    def within(self, done_bytes: int, _: int) -> None:
        """Report from inside the present file; the progress callback of a reader."""
        if self._on_progress:
            self._on_progress(self._before + done_bytes, self._total)

    def passed(self, size_bytes: int) -> None:
        """Go on to the next file."""
        self._before += size_bytes
        self.within(0, 0)
