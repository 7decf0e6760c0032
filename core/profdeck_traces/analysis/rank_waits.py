"""Assigns the time that ranks spend waiting in collectives to the rank that arrived last."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.arrivals import Arrivals
from profdeck_traces.account.causes import COMMUNICATION, SYNCHRONISATION
from profdeck_traces.account.model import Account, CauseTime, OwnerKey
from profdeck_traces.account.owned_path import RankWaits
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.reassignment import reassigned
from profdeck_traces.account.table import COLLECTIVES_INCLUDE_WAITS
from profdeck_traces.analysis.clock_shift import MIN_NOISE_NS
from profdeck_traces.analysis.clocks import MatchedTeam, OffsetSource
from profdeck_traces.analysis.collectives import MatchedGroup, waits_for_all
from profdeck_traces.analysis.rank_reading import RankReading
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.walking import NO_TIME

_NS_PER_US = 1000
_MAX_HOPS = 64
"""Maximum number of ranks in a chain of waits, in which each rank waits for the next one."""
_MAX_SEGMENTS = 1 << 20
"""Approximate number of waits or segments that are processed at a time, to limit memory use."""
_MIN_NOTED = 0.01  # fraction of the time in collectives


class _Meetings(NamedTuple):
    """The last two arrivals at each collective call of a rank. Times are on the clock of the team's first rank.

    If the rank did not wait in a call, `second` and `last` are `NO_TIME`, and `rank` and `call` are -1.
    """

    start: Int
    second: Int
    """Arrival time of the second-to-last rank."""
    last: Int
    """Arrival time of the last rank."""
    rank: Int
    """Index of the last rank in the team."""
    call: Int
    """Index of the last rank's call."""
    is_matched: NDArray[np.bool_]
    is_incomplete: NDArray[np.bool_]
    """True for calls of a process group with ranks that were not recorded."""


class _Waits(NamedTuple):
    """Intervals in which a rank waited for another rank."""

    root: Int
    """Index of the rank to whose account the time belongs."""
    rank: Int
    """Index of the rank that arrived last."""
    call: Int
    """Index of that rank's call."""
    begin: Int
    end: Int
    margin_ns: Int
    """Maximum time that each wait would save if only the last rank were faster."""


def assign_waits(readings: Sequence[RankReading], teams: Sequence[MatchedTeam]) -> list[Account | None]:
    """Return the ranks' accounts with waits in collectives assigned to the rank that arrived last.

    Until the last rank arrives, a collective on a rank's critical path is a wait. The wait is divided among the owners
    on the last rank's path to its call during the same interval. If that path contains another collective in which the
    last rank waited, this part is assigned to the rank that arrived last there, and so on.

    Args:
        readings: Readings of all ranks.
        teams: Result of `profdeck_traces.analysis.clocks.match_teams` for the readings' collectives.
    """
    accounts = [reading.summary.account for reading in readings]
    for team, waits in _waits_of(readings, teams):
        waits.assign()
        for index, place in enumerate(team.places):
            account = accounts[place]
            accounts[place] = None if account is None else waits.account(index, account)
    return accounts


def waits_on_paths(readings: Sequence[RankReading], teams: Sequence[MatchedTeam]) -> list[RankWaits | None]:
    """Return the waits for other ranks on each rank's critical path. See `assign_waits` for the arguments."""
    found: list[RankWaits | None] = [None] * len(readings)
    for team, waits in _waits_of(readings, teams):
        for index, place in enumerate(team.places):
            found[place] = waits.on_path(index)
    return found


def _waits_of(
    readings: Sequence[RankReading], teams: Sequence[MatchedTeam]
) -> Iterator[tuple[MatchedTeam, _TeamWaits]]:
    for team in teams:
        if team.repeated is None and None not in {rank.rank for rank in team.ranks}:
            yield team, _TeamWaits(team, [readings[place].arrivals for place in team.places])


class _Paths:
    """A rank's paths to its collective calls, on the clock of the team's first rank."""

    def __init__(self, arrivals: Arrivals, start: Int, offset_ns: int) -> None:
        """Decode the paths.

        Args:
            arrivals: The paths.
            start: Start of each call on the clock of the team's first rank.
            offset_ns: Clock offset of the rank.
        """
        segments = arrivals.segments
        self.owner, self.begin = segments.owner, segments.begin + offset_ns
        self._first = np.cumsum(arrivals.counts) - arrivals.counts
        self._end_place = self._first + arrivals.counts
        self.call = np.repeat(np.arange(len(start)), arrivals.counts)
        self.end = np.append(self.begin[1:], 0)[: len(self.begin)]
        with_path = np.flatnonzero(arrivals.counts)
        self.end[self._end_place[with_path] - 1] = start[with_path]
        # Combine call and time into one number, so that segments can be searched by both.
        self._origin = int(self.begin.min()) if len(self.begin) else 0
        self._span = int(self.end.max()) - self._origin + 1 if len(self.end) else 1
        self._begin_number = self._numbers(self.call, self.begin)
        self._end_number = self._numbers(self.call, self.end)

    def _numbers(self, call: Int, time: Int) -> Int:
        return call * self._span + np.clip(time - self._origin, 0, self._span - 1)

    def _bounds(self, waits: _Waits) -> tuple[Int, Int]:
        """Return the indices of the first segment in each wait and of the segment after the last."""
        first = self._end_number.searchsorted(self._numbers(waits.call, waits.begin), side="right")
        first = np.maximum(first, self._first[waits.call])
        end = self._begin_number.searchsorted(self._numbers(waits.call, waits.end))
        return first, np.clip(end, first, np.maximum(self._end_place[waits.call], first))

    def batches(self, waits: _Waits) -> Iterator[_Waits]:
        """Split waits into batches with a limited number of segments."""
        first, end = self._bounds(waits)
        batch = np.cumsum(end - first) // _MAX_SEGMENTS
        bounds = np.flatnonzero(np.diff(batch, prepend=-1, append=-1))
        for begin, stop in itertools.pairwise(bounds.tolist()):
            yield _Waits(*(column[begin:stop] for column in waits))

    def inside(self, waits: _Waits) -> tuple[Int, Int, Int, Int]:
        """Clip the paths to the intervals of the waits.

        Returns:
            The wait, owner, start and end of each segment. The owner is -1 for time before the start of the path.
        """
        first, end = self._bounds(waits)
        counts = end - first
        wait = np.repeat(np.arange(len(counts)), counts)
        segment = np.arange(len(wait)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        begin = np.maximum(self.begin[segment], waits.begin[wait])
        until = np.minimum(self.end[segment], waits.end[wait])
        known_from = waits.end.copy()
        has_path = np.flatnonzero(counts)
        known_from[has_path] = np.maximum(self.begin[first[has_path]], waits.begin[has_path])
        unknown = np.flatnonzero(known_from > waits.begin)
        return (
            np.append(wait, unknown),
            np.append(self.owner[segment], np.full(len(unknown), -1)),
            np.append(begin, waits.begin[unknown]),
            np.append(until, known_from[unknown]),
        )

    def times_by_call(self, keys: int) -> tuple[Int, Int, Int]:
        """Return the call, owner and total time for each non-collective owner on the path to each call, sorted by call.

        Args:
            keys: Number of owner keys.
        """
        selected = np.flatnonzero(self.owner < keys)
        code, which = np.unique(self.call[selected] * keys + self.owner[selected], return_inverse=True)
        times = np.zeros(len(code), np.int64)
        np.add.at(times, which, (self.end - self.begin)[selected])
        return code // keys if keys else code, code % keys if keys else code, times


class _TeamWaits:
    """Waits between the ranks of one team."""

    def __init__(self, team: MatchedTeam, arrivals: Sequence[Arrivals]) -> None:
        self._team, self._arrivals = team, arrivals
        self._offset_ns = [offset.offset_ns for offset in team.offsets]
        self._meetings = [
            _no_meetings(rank.start_ns + offset_ns) for rank, offset_ns in zip(team.ranks, self._offset_ns, strict=True)
        ]
        for group in team.groups:
            self._add_meetings(group)
        # For each rank, the owners that it waited for, by rank and key.
        self._times: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in arrivals]
        self._gains: list[dict[tuple[int, int], int]] = [{} for _ in arrivals]
        self._moved_ns: list[dict[OwnerKey, int]] = [{} for _ in arrivals]
        self._matched_ns = [0] * len(arrivals)
        self._incomplete_ns = [0] * len(arrivals)

    def assign(self) -> None:
        """Divide the waits on all paths among the owners on the awaited ranks' paths."""
        for waits in self._first_waits():
            self._assign(waits)

    def on_path(self, root: int) -> RankWaits:
        """Return a rank's waits for other ranks on its critical path. `root` is its index in the team."""
        waits, offset_ns = self._waits_on_path(root), self._offset_ns[root]
        numbers = np.array([rank.rank for rank in self._team.ranks], np.int64)
        return RankWaits(waits.begin - offset_ns, waits.end - offset_ns, numbers[waits.rank])

    def _add_meetings(self, group: MatchedGroup) -> None:
        """Find the rank that arrived last at each collective of a process group."""
        if not group.is_complete:
            for member, of_member in group.members.items():
                self._meetings[member].is_incomplete[of_member.index] = len(group.members) < (group.size or 0)
            return
        members = list(group.matched)
        offsets = [self._team.offsets[member] for member in members]
        if len(members) < 2 or any(offset.source is OffsetSource.UNKNOWN for offset in offsets):  # noqa: PLR2004 - a single rank never waits for another
            return
        is_awaited = np.array([waits_for_all(name) for name in group.names], dtype=bool)
        common = is_awaited[group.members[group.leader].name]
        common &= np.all([group.matched[member] >= 0 for member in members], axis=0)
        columns = np.flatnonzero(common)
        calls = np.stack([group.members[member].index[group.matched[member][columns]] for member in members])
        start, end = group.common_times_ns(columns, self._offset_ns)
        noise_ns = max([MIN_NOISE_NS, *(offset.spread_ns or 0 for offset in offsets)])
        last, arrived = start.argmax(axis=0), start.max(axis=0)
        second = np.partition(start, -2, axis=0)[-2]
        # Calls that do not overlap are not the same collective.
        overlaps = arrived <= end.min(axis=0) + noise_ns
        last_call = calls[last, np.arange(len(columns))]
        for row, member in enumerate(members):
            meetings = self._meetings[member]
            meetings.is_matched[calls[row, overlaps]] = True
            waits = overlaps & (arrived - start[row] > noise_ns)
            call = calls[row, waits]
            meetings.second[call], meetings.last[call] = second[waits], arrived[waits]
            meetings.rank[call], meetings.call[call] = np.array(members)[last[waits]], last_call[waits]

    def _first_waits(self) -> Iterator[_Waits]:
        """Yield the waits on the ranks' critical paths, in batches of limited size."""
        parts: list[_Waits] = []
        for root, (arrivals, meetings) in enumerate(zip(self._arrivals, self._meetings, strict=True)):
            call, time_ns = arrivals.path_call, arrivals.path_end - arrivals.path_begin
            self._matched_ns[root] = int(time_ns[meetings.is_matched[call]].sum())
            self._incomplete_ns[root] = int(time_ns[meetings.is_incomplete[call]].sum())
            parts.append(self._waits_on_path(root))
            if sum(len(part.root) for part in parts) >= _MAX_SEGMENTS:
                yield _joined(parts)
                parts = []
        yield _joined(parts)

    def _waits_on_path(self, root: int) -> _Waits:
        arrivals, meetings, offset_ns = self._arrivals[root], self._meetings[root], self._offset_ns[root]
        call, begin, end = arrivals.path_call, arrivals.path_begin + offset_ns, arrivals.path_end + offset_ns
        until = np.minimum(end, meetings.last[call])
        waits = np.flatnonzero(until > begin)
        call, begin, until = call[waits], begin[waits], until[waits]
        moved = np.zeros(len(arrivals.keys), np.int64)
        np.add.at(moved, arrivals.call_key[call], until - begin)
        self._moved_ns[root] = {arrivals.keys[key]: int(moved[key]) for key in np.flatnonzero(moved).tolist()}
        margin_ns = np.minimum(meetings.last[call] - meetings.second[call], until - begin)
        return _Waits(np.full(len(waits), root), meetings.rank[call], meetings.call[call], begin, until, margin_ns)

    def _assign(self, waits: _Waits) -> None:
        """Divide waits among the owners of the awaited ranks."""
        for hop in range(_MAX_HOPS):
            parts = []
            for rank, of_rank in _by_rank(waits):
                paths = _Paths(self._arrivals[rank], self._meetings[rank].start, self._offset_ns[rank])
                if not hop:
                    self._add_gains(rank, of_rank, paths)
                parts += [self._divide(rank, batch, paths) for batch in paths.batches(of_rank)]
            waits = _joined(parts)
            if not len(waits.root):
                return
        for rank, of_rank in _by_rank(waits):
            self._add(rank, of_rank.root, np.full(len(of_rank.root), -1), of_rank.end - of_rank.begin)

    def _divide(self, rank: int, waits: _Waits, paths: _Paths) -> _Waits:
        """Assign waits for a rank to the owners on its path. Return that rank's own waits for other ranks."""
        wait, owner, begin, end = paths.inside(waits)
        root = waits.root[wait]
        call = owner - len(self._arrivals[rank].keys)
        inside = np.flatnonzero(call >= 0)
        call = call[inside]
        owner[inside] = self._arrivals[rank].call_key[call]
        meetings = self._meetings[rank]
        since = begin[inside]
        until = np.clip(meetings.last[call], since, end[inside])
        begin[inside] = until
        self._add(rank, root, owner, end - begin)
        further = _Waits(root[inside], meetings.rank[call], meetings.call[call], since, until, until - since)
        return _Waits(*(column[until > since] for column in further))

    def _add(self, rank: int, root: Int, owner: Int, time_ns: Int) -> None:
        """Add the time of a rank's owners to the accounts of the roots. An owner of -1 is unknown."""
        size = len(self._arrivals[rank].keys) + 1
        for code, total_ns, count in _summed(root * size + owner + 1, time_ns):
            times, key = self._times[code // size], (rank, code % size - 1)
            before = times.get(key, (0, 0))
            times[key] = before[0] + total_ns, before[1] + count

    def _add_gains(self, rank: int, waits: _Waits, paths: _Paths) -> None:
        """Add the time that waits would save without each owner of the awaited rank.

        This is the owner's time on the path to the collective, limited to the interval between the last two arrivals.
        """
        size = len(self._arrivals[rank].keys)
        call, owner, time_ns = paths.times_by_call(size)
        first, end = call.searchsorted(waits.call), call.searchsorted(waits.call, side="right")
        batch = np.cumsum(end - first) // _MAX_SEGMENTS
        for number in np.unique(batch).tolist():
            some = np.flatnonzero(batch == number)
            counts = (end - first)[some]
            wait = np.repeat(some, counts)
            entry = np.arange(len(wait)) + np.repeat(first[some] - np.cumsum(counts) + counts, counts)
            saved_ns = np.minimum(time_ns[entry], waits.margin_ns[wait])
            for code, total_ns, _ in _summed(waits.root[wait] * size + owner[entry], saved_ns):
                gains, key = self._gains[code // size], (rank, code % size)
                gains[key] = gains.get(key, 0) + total_ns

    def account(self, index: int, account: Account) -> Account:
        """Return a rank's account with its waits assigned to other ranks."""
        collective_ns = sum(
            round(owner.time_us * _NS_PER_US) for owner in account.owners if owner.kind == OwnerKind.COLLECTIVE.label
        )
        if not collective_ns:
            return account
        added: dict[OwnerKey, tuple[int, int]] = {}
        gains_ns: dict[OwnerKey, int] = {}
        for (rank, owner), (time_ns, count) in self._times[index].items():
            key = self._wait_key(rank, owner)
            before_ns, before = added.get(key, (0, 0))
            added[key] = before_ns + time_ns, before + count
            if (gain_ns := self._gains[index].get((rank, owner))) is not None:
                gains_ns[key] = gain_ns
        found = reassigned(account, self._moved_ns[index], added, gains_ns)
        if found is None:  # the stored paths do not match the account
            return account
        notes = [note for note in account.notes if note != COLLECTIVES_INCLUDE_WAITS]
        return attrs.evolve(
            found,
            causes=tuple(self._causes(index, account)),
            notes=(*notes, *self._notes(index, collective_ns)),
        )

    def _causes(self, index: int, account: Account) -> Iterator[CauseTime]:
        """Yield the account's causes. Waits for ranks are neither communication nor saved without a synchronisation."""
        wait_us = left_us = sum(self._moved_ns[index].values()) / _NS_PER_US
        for cause in account.causes:
            if cause.cause == SYNCHRONISATION and wait_us and cause.gain_us is not None:
                saved_us = max(0.0, cause.gain_us - wait_us)
                yield attrs.evolve(cause, gain_us=saved_us, next_limit=OwnerKind.WAIT_FOR_RANK.label)
                continue
            if cause.cause != COMMUNICATION or not left_us:
                yield cause
                continue
            waits_us = min(left_us, cause.time_us)
            left_us -= waits_us
            gain_us = None if cause.gain_us is None else max(0.0, cause.gain_us - waits_us)
            # The waits of each step are unknown.
            yield attrs.evolve(cause, time_us=cause.time_us - waits_us, gain_us=gain_us, steps_us=())

    def _wait_key(self, rank: int, owner: int) -> OwnerKey:
        number = self._team.ranks[rank].rank
        kind = OwnerKind.WAIT_FOR_RANK.label
        if owner < 0:
            return kind, None, None, None, None, None, number, None, None
        awaited, name, operator, module, annotation, line, *_ = self._arrivals[rank].keys[owner]
        return kind, name, operator, module, annotation, line, number, awaited, None

    def _notes(self, index: int, collective_ns: int) -> Iterator[str]:
        """Yield notes about waits that were not assigned to a rank."""
        incomplete_share = self._incomplete_ns[index] / collective_ns
        if incomplete_share >= _MIN_NOTED:
            yield (
                f"{incomplete_share:.0%} of the time of collectives on the critical path is in process groups "
                "with ranks that were not recorded. This time includes waiting for these ranks."
            )
        unmatched = 1 - self._matched_ns[index] / collective_ns - incomplete_share
        if unmatched >= _MIN_NOTED:
            yield (
                f"{unmatched:.0%} of the time of collectives on the critical path could not be compared with other "
                "ranks, such as messages and calls without a match. This time includes waiting for other ranks."
            )
        if not self._matched_ns[index]:
            return
        awaited = {rank for rank, _ in self._times[index]}
        incomplete = sorted(rank for rank in awaited if not self._arrivals[rank].is_complete)
        if incomplete:
            ranks = ", ".join(str(self._team.ranks[rank].rank) for rank in incomplete)
            yield f"The critical path of rank {ranks} is too long, so what other ranks waited for is unknown."


def _no_meetings(start: Int) -> _Meetings:
    """Return meetings without waits for calls with the given start times."""
    count = len(start)
    never = np.full(count, NO_TIME)
    none = np.full(count, -1)
    return _Meetings(
        start, never, never.copy(), none, none.copy(), np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    )


def _joined(parts: Sequence[_Waits]) -> _Waits:
    none = np.zeros(0, np.int64)
    return _Waits(*map(np.concatenate, zip(_Waits(none, none, none, none, none, none), *parts, strict=True)))


def _by_rank(waits: _Waits) -> Iterator[tuple[int, _Waits]]:
    """Group waits by the awaited rank."""
    for rank in np.unique(waits.rank).tolist():
        selected = waits.rank == rank
        yield rank, _Waits(*(column[selected] for column in waits))


def _summed(codes: Int, values: Int) -> Iterator[tuple[int, int, int]]:
    """Yield each distinct code that has a positive sum, its sum, and its number of positive values."""
    distinct, which = np.unique(codes, return_inverse=True)
    sums = np.zeros(len(distinct), np.int64)
    np.add.at(sums, which, values)
    counts = np.bincount(which[values > 0], minlength=len(distinct))
    for code, total, count in zip(distinct.tolist(), sums.tolist(), counts.tolist(), strict=True):
        if total:
            yield code, total, count
