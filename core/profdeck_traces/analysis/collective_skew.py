"""Who waited for whom: the collectives that ranks ran together, matched across their traces.

No rank can leave a collective long before the others, so that its end is one instant on all clocks, up to some
microseconds: that tells how the clocks stand to each other. What is left between the starts is skew, the time in which
ranks that had arrived waited for the last one. Messages from point to point have no such instant and are left out;
collectives that a library carries out as messages are collectives only where the trace names them so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from profdeck_traces.analysis.clock_shift import MIN_NOISE_NS
from profdeck_traces.analysis.clocks import ClockOffset, MatchedTeam, OffsetSource
from profdeck_traces.analysis.collectives import Collectives, MatchedGroup, team_of
from profdeck_traces.analysis.model import CollectiveSkew, GroupSkew, RankSkew
from profdeck_traces.reading.intervals import Int

_NS_PER_US = 1000
# With fewer decisive collectives, a straggler cannot be distinguished from chance.
_MIN_CONTESTS = 5
_NO_TIMES = np.empty(0, dtype=np.int64)


def can_name_straggler(group: GroupSkew) -> bool:
    """Return whether a group has enough clear-cut collectives to tell a straggler from chance."""
    return sum(rank.last for rank in group.ranks) >= _MIN_CONTESTS


def skew_of_team(matched: MatchedTeam) -> GroupSkew:
    """Compute the collective skew of one role, replica and capture with at least two ranks.

    A rank arrives at a collective when its kernel starts. A collective is included if all recorded ranks of its process
    group took part and their calls overlap in time. Groups with ranks that were not recorded are excluded, and so are
    collectives that start in a rank's cold step.

    A collective is decisive if the gap between the last two arrivals exceeds the noise. The noise is the largest spread
    of the end times, and at least 1 us. The straggler is the rank whose share is more than halfway between chance and
    always. The share is computed in one of two ways:

    1. By count: the fraction of the rank's decisive collectives at which it arrived last. The rank must have taken part
       in at least five decisive collectives.
    2. By time, if no rank qualifies by count: the fraction of the total gap time that the rank caused, without the
       longest tenth of its gaps. The rank must have arrived last at five or more decisive collectives.
    """
    team, groups, offsets = matched.ranks, matched.groups, matched.offsets
    run, role, replica, capture = team_of(team[0])
    if matched.repeated is not None:
        note = f"Several traces say that they are rank {matched.repeated}: they are no ranks of one program."
        return GroupSkew(
            role=role, replica=replica, capture=capture, run=run, collectives=(), ranks=(), straggler=None, note=note
        )
    noise_ns = max([MIN_NOISE_NS, *(offset.spread_ns for offset in offsets if offset.spread_ns is not None)])
    tally = _Tally(len(team))
    for group in groups:
        tally.add(group, [offset.offset_ns for offset in offsets], noise_ns, [rank.warm_from_ns for rank in team])
    return GroupSkew(
        role=role,
        replica=replica,
        capture=capture,
        run=run,
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
    """Sums skew over the collectives of process groups."""

    def __init__(self, ranks: int) -> None:
        self.calls = self.used = 0
        self.count = [0] * ranks
        self.last = [0] * ranks
        self.late_ns = [0] * ranks
        self.wait_ns = [0] * ranks
        self._contests = [0] * ranks
        self._by_chance = [0.0] * ranks
        self._margins_ns: list[list[Int]] = [[] for _ in range(ranks)]
        """Gaps to the previous arrival in decisive collectives at which the rank arrived last."""
        self._of_name: dict[str, list[float]] = {}

    def add(
        self, group: MatchedGroup, offset_ns: Sequence[int], noise_ns: int, warm_from_ns: Sequence[int | None]
    ) -> None:
        """Add the collectives of a process group."""
        self.calls += sum(len(calls.name) for calls in group.members.values())
        members = list(group.matched)
        if len(members) < 2 or not group.is_complete:  # noqa: PLR2004 - a rank alone waits for nobody
            return
        everywhere = np.flatnonzero(np.all([group.matched[member] >= 0 for member in members], axis=0))
        cold = np.zeros(len(everywhere), dtype=bool)
        for member in members:
            if (from_ns := warm_from_ns[member]) is not None:
                cold |= group.members[member].start_ns[group.matched[member][everywhere]] < from_ns
        self.calls -= int(np.count_nonzero(cold)) * len(members)
        everywhere = everywhere[~cold]
        if not len(everywhere):
            return
        start, end = group.times_ns(everywhere, offset_ns)
        arrived = start.max(axis=0)
        together = arrived <= end.min(axis=0) + noise_ns
        start, end, arrived = start[:, together], end[:, together], arrived[together]
        self.used += start.size
        last = start.argmax(axis=0)
        others = start.copy()
        others[last, np.arange(len(last))] = -1
        margin_ns = arrived - others.max(axis=0)
        contested = margin_ns > noise_ns
        lost = np.bincount(last[contested], minlength=len(members))
        contests = int(np.count_nonzero(contested))
        for row, member in enumerate(members):
            self.count[member] += len(last)
            self.last[member] += int(lost[row])
            self.late_ns[member] += int(start[row].sum())
            self.wait_ns[member] += int((arrived - start[row]).sum())
            self._contests[member] += contests
            self._by_chance[member] += contests / len(members)
            self._margins_ns[member].append(margin_ns[contested & (last == row)])
        transfer = np.maximum(np.median(end, axis=0) - arrived, 0)
        name = group.members[group.leader].name[everywhere][together]
        counts = np.bincount(name)
        sums = [np.bincount(name, weights=time_ns) for time_ns in (transfer, arrived)]
        for code in np.flatnonzero(counts).tolist():
            of_name = self._of_name.setdefault(group.names[code], [0, 0.0, 0.0])
            for field, values in enumerate((counts, *sums)):
                of_name[field] += float(values[code])

    def collectives(self) -> tuple[CollectiveSkew, ...]:
        """Return the totals by collective name, sorted by skew, largest first."""
        found = [
            CollectiveSkew(
                name=name, count=int(count), transfer_us=transfer_ns / _NS_PER_US, skew_us=skew_ns / _NS_PER_US
            )
            for name, (count, transfer_ns, skew_ns) in self._of_name.items()
        ]
        return tuple(sorted(found, key=lambda collective: -collective.skew_us))

    def straggler(self) -> int | None:
        """Return the index of the straggler, or None. See `skew_of_team` for the criteria."""
        slow = [
            rank
            for rank, contests in enumerate(self._contests)
            if contests >= _MIN_CONTESTS and 2 * self.last[rank] > contests + self._by_chance[rank]
        ]
        return max(slow, key=lambda rank: self.last[rank]) if slow else self._straggler_by_time()

    def _straggler_by_time(self) -> int | None:
        margins = [np.sort(np.concatenate([_NO_TIMES, *parts])) for parts in self._margins_ns]
        # A single long delay does not make a rank a straggler.
        made_wait_ns = [int(of_rank[: len(of_rank) - math.ceil(len(of_rank) / 10)].sum()) for of_rank in margins]
        all_ns = sum(made_wait_ns)
        for rank, (waited_ns, contests) in enumerate(zip(made_wait_ns, self._contests, strict=True)):
            often = len(margins[rank]) >= _MIN_CONTESTS
            if often and 2 * waited_ns > all_ns * (1 + self._by_chance[rank] / contests):
                return rank
        return None


def _note(
    team: Sequence[Collectives], groups: Sequence[MatchedGroup], offsets: Sequence[ClockOffset], tally: _Tally
) -> str | None:
    if not groups:
        return "There are only messages from point to point, which do not show who waited for whom."
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
            "traces, or not at the same time, or ranks of their process group were not recorded."
        )
    return " ".join(notes) or None


def _label(rank: Collectives) -> str:
    return rank.path if rank.rank is None else f"rank {rank.rank}"
