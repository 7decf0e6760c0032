"""Tests for the causes that findings report for slow ranks, with generated GPU and CPU traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.run_model import CauseState, Finding
from profdeck_traces.findings.finding import with_findings
from profdeck_traces.findings.rank_view import views_of
from profdeck_traces.inputs.host_load import HostLoad
from profdeck_traces.loading import summarise

STEP_US, PRODUCTS = 20_000.0, 10


def event(category: str, name: str, tid: int, begin: float, duration: float, **args: Any) -> dict[str, Any]:
    times = {"ts": begin, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, "pid": 0 if tid == 7 else 1, "tid": tid, **times, "args": args}


def write(
    directory: Path, product_us: dict[int, float], rows: dict[int, int] | None = None, *, on_device: bool = True
) -> Path:
    """Write one trace per rank, with ten matrix products and an all-reduce in each step.

    Args:
        directory: Directory of the traces.
        product_us: Duration of a matrix product on each rank.
        rows: Number of rows of the first matrix on each rank. Default: 512.
        on_device: If False, the products and the all-reduce run on the host.
    """
    arrival = max(product_us.values()) * PRODUCTS + 500
    for rank, duration in product_us.items():
        events = []
        for step in range(6):
            begin = 10_000 + STEP_US * step
            events.append(event("user_annotation", f"ProfilerStep#{step}", 1, begin, STEP_US))
            now = begin + 200
            for product in range(PRODUCTS):
                number = 100 * step + product + 1
                about = {"Input Dims": [[(rows or {}).get(rank, 512), 512], [512, 512]], "Input type": ["float"] * 2}
                if on_device:
                    call = begin + 20 * product
                    events.append(event("cpu_op", "aten::mm", 1, call, 15, **about))
                    events.append(event("cuda_runtime", "cudaLaunchKernel", 1, call + 2, 5, correlation=number))
                    events.append(event("kernel", "gemm_kernel", 7, now, duration, correlation=number, stream=7))
                else:
                    events.append(event("cpu_op", f"aten::mm_{product}", 1, now, duration))
                    events.append(event("cpu_op", "aten::mm", 1, now, 1, **about))
                now += duration
            end = begin + arrival
            if on_device:
                number = 100 * step + 50
                about = {"Collective name": "allreduce", "Process Group Name": "0", "correlation": number, "stream": 7}
                events.append(event("cuda_runtime", "cudaLaunchKernel", 1, begin + 201, 5, correlation=number))
                events.append(event("kernel", "ncclDevKernel_AllReduce_Sum_f32()", 7, now, end - now, **about))
                events.append(event("cuda_runtime", "cudaDeviceSynchronize", 1, begin + 210, end - begin - 210))
            else:
                events.append(event("user_annotation", "gloo:all_reduce", 2, now, end - now))
            events.append(event("cpu_op", "aten::add", 1, end, begin + STEP_US - end))
        about = {"rank": rank, "world_size": len(product_us), "pg_count": 1}
        document = {"distributedInfo": about, "baseTimeNanoseconds": 10**18, "traceEvents": events}
        (directory / f"rank{rank}.trace.json").write_text(json.dumps(document))
    return directory


def write_overlapping(
    directory: Path,
    extra_us: Callable[[int, int], float],
    *,
    name: str = "allreduce",
    elements: int = 64,
    transfer_us: float = 50,
) -> Path:
    """Write traces of two ranks with two products per step, each followed by a collective on another stream.

    Args:
        directory: Directory of the traces.
        extra_us: Returns the time that a rank needs more for the first product of a step.
        name: Name of the collectives.
        elements: Number of float32 elements of a collective.
        transfer_us: Duration of a collective without waits.
    """
    for rank in range(2):
        events = []
        for step in range(8):
            begin = 10_000 + STEP_US * step
            events.append(event("user_annotation", f"ProfilerStep#{step}", 1, begin, STEP_US))
            ends = [begin + 1_200 + extra_us(any_rank, step) for any_rank in range(2)]
            now, free = begin + 200, 0.0
            for part, duration in enumerate((1_000 + extra_us(rank, step), 1_000)):
                about = {"Input Dims": [[512, 512], [512, 512]], "Input type": ["float"] * 2}
                number, call = 100 * step + 2 * part + 1, begin + 40 * part
                if name == "allreduce":
                    events.append(event("cpu_op", "aten::mm", 1, call, 15, **about))
                events.append(event("cuda_runtime", "cudaLaunchKernel", 1, call + 2, 5, correlation=number))
                events.append(event("kernel", "gemm_kernel", 7, now, duration, correlation=number, stream=7))
                now += duration
                arrival, end = max(now, free), max(max(ends) + 1_000 * part, free) + transfer_us
                about = {"Collective name": name, "Process Group Name": "0", "Group size": 2, "dtype": "Float"}
                about |= {"In msg nelems": elements, "stream": 20, "correlation": number + 1}
                events.append(event("cuda_runtime", "cudaLaunchKernel", 1, call + 20, 5, correlation=number + 1))
                events.append(event("kernel", "ncclDevKernel_AllReduce_Sum_f32()", 7, arrival, end - arrival, **about))
                free = end
            events.append(event("cuda_runtime", "cudaDeviceSynchronize", 1, begin + 100, free - begin - 100))
            events.append(event("cpu_op", "aten::add", 1, free, begin + STEP_US - free))
        document = {"distributedInfo": {"rank": rank, "world_size": 2, "pg_count": 1}, "traceEvents": events}
        (directory / f"rank{rank}.trace.json").write_text(json.dumps(document | {"baseTimeNanoseconds": 10**18}))
    return directory


def straggler(directory: Path) -> Finding:
    run, errors = summarise([directory])
    assert not errors
    (finding,) = [finding for finding in run.findings if finding.rule == "straggler"]
    return finding


def test_a_device_that_runs_the_same_work_more_slowly_is_named(tmp_path: Path) -> None:
    finding = straggler(write(tmp_path, {0: 500, 1: 650, 2: 500}))
    assert finding.text == (
        "The other ranks wait 1.50 ms per step for rank 1, where gemm_kernel takes 6.50 ms instead of 5.00 ms; "
        "its device runs the same work more slowly."
    )
    assert "nvidia-smi" in finding.do
    assert (finding.where.rank, finding.time_us, finding.gain_us) == (1, 1_500, 1_500)


def test_a_rank_with_more_work_is_named(tmp_path: Path) -> None:
    finding = straggler(write(tmp_path, {0: 500, 1: 650, 2: 500}, {1: 666}))
    assert "it computes 1.30 times as many FLOPs" in finding.text
    assert finding.do == "give each rank the same amount of work per step"


def test_a_cpu_that_runs_the_same_operators_more_slowly_is_named(tmp_path: Path) -> None:
    finding = straggler(write(tmp_path, {0: 500, 1: 650, 2: 500}, on_device=False))
    assert "its CPU runs the same operators more slowly" in finding.text


def test_the_gain_of_a_slow_rank_is_limited_by_the_next_one(tmp_path: Path) -> None:
    finding = straggler(write(tmp_path, {0: 500, 1: 650, 2: 600}))
    assert finding.time_us == pytest.approx(1_000)
    assert finding.gain_us == pytest.approx(500)


def test_equal_ranks_have_no_finding(tmp_path: Path) -> None:
    run, _ = summarise([write(tmp_path, {0: 500, 1: 501, 2: 500})])
    assert not {"straggler", "imbalance"} & {finding.rule for finding in run.findings}


def test_waits_that_overlap_with_work_are_not_gained(tmp_path: Path) -> None:
    finding = straggler(write_overlapping(tmp_path, lambda rank, _: 3_000 * rank))
    assert finding.time_us == pytest.approx(3_950)
    assert finding.gain_us == pytest.approx(3_000, rel=0.05)
    assert "; without the difference, each step would be 3." in finding.text


def test_work_that_ranks_exchange_is_gained_up_to_the_mean(tmp_path: Path) -> None:
    finding = straggler(write_overlapping(tmp_path, lambda rank, _: 3_000 * rank, name="all_to_allv"))
    assert finding.gain_us == pytest.approx(1_500, rel=0.05)
    assert finding.do == "balance the tokens of the experts between the ranks"


def test_gain_of_uneven_steps_is_limited_by_the_mean_work(tmp_path: Path) -> None:
    run, _ = summarise([write_overlapping(tmp_path, lambda rank, step: 6_000 * (step % 2 == rank))])
    (finding,) = [finding for finding in run.findings if finding.rule == "imbalance"]
    assert finding.gain_us == pytest.approx(3_000, rel=0.05)


def rules(*traces: Path) -> set[str]:
    run, errors = summarise([*traces])
    assert not errors
    return {finding.rule for finding in run.findings}


def test_slow_link_replaces_exposed_communication(tmp_path: Path) -> None:
    write_overlapping(tmp_path, lambda *_: 0, elements=10_000_000, transfer_us=9_000)
    run, _ = summarise([tmp_path])
    first = run.findings[0]
    assert first.text == (
        "allreduce of 40.0 MB, the fastest collective of process group 0, reaches only 4.4 GB/s of bus bandwidth (both "
        "ranks, most on rank 0)."
    )
    assert first.gain_us == pytest.approx(18_000 * (1 - 40 / 9 / 10), rel=0.2)
    assert "exposed-communication" not in {finding.rule for finding in run.findings}


def test_usual_bandwidth_is_no_slow_link(tmp_path: Path) -> None:
    write_overlapping(tmp_path, lambda *_: 0, elements=10_000_000, transfer_us=7_000)
    assert rules(tmp_path) & {"slow-link", "exposed-communication"} == {"exposed-communication"}


def test_bandwidth_of_small_collectives_is_not_judged(tmp_path: Path) -> None:
    assert "slow-link" not in rules(write_overlapping(tmp_path, lambda *_: 0, elements=249_000, transfer_us=1_000))


def test_bandwidth_is_not_judged_without_all_ranks(tmp_path: Path) -> None:
    """The recorded rank may have waited in each call."""
    write_overlapping(tmp_path, lambda *_: 0, elements=10_000_000, transfer_us=9_000)
    assert "slow-link" not in rules(tmp_path / "rank0.trace.json")


def write_late_host(directory: Path, arrivals_us: Sequence[int]) -> Path:
    """Write traces in which the host of each rank runs an operator for the given time before it launches an all-reduce.

    Each step takes 1,000 us. All ranks leave the all-reduce after 900 us.
    """
    for rank, arrival in enumerate(arrivals_us):
        events = []
        for step in range(6):
            begin = 10_000 + 1_000 * step
            about = {"Collective name": "allreduce", "Process Group Name": "0", "stream": 7, "correlation": step + 1}
            about["Group size"] = len(arrivals_us)
            events += [
                event("user_annotation", f"ProfilerStep#{step}", 1, begin, 1_000),
                event("cpu_op", "aten::sort", 1, begin + 1, arrival - 20),
                event("cuda_runtime", "cudaLaunchKernel", 1, begin + arrival - 15, 5, correlation=step + 1),
                event("kernel", "ncclDevKernel_AllReduce_Sum_f32()", 7, begin + arrival, 900 - arrival, **about),
                event("cuda_runtime", "cudaDeviceSynchronize", 1, begin + arrival - 5, 910 - arrival),
                event("cpu_op", "aten::add", 1, begin + 906, 90),
            ]
        document = {"distributedInfo": {"rank": rank, "world_size": len(arrivals_us)}, "traceEvents": events}
        (directory / f"rank{rank}.trace.json").write_text(json.dumps(document | {"baseTimeNanoseconds": 10**18}))
    return directory


def test_a_straggler_is_not_host_bound_as_well(tmp_path: Path) -> None:
    run, _ = summarise([write_late_host(tmp_path, [150, 250, 700])])
    assert run.findings[0].rule == "straggler"
    assert "host-bound" not in {finding.rule for finding in run.findings}


def test_waits_for_ranks_are_not_exposed_communication(tmp_path: Path) -> None:
    run, _ = summarise([write_late_host(tmp_path, [150, 250, 700])])
    assert [view.of_devices("exposed_communication_us") for view in views_of(run)] == [750, 650, 200]
    assert [view.exposed_communication_us for view in views_of(run)] == pytest.approx([200, 200, 200], abs=60)


def drop(path: Path, prefix: str, *, before_us: float = float("inf")) -> None:
    """Remove the events of a trace whose names start with `prefix` and that start before `before_us`."""
    document = json.loads(path.read_text())
    document["traceEvents"] = [
        one for one in document["traceEvents"] if not one["name"].startswith(prefix) or one["ts"] >= before_us
    ]
    path.write_text(json.dumps(document))


def on_busy_machine(*traces: Path, wait_s: float = 4) -> RunSummary:
    """Return the summary of traces whose recording threads waited `wait_s` of 10 s for a CPU."""
    run, errors = summarise([*traces])
    assert not errors
    load = HostLoad(wall_s=10, cpu_s=9, cpus=8, run_queue_s=wait_s)
    return with_findings(attrs.evolve(run, ranks=tuple(attrs.evolve(rank, host_load=load) for rank in run.ranks)))


def state_of(run: RunSummary, cause: str) -> CauseState:
    (state,) = [state for state in run.causes if state.cause == cause]
    return state


WAITED = "the ranks waited for a CPU"


def test_waits_without_a_main_owner_have_no_cause(tmp_path: Path) -> None:
    write(tmp_path, {0: 500, 1: 650, 2: 500}, on_device=False)
    for rank in range(3):
        document = json.loads((tmp_path / f"rank{rank}.trace.json").read_text())
        for one in document["traceEvents"]:
            one["args"] = {}  # without shapes, the FLOPs are unknown
        (tmp_path / f"rank{rank}.trace.json").write_text(json.dumps(document))
    finding = straggler(tmp_path)
    assert finding.text == (
        "The other ranks wait 1.50 ms per step for rank 1, which arrives last; no single operator, kernel or function "
        "explains half of the wait."
    )
    assert finding.do == "compare rank 1 with another rank: `profdeck view`"


def test_slow_operators_on_a_busy_machine_are_not_judged(tmp_path: Path) -> None:
    run = on_busy_machine(write(tmp_path, {0: 500, 1: 650, 2: 500}, on_device=False))
    assert (state_of(run, "straggler").state, state_of(run, "straggler").reason) == ("not_judged", WAITED)


def rename(path: Path, duration_us: float | None = None) -> None:
    """Rename all of a rank's matrix products. Given a duration, split each into a product that long and a sort."""
    document = json.loads(path.read_text())
    for one in [one for one in document["traceEvents"] if one["name"].startswith("aten::mm_")]:
        one["name"] = "aten::mm_"
        if duration_us is not None:
            rest = {"name": "aten::sort", "ts": one["ts"] + duration_us, "dur": one["dur"] - duration_us}
            document["traceEvents"].append(one | rest)
            one["dur"] = duration_us
    path.write_text(json.dumps(document))


def test_one_slow_operator_on_a_busy_machine_makes_a_straggler(tmp_path: Path) -> None:
    write(tmp_path, {0: 500, 1: 650, 2: 500}, on_device=False)
    for rank in range(3):
        rename(tmp_path / f"rank{rank}.trace.json", 500 if rank == 1 else None)
    (finding,) = [finding for finding in on_busy_machine(tmp_path).findings if finding.rule == "straggler"]
    assert "for rank 1, where aten::sort takes 1.50 ms instead of 0.00 ms" in finding.text


def test_busy_machine_does_not_excuse_a_slow_device(tmp_path: Path) -> None:
    run = on_busy_machine(write(tmp_path, {0: 500, 1: 650, 2: 500}))
    assert run.findings[0].rule == "busy-machine"
    assert state_of(run, "straggler").state == "found"


def test_time_outside_operators_in_each_step_makes_a_straggler(tmp_path: Path) -> None:
    write(tmp_path, {0: 500, 1: 650, 2: 500}, on_device=False)
    drop(tmp_path / "rank1.trace.json", "aten::mm")
    (finding,) = [finding for finding in on_busy_machine(tmp_path).findings if finding.rule == "straggler"]
    assert finding.text == (
        "The other ranks wait 1.50 ms per step for rank 1, where time outside operators grows from 0.20 ms to 6.70 ms."
    )
    assert finding.do == "pass with_stack=True to torch.profiler.profile, to get the function"


def test_time_outside_operators_in_few_steps_on_a_busy_machine_is_not_judged(tmp_path: Path) -> None:
    write(tmp_path, {0: 500, 1: 650, 2: 500}, on_device=False)
    drop(tmp_path / "rank1.trace.json", "aten::mm", before_us=10_000 + 2 * STEP_US)
    assert state_of(on_busy_machine(tmp_path), "straggler").reason == WAITED


def test_waits_in_host_collectives_on_a_busy_machine_are_not_judged(tmp_path: Path) -> None:
    path = write(tmp_path, {0: 500, 1: 1_500}, on_device=False) / "rank0.trace.json"
    assert "exposed-communication" in rules(path)
    assert state_of(on_busy_machine(path), "exposed-communication").reason == WAITED


def test_ranks_that_wait_for_each_other_on_a_busy_machine_are_not_judged(tmp_path: Path) -> None:
    run, _ = summarise([write(tmp_path, {0: 500, 1: 1_500}, on_device=False)])
    skew = tuple(attrs.evolve(group, straggler=None) for group in run.skew)
    run = with_findings(attrs.evolve(run, skew=skew))
    assert state_of(run, "imbalance").state == "found"
    load = HostLoad(wall_s=10, cpu_s=9, cpus=8, run_queue_s=4)
    run = with_findings(attrs.evolve(run, ranks=tuple(attrs.evolve(rank, host_load=load) for rank in run.ranks)))
    assert state_of(run, "imbalance").reason == WAITED


@pytest.mark.parametrize(("wait_s", "state"), [(4, "found"), (7, "not_judged")])
def test_time_outside_operators_is_judged_without_waits_for_a_cpu(tmp_path: Path, wait_s: float, state: str) -> None:
    path = write(tmp_path, {0: 500, 1: 1_500}, on_device=False) / "rank1.trace.json"
    drop(path, "aten::mm")
    run = on_busy_machine(path, wait_s=wait_s)
    assert run.findings[0].rule == "busy-machine"
    assert state_of(run, "outside-operators").state == state
    if state == "found":
        (finding,) = [finding for finding in run.findings if finding.rule == "outside-operators"]
        assert finding.gain_us == pytest.approx(0.6 * (finding.time_us or 0))
        assert "; without waits for a CPU, an estimated 7.60 ms" in finding.text
