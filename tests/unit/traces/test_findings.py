"""Tests of findings: a job on each side of each rule's threshold, simulated faults, and real traces."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from invented_summaries import run as invented_run, trace
from real_traces import named

from gpu_job import GpuJob
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.run_model import Finding
from profdeck_traces.findings.finding import findings_of as run_findings
from profdeck_traces.inputs.host_load import HostLoad
from profdeck_traces.loading import summarise


def read(path: Path) -> RunSummary:
    run, errors = summarise([path])
    assert not errors
    return run


def findings_of(directory: Path, job: GpuJob) -> list[Finding]:
    return list(read(job.write(directory / "job")).findings)


def rules(findings: list[Finding]) -> set[str]:
    return {finding.rule for finding in findings}


# Jobs on both sides of each rule's threshold.
@pytest.mark.parametrize(
    ("rule", "matching", "not_matching"),
    [
        ("host-bound", GpuJob(launch_us=480), GpuJob(launch_us=460)),
        ("exposed-communication", GpuJob(ranks=2, reduce_us=930), GpuJob(ranks=2, reduce_us=850)),
        ("little-overlap", GpuJob(ranks=2, reduce_us=480), GpuJob(ranks=2, reduce_us=380)),
        ("straggler", GpuJob(ranks=2, slow_rank=1, slow_load_us=130), GpuJob(ranks=2, slow_rank=1, slow_load_us=55)),
        ("synchronisation", GpuJob(items=4), GpuJob(items=1, products=25)),
        ("pageable-copies", GpuJob(pageable_us=48), GpuJob(pageable_us=36)),
        ("allocation", GpuJob(allocate_us=190), GpuJob(allocate_us=150)),
        ("small-kernels", GpuJob(small=85), GpuJob(small=75)),
        ("small-kernels", GpuJob(small=110, products=80), GpuJob(small=70, products=80)),
        ("fp32-gemm", GpuJob(name="ampere_sgemm_128x64_nn"), GpuJob(name="ampere_s16816gemm_128x64_nn")),
        ("unsteady-steps", GpuJob(slow_step=2), GpuJob(slow_step=9)),
        ("data-loading", GpuJob(load_us=1300), GpuJob(load_us=400)),
        ("few-steps", GpuJob(steps=2), GpuJob(steps=3)),
        ("unclassified", GpuJob(name="mystery", products=4), GpuJob(products=4)),
        ("pointwise", GpuJob(name="void at::native::vectorized_elementwise_kernel<4>"), GpuJob()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_rule_applies_at_its_threshold(tmp_path: Path, rule: str, matching: GpuJob, not_matching: GpuJob) -> None:
    first, second = findings_of(tmp_path / "matching", matching), findings_of(tmp_path / "not_matching", not_matching)
    texts = [finding.text for finding in first]
    assert rule in rules(first), texts
    assert rule not in rules(second), [finding.text for finding in second]


def test_healthy_job_has_no_gain(tmp_path: Path) -> None:
    for ranks in (1, 4):
        findings = findings_of(tmp_path / str(ranks), GpuJob(ranks=ranks))
        assert [finding for finding in findings if finding.gain_us] == []


FAULTS = {
    "slow loader": ({"slow_rank": 1, "ranks": 4}, "for rank 1, where data_loading takes"),
    "item": ({"items": 10}, "Waiting for the device"),
    "pageable copies": ({"pageable_us": 1500.0}, "use pageable memory"),
    "launch-bound": ({"launch_us": 700.0}, "waits for the host"),
    "allocation": ({"allocate_us": 1500.0}, "Allocating and freeing device memory"),
    "slow step": ({"slow_step": 2}, "Step 2 takes"),
    "communication": ({"ranks": 2, "reduce_us": 5000.0}, "Communication without overlap"),
    "FP32": ({"name": "ampere_sgemm_128x64_nn"}, "run in FP32"),
    "small kernels": ({"small": 1500}, "take less than 10 us"),
    "loading everywhere": ({"load_us": 4000.0}, "Loading data takes"),
}


@pytest.mark.parametrize("products", [12, 20, 33])
def test_first_finding_is_the_simulated_fault(tmp_path: Path, products: int) -> None:
    firsts = {}
    for name, (fault, _) in FAULTS.items():
        findings = findings_of(tmp_path / name, GpuJob(**{"products": products, **fault}))
        firsts[name] = findings[0].text if findings else ""
    named = [name for name, (_, phrase) in FAULTS.items() if phrase in firsts[name]]
    assert len(named) >= 9, {name: text for name, text in firsts.items() if name not in named}


def test_gain_is_at_most_the_cost_of_the_fault(tmp_path: Path) -> None:
    for name, (fault, _) in FAULTS.items():
        for finding in findings_of(tmp_path / name, GpuJob(**fault)):
            assert finding.share is None or 0.005 <= finding.share <= 1, finding


def test_equal_findings_of_ranks_are_combined(tmp_path: Path) -> None:
    (finding,) = [
        entry for entry in findings_of(tmp_path, GpuJob(ranks=3, items=10)) if entry.rule == "synchronisation"
    ]
    assert "all 3 ranks" in finding.text
    assert sorted(finding.ranks) == ["rank 0", "rank 1", "rank 2"]


def test_evidence_is_in_the_trace(tmp_path: Path) -> None:
    run = read(GpuJob(slow_step=2, items=4).write(tmp_path / "job"))
    (rank,) = run.ranks
    for finding in run.findings:
        if finding.evidence is not None:
            assert finding.evidence.path == rank.path
            assert finding.evidence.start_us < rank.span_us
            assert finding.evidence.start_us + finding.evidence.duration_us > 0


def test_id_depends_on_cause_and_place_and_not_on_numbers(tmp_path: Path) -> None:
    def ids(name: str, **fault: Any) -> dict[str, str]:
        return {one.rule: one.id for one in findings_of(tmp_path / name, GpuJob(**fault))}

    first, second = ids("first", load_us=4000.0, items=10), ids("second", load_us=5000.0, items=12)
    assert first == second
    assert len(set(first.values())) == len(first)


def test_time_of_findings_is_at_most_the_step(tmp_path: Path) -> None:
    for name, (fault, _) in FAULTS.items():
        for finding in findings_of(tmp_path / name, GpuJob(**fault)):
            if finding.time_us is not None:
                assert finding.step_us is not None
                assert (finding.gain_us or 0) <= finding.time_us <= finding.step_us


def test_findings_name_a_command_for_their_evidence(tmp_path: Path) -> None:
    directory = GpuJob(load_us=4000.0).write(tmp_path / "job")
    first, *_ = read(directory).findings
    assert first.check is not None
    assert re.fullmatch(r"profdeck view \S+\.gz --steps \d+", first.check)


def test_causes_without_findings_are_clear_or_not_judged(tmp_path: Path) -> None:
    run = read(GpuJob(load_us=4000.0).write(tmp_path / "job"))
    states = {cause.cause: cause for cause in run.causes}
    assert states["data-loading"].findings == tuple(one.id for one in run.findings if one.rule == "data-loading")
    assert states["data-loading"].state == "found"
    assert (states["straggler"].state, states["straggler"].reason) == ("not_judged", "only one rank was recorded")
    assert states["pageable-copies"].state == "clear"
    assert {cause.state for cause in run.causes} == {"found", "clear", "not_judged"}


def _host_job(path: Path, stages: dict[str, float], steps: int = 4) -> Path:
    events: list[dict[str, Any]] = []
    now = 0.0
    for step in range(steps):
        begin = now
        for name, duration in stages.items():
            events.append(_mark(name, now, duration))
            events.append(_mark("aten::mm", now, 100, "cpu_op"))
            now += duration
        events.append(_mark(f"ProfilerStep#{step}", begin, now - begin))
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return path


def _mark(name: str, start: float, duration: float, category: str = "user_annotation") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration}


def test_idle_stage_is_reported_without_a_device(tmp_path: Path) -> None:
    first, *_ = read(_host_job(tmp_path / "rank0.json", {"rollout": 300_000, "update": 92_000})).findings
    assert first.rule == "idle-stage"
    assert first.text == "rollout takes 77% of each step (300 ms), over 90% of it outside operators."


def _step_job(path: Path, steps: list[list[tuple[str, float, list[tuple[str, str, float]]]]]) -> Path:
    """Write steps that consist of stages. Each stage has a name, a duration, and events that start with it."""
    events: list[dict[str, Any]] = []
    now = 0.0
    for number, stages in enumerate(steps):
        begin = now
        for name, duration, inner in stages:
            events.append(_mark(name, now, duration))
            events += [_mark(event, now + 1, time, category) for category, event, time in inner]
            now += duration
        events.append(_mark(f"ProfilerStep#{number}", begin, now - begin))
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return path


_LOADERS = {
    "loader annotation": ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
    "loader frame": ("python_function", "torch/utils/data/dataloader.py(733): __next__"),
    "file read": ("python_function", "<built-in method read of _io.BufferedReader object at 0x7f7d>"),
}


@pytest.mark.parametrize("loader", _LOADERS.values(), ids=_LOADERS.keys())
def test_stage_that_fetches_data_loads_data(tmp_path: Path, loader: tuple[str, str]) -> None:
    category, name = loader
    inner = [("python_function", "train.py(3): prepare", 28_000.0), (category, name, 27_000.0)]
    step = [("prepare", 30_000.0, inner), ("update", 70_000.0, [("cpu_op", "aten::mm", 69_000.0)])]
    first, *others = read(_step_job(tmp_path / "job.json", [step] * 4)).findings
    assert first.rule == "data-loading"
    assert first.gain_us == pytest.approx(27_500, abs=500)
    assert first.text.startswith("Loading data takes 2")
    assert others == []


def test_data_that_a_larger_stage_fetches_is_counted_alone(tmp_path: Path) -> None:
    inner = [("user_annotation", _LOADERS["loader annotation"][1], 20_000.0), ("cpu_op", "aten::mm", 99_000.0)]
    (first,) = read(_step_job(tmp_path / "job.json", [[("train_step", 100_000.0, inner)]] * 4)).findings
    assert (first.rule, first.gain_us) == ("data-loading", 20_000)


@pytest.mark.parametrize(
    ("name", "is_loader"),
    [
        *(
            (name, True)
            for name in ("data", "get_batch", "fetch", "dataloader", "load_data", "train.data", "NextBatch")
        ),
        *((name, False) for name in ("update_data_stats", "data_parallel", "fetch_weights", "metadata", "rollout")),
    ],
)
def test_usual_names_of_loaders(tmp_path: Path, name: str, is_loader: bool) -> None:
    step = [(name, 30_000.0, []), ("update", 70_000.0, [("cpu_op", "aten::mm", 69_000.0)])]
    (first,) = read(_step_job(tmp_path / "job.json", [step] * 4)).findings
    assert first.rule == ("data-loading" if is_loader else "idle-stage")
    assert name in first.text


def test_long_step_is_explained_by_its_stage(tmp_path: Path) -> None:
    def step(data_us: float) -> list[tuple[str, float, list[tuple[str, str, float]]]]:
        return [("data", data_us, []), ("update", 17_000.0, [("cpu_op", "aten::mm", 16_900.0)])]

    steps = [step(608_000.0 if number == 12 else 3_000.0) for number in range(15)]
    first, *others = read(_step_job(tmp_path / "a.json", steps)).findings
    assert first.text == "Loading data takes 608 ms in step 12 instead of 3.00 ms in data."
    assert (first.rule, first.where.stage, others) == ("data-loading", "data", [])
    assert first.do == "load the next batch in the background, such as with num_workers of DataLoader"
    assert first.gain_us == pytest.approx((608_000 + 14 * 3_000) / 15)

    for number in (4, 8):
        steps[number] = step(300_000.0)
    first, *_ = read(_step_job(tmp_path / "b.json", steps)).findings
    assert first.text == "Loading data takes 403 ms in 3 of 15 steps instead of 3.00 ms in data."


def test_long_step_without_stages_is_explained_by_its_function(tmp_path: Path) -> None:
    def step(operator_us: float, other_us: float) -> list[tuple[str, float, list[tuple[str, str, float]]]]:
        inner = [("cpu_op", "aten::mm", operator_us), ("python_function", "train.py(3): f", operator_us + other_us)]
        return [("update", operator_us + other_us + 2, inner)]

    steps = [step(20_000, 600_000 if number == 12 else 1_000) for number in range(15)]
    path = _step_job(tmp_path / "a.json", steps)
    events = json.loads(path.read_text())["traceEvents"]
    path.write_text(json.dumps({"traceEvents": [event for event in events if event["name"] != "update"]}))
    first, *others = read(path).findings
    assert first.text == "Python code without operators takes 600 ms in step 12 instead of 1.00 ms in f (train.py:3)."
    assert (first.rule, others) == ("python-code", [])
    assert first.check == f"profdeck view {path} --steps 12"


def test_advice_is_one_cure(tmp_path: Path) -> None:
    """Advice that lists suspects, such as "loading, logging, waiting", leaves the diagnosis to the reader."""
    jobs = [GpuJob(**fault) for fault, _ in FAULTS.values()]
    cures = {one.do for number, job in enumerate(jobs) for one in findings_of(tmp_path / str(number), job)}
    assert len(cures) > 5
    assert [cure for cure in cures if cure.count(",") > 2 or ": loader" in cure] == []


def test_role_without_recordings_is_the_first_finding(tmp_path: Path) -> None:
    directory = GpuJob(items=10).write(tmp_path / "job")
    (directory / "run.json").write_text(json.dumps({"roles": ["trainer", "rollout"]}))
    run = read(directory)
    assert run.silent_roles == ("trainer", "rollout")
    assert run.findings[0].text == "The role trainer recorded nothing."


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpu/nccl.json.gz", ["host-bound", "little-overlap"]),
        ("gpu/ns_resolution_rank0.pt.trace.json.gz", ["fp32-gemm"]),
        ("gpu/pair_rank0.json.gz", ["host-bound", "exposed-communication", "few-steps"]),
        ("gpu/amd_mi250.json.gz", ["host-bound", "few-steps"]),
        ("gpu/no_distributed_info.json.gz", ["idle-stage", "few-steps"]),
        ("npu/trace_view.json", ["host-bound", "data-loading", "pointwise", "few-steps"]),
        ("npu/kernel_details.csv", ["exposed-communication", "few-steps"]),
    ],
)
def test_findings_of_real_traces(name: str, expected: list[str]) -> None:
    assert [finding.rule for finding in read(named(name)).findings] == expected


def test_findings_are_independent_of_the_order_of_ranks(tmp_path: Path) -> None:
    directory = GpuJob(ranks=3, slow_rank=2).write(tmp_path / "job")
    paths = sorted(directory.glob("*.gz"))
    texts_by_order = {
        tuple(finding.text for finding in summarise(list(order))[0].findings) for order in itertools.permutations(paths)
    }
    assert len(texts_by_order) == 1
    assert attrs.asdict(read(directory).findings[0])["rule"] == "straggler"


def write_late_ranks(directory: Path, last_ranks: Sequence[int]) -> None:
    """Write traces of two ranks without devices. At each collective, which takes 10 ms, one rank arrives 5 ms late."""
    for rank in range(2):
        events: list[dict[str, Any]] = []
        for call, last in enumerate(last_ranks):
            late_us = 5000 if last == rank else 0
            name = {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 1, "tid": 2}
            events.append(name | {"ts": 10_000 * call + late_us, "dur": 6000 - late_us})
            step = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{call}", "pid": 1, "tid": 1}
            events.append(step | {"ts": 10_000 * call, "dur": 10_000})
        about = {"rank": rank, "world_size": 2, "pg_count": 1}
        path = directory / f"rank{rank}.trace.json"
        path.write_text(json.dumps({"distributedInfo": about, "traceEvents": events}))


def test_alternately_late_ranks_have_no_straggler(tmp_path: Path) -> None:
    write_late_ranks(tmp_path, [0, 1] * 20)
    (imbalance,) = [finding for finding in read(tmp_path).findings if finding.rule == "imbalance"]
    assert imbalance.text == (
        "Ranks wait for each other 2.50 ms per step, no rank more than the others; the last rank arrives 5.00 ms per "
        "step after the first."
    )


def test_few_collectives_do_not_name_a_rank(tmp_path: Path) -> None:
    """Rank 1 arrives last at all three collectives, so "no rank is slower than the others" would be false."""
    write_late_ranks(tmp_path, [1] * 3)
    (imbalance,) = [finding for finding in read(tmp_path).findings if finding.rule == "imbalance"]
    assert ", with too few collectives (3) to name a rank;" in imbalance.text


def test_busy_machine_is_a_finding() -> None:
    idle = trace({"gemm": [100] * 5}, span_us=500.0, host_load=HostLoad(wall_s=10, cpu_s=9, cpus=8, run_queue_s=0.1))
    busy = attrs.evolve(idle, rank=1, path="b.json", host_load=HostLoad(wall_s=10, cpu_s=9, cpus=8, run_queue_s=4))
    assert "busy-machine" not in rules([*run_findings(invented_run(idle))])
    (finding,) = (one for one in run_findings(invented_run(idle, busy)) if one.rule == "busy-machine")
    assert finding.text == "The machine was busy: the main thread waited 40% of the time for a CPU (trainer rank 1)."
    assert finding.ranks == ("trainer rank 1",)
