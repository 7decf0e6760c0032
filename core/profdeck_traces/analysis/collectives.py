"""The collectives that ranks ran together, matched across their traces."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.clock_shift import RankCalls, match_calls
from profdeck_traces.analysis.detail_model import CollectiveCalls
from profdeck_traces.reading.columns import Columns
from profdeck_traces.reading.intervals import Int

if TYPE_CHECKING:
    from profdeck_traces.reading.trace import Trace

_NS_PER_US = 1000

# NCCL's kernels, then HCCL's, whose names end in numbers that differ from call to call.
_NCCL = re.compile(r"[nr]ccl\w*?Kernel_([A-Za-z]+)")
_HCCL = re.compile(r"hcom_([A-Za-z]+)")
# `cross_device_reduce` is vLLM's all-reduce.
_WAITS_FOR_ALL = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier|cross_device_reduce", re.IGNORECASE
)
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


def waits_for_all(name: str) -> bool:
    """Return whether every rank in a collective must wait until all ranks of its group have arrived.

    A broadcast does not qualify, for example, because its root can leave earlier. Return False for unknown names.
    """
    return _WAITS_FOR_ALL.search(collective_name(name)) is not None and not is_message(name)


@attrs.frozen(kw_only=True, eq=False)
class Collectives:
    """The communication of one trace, on its devices or else its host: parallel arrays of one value a call."""

    path: str
    rank: int | None
    role: str | None = None
    replica: int | None = None
    capture: str | None = None
    run: str | None = None
    host: str | None = None
    """Ranks of one host share a clock, unless their collectives are more than 100 us apart."""
    anchor_offset_ns: int | None = None
    """What to add to the trace's clock to get the real time, by marks that the recorder left."""
    names: Sequence[str]
    """Of the kernels, or of the collectives that they are part of."""
    groups: Sequence[str]
    """The same text on the ranks that communicate with each other: of process groups the name or ranks; where the
    trace has neither, of streams. A text may come more than once."""
    warm_from_ns: int | None = None
    """Start of the first warm step. Statistics exclude earlier calls. ``None`` includes all calls."""
    meant: Mapping[str, str] = attrs.field(factory=dict)
    """Which group is meant by one of ``groups`` where others have the same text; what is not known may be missing."""
    sizes: Mapping[str, int] = attrs.field(factory=dict)
    """Number of ranks in each process group, by its text in ``groups``. Groups of unknown size are missing."""
    name: NDArray[np.integer]
    """Index into ``names``."""
    group: NDArray[np.integer]
    """Index into ``groups``."""
    start_ns: Int
    """With the base of the trace's clock, so that clocks of different traces compare."""
    end_ns: Int
    step: Int | None = None
    """Number of the global step in which each call started, or -1. ``None`` if unknown."""


@attrs.frozen(eq=False)
class MatchedGroup:
    """The ranks of one process group, and which of their calls are the same collective."""

    names: list[str]
    leader: int
    """The rank with the most calls: an index into the traces."""
    members: dict[int, RankCalls]
    matched: dict[int, Int]
    """Of each member that has collectives in common with the leader: the call that is each of the leader's, or -1."""
    size: int | None = None
    """Number of ranks in the process group, or ``None`` if it is unknown."""

    @property
    def is_complete(self) -> bool:
        """False if a rank of the group was not recorded or has no matching calls, so that it may arrive last."""
        return self.size is None or len(self.matched) == self.size

    def apart_ns(self, member: int) -> Int:
        """Return by how much each collective ended earlier on a member's clock than on the leader's."""
        which = self.matched[member]
        return self.members[self.leader].end_ns[which >= 0] - self.members[member].end_ns[which[which >= 0]]

    def times_ns(self, collectives: Int, offset_ns: Sequence[int]) -> tuple[Int, Int]:
        """Return starts and ends of some of the leader's collectives, from the first start of each: a row a member."""
        start, end = self.common_times_ns(collectives, offset_ns)
        begin = start.min(axis=0)
        return start - begin, end - begin

    def common_times_ns(self, collectives: Int, offset_ns: Sequence[int]) -> tuple[Int, Int]:
        """Return the start and end times of some of the leader's collectives on a common clock, one row per member."""
        calls = [
            (self.members[member], which[collectives], offset_ns[member]) for member, which in self.matched.items()
        ]
        start = np.stack([of_member.start_ns[which] + offset for of_member, which, offset in calls])
        end = np.stack([of_member.end_ns[which] + offset for of_member, which, offset in calls])
        return start, end


RankTeam = tuple[str | None, str | None, int | None, str | None]


def team_of(rank: Collectives) -> RankTeam:
    """Return which ranks an offset holds for."""
    return rank.run, rank.role, rank.replica, rank.capture


def _meant_by_all(ranks: Sequence[Collectives]) -> dict[tuple[object, ...], str]:
    """Return, by team and text, the group that all ranks mean which know it."""
    meant: dict[tuple[object, ...], set[str]] = {}
    for rank in ranks:
        for text, group in rank.meant.items():
            meant.setdefault((*team_of(rank), text), set()).add(group)
    return {key: groups.pop() for key, groups in meant.items() if len(groups) == 1}


def matched_groups(ranks: Sequence[Collectives]) -> list[MatchedGroup]:
    """Match the calls of all ranks, by the process groups that ran them.

    If more ranks have a group's name than the group has members, several groups have this name. Their calls are not
    matched.
    """
    names: dict[str, int] = {}
    found: dict[tuple[object, ...], dict[int, RankCalls]] = {}
    sizes: dict[tuple[object, ...], int] = {}
    only_one = _meant_by_all(ranks)
    for index, rank in enumerate(ranks):
        common = [collective_name(name) for name in rank.names]
        code = np.array([names.setdefault(name, len(names)) for name in common], dtype=np.int64)
        is_collective = np.array([not is_message(name) for name in rank.names], dtype=bool)
        order = np.argsort(rank.start_ns, kind="stable")
        order = order[is_collective[rank.name[order]]]
        meant = {text: rank.meant.get(text) or only_one.get((*team_of(rank), text), text) for text in rank.groups}
        texts = {text: number for number, text in enumerate(dict.fromkeys(meant.values()))}
        group_of_call = np.array([texts[meant[text]] for text in rank.groups], dtype=np.int64)[rank.group[order]]
        for text, group in texts.items():
            calls = order[group_of_call == group]
            if not len(calls):
                continue
            key = (*team_of(rank), text)
            members = found.setdefault(key, {})
            step = None if rank.step is None else rank.step[calls]
            members[index] = RankCalls(code[rank.name[calls]], rank.start_ns[calls], rank.end_ns[calls], calls, step)
            if text in rank.sizes:
                sizes[key] = max(rank.sizes[text], sizes.get(key, 0))
    groups = []
    for group_key, members in found.items():
        size = sizes.get(group_key)
        leader = max(members, key=lambda member: len(members[member].name))
        matched = {
            member: which
            for member, calls in members.items()
            if size is None or len(members) <= size
            if (which := match_calls(members[leader], calls)) is not None
        }
        groups.append(MatchedGroup(list(names), leader, members, matched, size))
    return groups


# What nccl-tests multiplies size over time by, so that the result compares with the speed of the link, for n ranks.
# (a, b) means a (n - b) / n.
_BUS_FACTORS = {
    "allreduce": (2, 1),
    "allgather": (1, 1),
    "reduce_scatter": (1, 1),
    "alltoall": (1, 1),
    "broadcast": (1, 0),
    "reduce": (1, 0),
}
_SPELLINGS = (
    ("allreduce", re.compile(r"all_?reduce", re.IGNORECASE)),
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("allgather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("alltoall", re.compile(r"all_?to_?all", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    ("reduce", re.compile(r"reduce", re.IGNORECASE)),
)


def bus_bytes_per_s(collective: str, size_bytes: int, ranks: int, time_ns: int) -> float | None:
    """Return the bus bandwidth of one call, as nccl-tests defines it (doc/PERFORMANCE.md in NVIDIA/nccl-tests).

    Args:
        collective: As torch or NCCL calls it.
        size_bytes: Of the whole of what a rank gives or gets, whichever is more.
        ranks: How many take part.
        time_ns: How long it took.
    """
    name = next((name for name, pattern in _SPELLINGS if pattern.search(collective)), None)
    if name is None or not time_ns or ranks < 1:
        return None
    times, less = _BUS_FACTORS[name]
    return size_bytes / time_ns * 1e9 * times * (ranks - less) / ranks


# Element types, spelled as torch writes them (c10/core/ScalarType.h), grouped by size in bytes.
_BYTES_OF_TYPE = {
    name: size
    for size, names in {
        1: "Byte Char Bool Float8_e4m3fn Float8_e5m2 Float8_e4m3fnuz Float8_e5m2fnuz Float8_e8m0fnu",
        2: "Short UInt16 Half BFloat16",
        4: "Int UInt32 Float ComplexHalf",
        8: "Long UInt64 Double ComplexFloat",
        16: "ComplexDouble",
    }.items()
    for name in names.split()
}
_COLLECTIVE_ARGS = ("Collective name", "Process Group Name", "Process Group Ranks", "dtype")
_SIZE_ARGS = ("Group size", "In msg nelems", "Out msg nelems")
_MAX_TEXT_LENGTH = 4096


@attrs.frozen
class StatedCollective:
    """Args shared by all calls to a given collective that have the same process group and size."""

    name: str
    group: str
    """Name and ranks of the process group."""
    group_size: int | None = None
    size_bytes: int | None = None
    """Size of the input or output on this rank, whichever is larger, as in nccl-tests."""


def stated_collectives(trace: Trace, kernels: Columns) -> tuple[list[StatedCollective], Int]:
    """Return the distinct collectives named in kernel args, and the index of each kernel's collective.

    If a kernel's args do not name both a collective and a process group, its index is the number of collectives. Torch
    has written these args since 2.3, except for kernels in captured graphs (``CollectiveMetadataFields`` in
    pytorch/kineto).
    """
    args = np.stack([trace.arg(key, kernels.row) for key in (*_COLLECTIVE_ARGS, *_SIZE_ARGS)], axis=1)
    rows, which = np.unique(args, axis=0, return_inverse=True)
    numbers: dict[StatedCollective, int] = {}
    codes = [
        -1 if (stated := _stated_collective(trace, row)) is None else numbers.setdefault(stated, len(numbers))
        for row in rows.tolist()
    ]
    code = np.array(codes, dtype=np.int64)[which.ravel()]
    return list(numbers), np.where(code < 0, len(numbers), code)


def _stated_collective(trace: Trace, row: Sequence[int]) -> StatedCollective | None:
    name, group, ranks, dtype = (trace.text(key, code) for key, code in zip(_COLLECTIVE_ARGS, row, strict=False))
    group_size, *elements = row[len(_COLLECTIVE_ARGS) :]
    process_group = " ".join(filter(None, (group, ranks)))
    if not isinstance(name, str) or not process_group:
        return None
    bytes_of_type = _BYTES_OF_TYPE.get(dtype or "")
    stated_elements = [count for count in elements if count >= 0]
    return StatedCollective(
        name[:_MAX_TEXT_LENGTH],
        process_group[:_MAX_TEXT_LENGTH],
        group_size if group_size > 0 else None,
        max(stated_elements) * bytes_of_type if stated_elements and bytes_of_type else None,
    )


def collective_calls(stated: Sequence[StatedCollective], which: Int, calls: Columns) -> tuple[CollectiveCalls, ...]:
    """Return the calls of each collective named in a trace, sorted by total time, longest first.

    Args:
        stated: Distinct collectives, as returned by `stated_collectives`.
        which: For each call, the index of its collective.
        calls: All communication kernels.
    """
    found = []
    duration_ns = calls.duration_ns
    for code, one in enumerate(stated):
        times_ns = duration_ns[which == code]
        if not len(times_ns):
            continue
        shortest_ns = int(times_ns.min())
        known = one.size_bytes is not None and one.group_size is not None
        found.append(
            CollectiveCalls(
                name=one.name,
                group=one.group,
                group_size=one.group_size,
                size_bytes=one.size_bytes,
                count=len(times_ns),
                total_us=int(times_ns.sum()) / _NS_PER_US,
                min_us=shortest_ns / _NS_PER_US,
                bus_bytes_per_s=bus_bytes_per_s(one.name, one.size_bytes or 0, one.group_size or 0, shortest_ns)
                if known
                else None,
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.total_us, one.name, one.group, one.size_bytes or 0)))
