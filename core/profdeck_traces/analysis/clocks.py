"""What to add to each rank's times so that those of all ranks compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

import attrs
import numpy as np

from profdeck_traces.analysis.clock_shift import MIN_COLLECTIVES, median
from profdeck_traces.analysis.collectives import Collectives, MatchedGroup, RankTeam, matched_groups, team_of
from profdeck_traces.reading.intervals import Int

# What the ends of collectives differ by on one clock is less; if not, different hosts have the same name.
_SHARED_CLOCK_NS = 100_000


class OffsetSource(StrEnum):
    """What a clock offset comes from."""

    FIRST = "first"
    """The rank is the one that the others are compared with."""
    HOST = "host"
    """It is on the host of one that is known."""
    COLLECTIVES = "collectives"
    ANCHORS = "anchors"
    UNKNOWN = "unknown"
    """Nothing ties its clock to that of the first rank; its offset is 0."""


@attrs.frozen(kw_only=True)
class ClockOffset:
    """How the clock of one trace stands to that of the first rank."""

    path: str
    rank: int | None
    offset_ns: int
    """What to add to its times to get those of the first rank."""
    source: OffsetSource
    collectives: int
    """How many were matched with another rank's."""
    spread_ns: int | None
    """Median distance of their ends from each other, with the offsets; ``None`` without any."""
    anchors_ns: int | None
    """The offset by the recorders' marks alone, where both have them."""


@attrs.frozen(eq=False)
class MatchedTeam:
    """The ranks of one role, replica and capture, with matched collectives and aligned clocks."""

    ranks: Sequence[Collectives]
    """Sorted by rank number."""
    places: Sequence[int]
    """Index of each rank in the input."""
    groups: Sequence[MatchedGroup]
    """Process groups with matched calls. Empty if `repeated` is set."""
    offsets: Sequence[ClockOffset]
    """Clock offset of each rank. Empty if `repeated` is set."""
    repeated: int | None
    """Rank number that several traces share, or None. Such traces are not from one program."""


def match_teams(ranks: Sequence[Collectives]) -> list[MatchedTeam]:
    """Match collectives within each role, replica and capture in which at least two ranks have collectives."""
    teams: dict[RankTeam, list[int]] = {}
    for place in sorted(range(len(ranks)), key=lambda place: (ranks[place].rank is None, ranks[place].rank or 0)):
        teams.setdefault(team_of(ranks[place]), []).append(place)
    matched = []
    for places in teams.values():
        team = [ranks[place] for place in places]
        if sum(len(rank.name) > 0 for rank in team) < 2:  # noqa: PLR2004 - a single rank has no other rank to wait for
            continue
        counts = Counter(rank.rank for rank in team if rank.rank is not None)
        repeated = next((rank for rank, count in counts.items() if count > 1), None)
        groups = [] if repeated is not None else matched_groups(team)
        matched.append(
            MatchedTeam(team, places, groups, offsets_of(team, groups) if repeated is None else (), repeated)
        )
    return matched


def clock_offsets(ranks: Sequence[Collectives]) -> tuple[ClockOffset, ...]:
    """Return how the clock of each trace stands to that of the first one, in the order given.

    The offset of two clocks is the median, over the collectives that they have in common, of the difference of the
    ends. Clocks that have none in common are compared over others. The ranks of a host have one clock; those
    whose host is unknown have one each. Marks of recorders count where there are less than eight collectives.
    """
    return offsets_of(ranks, matched_groups(ranks))


def offsets_of(ranks: Sequence[Collectives], groups: Sequence[MatchedGroup]) -> tuple[ClockOffset, ...]:
    """Estimate the offset of every rank."""
    links = [
        (group.leader, member, group.apart_ns(member))
        for group in groups
        for member in group.matched
        if member != group.leader
    ]
    odd = _with_other_clocks(ranks, groups)
    clocks: dict[str | int, int] = {}
    clock_of = [
        clocks.setdefault(index if rank.host is None or index in odd else rank.host, len(clocks))
        for index, rank in enumerate(ranks)
    ]
    apart: dict[tuple[int, int], list[Int]] = {}
    for leader, member, difference in links:
        one, other = clock_of[leader], clock_of[member]
        if one != other:
            apart.setdefault((one, other), []).append(difference)
            apart.setdefault((other, one), []).append(-difference)
    anchors = _anchors(ranks, clock_of, len(clocks))
    offset, source = _clocks({pair: np.concatenate(parts) for pair, parts in apart.items()}, anchors)
    distances: dict[int, list[Int]] = {}
    for leader, member, difference in links:
        distance = np.abs(difference + offset[clock_of[leader]] - offset[clock_of[member]])
        distances.setdefault(leader, []).append(distance)
        distances.setdefault(member, []).append(distance)
    offsets = []
    for index, rank in enumerate(ranks):
        clock = clock_of[index]
        distance = np.concatenate(distances.get(index, [np.empty(0, dtype=np.int64)]))
        offsets.append(
            ClockOffset(
                path=rank.path,
                rank=rank.rank,
                offset_ns=offset[clock],
                source=OffsetSource.HOST if clock == 0 and index else source[clock],
                collectives=len(distance),
                spread_ns=median(distance) if len(distance) else None,
                anchors_ns=anchors[clock],
            )
        )
    return tuple(offsets)


def _with_other_clocks(ranks: Sequence[Collectives], groups: Sequence[MatchedGroup]) -> set[int]:
    """Return the ranks that cannot have the clock of the first rank on their host."""
    found = set()
    for group in groups:
        of_host: dict[str, int] = {}
        for member in group.matched:
            host = ranks[member].host
            apart_ns = median(group.apart_ns(member))
            if host is not None and abs(apart_ns - of_host.setdefault(host, apart_ns)) > _SHARED_CLOCK_NS:
                found.add(member)
    return found


def _anchors(ranks: Sequence[Collectives], clock_of: list[int], clocks: int) -> list[int | None]:
    """Return the offset of each clock to the first one by the recorders' marks."""
    of_clock: list[list[int]] = [[] for _ in range(clocks)]
    for rank, clock in zip(ranks, clock_of, strict=True):
        if rank.anchor_offset_ns is not None:
            of_clock[clock].append(rank.anchor_offset_ns)
    absolute = [median(np.array(offsets)) if offsets else None for offsets in of_clock]
    first = absolute[0] if absolute else None
    return [None if first is None or offset is None else offset - first for offset in absolute]


def _clocks(apart: dict[tuple[int, int], Int], anchors: Sequence[int | None]) -> tuple[list[int], list[OffsetSource]]:
    """Return the offset of each clock and what it comes from, going out from the first along the strongest links.

    Args:
        apart: Of two clocks that ran the same collectives, what to add to the second one to get the first.
        anchors: The offsets by the recorders' marks.
    """
    offset = [0] * len(anchors)
    source = [OffsetSource.FIRST] * len(anchors)
    left = set(range(1, len(anchors)))
    while left:
        links = [pair for pair in apart if pair[0] not in left and pair[1] in left]
        best = max(links, key=lambda pair: len(apart[pair]), default=None)
        anchored = min((clock for clock in left if anchors[clock] is not None), default=None)
        if best and (anchored is None or len(apart[best]) >= MIN_COLLECTIVES):
            clock = best[1]
            offset[clock] = offset[best[0]] + median(apart[best])
            source[clock] = OffsetSource.COLLECTIVES
        elif anchored is not None:
            clock = anchored
            offset[clock] = anchors[clock] or 0
            source[clock] = OffsetSource.ANCHORS
        else:
            clock = min(left)
            source[clock] = OffsetSource.UNKNOWN
        left.remove(clock)
    return offset, source
