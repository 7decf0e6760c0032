"""Critical path of a recording with the owner of each segment, for viewers."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.model import OwnerIdentity
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int

ARGS = ("kind", "operator", "module", "annotation", "line")
"""Owner fields that viewers show as args of a segment."""


def args_of(owner: OwnerIdentity) -> dict[str, str]:
    """Return the args of an owner's segments."""
    return {name: value for name in ARGS if (value := getattr(owner, name)) is not None}


@attrs.frozen(eq=False)
class RankWaits:
    """Intervals in which a rank's critical path waited for the rank that arrived last at a collective."""

    begin_ns: Int
    """Start times, including the trace's base time. Each is the start of a segment inside a collective."""
    end_ns: Int
    rank: Int
    """The awaited rank."""


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

    def with_waits(self, waits: RankWaits, base_ns: int) -> OwnedPath:
        """Return the path with each wait as a separate segment. Waits that are not on the path are ignored.

        Args:
            waits: Waits for other ranks.
            base_ns: Base time of the trace.
        """
        begin, end = waits.begin_ns - base_ns, waits.end_ns - base_ns
        segment = np.minimum(self.begin_ns.searchsorted(begin), len(self) - 1)
        is_collective = np.array([owner.kind == OwnerKind.COLLECTIVE.label for owner in self.owners], np.bool_)
        is_on_path = (self.begin_ns[segment] == begin) & (end <= self.end_ns[segment])
        used = np.flatnonzero(is_on_path & is_collective[self.owner[segment]])
        begin, end, segment = begin[used], end[used], segment[used]
        ranks, number = np.unique(waits.rank[used], return_inverse=True)
        begin_ns = self.begin_ns.copy()
        begin_ns[segment] = end
        begin_ns, end_ns = np.append(begin_ns, begin), np.append(self.end_ns, end)
        owner = np.append(self.owner, (len(self.owners) + number).astype(np.int32))
        order = np.argsort(begin_ns, kind="stable")
        order = order[end_ns[order] > begin_ns[order]]
        owners = (*self.owners, *map(_wait_for, ranks.tolist()))
        return OwnedPath(begin_ns[order], end_ns[order], owner[order], owners, self.process)


def _wait_for(rank: int) -> OwnerIdentity:
    kind = OwnerKind.WAIT_FOR_RANK.label
    return OwnerIdentity(kind=kind, name=None, operator=None, module=None, annotation=None, line=None, rank=rank)
