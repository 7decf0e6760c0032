"""Sources of a merge."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.owned_path import RankWaits
from profdeck_traces.inputs.artifact_kinds import chrome_trace
from profdeck_traces.reading.events import Events


class EventFilter(Protocol):
    """Selects the events to merge. It must be picklable, because it is sent to other processes."""

    def rows(self, events: Events) -> NDArray[np.bool_]:
        """Return a mask of the events to keep, in file order."""


@attrs.frozen
class MergeSource:
    """One trace to merge."""

    path: Path
    """A Chrome trace, plain or compressed, or an artifact that contains one."""
    label: str
    """Prefix for the names of the source's processes, such as ``"rollout/2 rank 1 (tp1)"``."""
    sort_index: int
    """Position of the source in the viewer. Sources with equal values keep their order."""
    shift_ns: int = 0
    """Added to all times of the source, to align its clock with the other sources."""
    select: EventFilter | None = None
    """Filter for the events to merge; ``None`` merges all events."""
    path_window: tuple[int | None, int | None] | None = None
    """Add the part of the critical path that overlaps this window as a thread. The bounds are nanoseconds on the clock
    of the trace; a bound of ``None`` means unbounded. ``None`` adds nothing."""
    waits: RankWaits | None = None
    """Waits for other ranks, written as events of that thread."""

    @property
    def file(self) -> Path:
        """The source's Chrome trace.

        Raises:
            TraceError: The artifact does not contain a Chrome trace.
        """
        return chrome_trace(self.path)
