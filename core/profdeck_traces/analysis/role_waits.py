"""Assigns the time that trainers and servers spend waiting for each other to the role that is working at that time.

A trainer waits for servers if it runs no operators from before their first iteration until after their last. The wait
is divided among the servers, working backward from the end of the last iteration. It is assigned first to the server
that finishes last, then to the server that was busy before it, and so on. A server's waits for trainers are divided in
the same way.

If the other role's work extends beyond the idle period, as in asynchronous training, the process may be waiting for
something else. In this case, the time keeps its owner.

Disaggregated servers work at the same time. A decode server waits for the prefill server whose iteration was the last
to end before the decode server resumed.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import attrs
import numpy as np

from profdeck_traces.account.causes import BETWEEN, PYTHON_CODE, WAITING
from profdeck_traces.account.model import Account, CauseTime, OwnerKey
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.reassignment import reassigned
from profdeck_traces.analysis.engine_iterations import all_iterations, decode_requests
from profdeck_traces.analysis.model import StepSummary
from profdeck_traces.analysis.rank_reading import RankReading
from profdeck_traces.analysis.step_names import DECODE, ITERATION, PREFILL
from profdeck_traces.base.text import plural
from profdeck_traces.inputs.facts import TraceFacts
from profdeck_traces.reading.intervals import complement, intersection, total, union

NO_BATCH, WORK = "no batch", "work"
"""``NO_BATCH`` is the activity of a server between iterations. ``WORK`` is an activity outside all stages."""
_NOTE = re.compile(r"Waits for (.+) are not assigned: (.+)\.")
_CLOCK_NOISE_NS = 100_000
_MIN_NOTED = 0.01  # fraction of the account's time
_NS_PER_US = 1000
_CAUSES = {
    OwnerKind.BETWEEN.label: BETWEEN,
    OwnerKind.WAIT_FOR_THREAD.label: WAITING,
    OwnerKind.PYTHON.label: PYTHON_CODE,
}


class _Activity(NamedTuple):
    """A role's activity during an interval. Times are in Unix nanoseconds."""

    begin: int
    end: int
    awaited: str
    name: str | None


class _Piece(NamedTuple):
    """Part of a wait, and the peer that was awaited."""

    peer: _Peer
    activity: _Activity
    is_last: bool
    """True if the peer is the last to finish during the wait."""


@attrs.frozen(eq=False)
class _Peer:
    """The activities of a server, or of all recorded ranks of another role."""

    readings: Sequence[RankReading]
    bursts: Sequence[Sequence[_Activity]]
    """Bursts, sorted by time. Each burst is a sequence of activities without pauses."""

    @property
    def role(self) -> str:
        return _facts(self.readings[0]).role

    @property
    def label(self) -> str:
        """Role and replica, for example ``rollout/1``."""
        return _facts(self.readings[0]).role_and_replica

    @property
    def is_server(self) -> bool:
        return _is_server(self.readings[0])

    def bursts_in(self, begin: int, end: int) -> Sequence[Sequence[_Activity]]:
        """Return the bursts that overlap an interval."""
        first = bisect.bisect_right(self.bursts, begin, key=lambda burst: burst[-1].end)
        last = bisect.bisect_left(self.bursts, end, key=lambda burst: burst[0].begin)
        return self.bursts[first:last]

    @property
    def clocks(self) -> set[str | None]:
        """Hosts whose clocks provide the Unix times of the readings."""
        return {_clock(reading) for reading in self.readings}

    @property
    def error_ns(self) -> int:
        """Maximum clock error of the ranks."""
        return max(_facts(reading).clock_error_ns or 0 for reading in self.readings)

    @property
    def recorded_until(self) -> int:
        """End of the interval in which all ranks were recorded."""
        return min(_recorded_until(reading) for reading in self.readings)


def assign_role_waits(readings: Sequence[RankReading], accounts: Sequence[Account | None]) -> list[Account | None]:
    """Return the accounts, with each wait for another role assigned to the role that was working at the time.

    Args:
        readings: Readings of all ranks.
        accounts: Account of each rank, or ``None`` if it has no account.
    """
    captures: dict[tuple[str, str], list[int]] = {}
    for place, reading in enumerate(readings):
        if reading.facts is not None and reading.summary.origin_unix_ns is not None:
            captures.setdefault((reading.facts.run, reading.facts.capture), []).append(place)
    assigned = list(accounts)
    for places in captures.values():
        members = [readings[place] for place in places]
        servers, trainers = _servers(members), _trainers(members)
        for place, reading in zip(places, members, strict=True):
            account = assigned[place]
            if account is None:
                continue
            for wait in _waits_of(reading, servers, trainers):
                account = wait.account(account)
            assigned[place] = account
    return assigned


def unassigned_roles(account: Account) -> dict[str, str]:
    """Return the roles for which some or all waits could not be assigned, with the reason for each role."""
    return {found[1]: found[2] for note in account.notes if (found := _NOTE.fullmatch(note))}


def _servers(members: Sequence[RankReading]) -> list[_Peer]:
    """Return the servers in a capture. Each server is represented by its first recorded rank."""
    servers = _by_place(reading for reading in members if _is_server(reading))
    return [_Peer(readings[:1], _iterations(readings[0])) for readings in servers]


def _trainers(members: Sequence[RankReading]) -> list[_Peer]:
    """Return the roles in a capture that are not servers."""
    roles = _by_place(reading for reading in members if not _is_server(reading) and reading.summary.work)
    return [_Peer(readings, _stages(readings)) for readings in roles]


def _by_place(readings: Iterable[RankReading]) -> list[list[RankReading]]:
    """Group readings by role and replica, and sort each group by rank."""
    groups: dict[str, list[RankReading]] = {}
    for reading in sorted(readings, key=lambda reading: reading.summary.rank or 0):
        groups.setdefault(_facts(reading).role_and_replica, []).append(reading)
    return [*groups.values()]


def _is_server(reading: RankReading) -> bool:
    return any(step.kind == ITERATION for step in reading.summary.steps)


def _facts(reading: RankReading) -> TraceFacts:
    assert reading.facts is not None  # noqa: S101 - a reading without facts is not part of a capture
    return reading.facts


def _clock(reading: RankReading) -> str | None:
    """Return the host whose clock provides the reading's Unix times."""
    facts = _facts(reading)
    return facts.host if facts.clock_offset_ns is None else facts.clock_host


def _recorded_until(reading: RankReading) -> int:
    return max(_unix_ns(reading, reading.summary.span_us), _facts(reading).recorded_until_ns or 0)


def _unix_ns(reading: RankReading, time_us: float) -> int:
    return (reading.summary.origin_unix_ns or 0) + round(time_us * _NS_PER_US)


def _iterations(reading: RankReading) -> list[list[_Activity]]:
    """Return a server's iterations as bursts. Between two bursts, the server has no unfinished requests."""
    bursts: list[list[_Activity]] = []
    continues = False
    for iteration in all_iterations(reading.summary):
        begin = _unix_ns(reading, iteration.step.start_us)
        end = _unix_ns(reading, iteration.step.start_us + iteration.period_us)
        activity = _Activity(begin, end, iteration.step.stage or WORK, _batch_name(iteration.step))
        if not continues:
            bursts.append([activity])
        elif activity.awaited == DECODE and activity[2:] == bursts[-1][-1][2:]:
            bursts[-1][-1] = bursts[-1][-1]._replace(end=end)
        else:
            bursts[-1][-1] = bursts[-1][-1]._replace(end=begin)
            bursts[-1].append(activity)
        continues = iteration.has_more_work
    return bursts


def _batch_name(step: StepSummary) -> str | None:
    """Return a name that gives the number of decoding requests as a range, so that similar batches share a name."""
    count = decode_requests(step)
    if step.stage != DECODE or not count:
        return None
    low = 1 << (count.bit_length() - 1)
    return f"batch of {low}" if low == 1 else f"batch of {low} to {2 * low - 1}"


def _stages(readings: Sequence[RankReading]) -> list[list[_Activity]]:
    """Return the periods in which any rank of a role is working, split where the first rank's stages start or end."""
    spans = [
        (_unix_ns(reading, period.start_us), _unix_ns(reading, period.start_us + period.duration_us))
        for reading in readings
        for period in reading.summary.work
    ]
    stages = [
        (_unix_ns(readings[0], stage.start_us), _unix_ns(readings[0], stage.start_us + stage.duration_us), stage.name)
        for stage in readings[0].summary.stage_periods
    ]
    bursts = []
    for begin, end in zip(*(times.tolist() for times in union(*np.array(spans, np.int64).T)), strict=True):
        cuts = {time for stage in stages for time in stage[:2] if begin < time < end}
        times = [begin, *sorted(cuts), end]
        bursts.append(
            [
                _Activity(
                    first, last, next((name for b, e, name in stages if b <= first and last <= e), None) or WORK, None
                )
                for first, last in itertools.pairwise(times)
            ]
        )
    return bursts


def _waits_of(reading: RankReading, servers: Sequence[_Peer], trainers: Sequence[_Peer]) -> Iterator[_Waits]:
    """Yield a rank's waits, separately for each group of peers."""
    if not _is_server(reading):
        if servers:
            yield _TurnWaits(reading, servers)
        return
    if trainers:
        yield _TurnWaits(reading, trainers)
    if _facts(reading).worker_type == DECODE:
        fleet = [server for server in servers if server.role == _facts(reading).role]
        if any(_worker_type(server) == PREFILL for server in fleet):
            yield _PrefillWaits(reading, fleet, trainers)


def _worker_type(server: _Peer) -> str | None:
    return _facts(server.readings[0]).worker_type


class _Waits:
    """One rank's waits for its peers."""

    def __init__(self, reading: RankReading, peers: Sequence[_Peer]) -> None:
        self._reading, self._peers = reading, peers
        self._noise_ns = _CLOCK_NOISE_NS + (_facts(reading).clock_error_ns or 0)
        self._noise_ns += max(peer.error_ns for peer in peers)
        self._moved_ns: dict[OwnerKey, int] = {}
        self._added: dict[OwnerKey, tuple[int, int]] = {}
        self._gains_ns: dict[OwnerKey, int] = {}
        self._without_gain: set[OwnerKey] = set()
        self._recorded_until = min(peer.recorded_until for peer in peers) + self._noise_ns
        self._unknown_ns = 0

    def account(self, account: Account) -> Account:
        """Return the rank's account, with its waits assigned to the peers."""
        reason = self._reason()
        if reason is None:
            for begin, end in self._periods():
                self._assign(begin, end)
            gains = {key: gain_ns for key, gain_ns in self._gains_ns.items() if key not in self._without_gain}
            found = reassigned(account, self._moved_ns, self._added, gains)
            if found is None:  # the stored periods do not match the account
                return account
            account = attrs.evolve(found, causes=tuple(self._causes(account.causes)))
            share = self._unknown_ns / (account.time_us * _NS_PER_US)
            if share < _MIN_NOTED:
                return account
            reason = (
                f"in {share:.0%} of the time, their work continues outside the idle period, or the recording ends too "
                "early"
            )
        roles = " and ".join(sorted({peer.role for peer in self._peers}))
        return attrs.evolve(account, notes=(*account.notes, f"Waits for {roles} are not assigned: {reason}."))

    def _reason(self) -> str | None:
        """Return the reason why the waits cannot be assigned, or ``None`` if they can be."""
        if {clock for peer in self._peers for clock in peer.clocks} != {_clock(self._reading)}:
            return "the clocks of the hosts are not aligned"
        for role in dict.fromkeys(peer.role for peer in self._peers if peer.is_server):
            servers = [peer for peer in self._peers if peer.role == role]
            size = max(_facts(server.readings[0]).fleet_size or 0 for server in servers)
            if len(servers) < size:
                return f"there are traces of only {len(servers)} of {plural(size, 'server')}"
        return None

    def _periods(self) -> Iterator[tuple[int, int]]:
        """Yield the rank's idle periods in Unix nanoseconds. If the rank is a server, its iterations are not idle."""
        idle = self._reading.idle
        periods = union(idle.begin + self._offset_ns, idle.end + self._offset_ns)
        own = _iterations(self._reading) if _is_server(self._reading) else []
        if own and len(periods[0]):
            bursts = union(np.array([burst[0].begin for burst in own]), np.array([burst[-1].end for burst in own]))
            limits = periods[0][:1], periods[1][-1:]
            periods = intersection(
                periods, complement(intersection(bursts, limits), int(limits[0][0]), int(limits[1][0]))
            )
        yield from zip(periods[0].tolist(), periods[1].tolist(), strict=True)

    @property
    def _offset_ns(self) -> int:
        """Offset that converts times on the trace's clock, including the base time, to Unix time."""
        return (self._reading.summary.origin_unix_ns or 0) - self._reading.origin_ns - self._reading.base_ns

    def _assign(self, begin: int, end: int) -> None:
        """Assign one idle period to the peers that worked during it."""
        raise NotImplementedError

    def _add(self, pieces: Sequence[_Piece], margin_ns: int | None) -> None:
        """Add the pieces of one wait.

        Args:
            pieces: The pieces. They do not overlap.
            margin_ns: Time that would be saved without the peer that finished last; ``None`` if it is the entire wait.
        """
        gains: dict[OwnerKey, int] = {}
        for piece in pieces:
            for owner, time_ns in self._segments(piece.activity):
                if piece.activity.awaited == NO_BATCH and owner[0] == OwnerKind.PYTHON.label:
                    continue  # this process is working, not waiting
                _, _, _, _, annotation, line, *_ = owner
                kind, awaited, name = OwnerKind.WAIT_FOR_ROLE.label, piece.activity.awaited, piece.activity.name
                key: OwnerKey = kind, name, None, None, annotation, line, None, awaited, piece.peer.label
                self._moved_ns[owner] = self._moved_ns.get(owner, 0) + time_ns
                before_ns, count = self._added.get(key, (0, 0))
                self._added[key] = before_ns + time_ns, count + 1
                gains[key] = gains.get(key, 0) + time_ns
                if not piece.is_last:
                    self._without_gain.add(key)
        for key, gain_ns in gains.items():
            saved_ns = gain_ns if margin_ns is None else min(gain_ns, margin_ns)
            self._gains_ns[key] = self._gains_ns.get(key, 0) + saved_ns

    def _segments(self, activity: _Activity) -> Iterator[tuple[OwnerKey, int]]:
        """Yield the owner of each segment of the rank's path during an activity, and the duration of their overlap."""
        idle, begin, end = self._reading.idle, activity.begin - self._offset_ns, activity.end - self._offset_ns
        first, last = idle.segment_end.searchsorted(begin, side="right"), idle.segment_begin.searchsorted(end)
        for segment in range(int(first), int(last)):
            time_ns = min(int(idle.segment_end[segment]), end) - max(int(idle.segment_begin[segment]), begin)
            yield idle.keys[int(idle.segment_owner[segment])], time_ns

    def _causes(self, causes: Sequence[CauseTime]) -> Iterator[CauseTime]:
        """Yield the causes, each reduced by the time that was reassigned to peers.

        If a cause loses time, its times per step are cleared because they are no longer known.
        """
        left_us: dict[tuple[str, str | None, str | None], float] = {}
        for owner, time_ns in self._moved_ns.items():
            key = _CAUSES[owner[0]], owner[4], owner[5]
            left_us[key] = left_us.get(key, 0.0) + time_ns / _NS_PER_US
        for cause in causes:
            moved_us = left_us.get((cause.cause, cause.annotation, cause.line), 0.0)
            if not moved_us:
                yield cause
            elif moved_us < cause.time_us:
                gain_us = None if cause.gain_us is None else max(0.0, cause.gain_us - moved_us)
                yield attrs.evolve(cause, time_us=cause.time_us - moved_us, gain_us=gain_us, steps_us=())


class _TurnWaits(_Waits):
    """The time that a rank spends waiting for peers, all of whose work is inside its idle time."""

    def _assign(self, begin: int, end: int) -> None:
        active = [(peer, [*bursts]) for peer in self._peers if (bursts := peer.bursts_in(begin, end))]
        if not active:
            return
        ends = sorted(bursts[-1][-1].end for _, bursts in active)
        is_inside = begin - self._noise_ns <= min(bursts[0][0].begin for _, bursts in active)
        if not is_inside or ends[-1] > end + self._noise_ns or end > self._recorded_until:
            spans = [(burst[0].begin, burst[-1].end) for _, bursts in active for burst in bursts]
            works = union(*np.array(spans, np.int64).T)
            self._unknown_ns += total(intersection(works, (np.array([begin]), np.array([end]))))
            return
        self._add(list(_backward(active, begin, end)), ends[-1] - ends[-2] if len(ends) > 1 else None)


def _backward(active: Sequence[tuple[_Peer, list[Sequence[_Activity]]]], begin: int, end: int) -> Iterator[_Piece]:
    """Divide a wait among the peers, working backward from the peer that finishes last.

    Args:
        active: Peers, each with a list of its bursts during the wait. The lists are modified in place.
        begin: Start of the wait.
        end: End of the wait.
    """
    last_peer, _ = max(active, key=lambda item: item[1][-1][-1].end)
    time, follower = end, None
    while time > begin:
        for _, bursts in active:
            while bursts and bursts[-1][0].begin >= time:
                bursts.pop()
        before = [
            (min(bursts[-1][-1].end, time), bursts[-1][-1].end, peer, bursts[-1]) for peer, bursts in active if bursts
        ]
        if not before:
            return
        until, _, peer, burst = max(before, key=lambda item: item[:2])
        if follower is not None and follower.is_server and until < time:
            yield _Piece(follower, _Activity(max(until, begin), time, NO_BATCH, None), follower is last_peer)
        for activity in burst:
            clipped = activity._replace(begin=max(activity.begin, begin), end=min(activity.end, time))
            if clipped.begin < clipped.end:
                yield _Piece(peer, clipped, peer is last_peer)
        time, follower = burst[0].begin, peer


class _PrefillWaits(_Waits):
    """A decode server's waits for the prefill servers in its fleet, after the trainers have finished."""

    def __init__(self, reading: RankReading, peers: Sequence[_Peer], trainers: Sequence[_Peer]) -> None:
        super().__init__(reading, peers)
        self._trainers = trainers

    def _reason(self) -> str | None:
        if sum(_worker_type(peer) == DECODE for peer in self._peers) > 1:
            return "the traces do not show which decode server continued a prefill"
        return super()._reason()

    def _assign(self, begin: int, end: int) -> None:
        begin = max([begin, *(burst[-1].end for peer in self._trainers for burst in peer.bursts_in(begin, end))])
        prefills = [
            (activity.end, peer, activity)
            for peer in self._peers
            if _worker_type(peer) == PREFILL
            for burst in peer.bursts_in(begin, end)
            for activity in burst
            if begin < activity.end <= end + self._noise_ns and activity.begin < end
        ]
        if not prefills:
            return
        if end > self._recorded_until:
            self._unknown_ns += end - begin
            return
        _, last_peer, _ = max(prefills, key=lambda prefill: prefill[0])
        pieces = [
            _Piece(peer, activity._replace(begin=max(activity.begin, begin), end=min(activity.end, end)), is_last=True)
            for _, peer, activity in prefills
            if peer is last_peer
        ]
        self._add(pieces, None)
