"""Selection of the iterations that a capture records."""

from __future__ import annotations

import attrs


@attrs.define
class IterationWindow:
    """Iteration window for one kind of batch, and its progress."""

    skip: int
    """Number of iterations to skip."""
    count: int | None
    """Number of iterations to record. None: until the stop."""
    seen: int = 0
    """Iterations since the device became available, including recorded ones."""
    recorded: int = 0

    @property
    def includes_next(self) -> bool:
        """True if the next iteration must be recorded."""
        return self.seen >= self.skip and not self.done

    @property
    def done(self) -> bool:
        """True if all requested iterations are recorded."""
        return self.count is not None and self.recorded >= self.count
