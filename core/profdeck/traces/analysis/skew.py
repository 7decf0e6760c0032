"""Who waited for whom: the collectives that ranks ran together, matched across their traces.

No rank can leave a collective long before the others, so that its end is one instant on all clocks, up to some
microseconds: that tells how the clocks stand to each other. What is left between the starts is skew, the time in which
ranks that had arrived waited for the last one. Messages from point to point have no such instant and are left out;
collectives that a library carries out as messages are collectives only where the trace names them so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck.traces.analysis.model import CollectiveSkew, GroupSkew, RankSkew
from profdeck.traces.reading.intervals import Int

_NS_PER_US = 1000

# Below this nothing is told apart, however well the ends agree.
_MIN_NOISE_NS = 1000
# So many collectives give a better clock than the marks that recorders leave.
_MIN_COLLECTIVES = 8
# Out of less nobody is called a straggler.
_MIN_CONTESTS = 5
# What the ends of collectives differ by on one clock is less; if not, different hosts have the same name.
_SHARED_CLOCK_NS = 100_000
# What time servers keep the clocks of hosts within.
_CLOCKS_AGREE_NS = 10_000_000

# To find how two sequences of calls lie to each other, the times between so many calls are looked for in the other ...
_PROBE = 32
# ... and what is found is judged by so many pairs.
_JUDGED = 512

# NCCL's kernels, then HCCL's, whose names end in numbers that differ from call to call.
_NCCL = re.compile(r"[nr]ccl\w*?Kernel_([A-Za-z]+)")
_HCCL = re.compile(r"hcom_([A-Za-z]+)")
_POINT_TO_POINT = re.compile(r"send|recv|receive", re.IGNORECASE)


def collective_name(name: str) -> str:
    """Return what ranks have in common in the name of a kernel or collective, such as ``AllReduce``."""
    for library in (_NCCL, _HCCL):
        if found := library.search(name):
            return found[1]
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name, maxsplit=1)[0].rpartition("::")[2]


def is_message(name: str) -> bool:
    """Tell whether a kernel or collective is by its name one from point to point."""
    return _POINT_TO_POINT.search(collective_name(name)) is not None


@attrs.frozen(kw_only=True, eq=False)
class Collectives:
    """The communication on the devices of one trace: parallel arrays of one value for each kernel, in any order."""

    path: str
    rank: int | None
    role: str | None = None
    replica: int | None = None
    capture: str | None = None
    host: str | None = None
    """Ranks of one host share a clock, unless their collectives are more than 100 us apart."""
    anchor_offset_ns: int | None = None
    """What to add to the trace's clock to get the real time, by marks that the recorder left."""
    names: Sequence[str]
    """Of the kernels, or of the collectives that they are part of."""
    groups: Sequence[str]
    """The same text on the ranks that communicate with each other: of process groups the name or ranks; where the
    trace has neither, of streams. A text may come more than once."""
    meant: Mapping[str, str] = attrs.field(factory=dict)
    """Which group is meant by one of ``groups`` where others have the same text; what is not known may be missing."""
    name: NDArray[np.integer]
    """Index into ``names``."""
    group: NDArray[np.integer]
    """Index into ``groups``."""
    start_ns: Int
    """With the base of the trace's clock, so that clocks of different traces compare."""
    end_ns: Int


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


def clock_offsets(ranks: Sequence[Collectives]) -> tuple[ClockOffset, ...]:
    """Return how the clock of each trace stands to that of the first one, in the order given.

    The offset of two clocks is the median, over the collectives that they have in common, of the difference of the
    ends. Clocks that have none in common are compared over others. The ranks of a host have one clock; those
    whose host is unknown have one each. Marks of recorders count where there are less than eight collectives.
    """
    return _offsets(ranks, _groups(ranks))


def skew_of(ranks: Sequence[Collectives]) -> tuple[GroupSkew, ...]:
    """Return how the ranks of each role, replica and capture stood to each other, where they are two or more.

    A rank arrives at a collective when its kernel starts. A collective counts if all ranks of its process group that
    are here took part, at the same time. The last to arrive is named only if it is later than the one before by more
    than ends differ, and by 1 us: less is noise. A straggler was the last of at least five collectives, more often
    than half-way between chance and always.
    """
    teams: dict[_Team, list[Collectives]] = {}
    for rank in sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank or 0)):
        teams.setdefault(_team(rank), []).append(rank)
    return tuple(
        _skew(team) for team in teams.values() if len(team) > 1 and sum(len(rank.name) > 0 for rank in team) > 1
    )


@attrs.frozen(eq=False)
class _Calls:
    """The calls of one rank in one process group, by start."""

    name: Int
    start_ns: Int
    end_ns: Int


@attrs.frozen(eq=False)
class _Group:
    """The ranks of one process group, and which of their calls are the same collective."""

    names: list[str]
    leader: int
    """The rank with the most calls: an index into the traces."""
    members: dict[int, _Calls]
    matched: dict[int, Int]
    """Of each member that has collectives in common with the leader: the call that is each of the leader's, or -1."""

    def apart_ns(self, member: int) -> Int:
        """Return by how much each collective ended earlier on a member's clock than on the leader's."""
        which = self.matched[member]
        return self.members[self.leader].end_ns[which >= 0] - self.members[member].end_ns[which[which >= 0]]

    def times_ns(self, collectives: Int, offset_ns: Sequence[int]) -> tuple[Int, Int]:
        """Return starts and ends of some of the leader's collectives, from the first start of each: a row a member."""
        calls = [
            (self.members[member], which[collectives], offset_ns[member]) for member, which in self.matched.items()
        ]
        start = np.stack([of_member.start_ns[which] + offset for of_member, which, offset in calls])
        end = np.stack([of_member.end_ns[which] + offset for of_member, which, offset in calls])
        begin = start.min(axis=0)
        return start - begin, end - begin


_Team = tuple[str | None, int | None, str | None]


def _team(rank: Collectives) -> _Team:
    return rank.role, rank.replica, rank.capture


def _meant_by_all(ranks: Sequence[Collectives]) -> dict[tuple[object, ...], str]:
    """Return, by team and text, the group that all ranks mean which know it."""
    meant: dict[tuple[object, ...], set[str]] = {}
    for rank in ranks:
        for text, group in rank.meant.items():
            meant.setdefault((*_team(rank), text), set()).add(group)
    return {key: groups.pop() for key, groups in meant.items() if len(groups) == 1}


def _groups(ranks: Sequence[Collectives]) -> list[_Group]:
    names: dict[str, int] = {}
    found: dict[tuple[object, ...], dict[int, _Calls]] = {}
    only_one = _meant_by_all(ranks)
    for index, rank in enumerate(ranks):
        common = [collective_name(name) for name in rank.names]
        code = np.array([names.setdefault(name, len(names)) for name in common], dtype=np.int64)
        is_collective = np.array([not is_message(name) for name in rank.names], dtype=bool)
        order = np.argsort(rank.start_ns, kind="stable")
        order = order[is_collective[rank.name[order]]]
        meant = {text: rank.meant.get(text) or only_one.get((*_team(rank), text), text) for text in rank.groups}
        texts = {text: number for number, text in enumerate(dict.fromkeys(meant.values()))}
        group_of_call = np.array([texts[meant[text]] for text in rank.groups], dtype=np.int64)[rank.group[order]]
        for text, group in texts.items():
            calls = order[group_of_call == group]
            if not len(calls):
                continue
            key = (*_team(rank), text)
            members = found.setdefault(key, {})
            members[index] = _Calls(code[rank.name[calls]], rank.start_ns[calls], rank.end_ns[calls])
    groups = []
    for members in found.values():
        leader = max(members, key=lambda member: len(members[member].name))
        matched = {
            member: which
            for member, calls in members.items()
            if (which := _matched(members[leader], calls)) is not None
        }
        groups.append(_Group(list(names), leader, members, matched))
    return groups


def _matched(first: _Calls, other: _Calls) -> Int | None:
    """Return which call of the other rank is each of the first one's, or -1; ``None`` if they have nothing in common.

    The k-th call of one goes with the k-th of the other, but for calls that one of them missed before it began to
    record or after it ended. Half of the calls must then be under way on both at the same time.
    """
    shift = _shift(first, other)
    if shift is None:
        return None
    mine, theirs = _overlap(len(first.name), len(other.name), shift)
    same = first.name[mine] == other.name[theirs]
    offset = _median((first.end_ns[mine] - other.end_ns[theirs])[same])
    begin = np.maximum(first.start_ns[mine], other.start_ns[theirs] + offset)
    together = same & (begin <= np.minimum(first.end_ns[mine], other.end_ns[theirs] + offset) + _MIN_NOISE_NS)
    if 2 * np.count_nonzero(together) < len(same):
        return None
    which = np.full(len(first.name), -1, dtype=np.int64)
    which[mine] = np.where(same, np.arange(theirs.start, theirs.stop), -1)
    return which


def _overlap(first: int, other: int, shift: int) -> tuple[slice, slice]:
    """Return what two sequences have in common if the element k of the other one is k + shift of the first."""
    begin, end = max(0, shift), min(first, other + shift)
    return slice(begin, end), slice(begin - shift, end - shift)


@attrs.frozen
class _Fit:
    shift: int
    calls: int
    offset_ns: int
    spread_ns: int


def _shift(first: _Calls, other: _Calls) -> int | None:
    """Return by how many calls the other sequence lies behind the first, ``None`` if it cannot be told.

    At the right shift the ends differ by a constant; at others by what the times between calls add up to, unless the
    calls are periodic. Of shifts that fit alike, that one is taken which makes the clocks agree, or else which leaves
    the least calls alone.
    """
    count, others = len(first.name), len(other.name)
    if count == others and (whole := _fit(first, other, 0)) and whole.spread_ns * 10 < _regularity(first.end_ns):
        return 0
    fits = [fit for shift in _candidates(first.end_ns, other.end_ns) if (fit := _fit(first, other, shift))]
    if not fits:
        return None
    limit = max(_MIN_NOISE_NS, 2 * min(fit.spread_ns for fit in fits))
    alike = [fit for fit in fits if fit.spread_ns <= limit]
    agree = [fit for fit in alike if abs(fit.offset_ns) <= _CLOCKS_AGREE_NS]
    if agree:
        return min(agree, key=lambda fit: abs(fit.offset_ns)).shift
    return max(alike, key=lambda fit: fit.calls).shift


def _regularity(end_ns: Int) -> int:
    """Return how the times between calls vary: their median distance from their median."""
    if len(end_ns) < 3:  # noqa: PLR2004 - two times between calls are the least that can vary
        return 0
    between = np.diff(end_ns[:_JUDGED])
    return _median(np.abs(between - _median(between)))


def _candidates(first: Int, other: Int) -> Iterable[int]:
    """Return shifts that may be right: all, or of many those at which clocks or some times between calls agree.

    Args:
        first: The ends of the longer sequence.
        other: Those of the other one.
    """
    if len(first) <= 2 * _PROBE:
        return range(1 - len(other), len(first))
    middle = len(other) // 2
    nearest = int(np.searchsorted(first, other[middle])) - middle
    found = {0, len(first) - len(other), nearest - 1, nearest}
    between, others = np.diff(first), np.diff(other)
    probe = min(_PROBE, len(others))
    for quarter in (1, 2, 3):
        begin = (len(others) - probe) * quarter // 4
        distance = np.zeros(len(between) - probe + 1, dtype=np.int64)
        for gap in range(probe):
            distance += np.abs(between[gap : gap + len(distance)] - others[begin + gap])
        found.add(int(distance.argmin()) - begin)
    return found


def _fit(first: _Calls, other: _Calls, shift: int) -> _Fit | None:
    """Judge a shift; ``None`` if less than half of the names agree, or too few calls are left."""
    mine, theirs = _overlap(len(first.name), len(other.name), shift)
    calls = mine.stop - mine.start
    if calls < min(_MIN_COLLECTIVES, len(first.name), len(other.name)):
        return None
    step = max(1, calls // _JUDGED)
    some, others = slice(mine.start, mine.stop, step), slice(theirs.start, theirs.stop, step)
    same = first.name[some] == other.name[others]
    if 2 * np.count_nonzero(same) <= len(same):
        return None
    apart = (first.end_ns[some] - other.end_ns[others])[same]
    offset = _median(apart)
    return _Fit(shift, calls, offset, _median(np.abs(apart - offset)))


def _median(values: Int) -> int:
    """Return the median, of an even number the lower middle: an exact integer."""
    middle = (len(values) - 1) // 2
    return int(np.partition(values, middle)[middle])


def _offsets(ranks: Sequence[Collectives], groups: Sequence[_Group]) -> tuple[ClockOffset, ...]:
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
                spread_ns=_median(distance) if len(distance) else None,
                anchors_ns=anchors[clock],
            )
        )
    return tuple(offsets)


def _with_other_clocks(ranks: Sequence[Collectives], groups: Sequence[_Group]) -> set[int]:
    """Return the ranks that cannot have the clock of the first rank on their host."""
    found = set()
    for group in groups:
        of_host: dict[str, int] = {}
        for member in group.matched:
            host = ranks[member].host
            apart_ns = _median(group.apart_ns(member))
            if host is not None and abs(apart_ns - of_host.setdefault(host, apart_ns)) > _SHARED_CLOCK_NS:
                found.add(member)
    return found


def _anchors(ranks: Sequence[Collectives], clock_of: list[int], clocks: int) -> list[int | None]:
    """Return the offset of each clock to the first one by the recorders' marks."""
    of_clock: list[list[int]] = [[] for _ in range(clocks)]
    for rank, clock in zip(ranks, clock_of, strict=True):
        if rank.anchor_offset_ns is not None:
            of_clock[clock].append(rank.anchor_offset_ns)
    absolute = [_median(np.array(offsets)) if offsets else None for offsets in of_clock]
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
        if best and (anchored is None or len(apart[best]) >= _MIN_COLLECTIVES):
            clock = best[1]
            offset[clock] = offset[best[0]] + _median(apart[best])
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


def _skew(team: Sequence[Collectives]) -> GroupSkew:
    role, replica, capture = team[0].role, team[0].replica, team[0].capture
    twice = [rank for rank, times in Counter(rank.rank for rank in team).items() if rank is not None and times > 1]
    if twice:
        note = f"Several traces say that they are rank {twice[0]}: they are no ranks of one program."
        return GroupSkew(
            role=role, replica=replica, capture=capture, collectives=(), ranks=(), straggler=None, note=note
        )
    groups = _groups(team)
    offsets = _offsets(team, groups)
    noise_ns = max([_MIN_NOISE_NS, *(offset.spread_ns for offset in offsets if offset.spread_ns is not None)])
    tally = _Tally(len(team))
    for group in groups:
        tally.add(group, [offset.offset_ns for offset in offsets], noise_ns)
    return GroupSkew(
        role=role,
        replica=replica,
        capture=capture,
        collectives=tally.collectives(),
        ranks=tuple(
            RankSkew(
                rank=rank.rank,
                path=rank.path,
                clock_offset_us=offset.offset_ns / _NS_PER_US,
                collectives=tally.count[index],
                last=tally.last[index],
                late_us=tally.late_ns[index] / _NS_PER_US,
                wait_us=tally.wait_ns[index] / _NS_PER_US,
            )
            for index, (rank, offset) in enumerate(zip(team, offsets, strict=True))
        ),
        straggler=None if (straggler := tally.straggler()) is None else team[straggler].rank,
        note=_note(team, groups, offsets, tally),
    )


class _Tally:
    """Adds up the collectives of process groups."""

    def __init__(self, ranks: int) -> None:
        self.calls = self.used = 0
        self.count = [0] * ranks
        self.last = [0] * ranks
        self.late_ns = [0] * ranks
        self.wait_ns = [0] * ranks
        self._contests = [0] * ranks
        self._by_chance = [0.0] * ranks
        self._of_name: dict[str, list[float]] = {}

    def add(self, group: _Group, offset_ns: Sequence[int], noise_ns: int) -> None:
        """Take the collectives of a group."""
        self.calls += sum(len(calls.name) for calls in group.members.values())
        members = list(group.matched)
        if len(members) < 2:  # noqa: PLR2004 - a rank alone waits for nobody
            return
        everywhere = np.flatnonzero(np.all([group.matched[member] >= 0 for member in members], axis=0))
        start, end = group.times_ns(everywhere, offset_ns)
        arrived = start.max(axis=0)
        together = arrived <= end.min(axis=0) + noise_ns
        start, end, arrived = start[:, together], end[:, together], arrived[together]
        self.used += start.size
        last = start.argmax(axis=0)
        others = start.copy()
        others[last, np.arange(len(last))] = -1
        contested = arrived - others.max(axis=0) > noise_ns
        lost = np.bincount(last[contested], minlength=len(members))
        contests = int(np.count_nonzero(contested))
        for row, member in enumerate(members):
            self.count[member] += len(last)
            self.last[member] += int(lost[row])
            self.late_ns[member] += int(start[row].sum())
            self.wait_ns[member] += int((arrived - start[row]).sum())
            self._contests[member] += contests
            self._by_chance[member] += contests / len(members)
        transfer = np.maximum(np.median(end, axis=0) - arrived, 0)
        name = group.members[group.leader].name[everywhere][together]
        counts = np.bincount(name)
        sums = [np.bincount(name, weights=time_ns) for time_ns in (transfer, arrived)]
        for code in np.flatnonzero(counts).tolist():
            of_name = self._of_name.setdefault(group.names[code], [0, 0.0, 0.0])
            for field, values in enumerate((counts, *sums)):
                of_name[field] += float(values[code])

    def collectives(self) -> tuple[CollectiveSkew, ...]:
        """Return the collectives by name, those with the most skew first."""
        found = [
            CollectiveSkew(
                name=name, count=int(count), transfer_us=transfer_ns / _NS_PER_US, skew_us=skew_ns / _NS_PER_US
            )
            for name, (count, transfer_ns, skew_ns) in self._of_name.items()
        ]
        return tuple(sorted(found, key=lambda collective: -collective.skew_us))

    def straggler(self) -> int | None:
        """Return which rank the others waited for."""
        slow = [
            rank
            for rank, contests in enumerate(self._contests)
            if contests >= _MIN_CONTESTS and 2 * self.last[rank] > contests + self._by_chance[rank]
        ]
        return max(slow, key=lambda rank: self.last[rank], default=None)


def _note(
    team: Sequence[Collectives], groups: Sequence[_Group], offsets: Sequence[ClockOffset], tally: _Tally
) -> str | None:
    if not groups:
        return "There are only messages from point to point, of which it cannot be told who waited for whom."
    with_calls = {member for group in groups for member in group.members}
    alone = [_label(team[rank]) for rank in sorted(with_calls) if not offsets[rank].collectives]
    untied = [
        _label(team[rank])
        for rank, offset in enumerate(offsets)
        if offset.source is OffsetSource.UNKNOWN and offset.collectives
    ]
    notes = []
    if alone:
        notes.append(f"No collectives in common with the others: {', '.join(alone)}.")
    if untied:
        notes.append(f"Nothing ties their clocks to that of {_label(team[0])}: {', '.join(untied)}.")
    if tally.used < tally.calls:
        notes.append(
            f"{tally.calls - tally.used} of {tally.calls} calls were left out: not all ranks have them in their "
            "traces, or not at the same time."
        )
    return " ".join(notes) or None


def _label(rank: Collectives) -> str:
    return rank.path if rank.rank is None else f"rank {rank.rank}"
