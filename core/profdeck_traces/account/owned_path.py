"""Critical path of a recording with the owner of each segment, for viewers."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.model import OwnerIdentity
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int

ARGS = ("kind", "operator", "module", "annotation", "line")
"""Owner fields that viewers show as args of a segment."""


def args_of(owner: OwnerIdentity) -> dict[str, str]:
    """Return the args of an owner's segments."""
    return {name: value for name in ARGS if (value := getattr(owner, name)) is not None}


@attrs.frozen(eq=False)
class OwnedPath:
    """Segments of a critical path as parallel arrays, sorted by time. Segments do not overlap."""

    begin_ns: Int
    end_ns: Int
    owner: NDArray[np.int32]
    """Index into ``owners`` for each segment."""
    owners: tuple[OwnerIdentity, ...]
    process: Id | None
    """Process of the main thread; ``None`` if the trace has no host threads."""

    def __len__(self) -> int:
        return len(self.begin_ns)

    def overlapping(self, begin_ns: int | None, end_ns: int | None) -> OwnedPath:
        """Return the segments that overlap an interval. ``None`` means unbounded."""
        first = 0 if begin_ns is None else int(self.end_ns.searchsorted(begin_ns, side="right"))
        last = len(self) if end_ns is None else int(self.begin_ns.searchsorted(end_ns))
        part = slice(first, max(first, last))
        return OwnedPath(self.begin_ns[part], self.end_ns[part], self.owner[part], self.owners, self.process)
