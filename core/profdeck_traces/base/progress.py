"""Progress callbacks, and the combined progress of several files."""

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
        """Report progress in the current file. This is the progress callback for its reader."""
        if self._on_progress:
            self._on_progress(self._before + done_bytes, self._total)

    def passed(self, size_bytes: int) -> None:
        """Count the current file as read, and start the next file.

        Args:
            size_bytes: Size of the current file.
        """
        self._before += size_bytes
        self.within(0, 0)


def halves(on_progress: Progress | None) -> tuple[Progress | None, Progress | None]:
    """Return progress callbacks for two passes over the same files. Each pass counts for half of the progress."""
    if on_progress is None:
        return None, None
    return (
        lambda read_bytes, total_bytes: on_progress(read_bytes // 2, total_bytes),
        lambda read_bytes, total_bytes: on_progress((total_bytes + read_bytes) // 2, total_bytes),
    )
