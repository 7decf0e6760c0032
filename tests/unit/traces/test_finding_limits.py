"""Tests of rules for engines, hosts without a device, and NPUs, on both sides of each limit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_account_rules
import test_findings
from ascend_job import KERNEL_COLUMNS, Job, row

from gpu_job import GpuJob
from profdeck_traces import findings
from profdeck_traces.loading import summarise

Write = Callable[[Path], Path]
DECODE = "execute_context_0(0)_generation_4(4)"


def event(category: str, name: str, start: float, duration: float, **fields: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration, **fields}


def save(path: Path, events: Sequence[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return path


def engine(device_us: float = 100, durations: Sequence[float] = (100,) * 6, *, graphs: bool = False) -> Write:
    """Decode iterations with one kernel each. Kernel times are percentages of the first kernel's time."""

    def write(path: Path) -> Path:
        device, events, now = {"pid": 0, "tid": 7}, [], 0.0
        call = "cudaGraphLaunch" if graphs else "cudaLaunchKernel"
        for duration in durations:
            events += [
                event("user_annotation", DECODE, now, duration),
                event("cuda_runtime", call, now + 1, 2),
                event("gpu_user_annotation", DECODE, now + 5, device_us, **device),
                event("kernel", "gemm_bf16", now + 5, device_us, **device),
            ]
            now += max(duration, device_us) + 10
        return save(path, events)

    return write


def host(durations: Sequence[float], *, operator_us: float = 10_000, stage: str = "update") -> Write:
    """Steps with one stage and one operator on a host without a device."""

    def write(path: Path) -> Path:
        events, now = [], 0.0
        for step, duration in enumerate(durations):
            events += [
                event("user_annotation", f"ProfilerStep#{step}", now, duration),
                event("user_annotation", stage, now, duration),
                event("cpu_op", "aten::mm", now, min(operator_us, duration)),
            ]
            now += duration
        return save(path, events)

    return write


def gpus(**job: Any) -> Write:
    return lambda path: GpuJob(ranks=2, steps=12, **job).write(path)


def cores(ai_cpu_us: float) -> Write:
    """A kernel on AI_CPU, and a kernel of 100 us on other cores."""

    def write(path: Path) -> Path:
        directory = path.with_name("kernels")
        directory.mkdir()
        begin_us = 1_713_174_287_000_000.0
        rows = [
            KERNEL_COLUMNS,
            row(1, 1, "MatMulV2_1", "MatMulV2", "AI_CORE", begin_us, 100, stream="16"),
            row(1, 2, "Unique_2", "Unique", "AI_CPU", begin_us + 100, ai_cpu_us, stream="16"),
        ]
        table = directory / "kernel_details.csv"
        table.write_text("".join(f"{line}\r\n" for line in rows), encoding="utf-8")
        return table

    return write


def link(name: str, gb_per_s: float, large: float = 1.0) -> Write:
    """An NPU job whose collectives use one link with this rate and share of large packets."""

    def write(path: Path) -> Path:
        (directory,) = Job(lambda _rank, _step: 500.0, ranks=1).write(path)
        file = directory / "ASCEND_PROFILER_OUTPUT" / "communication.json"
        document = json.loads(file.read_text())
        for step in document.values():
            for call in step["collective"].values():
                call["Communication Bandwidth Info"] = {
                    name: {
                        "Transit Size(MB)": gb_per_s * 100,
                        "Transit Time(ms)": 100,
                        "Bandwidth(GB/s)": gb_per_s,
                        "Large Packet Ratio": large,
                        "Size Distribution": {"1.0": [1000, 100]},
                    }
                }
        file.write_text(json.dumps(document))
        return directory

    return write


def communication(count: int, kind: str = "AllReduce", reduce_us: float = 4.0, nelems: int = 240_000) -> Write:
    """Return a writer of traces with steps of 1,000 us, in which the host waits for collectives on the device."""

    def write(path: Path) -> Path:
        events = []
        for step in range(4):
            begin, device = 10_000 + 1_000 * step, {"pid": 0, "tid": 7}
            events += [
                event("user_annotation", f"ProfilerStep#{step}", begin, 1_000),
                event("cuda_runtime", "cudaDeviceSynchronize", begin + 100, 10 + count * reduce_us),
            ]
            for call in range(count):
                about = {
                    "Collective name": kind.lower(),
                    "Process Group Name": "0",
                    "In msg nelems": nelems,
                    "dtype": "Float",
                    "Group size": 2,
                    "correlation": 100 * step + call,
                }
                name, start = f"ncclDevKernel_{kind}_Sum_f32_RING_LL()", begin + 105 + call * reduce_us
                launch = event("cuda_runtime", "cudaLaunchKernel", begin + call, 1, args=about)
                events += [launch, event("kernel", name, start, reduce_us, args=about, **device)]
        return save(path, events)

    return write


def groups(ratio: float, ranks: Sequence[int] = (0, 1)) -> Write:
    """Return a writer of traces of two ranks with all-reduces in three process groups. The last takes `ratio` times as
    long.
    """

    def write(path: Path) -> Path:
        events = [event("user_annotation", "ProfilerStep#0", 0, 1_000)]
        events.append(event("cuda_runtime", "cudaDeviceSynchronize", 50, 500))
        start = 100.0
        for group, duration in enumerate((100, 100, 100 * ratio)):
            about = {"Collective name": "allreduce", "Process Group Name": str(group), "In msg nelems": 1_000_000}
            about |= {"dtype": "Float", "Group size": 2, "correlation": group + 1}
            events.append(event("cuda_runtime", "cudaLaunchKernel", group, 1, args=about))
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"
            events.append(event("kernel", name, start, duration, args=about, pid=0, tid=7))
            start += duration
        for rank in ranks:
            document = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}
            (path.parent / f"rank{rank}.json").write_text(json.dumps(document))
        return path.parent

    return write


def stages(slow_us: float) -> Write:
    """Return a writer of traces of two ranks without collectives. A stage takes `slow_us` on the slower rank."""

    def write(path: Path) -> Path:
        for rank, duration in enumerate((100, slow_us)):
            events = []
            for step in range(4):
                begin = 10_000 * step
                events += [
                    event("user_annotation", f"ProfilerStep#{step}", begin, 10_000),
                    event("user_annotation", "rollout", begin, duration),
                    event("cpu_op", "aten::mm", begin, 10_000),
                ]
            document = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}
            (path.parent / f"rank{rank}.json").write_text(json.dumps(document))
        return path.parent

    return write


def precise(double_us: float, dims: Sequence[Any] = ((8, 8), (8, 8)), name: str = "k") -> Write:
    """Return a writer of traces with 100 us of kernels, ``double_us`` of them from a float64 operator."""

    def write(path: Path) -> Path:
        events = []
        for number, (dtype, duration) in enumerate((("float", 100 - double_us), ("double", double_us)), 1):
            args = {"Input Dims": dims, "Input type": [dtype] * 2}
            device = {"pid": 0, "tid": 7, "args": {"correlation": number}}
            events += [
                event("cpu_op", "aten::mm", number * 10, 5, args=args if name == "k" else {}),
                event("cuda_runtime", "cudaLaunchKernel", number * 10 + 1, 2, args={"correlation": number}),
                event("kernel", name if dtype == "double" else "k", number * 100, duration, **device),
            ]
        return save(path, events)

    return write


LIMITS: list[tuple[str, Write, Write]] = [
    ("decode-launch-bound", engine(69), engine(71)),
    ("decode-launch-bound", engine(50), engine(50, graphs=True)),
    ("unsteady-decode", engine(50, [100] * 120 + [230] * 3), engine(50, [100] * 120 + [190] * 3)),
    ("unsteady-decode", engine(50, [100] * 98 + [230] * 3), engine(50, [100] * 95 + [230] * 3)),
    ("outside-operators", host([10_000] * 4, operator_us=6_900), host([10_000] * 4, operator_us=7_100)),
    ("idle-stage", host([10_000] * 4, operator_us=900), host([10_000] * 4, operator_us=1_100)),
    ("garbage-collection", host([1_010] * 4, operator_us=10, stage="gc.collect"), host([1_010] * 4)),
    ("unsteady-steps", host([10_000, 10_000, 10_000, 12_600]), host([10_000, 10_000, 10_000, 12_400])),
    ("unsteady-steps", host([10_000] * 11 + [20_100]), host([10_000] * 11 + [15_000])),
    ("unsteady-steps", host([1_000] * 3 + [2_100], operator_us=900), host([1_000] * 3 + [1_900], operator_us=900)),
    ("imbalance", gpus(uneven_us=2_300), gpus(uneven_us=2_000)),
    ("small-collectives", communication(20), communication(19)),
    ("small-collectives", communication(20), communication(20, nelems=250_000)),
    ("small-collectives", communication(20), communication(20, reduce_us=1.0)),
    ("pipeline-bubble", communication(4, "SendRecv", 30.0), communication(4, "SendRecv", 10.0)),
    ("slow-link", groups(1.6), groups(1.4)),
    ("slow-link", groups(1.6), groups(1.6, ranks=[0])),
    ("slow-stage", stages(1_200), stages(1_000)),
    ("float64", precise(5.5), precise(0.9)),
    ("float64", precise(50), precise(50, dims=((), ()))),
    ("float64", precise(50, name="ampere_dgemm_128x64_nn"), precise(50, name="ampere_sgemm_128x64_nn")),
    ("ai-cpu", cores(5.5), cores(5.0)),
    ("slow-link", link("SDMA", 14.3), link("SDMA", 14.5)),
    ("slow-link", link("RDMA", 5.0, large=0.79), link("RDMA", 5.0, large=0.81)),
]


def finding_texts(path: Path) -> dict[str, str]:
    run, errors = summarise([path])
    assert not errors
    return {finding.rule: finding.text for finding in run.findings}


@pytest.mark.parametrize(
    ("rule", "matching", "not_matching"), LIMITS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_rule_applies_at_its_limit(tmp_path: Path, rule: str, matching: Write, not_matching: Write) -> None:
    for name, write in (("matching", matching), ("not_matching", not_matching)):
        (tmp_path / name).mkdir()
        findings = finding_texts(write(tmp_path / name / "trace.json"))
        assert (rule in findings) is (name == "matching"), findings


def test_each_rule_has_a_test() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(*findings.__path__).glob("*_rules.py"))
    rules = set(re.findall(r'(?:rule=|,\n\s+)"([a-z0-9-]+)",\n', sources)) | {"few-steps"}
    (pairs,) = [
        pytest_mark
        for pytest_mark in test_findings.test_each_rule_applies_at_its_threshold.pytestmark
        if pytest_mark.args
    ]
    covered_rules = {rule for rule, *_ in [*LIMITS, *pairs.args[1]]}
    covered_rules |= {"busy-machine"}  # see test_findings
    covered_rules |= {*test_account_rules.PLANTED, "uneven-batches", "lock", "duplicated-work", "gil-contention"}
    covered_rules |= {"unpickling", "small-batches", "partial-recording"}  # see test_account_rules
    covered_rules |= {"cold-step"}  # see test_cold_steps
    covered_rules |= {"exposed-copies", "initialisation"}  # see test_device_findings
    covered_rules |= {"device-not-recorded", "implausible-times"}  # see test_reported_traces
    assert len(rules) > 20
    assert rules - covered_rules == set()
