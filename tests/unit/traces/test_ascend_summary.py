"""Tests of summaries of torch_npu directories. Fixtures are synthetic ranks with given times."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from ascend_job import BYTES, GROUP, TRANSFER_US, Job, call

from profdeck_traces.analysis.diff import diff_runs, load_summary
from profdeck_traces.analysis.model import RankSummary, RunSummary
from profdeck_traces.analysis.run_summary import summarise_run
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.inputs.sources import TraceSource

SLOW_RANK, SLOWER_US = 5, 300.0


def compute_us(rank: int, step: int) -> float:
    return 700.0 + (rank * 7 + step * 13) % 40 + (SLOWER_US if rank == SLOW_RANK else 0)


JOB = Job(compute_us, clock_us=lambda rank: 137.25 if rank >= 4 else 0.0)


def output(directory: Path, name: str) -> Path:
    return directory / "ASCEND_PROFILER_OUTPUT" / name


def summarised(job: Job, folder: Path) -> RunSummary:
    return summarise_run([TraceSource(directory) for directory in job.write(folder)])[0]


def rank_0(tmp_path: Path) -> tuple[Path, RankSummary]:
    directory = JOB.write_rank(tmp_path, 0)
    return directory, summarise_trace(directory)


def test_straggler_is_found(tmp_path: Path) -> None:
    run, errors = summarise_run([TraceSource(directory) for directory in JOB.write(tmp_path)])

    assert errors == []
    assert [rank.rank for rank in run.ranks] == list(range(8))
    (group,) = run.skew
    assert (group.straggler, group.note) == (SLOW_RANK, None)
    ranks = {rank.rank: rank for rank in group.ranks}
    assert [ranks[rank].clock_offset_us for rank in range(8)] == [0] * 4 + [-137.25] * 4
    assert [(ranks[rank].collectives, ranks[rank].last) for rank in (0, SLOW_RANK)] == [(6, 0), (6, 6)]
    for rank in range(8):
        waited_us = sum(compute_us(SLOW_RANK, step) - compute_us(rank, step) for step in JOB.steps)
        assert ranks[rank].wait_us == pytest.approx(waited_us, abs=0.01)
    (collective,) = group.collectives
    assert (collective.name, collective.count) == ("allReduce", 6)
    assert collective.transfer_us == pytest.approx(6 * TRANSFER_US, abs=0.01)


def test_tables_of_the_analysis_are_included(tmp_path: Path) -> None:
    _, summary = rank_0(tmp_path)

    assert (summary.whole, summary.problem, summary.rank) == (True, None, 0)
    assert [step.step for step in summary.device_steps] == list(JOB.steps)
    for step in summary.device_steps:
        compute, slowest = compute_us(0, step.step or 0), compute_us(SLOW_RANK, step.step or 0)
        assert (step.device, step.compute_us, step.idle_us, step.preparation_us) == (0, compute, 0, 50)
        assert step.exposed_communication_us == slowest - compute + TRANSFER_US
    (operation,) = summary.communication
    waited_us = sum(compute_us(SLOW_RANK, step) - compute_us(0, step) for step in JOB.steps)
    assert (operation.name, operation.kind, operation.group, operation.count) == ("allReduce", "collective", GROUP, 6)
    assert (operation.transit_us, operation.wait_us) == (6 * TRANSFER_US, waited_us)
    assert [(link.link, link.size_bytes) for link in operation.links] == [("HCCS", 6 * BYTES)]


def test_kernel_types_and_core_shares(tmp_path: Path) -> None:
    _, summary = rank_0(tmp_path)

    assert [(kernel.name, kernel.type, kernel.category) for kernel in summary.kernels] == [
        ("MatMulV2", "MatMulV2", "gemm"),
        ("hcom_allReduce_", "hcom_allReduce_", "communication"),
    ]
    assert [(core.core, core.count, core.total_us) for core in summary.cores] == [
        ("AI_CORE", 6, summary.kernels[0].total_us),
        ("HCCL", 6, summary.kernels[1].total_us),
    ]
    assert sum(core.share for core in summary.cores) == pytest.approx(1)


def test_kernel_type_determines_the_category(tmp_path: Path) -> None:
    directory = JOB.write_rank(tmp_path, 0)
    table = output(directory, "kernel_details.csv")
    table.write_text(table.read_text().replace("MatMulV2_0,MatMulV2", "Default/network/attention/Dense-op7,MatMulV2"))

    classes = {kernel.name: kernel.category for kernel in summarise_trace(directory).kernels}

    assert classes["Default/network/attention/Dense-op7"] == "gemm"


@pytest.mark.parametrize("name", ["communication.json", "step_trace_time.csv"])
@pytest.mark.parametrize("size", [0, 1, -3], ids=["empty", "one byte", "cut"])
def test_corrupt_table_does_not_affect_other_results(tmp_path: Path, name: str, size: int) -> None:
    directory, sound = rank_0(tmp_path)
    table = output(directory, name)
    table.write_bytes(table.read_bytes()[:size])

    damaged = summarise_trace(directory)

    assert not damaged.whole
    assert damaged.problem is not None
    assert damaged.problem.startswith(f"{name}: ")
    field = {"communication.json": "communication", "step_trace_time.csv": "device_steps"}[name]
    assert attrs.evolve(damaged, **{field: getattr(sound, field)}, whole=True, problem=None) == sound


def test_missing_tables_are_accepted(tmp_path: Path) -> None:
    directory, _ = rank_0(tmp_path)
    for name in ("communication.json", "step_trace_time.csv"):
        output(directory, name).unlink()

    summary = summarise_trace(directory)

    assert (summary.whole, summary.device_steps, summary.communication) == (True, (), ())


def test_process_groups_with_equal_last_digits_are_separate(tmp_path: Path) -> None:
    # Each half of the eight ranks is a group. Kernel names contain 445 for both groups. The second half is fast.
    halves = [Job(lambda rank, _: 700.0 + 100 * (rank == 2), ranks=4), Job(lambda _rank, _step: 300.0, ranks=4)]
    sources = []
    for half, job in enumerate(halves):
        for rank, directory in enumerate(job.write(tmp_path / str(half))):
            table = output(directory, "communication.json")
            table.write_text(table.read_text().replace(GROUP, f"{half + 1}{GROUP}"))
            info = directory / f"profiler_info_{rank}.json"
            info.rename(info.with_name(f"profiler_info_{half * 4 + rank}.json"))
            sources.append(TraceSource(directory))

    (group,) = summarise_run(sources)[0].skew

    assert (group.straggler, group.note) == (2, "Nothing ties their clocks to that of rank 0: rank 4.")
    assert [round(rank.wait_us) for rank in group.ranks] == [600, 600, 0, 600, 0, 0, 0, 0]


def test_group_without_an_id_is_assigned_to_the_only_match(tmp_path: Path) -> None:
    directories = JOB.write(tmp_path)
    output(directories[0], "communication.json").unlink()

    (group,) = summarise_run([TraceSource(directory) for directory in directories])[0].skew

    assert (group.straggler, group.note) == (SLOW_RANK, None)


def test_npu_runs_can_be_compared_by_their_json(tmp_path: Path) -> None:
    (tmp_path / "before.json").write_text(json.dumps(summarised(JOB, tmp_path / "before").to_dict()))
    slower = summarised(Job(lambda rank, step: compute_us(rank, step) + 70), tmp_path / "after")

    (role,) = diff_runs(load_summary(tmp_path / "before.json"), slower).roles

    assert [(change.name, change.verdict) for change in role.kernels] == [
        ("MatMulV2", "slower"),
        ("hcom_allReduce_", "same"),
    ]
    assert role.kernels[0].delta_us == pytest.approx(70)


def test_call_without_a_group_keeps_its_stream(tmp_path: Path) -> None:
    directory, sound = rank_0(tmp_path)
    stream_call = call(elapse_us=1, transit_us=1, wait_us=0, links={})
    output(directory, "communication.json").write_text(
        json.dumps({"step": {"collective": {"allreduce_1": stream_call}}})
    )

    summary = summarise_trace(directory)

    assert [(operation.name, operation.group) for operation in summary.communication] == [("allreduce", None)]
    assert summary.kernels == sound.kernels
