"""Tests of collectives described in the args of kernels, from files to skew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profdeck_traces.analysis.classes import Classifier
from profdeck_traces.analysis.clocks import match_teams
from profdeck_traces.analysis.collective_skew import skew_of_team
from profdeck_traces.analysis.collectives import Collectives
from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.analysis.summary import read_summary
from profdeck_traces.inputs.sources import TraceSource

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
PAIR = {"Process Group Name": "3", "Process Group Ranks": "[0, 1]"}

LAYOUTS: list[dict[str, Any]] = [{}, {"separators": (",", ":")}, {"indent": 4}, {"sort_keys": True}]


def kernel(name: str, start_us: Any, *, stream: Any = 7, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start_us, "dur": 5, "args": args
    }  # fmt: skip


def stated(collective: str, group: dict[str, Any] = PAIR) -> dict[str, Any]:
    return {"device": 0, "grid": [24, 1, 1], "Collective name": collective, "dtype": "Float", **group}


def read(tmp_path: Path, events: list[dict[str, Any]], *, rank: int = 0, **layout: Any) -> Collectives:
    path = tmp_path / f"rank{rank}.json"
    document = {"distributedInfo": {"rank": rank, "world_size": 4}, "traceEvents": events}
    path.write_text(json.dumps(document, **layout))
    return read_file(path)


def read_file(path: Path) -> Collectives:
    return read_summary(TraceSource(path), classifier=Classifier(), step_names=StepNames([])).collectives


def calls(collectives: Collectives) -> list[tuple[int, str, str]]:
    """Return start, name and group of each."""
    names, groups = collectives.names, collectives.groups
    return [
        (start_ns, names[name], groups[group])
        for start_ns, name, group in zip(
            collectives.start_ns.tolist(), collectives.name.tolist(), collectives.group.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_are_grouped_by_their_process_group_and_else_by_stream(tmp_path: Path, layout: dict[str, Any]) -> None:
    events = [
        kernel(ALL_REDUCE, 10, **stated("allreduce")),
        kernel("gemm", 12, stream=8),
        kernel(ALL_REDUCE, 20.125, **stated("allreduce", {"Process Group Ranks": "[0, 1, ..., 63]"})),
        kernel(ALL_REDUCE, 30, device=0),
        kernel(ALL_REDUCE, 40, stream=9),
        kernel(ALL_REDUCE, 50, **stated("allreduce", {})),
    ]

    assert calls(read(tmp_path, events, **layout)) == [
        (10_000, ALL_REDUCE, "3 [0, 1]"),
        (20_125, ALL_REDUCE, "[0, 1, ..., 63]"),
        (30_000, ALL_REDUCE, "7"),
        (40_000, ALL_REDUCE, "9"),
        (50_000, ALL_REDUCE, "7"),
    ]


def test_collectives_that_are_carried_out_by_messages_have_their_name(tmp_path: Path) -> None:
    events = [
        kernel(SEND_RECV, 10, **stated("alltoall_base")),
        kernel(SEND_RECV, 20, **stated("send")),
        kernel(SEND_RECV, 30),
    ]

    assert [name for _, name, _ in calls(read(tmp_path, events))] == ["alltoall_base", "send", SEND_RECV]


@pytest.mark.parametrize(
    ("start_us", "start_ns"),
    [('"4458676980491.800"', 4458676980491800), ("1712195495519123.456", 1712195495519123456)],
)
def test_kernels_are_found_again_however_their_times_are_written(tmp_path: Path, start_us: str, start_ns: int) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps([kernel(ALL_REDUCE, "START", **stated("allreduce"))]).replace('"START"', start_us))

    assert calls(read_file(path)) == [(start_ns, ALL_REDUCE, "3 [0, 1]")]


def test_only_kernels_count(tmp_path: Path) -> None:
    operator = kernel("record_param_comms", 10, **stated("allreduce")) | {"cat": "cpu_op"}
    events = [
        operator,
        kernel(ALL_REDUCE, 10),
        kernel(ALL_REDUCE, 20, **stated("allreduce"), note="}{"),
        kernel(ALL_REDUCE, 30, **stated("allreduce")) | {"tid": None},
        kernel(ALL_REDUCE, 40, **stated("allreduce")),
        {"Collective name": 5},
    ]

    assert [group for *_, group in calls(read(tmp_path, events))] == ["7", *["3 [0, 1]"] * 3]


def test_ranks_wait_only_for_their_group(tmp_path: Path) -> None:
    """In the group of rank 0, rank 1 is 2 us late. The other group is 100 us earlier and does not wait."""
    begins_us = [50 * call**2 for call in range(12)]
    late_us = [100, 102, 0, 0]
    groups = [PAIR, PAIR, *[{"Process Group Name": "4", "Process Group Ranks": "[2, 3]"}] * 2]
    ranks = [
        read(
            tmp_path,
            [
                kernel(SEND_RECV, begin + late, **stated("alltoall_base", group)) | {"dur": 20 - late % 100}
                for begin in begins_us
            ],
            rank=rank,
        )
        for rank, (late, group) in enumerate(zip(late_us, groups, strict=True))
    ]

    (skew,) = map(skew_of_team, match_teams(ranks))

    assert [(rank.rank, rank.collectives, rank.last, rank.late_us) for rank in skew.ranks] == [
        (0, 12, 0, 0.0),
        (1, 12, 12, 24.0),
        (2, 12, 0, 0.0),
        (3, 12, 0, 0.0),
    ]
    assert [(collective.name, collective.count, collective.skew_us) for collective in skew.collectives] == [
        ("alltoall_base", 24, 24.0)
    ]
