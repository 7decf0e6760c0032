"""Tests of matching collectives across ranks, and of the clock offsets, skew and stragglers computed from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from profdeck_traces.analysis.clock_alignment import Alignment, Shifts, align
from profdeck_traces.analysis.clocks import OffsetSource, clock_offsets, match_teams
from profdeck_traces.analysis.collective_skew import skew_of_team
from profdeck_traces.analysis.collectives import Collectives, collective_name
from profdeck_traces.analysis.model import GroupSkew, RankSkew
from profdeck_traces.analysis.run_summary import summarise_run
from profdeck_traces.inputs.sources import TraceSource

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
NAMES = (ALL_REDUCE, ALL_GATHER, SEND_RECV)
EPOCH_NS = 1_700_000_000_000_000_000


def run(
    ranks: int = 4,
    calls: int = 40,
    *,
    late_us: tuple[int, ...] = (),
    jitter_ns: int = 0,
    clock_ns: tuple[int, ...] = (),
    group: str = "0",
    seed: int = 0,
) -> list[Collectives]:
    """Return the collectives of ranks.

    Without delays, all ranks arrive at the same time. They leave 20 us after the last rank arrives.
    """
    random = np.random.default_rng(seed)
    begin = EPOCH_NS + np.cumsum(random.integers(100_000, 5_000_000, calls))
    late = np.array([*late_us, *[0] * (ranks - len(late_us))])[:, np.newaxis] * 1000
    clock = np.array([*clock_ns, *[0] * (ranks - len(clock_ns))])[:, np.newaxis]
    start = begin + late
    end = start.max(axis=0) + 20_000 + (random.integers(0, jitter_ns + 1, (ranks, calls)))
    name = random.integers(0, 2, calls).astype(np.int32)
    return [
        Collectives(
            path=f"rank{rank}.json",
            rank=rank,
            names=NAMES,
            groups=(group,),
            name=name,
            group=np.zeros(calls, dtype=np.int32),
            start_ns=(start - clock)[rank],
            end_ns=(end - clock)[rank],
        )
        for rank in range(ranks)
    ]


def skew_of(ranks: list[Collectives]) -> tuple[GroupSkew, ...]:
    return tuple(map(skew_of_team, match_teams(ranks)))


def only(rank: Collectives, selection: Any) -> Collectives:
    return attrs.evolve(
        rank,
        name=rank.name[selection],
        group=rank.group[selection],
        start_ns=rank.start_ns[selection],
        end_ns=rank.end_ns[selection],
    )


def joined(*ranks: Collectives) -> Collectives:
    """Combine the collectives of one rank in several process groups."""
    return attrs.evolve(
        ranks[0],
        groups=tuple(rank.groups[0] for rank in ranks),
        name=np.concatenate([rank.name for rank in ranks]),
        group=np.repeat(np.arange(len(ranks)), [len(rank.name) for rank in ranks]),
        start_ns=np.concatenate([rank.start_ns for rank in ranks]),
        end_ns=np.concatenate([rank.end_ns for rank in ranks]),
    )


def the(groups: tuple[GroupSkew, ...]) -> GroupSkew:
    (group,) = groups
    return group


def numbers(ranks: tuple[RankSkew, ...]) -> list[tuple[int, int, float, float]]:
    return [(rank.collectives, rank.last, rank.late_us, rank.wait_us) for rank in ranks]


@pytest.mark.parametrize(
    ("name", "common"),
    [
        (ALL_REDUCE, "AllReduce"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "ReduceScatter"),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs)", "AllGather"),
        ("hcom_allReduce__619_0_1", "allReduce"),
        ("void engine::cross_device_reduce_1stage<__nv_bfloat16, 2>(RankData*)", "cross_device_reduce_1stage"),
        ("void (anonymous namespace)::multimem_all_reduce<float>(int)", "multimem_all_reduce"),
        ("allreduce", "allreduce"),
    ],
)
def test_collective_name_is_equal_on_all_ranks(name: str, common: str) -> None:
    assert collective_name(name) == common


def test_clock_offsets_are_exact() -> None:
    offsets = clock_offsets(run(clock_ns=(0, 137_250, -3_000_000, 960_800)))

    assert [offset.offset_ns for offset in offsets] == [0, 137_250, -3_000_000, 960_800]
    assert [offset.source for offset in offsets] == [OffsetSource.FIRST, *[OffsetSource.COLLECTIVES] * 3]
    assert [offset.collectives for offset in offsets] == [120, 40, 40, 40]
    assert {offset.spread_ns for offset in offsets} == {0}


def test_straggler_is_found_with_any_clock_offsets() -> None:
    skew = the(skew_of(run(late_us=(0, 10, 50), clock_ns=(0, 137_250, -3_000_000, 960_800))))

    assert skew.straggler == 2
    assert numbers(skew.ranks) == [
        (40, 0, 0.0, 2000.0),
        (40, 0, 400.0, 1600.0),
        (40, 40, 2000.0, 0.0),
        (40, 0, 0.0, 2000.0),
    ]
    assert [rank.clock_offset_us for rank in skew.ranks] == [0.0, 137.25, -3000.0, 960.8]
    assert {collective.name for collective in skew.collectives} == {"AllReduce", "AllGather"}
    assert sum(collective.count for collective in skew.collectives) == 40
    assert sum(collective.transfer_us for collective in skew.collectives) == 40 * 20.0
    assert sum(collective.skew_us for collective in skew.collectives) == 40 * 50.0
    assert skew.note is None


def test_delay_below_the_jitter_of_ends_is_not_a_straggler() -> None:
    skew = the(skew_of(run(late_us=(0, 0, 2), jitter_ns=20_000)))

    assert skew.straggler is None
    assert [rank.last for rank in skew.ranks] == [0, 0, 0, 0]


def test_alternating_late_ranks_are_not_stragglers() -> None:
    early, late = run(2, late_us=(0, 30))
    swap = np.arange(40) < 16
    first = attrs.evolve(early, start_ns=np.where(swap, late.start_ns, early.start_ns))
    second = attrs.evolve(late, start_ns=np.where(swap, early.start_ns, late.start_ns))
    skew = the(skew_of([first, second]))

    assert [rank.last for rank in skew.ranks] == [16, 24]
    assert skew.straggler is None


def test_jitter_of_ends_changes_clock_offsets_by_less() -> None:
    offsets = clock_offsets(run(calls=400, jitter_ns=5000, clock_ns=(0, 137_250)))

    assert abs(offsets[1].offset_ns - 137_250) < 1000
    assert 0 < (offsets[1].spread_ns or 0) < 5000


@pytest.mark.parametrize("calls", [30, 300])
def test_calls_missing_at_either_end_are_omitted(calls: int) -> None:
    ranks = run(3, calls, late_us=(0, 40), clock_ns=(0, 500_000, -700_000))
    ranks = [ranks[0], only(ranks[1], slice(9, None)), only(ranks[2], slice(2, calls - 5))]
    skew = the(skew_of(ranks))

    assert [rank.clock_offset_us for rank in skew.ranks] == [0.0, 500.0, -700.0]
    assert [rank.collectives for rank in skew.ranks] == [calls - 14] * 3
    assert skew.straggler == 1
    left_out = 3 * calls - 9 - 7 - 3 * (calls - 14)
    assert skew.note is not None
    assert skew.note.startswith(f"{left_out} of {3 * calls - 16} calls were left out")


def test_recordings_with_different_bounds_are_matched_by_call_intervals() -> None:
    early, late = run(2, 200, clock_ns=(0, 3_600_000_000_000))
    offsets = clock_offsets([only(early, slice(0, 150)), only(late, slice(50, 200))])

    assert offsets[1].offset_ns == 3_600_000_000_000
    assert offsets[1].collectives == 100


def test_periodic_calls_are_matched_by_clocks() -> None:
    ranks = [
        attrs.evolve(
            rank,
            name=np.zeros(200, dtype=np.int32),
            start_ns=EPOCH_NS + np.arange(200) * 1_000_000 + late_ns,
            end_ns=EPOCH_NS + np.arange(200) * 1_000_000 + 300_000,
        )
        for late_ns, rank in zip((0, 100_000), run(2, 200), strict=True)
    ]
    skew = the(skew_of([only(ranks[0], slice(0, 190)), only(ranks[1], slice(10, 200))]))

    assert [rank.clock_offset_us for rank in skew.ranks] == [0.0, 0.0]
    assert [rank.collectives for rank in skew.ranks] == [180, 180]
    assert skew.straggler == 1


def test_call_missing_in_the_middle_omits_the_shorter_side() -> None:
    early, late = run(2, 100, late_us=(0, 30))
    skew = the(skew_of([early, only(late, np.arange(100) != 70)]))

    assert [rank.collectives for rank in skew.ranks] == [70, 70]
    assert skew.straggler == 1


def test_group_with_several_numbers_is_one_group() -> None:
    ranks = run(late_us=(0, 30), calls=40)
    apart = [attrs.evolve(rank, groups=("0", "0"), group=(rank.name != 0).astype(np.int32)) for rank in ranks]

    assert skew_of(apart) == skew_of(ranks)


def test_process_groups_are_matched_separately() -> None:
    pairs = [run(2, late_us=(0, 20), group="tp0", seed=1), run(2, late_us=(30, 0), group="tp1", seed=2)]
    ranks = [attrs.evolve(rank, rank=number) for number, rank in enumerate([*pairs[0], *pairs[1]])]
    skew = the(skew_of(ranks))

    assert numbers(skew.ranks) == [
        (40, 0, 0.0, 800.0),
        (40, 40, 800.0, 0.0),
        (40, 40, 1200.0, 0.0),
        (40, 0, 0.0, 1200.0),
    ]
    assert skew.note == "Nothing ties their clocks to that of rank 0: rank 2."
    assert skew.straggler == 1


def test_clock_offsets_are_chained_over_shared_ranks() -> None:
    clocks = (0, 5000, -9000)
    first = run(2, clock_ns=clocks[:2], group="a", seed=1)
    second = run(2, clock_ns=clocks[1:], group="b", seed=2)
    ranks = [first[0], joined(first[1], second[0]), attrs.evolve(second[1], rank=2)]

    assert [offset.offset_ns for offset in clock_offsets(ranks)] == list(clocks)
    assert the(skew_of(ranks)).note is None


def test_ranks_of_a_host_share_a_clock() -> None:
    ranks = run(4, jitter_ns=3000, clock_ns=(0, 0, 77_000, 77_000))
    ranks = [attrs.evolve(rank, host="ab"[number // 2]) for number, rank in enumerate(ranks)]
    offsets = clock_offsets(ranks)

    assert offsets[1].offset_ns == 0
    assert offsets[1].source is OffsetSource.HOST
    assert offsets[2].offset_ns == offsets[3].offset_ns
    assert abs(offsets[2].offset_ns - 77_000) < 3000


def test_equal_host_names_with_different_offsets_have_separate_clocks() -> None:
    ranks = [attrs.evolve(rank, host="localhost") for rank in run(3, clock_ns=(0, 0, 137_250))]

    assert [offset.offset_ns for offset in clock_offsets(ranks)] == [0, 0, 137_250]


def test_host_connects_the_clocks_of_roles() -> None:
    actors = [
        attrs.evolve(rank, role="actor", host=host)
        for rank, host in zip(run(2, clock_ns=(0, 99_000)), "ab", strict=True)
    ]
    rollout = attrs.evolve(run(1)[0], role="rollout", host="b")

    assert clock_offsets([*actors, rollout])[2].offset_ns == 99_000


def test_anchors_are_used_with_few_collectives() -> None:
    def offsets(calls: int) -> Any:
        ranks = run(2, calls, clock_ns=(0, 5000))
        anchor_offsets_ns = (10**15, 10**15 + 4000)
        ranks = [
            attrs.evolve(rank, anchor_offset_ns=offset_ns)
            for rank, offset_ns in zip(ranks, anchor_offsets_ns, strict=True)
        ]
        return clock_offsets(ranks)[1]

    assert (offsets(8).offset_ns, offsets(8).source, offsets(8).anchors_ns) == (5000, OffsetSource.COLLECTIVES, 4000)
    assert (offsets(7).offset_ns, offsets(7).source, offsets(7).anchors_ns) == (4000, OffsetSource.ANCHORS, 4000)
    without_marks = clock_offsets(run(2, 7, clock_ns=(0, 5000)))[1]
    assert (without_marks.offset_ns, without_marks.source) == (5000, OffsetSource.COLLECTIVES)


def test_single_rank_has_no_skew() -> None:
    assert skew_of(run(1)) == ()
    assert skew_of([]) == ()
    assert clock_offsets([]) == ()
    assert [offset.offset_ns for offset in clock_offsets(run(1))] == [0]


def test_replicas_are_separate_groups() -> None:
    ranks = [attrs.evolve(rank, replica=replica) for replica in (0, 1) for rank in run(2)]

    assert [group.replica for group in skew_of(ranks)] == [0, 1]


def test_traces_of_one_rank_are_not_compared() -> None:
    trace = run(1)[0]
    skew = the(skew_of([trace, attrs.evolve(trace, path="other.json")]))

    assert skew.ranks == ()
    assert skew.note == "Several traces say that they are rank 0: they are no ranks of one program."


def test_point_to_point_messages_are_not_used() -> None:
    ranks = [attrs.evolve(rank, name=np.full(40, NAMES.index(SEND_RECV))) for rank in run(2, late_us=(0, 50))]
    skew = the(skew_of(ranks))

    assert skew.collectives == ()
    assert skew.note is not None
    assert skew.note.startswith("There are only messages from point to point")
    assert clock_offsets(ranks)[1].source is OffsetSource.UNKNOWN


def test_ranks_without_common_collectives_are_noted() -> None:
    skew = the(skew_of([run(2, seed=1)[0], run(2, seed=2)[1]]))

    assert skew.collectives == ()
    assert skew.note is not None
    assert "No collectives in common with the others: rank 0, rank 1." in skew.note


def test_skew_is_independent_of_event_and_trace_order() -> None:
    ranks = run(late_us=(0, 10, 50), clock_ns=(0, 1000, 2000, 3000))
    shuffled = [only(rank, np.random.default_rng(7).permutation(40)) for rank in reversed(ranks)]

    assert skew_of(shuffled) == skew_of(ranks)


@given(
    moved_rank=st.integers(1, 3),
    clock_ns=st.integers(-(10**15), 10**15),
    late_us=st.tuples(*[st.integers(0, 80)] * 4),
    jitter_ns=st.integers(0, 3000),
    seed=st.integers(0, 10_000),
)
def test_clock_of_a_rank_affects_only_its_offset(
    moved_rank: int, clock_ns: int, late_us: tuple[int, ...], jitter_ns: int, seed: int
) -> None:
    ranks = run(late_us=late_us, jitter_ns=jitter_ns, seed=seed)
    moved = [
        attrs.evolve(rank, start_ns=rank.start_ns - clock_ns, end_ns=rank.end_ns - clock_ns)
        if rank.rank == moved_rank
        else rank
        for rank in ranks
    ]
    before, after = the(skew_of(ranks)), the(skew_of(moved))

    assert attrs.evolve(after, ranks=()) == attrs.evolve(before, ranks=())
    assert numbers(after.ranks) == numbers(before.ranks)
    assert [offset.offset_ns for offset in clock_offsets(moved)] == [
        offset.offset_ns + (clock_ns if rank == moved_rank else 0) for rank, offset in enumerate(clock_offsets(ranks))
    ]


@given(
    calls=st.integers(1, 90),
    ranks=st.integers(1, 4),
    cuts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=4, max_size=4),
    jitter_ns=st.integers(0, 50_000),
    seed=st.integers(0, 10_000),
)
def test_sums_are_consistent(calls: int, ranks: int, cuts: list[tuple[int, int]], jitter_ns: int, seed: int) -> None:
    traces = [
        only(rank, slice(begin, max(begin, calls - end)))
        for rank, (begin, end) in zip(run(ranks, calls, jitter_ns=jitter_ns, seed=seed), cuts, strict=False)
    ]
    for group in skew_of(traces):
        taking_part = [rank for rank in group.ranks if rank.collectives]
        count = sum(collective.count for collective in group.collectives)
        skew_us = sum(collective.skew_us for collective in group.collectives)
        assert sum(rank.last for rank in group.ranks) <= count
        for rank in taking_part:
            assert rank.collectives == count
            assert rank.late_us + rank.wait_us == pytest.approx(skew_us)


def arriving(late_ns: NDArray[np.int64]) -> list[Collectives]:
    """Return collectives with these delays at arrival. Each row is a rank."""
    ranks, calls = late_ns.shape
    start = EPOCH_NS + np.arange(calls) * 10_000_000 + late_ns
    end = start.max(axis=0) + 20_000 + np.zeros_like(start)
    template = run(ranks, calls)
    return [attrs.evolve(rank, start_ns=start[row], end_ns=end[row]) for row, rank in enumerate(template)]


def test_straggler_has_the_longest_delays_not_the_most_last_arrivals() -> None:
    """One rank is 4 ms late at every third collective. At the others, delays are random and below 40 us."""
    late_ns = np.random.default_rng(0).integers(0, 40_000, (4, 90))
    late_ns[2, ::3] += 4_000_000
    (group,) = skew_of(arriving(late_ns))
    assert group.straggler == 2
    last = [rank.last for rank in group.ranks]
    assert last[2] < 0.6 * sum(last)


@pytest.mark.parametrize("seed", range(20))
def test_random_and_single_delays_have_no_straggler(seed: int) -> None:
    late_ns = np.random.default_rng(seed).integers(0, 40_000, (4, 90))
    (group,) = skew_of(arriving(late_ns))
    assert group.straggler is None
    late_ns[1, 40] += 1_000_000_000
    (group,) = skew_of(arriving(late_ns))
    assert group.straggler is None


# Tests of ranks without devices.


def of_hosts(directory: Path, process_groups: int, name: str) -> list[TraceSource]:
    """Write the traces of two ranks with 20 gloo collectives. The clock of the second rank is 5 ms behind."""
    sources = []
    for rank, behind_us in enumerate((0, 5000)):
        events = [
            {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 7 + call % 2}
            | {"ts": 1000 * call + call**2 - behind_us + 10_000, "dur": 300, "args": {}}
            for call in range(20)
        ]
        path = directory / f"rank{rank}.trace.json"
        about = {"rank": rank, "world_size": 2, "pg_count": process_groups}
        path.write_text(json.dumps({"distributedInfo": about, "traceEvents": events}))
        sources.append(TraceSource(path))
    return sources


@pytest.mark.parametrize("name", ["gloo:all_reduce", "gloo:all_gather", "gloo:reduce_scatter", "gloo:barrier"])
def test_gloo_collectives_align_clocks(tmp_path: Path, name: str) -> None:
    sources = of_hosts(tmp_path, 1, name)
    assert align(sources, Alignment.COLLECTIVES) == Shifts((0, 5_000_000), (), 0)
    summary, errors = summarise_run(sources)
    assert errors == []
    skew = the(summary.skew)
    assert [(collective.name, collective.count) for collective in skew.collectives] == [(name, 20)]
    assert [rank.clock_offset_us for rank in skew.ranks] == [0, 5000]


@pytest.mark.parametrize(
    ("process_groups", "name"),
    [(2, "gloo:all_reduce"), (1, "gloo:broadcast"), (1, "gloo:send"), (1, "gloo:recv"), (1, "my gloo:barrier")],
)
def test_gloo_collectives_without_a_common_end_are_not_used(tmp_path: Path, process_groups: int, name: str) -> None:
    """The group of a collective is unknown with several groups, and the root of a broadcast leaves first."""
    sources = of_hosts(tmp_path, process_groups, name)
    assert align(sources, Alignment.COLLECTIVES) == Shifts((0, 0), (sources[1],), None)
    assert summarise_run(sources)[0].skew == ()


def test_groups_with_the_same_text_are_not_matched() -> None:
    """Four ranks cannot be in one group of two ranks, so that two groups have the same name."""
    ranks = run(4, late_us=(0, 0, 0, 500))
    assert len(match_teams(ranks)[0].groups[0].matched) == 4
    (team,) = match_teams([attrs.evolve(rank, sizes={"0": 2}) for rank in ranks])
    assert not team.groups[0].matched


def test_a_rank_is_not_a_straggler_if_ranks_of_its_group_were_not_recorded() -> None:
    ranks = run(2, late_us=(0, 500))
    assert the(skew_of(ranks)).straggler == 1
    skew = the(skew_of([attrs.evolve(rank, sizes={"0": 4}) for rank in ranks]))
    assert (skew.straggler, [rank.wait_us for rank in skew.ranks]) == (None, [0, 0])
    assert "ranks of their process group were not recorded" in (skew.note or "")


@pytest.mark.parametrize("clock_ns", [0, 3_600 * 10**9])
def test_matched_calls_are_in_the_same_step(clock_ns: int) -> None:
    """Rank 0 lacks its last call, and rank 1 its first, so that both have the same number of calls."""
    begin = EPOCH_NS + 1_000_000 * np.arange(12)
    late_us = np.where(np.arange(12) % 4 == 0, 550, 0)
    ranks = []
    for rank, late in enumerate((late_us, 550 - late_us)):
        calls = attrs.evolve(
            run(1, 12)[0],
            path=f"rank{rank}.json",
            rank=rank,
            name=np.zeros(12, np.int64),
            start_ns=begin + 1000 * late - rank * clock_ns,
            end_ns=begin + 650_000 - rank * clock_ns,
        )
        kept = slice(0, 11) if rank == 0 else slice(1, 12)
        ranks.append(attrs.evolve(only(calls, kept), step=np.arange(12)[kept]))
    (group,) = match_teams(ranks)[0].groups
    assert group.matched[1].tolist() == [-1, *range(10)]


def test_calls_are_not_matched_if_their_steps_contradict() -> None:
    ranks = run(2)
    steps = [np.zeros(40, np.int64), np.ones(40, np.int64)]
    ranks = [attrs.evolve(rank, step=step) for rank, step in zip(ranks, steps, strict=True)]
    assert list(match_teams(ranks)[0].groups[0].matched) == [0]
