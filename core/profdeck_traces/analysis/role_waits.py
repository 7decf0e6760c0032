"""Assigns the time that trainers and servers spend waiting for each other to the role that is working at the time.

A trainer waits for servers if it runs no operators from before their first iteration until after their last. The wait
is divided among the other roles, working backward from the end of their work. It is assigned first to the server or
role that finishes last, then to the one that was busy before it, and so on. A server's waits for trainers are divided
in the same way.

If the other role's work extends beyond the idle period, as in asynchronous training, the process may be waiting for
something else. It may also be waiting for a member of the capture whose trace can't be read. In both cases, the time
keeps its owner.

Disaggregated servers work at the same time. A decode server waits for the prefill server whose iteration was the last
to end before the decode server resumed.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import attrs
import numpy as np

from profdeck_traces.account.causes import BETWEEN, PYTHON_CODE, WAITING
from profdeck_traces.account.model import Account, CauseTime, OwnerKey, UnassignedWaits
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.reassignment import reassigned
from profdeck_traces.analysis.engine_iterations import all_iterations, decode_requests
from profdeck_traces.analysis.model import StepSummary
from profdeck_traces.analysis.rank_reading import RankReading
from profdeck_traces.analysis.step_names import DECODE, ITERATION, PREFILL
from profdeck_traces.base.text import plural
from profdeck_traces.inputs.facts import ENGINE_ITERATION, CaptureMember, TraceFacts, run_records
from profdeck_traces.reading.event_names import is_weight_sync
from profdeck_traces.reading.intervals import Spans, complement, intersection, total, union

NO_BATCH, WORK = "no batch", "work"
"""``NO_BATCH`` is the activity of a server between iterations. ``WORK`` is an activity outside all stages."""
_CLOCK_NOISE_NS = 100_000
_CONTINUES_NS = 5_000_000
"""If a trainer is working this soon after its recording starts, it may have been working before."""
_MAX_OVERLAP = 0.01
"""Two roles take turns if the time in which both are busy is at most this fraction of the busy time of either."""
_MAX_NAMED = 3
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

    @property
    def is_batch(self) -> bool:
        """False if a server isn't running a batch: it is idle or receiving weights, possibly from this process."""
        awaited = self.activity.awaited
        return awaited != NO_BATCH and not (self.peer.is_server and is_weight_sync(awaited))


@attrs.frozen(eq=False)
class _Peer:
    """The activities of a server, or of all recorded ranks of another role."""

    readings: Sequence[RankReading]
    bursts: Sequence[Sequence[_Activity]]
    """Bursts, sorted by time. Each burst is a sequence of activities without pauses."""
    is_server: bool = attrs.field(kw_only=True)

    @property
    def role(self) -> str:
        return _facts(self.readings[0]).role

    @property
    def label(self) -> str:
        """Role and replica, for example ``rollout/1``."""
        return _facts(self.readings[0]).role_and_replica

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
    def recorded_from(self) -> int:
        """Start of the interval in which all ranks were recorded."""
        return max(_recorded_from(reading) for reading in self.readings)

    @property
    def recorded_until(self) -> int:
        """End of the interval in which all ranks were recorded."""
        return min(_recorded_until(reading) for reading in self.readings)

    @property
    def may_work_before_recording(self) -> bool:
        """True if the peer may already have been working when its recording started.

        A server's first batch is a prefill, unless the server already has requests. For a trainer, this is only a
        hint, because training can also begin as soon as the recording starts.
        """
        if not self.bursts:
            return False
        first = self.bursts[0][0]
        return first.awaited != PREFILL if self.is_server else first.begin < self.recorded_from + _CONTINUES_NS


class _Capture:
    """The readings of one capture, its peers, and its members whose traces can't be read."""

    def __init__(self, readings: Sequence[RankReading]) -> None:
        self._server_roles = {
            facts.role
            for reading in readings
            for facts in [_facts(reading)]
            if facts.unit == ENGINE_ITERATION or any(step.kind == ITERATION for step in reading.summary.steps)
        }
        self._members = run_records().members(_facts(readings[0]))
        self.readings = [reading for reading in readings if reading.summary.problem is None]
        usable = [reading for reading in self.readings if reading.summary.origin_unix_ns is not None]
        groups: dict[tuple[str, int | None], list[RankReading]] = {}
        for reading in sorted(usable, key=lambda reading: reading.summary.rank or 0):
            groups.setdefault((_facts(reading).role, _facts(reading).replica), []).append(reading)
        self.peers = [peer for group in groups.values() for peer in self._peers(group)]
        self.has_clocks = len(usable) == len(self.readings)

    def is_server(self, reading: RankReading) -> bool:
        """Return whether a rank belongs to a role whose processes run engine iterations."""
        return _facts(reading).role in self._server_roles

    def _peers(self, readings: Sequence[RankReading]) -> Iterator[_Peer]:
        """Yield the peers in a group of ranks: one for the entire group, or one per data-parallel rank of a server.

        The other ranks of a server are skipped, because they run the same batches.
        """
        if not self.is_server(readings[0]):
            yield _Peer(readings, _stages(readings), is_server=False)
            return
        first: dict[int | None, RankReading] = {}
        for reading in readings:
            first.setdefault(_facts(reading).data_parallel_rank, reading)
        for reading in first.values():
            bursts = _iterations(reading)
            bursts = _with_weight_syncs(bursts, reading) if bursts else _stages([reading])
            yield _Peer([reading], bursts, is_server=True)

    @functools.cached_property
    def missing(self) -> list[CaptureMember]:
        """Members without a readable trace. A server needs only one trace, unless it has data-parallel ranks."""
        groups: dict[tuple[str, int | None], list[TraceFacts]] = {}
        for reading in self.readings:
            groups.setdefault((_facts(reading).role, _facts(reading).replica), []).append(_facts(reading))
        missing: dict[CaptureMember, None] = {}
        for member in self._members:
            group = groups.get((member.role, member.replica), [])
            ranks = {facts.rank for facts in group}
            if not group:
                missing[CaptureMember(member.role, member.replica)] = None
            elif member.rank is not None and member.rank not in ranks:
                is_server = member.role in self._server_roles
                if not is_server or any(facts.data_parallel_rank is not None for facts in group):
                    missing[member] = None
        return sorted(missing, key=_sort_key)


def assign_role_waits(readings: Sequence[RankReading], accounts: Sequence[Account | None]) -> list[Account | None]:
    """Return the accounts, with each wait for another role assigned to the role that was working at the time.

    Args:
        readings: Readings of all ranks.
        accounts: Account of each rank, or ``None`` if it has no account.
    """
    captures: dict[tuple[str, str], list[int]] = {}
    for place, reading in enumerate(readings):
        if reading.facts is not None:
            captures.setdefault((reading.facts.run, reading.facts.capture), []).append(place)
    assigned = list(accounts)
    for places in captures.values():
        if not any(len(readings[place].idle.begin) for place in places):
            continue
        capture = _Capture([readings[place] for place in places])
        for place in places:
            reading, account = readings[place], assigned[place]
            if account is None or not len(reading.idle.begin) or reading.summary.problem is not None:
                continue
            for wait in _waits_of(reading, capture):
                account = wait.account(account)
            assigned[place] = account
    return assigned


def _facts(reading: RankReading) -> TraceFacts:
    assert reading.facts is not None  # noqa: S101 - a reading without facts is not part of a capture
    return reading.facts


def _clock(reading: RankReading) -> str | None:
    """Return the host whose clock provides the reading's Unix times."""
    facts = _facts(reading)
    return facts.host if facts.clock_offset_ns is None else facts.clock_host


def _recorded_from(reading: RankReading) -> int:
    origin, start = reading.summary.origin_unix_ns or 0, _facts(reading).recorded_from_ns
    return origin if start is None else min(origin, start)


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


def _with_weight_syncs(bursts: list[list[_Activity]], reading: RankReading) -> list[list[_Activity]]:
    """Add a server's weight syncs to its bursts. A sync can interrupt a burst."""
    for period in reading.summary.stage_periods:
        begin, end = _unix_ns(reading, period.start_us), _unix_ns(reading, period.start_us + period.duration_us)
        sync = _Activity(begin, end, period.name or WORK, None)
        overlapping = [burst for burst in bursts if burst[0].begin <= end and burst[-1].end >= begin]
        parts = [sync]
        for activity in itertools.chain.from_iterable(overlapping):
            if activity.begin < begin:
                parts.append(activity._replace(end=min(activity.end, begin)))
            if activity.end > end:
                parts.append(activity._replace(begin=max(activity.begin, end)))
        bursts = [burst for burst in bursts if burst not in overlapping]
        bursts.append(sorted(parts))
        bursts.sort()
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
    if not spans:
        return []
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


def _waits_of(reading: RankReading, capture: _Capture) -> Iterator[_Waits]:
    """Yield a rank's waits, separately for each group of peers."""
    role, replica = _facts(reading).role, _facts(reading).replica
    others = [peer for peer in capture.peers if peer.role != role]
    missing = [member for member in capture.missing if member.role != role]
    is_between_turns = capture.is_server(reading) or any(peer.is_server for peer in others)
    if missing or (others and is_between_turns):
        yield _TurnWaits(reading, capture, others, missing)
    if _facts(reading).worker_type == DECODE and capture.is_server(reading):
        fleet = [peer for peer in capture.peers if peer.role == role]
        if any(_worker_type(server) == PREFILL for server in fleet):
            missing = [member for member in capture.missing if (member.role, member.replica) != (role, replica)]
            yield _PrefillWaits(reading, capture, fleet, missing, others)


def _worker_type(server: _Peer) -> str | None:
    return _facts(server.readings[0]).worker_type


def _sort_key(member: CaptureMember) -> tuple[str, int, int]:
    replica, rank = (-1 if number is None else number for number in (member.replica, member.rank))
    return member.role, replica, rank


def _listed(members: Sequence[CaptureMember]) -> str:
    """Format a list of members, such as ``rollout/1, trainer rank 3 and 2 others``."""
    names = []
    for member in members:
        name = member.role if member.replica is None else f"{member.role}/{member.replica}"
        names.append(name if member.rank is None else f"{name} rank {member.rank}")
    if len(names) > _MAX_NAMED:
        names[_MAX_NAMED - 1 :] = [plural(len(names) - _MAX_NAMED + 1, "other")]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


class _Waits:
    """One rank's waits for its peers."""

    def __init__(
        self, reading: RankReading, capture: _Capture, peers: Sequence[_Peer], missing: Sequence[CaptureMember]
    ) -> None:
        self._reading, self._capture, self._peers, self._missing = reading, capture, peers, missing
        self._noise_ns = _CLOCK_NOISE_NS + (_facts(reading).clock_error_ns or 0)
        self._noise_ns += max((peer.error_ns for peer in peers), default=0)
        self._moved_ns: dict[OwnerKey, int] = {}
        self._added: dict[OwnerKey, tuple[int, int]] = {}
        self._gains_ns: dict[OwnerKey, int] = {}
        self._without_gain: set[OwnerKey] = set()
        self._recorded_from = max((peer.recorded_from for peer in peers), default=0) - self._noise_ns
        self._recorded_until = min((peer.recorded_until for peer in peers), default=0) + self._noise_ns
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
        roles = {peer.role for peer in self._peers} | {member.role for member in self._missing}
        unassigned = UnassignedWaits(roles=tuple(sorted(roles)), reason=reason)
        return attrs.evolve(
            account,
            notes=(*account.notes, unassigned.note),
            unassigned_waits=(*account.unassigned_waits, unassigned),
        )

    def _reason(self) -> str | None:
        """Return the reason why the waits cannot be assigned, or ``None`` if they can be."""
        if self._missing:
            return f"there is no readable trace of {_listed(self._missing)}"
        for role in dict.fromkeys(peer.role for peer in self._peers if peer.is_server):
            servers = {peer.label: peer for peer in self._peers if peer.role == role}
            size = max(_facts(server.readings[0]).fleet_size or 0 for server in servers.values())
            if len(servers) < size:
                return f"there are traces of only {len(servers)} of {plural(size, 'server')}"
        clocks = {clock for peer in self._peers for clock in peer.clocks}
        if not self._capture.has_clocks or clocks != {_clock(self._reading)}:
            return "the clocks of the hosts are not aligned"
        return None

    def _periods(self) -> Iterator[tuple[int, int]]:
        """Yield the rank's idle periods in Unix nanoseconds. If the rank is a server, its iterations are not idle."""
        idle = self._reading.idle
        periods = union(idle.begin + self._offset_ns, idle.end + self._offset_ns)
        own = _iterations(self._reading) if self._capture.is_server(self._reading) else []
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
                if not piece.is_batch and owner[0] == OwnerKind.PYTHON.label:
                    continue  # this process may be working, not waiting
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

    def _may_extend(self, peer: _Peer, begin: int, end: int) -> bool:
        """Return whether a peer that is busy during an idle period may already have been busy before it began."""
        return (
            peer.recorded_from - self._noise_ns > begin
            and peer.may_work_before_recording
            and peer.bursts[0][0].begin < end
            and (peer.is_server or not self._takes_turns(peer))
        )

    def _takes_turns(self, peer: _Peer) -> bool:
        """Return whether this role and a peer are both busy in the recording, but never at the same time."""
        own = [one for one in self._capture.peers if one.role == _facts(self._reading).role]
        begin = max(one.recorded_from for one in (peer, *own))
        end = min(one.recorded_until for one in (peer, *own))
        works = [_work_of(peers, begin, end) for peers in (own, [peer])]
        shorter = min(map(total, works))
        return shorter > self._noise_ns and total(intersection(*works)) <= self._noise_ns + _MAX_OVERLAP * shorter

    def _assign(self, begin: int, end: int) -> None:
        may_extend = any(self._may_extend(peer, begin, end) for peer in self._peers)
        idle_from, begin = begin, max(begin, self._recorded_from)
        active = [(peer, [*bursts]) for peer in self._peers if (bursts := peer.bursts_in(begin, end))]
        if not active:
            return
        ends = sorted(bursts[-1][-1].end for _, bursts in active)
        # A rank can start working before the recordings of the other ranks of its role start.
        is_inside = idle_from - self._noise_ns <= min(bursts[0][0].begin for _, bursts in active)
        if may_extend or not is_inside or ends[-1] > end + self._noise_ns or end > self._recorded_until:
            spans = [(burst[0].begin, burst[-1].end) for _, bursts in active for burst in bursts]
            works = union(*np.array(spans, np.int64).T)
            self._unknown_ns += total(intersection(works, (np.array([begin]), np.array([end]))))
            return
        self._add(list(_backward(active, begin, end)), ends[-1] - ends[-2] if len(ends) > 1 else None)


def _work_of(peers: Sequence[_Peer], begin: int, end: int) -> Spans:
    """Return the intervals during which any of the peers is busy, clipped to a time range.

    Weight syncs of servers are left out because trainers take part in them.
    """
    spans = [
        (max(begin, activity.begin), min(end, activity.end))
        for peer in peers
        for burst in peer.bursts_in(begin, end)
        for activity in burst
        if not (peer.is_server and is_weight_sync(activity.awaited))
    ]
    spans = [span for span in spans if span[0] < span[1]]
    return union(*np.array(spans, np.int64).reshape(-1, 2).T)


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

    def __init__(
        self,
        reading: RankReading,
        capture: _Capture,
        peers: Sequence[_Peer],
        missing: Sequence[CaptureMember],
        others: Sequence[_Peer],
    ) -> None:
        super().__init__(reading, capture, peers, missing)
        self._others = others

    def _reason(self) -> str | None:
        if len({peer.label for peer in self._peers if _worker_type(peer) == DECODE}) > 1:
            return "the traces do not show which decode server continued a prefill"
        return super()._reason()

    def _assign(self, begin: int, end: int) -> None:
        begin = max([begin, *(burst[-1].end for peer in self._others for burst in peer.bursts_in(begin, end))])
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
