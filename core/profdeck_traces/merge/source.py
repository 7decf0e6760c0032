"""The sources of a merge."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.inputs.artifact_kinds import chrome_trace
from profdeck_traces.reading.events import Events


class EventFilter(Protocol):
    """Selects events. It is sent to other processes, so it must be picklable."""

    def rows(self, events: Events) -> NDArray[np.bool_]:
        """Return whether each event is kept, by its position in the file."""


@attrs.frozen
class MergeSource:
    """One trace to merge."""

    path: Path
    """A Chrome trace, plain or compressed, or an artifact that contains one."""
    label: str
    """Prefix of the names of its processes, such as ``"rollout/2 rank 1 (tp1)"``."""
    sort_index: int
    """Position of its processes in the viewer. Sources with equal values keep their order."""
    shift_ns: int = 0
    """Added to all of its times, for clocks that differ."""
    select: EventFilter | None = None
    """The events to merge; ``None``: all."""

    @property
    def file(self) -> Path:
        """The Chrome trace.

        Raises:
            TraceError: The artifact contains none.
        """
        return chrome_trace(self.path)
