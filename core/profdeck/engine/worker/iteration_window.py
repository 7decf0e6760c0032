"""How many iterations of one kind are wanted, and how many have come."""

from __future__ import annotations

import attrs


@attrs.define
class IterationWindow:
    """The iterations of one kind: how many came since they could be recorded, how many were recorded."""

    skip: int
    count: int | None
    seen: int = 0
    recorded: int = 0

    @property
    def wants_next(self) -> bool:
        """Whether the next iteration is to be recorded."""
        return self.seen >= self.skip and not self.done

    @property
    def done(self) -> bool:
        """Whether all that were asked for are recorded."""
        return self.count is not None and self.recorded >= self.count
