"""Tests of device time and self CPU time by owner, compared with torch and with an independent count."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import ascend_files
import attrs
import oracle
import pytest
from real_traces import each
from typer.testing import CliRunner

import profdeck_traces as traces
from profdeck.cli import app
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.attribution.model import AttributedTime, AttributedTimes

Event = dict[str, Any]
TABLES = ("operators", "shapes", "modules", "stages", "lines")


def attributed(path: Path) -> AttributedTimes:
    times = summarise_trace(path).attributed
    assert times is not None
    return times


def nanoseconds(time_us: float) -> int:
    return round(time_us * 1000)


def sums(rows: tuple[AttributedTime, ...]) -> dict[tuple[str, str], tuple[int, int]]:
    return {(row.kind, row.name): (row.count, nanoseconds(row.time_us)) for row in rows}


def complete(category: str, name: str, start: float, end: float, thread: int = 1, **args: Any) -> Event:
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": thread, **times, "args": args}


def launched(number: int, at: float, duration: float, thread: int = 1) -> list[Event]:
    """Return a launch at the given time and its kernel."""
    call = complete("cuda_runtime", "cudaLaunchKernel", at, at + 1, thread, correlation=number)
    work = complete("kernel", "k", at + 500, at + 500 + duration, 7, correlation=number)
    return [call, work | {"pid": 0}]


def written(path: Path, *events: Event) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.mark.shared_data
@each("gpu/*.json.gz", "public/*.json.gz", "npu/trace_view.json")
def test_tables_of_real_traces_add_up(path: Path) -> None:
    """The rows of each table add up to the time of all kernels, or else to the self time of all operators."""
    summary = summarise_trace(path)
    times = summary.attributed
    assert times is not None
    kernels = [(row.count, nanoseconds(row.total_us)) for row in summary.kernels]
    operators = [(row.count, nanoseconds(row.self_us or 0.0)) for row in summary.operators]
    expected = [sum(values) for values in zip(*(kernels or operators), strict=True)]
    assert times.basis == ("device" if kernels else "host")
    assert nanoseconds(times.total_us) == expected[1]
    for table in TABLES:
        rows = getattr(times, table)
        assert [sum(row.count for row in rows), sum(nanoseconds(row.time_us) for row in rows)] == expected
        assert sum(row.share for row in rows) == pytest.approx(1)


def owners_by_sweep(events: list[Event], starts: list[Event], category: str) -> dict[int, str]:
    """Return, for each event in `starts`, the name of the innermost event of the category that is open at its start.

    Keys are the `id` of the events. Each thread is swept once, with a list of its open events.
    """
    threads: dict[Any, list[tuple[int, int, int, Event]]] = defaultdict(list)
    for order, kind in ((0, [event for event in events if event["cat"] == category]), (1, starts)):
        for event in kind:
            start, end = oracle.span(event)
            threads[event["pid"], event["tid"]].append((start, order, -end, event))
    owners: dict[int, str] = {}
    for rows in threads.values():
        is_open: list[tuple[int, str]] = []
        for start, order, negative_end, event in sorted(rows, key=lambda row: row[:3]):
            is_open = [row for row in is_open if row[0] > start]
            if order == 0:
                is_open.append((-negative_end, event["name"]))
            elif is_open:
                owners[id(event)] = is_open[-1][1]
    return owners


@pytest.mark.shared_data
@each("gpu/nccl.json.gz", "gpu/pair_*.json.gz", "public/*.json.gz")
def test_device_time_of_operators_equals_an_independent_count(path: Path) -> None:
    spellings = {"Operator": "cpu_op", "Runtime": "cuda_runtime", "Kernel": "kernel"}
    spellings |= {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "cuda_driver": "cuda_runtime"}
    events = [event for event in oracle.events_of(path) if event.get("ph") == "X"]
    for event in events:
        event["cat"] = spellings.get(event.get("cat", ""), event.get("cat"))
    events = [event for event in events if not event["name"].startswith("ProfilerStep")]
    calls = {event["args"]["correlation"]: event for event in events if event["cat"] == "cuda_runtime"}
    owners = owners_by_sweep(events, list(calls.values()), "cpu_op")
    expected = Counter[tuple[str, str]]()
    for event in events:
        if event["cat"] in oracle.DEVICE:
            call = calls.get(event["args"]["correlation"])
            owner = call and owners.get(id(call))
            if owner:
                key = "operator", owner
            else:
                key = ("runtime call", call["name"]) if call else ("none", "not attributed: no launch recorded")
            start, end = oracle.span(event)
            expected[key] += end - start
    assert {key: time_ns for key, (_, time_ns) in sums(attributed(path).operators).items()} == expected


def test_backward_on_autograds_thread_belongs_to_the_open_stage(tmp_path: Path) -> None:
    """Forward and backward are stages on the main thread. A loader thread belongs to no stage."""
    backward = {"Sequence number": 3, "Fwd thread id": 1}
    path = written(
        tmp_path / "a.json",
        complete("user_annotation", "ProfilerStep#3", 0, 100),
        complete("user_annotation", "forward", 0, 40),
        complete("cpu_op", "aten::mm", 1, 20, **{"Sequence number": 3, "Fwd thread id": 0}),
        *launched(1, 2, 10),
        complete("user_annotation", "backward", 50, 90),
        complete("cpu_op", "MmBackward0", 55, 80, 2, **backward),
        *launched(2, 56, 20, 2),
        complete("cpu_op", "aten::copy_", 10, 30, 5),
        *launched(3, 11, 40, 5),
    )
    assert sums(attributed(path).stages) == {
        ("stage", "forward"): (1, 10_000),
        ("stage", "backward"): (1, 20_000),
        ("none", "outside stages"): (1, 40_000),
    }


def test_without_stacks_the_nearest_owner_is_used(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.json",
        complete("user_annotation", "ProfilerStep#3", 0, 100),
        complete("user_annotation", "encode", 0, 40),
        complete("cpu_op", "aten::mm", 1, 20),
        *launched(1, 2, 10),
        complete("cpu_op", "aten::add", 50, 60),
        *launched(2, 51, 20),
        *launched(3, 70, 40),
        launched(4, 80, 80)[1],
    )
    expected = {
        ("annotation", "encode"): (1, 10_000),
        ("operator", "aten::add"): (1, 20_000),
        ("runtime call", "cudaLaunchKernel"): (1, 40_000),
        ("none", "not attributed: no launch recorded"): (1, 80_000),
    }
    times = attributed(path)
    assert not times.has_stacks
    assert sums(times.lines) == sums(times.modules) == expected


def test_shapes_are_listed_with_data_types(tmp_path: Path) -> None:
    inputs = {"Input Dims": [[2, 3], [3, 5], []], "Input type": ["c10::BFloat16", "float", "Scalar"]}
    path = written(
        tmp_path / "a.json",
        complete("cpu_op", "aten::mm", 0, 20, **inputs),
        *launched(1, 2, 10),
        complete("cpu_op", "aten::mm", 30, 40, **inputs | {"Input type": ["float", "float", ""]}),
        *launched(2, 31, 20),
        complete("cpu_op", "bare", 50, 60),
        *launched(3, 51, 5),
    )
    assert [(row.name, row.shapes, row.dtypes, row.time_us) for row in attributed(path).shapes] == [
        ("aten::mm", "[[2, 3], [3, 5], []]", "float32", 20.0),
        ("aten::mm", "[[2, 3], [3, 5], []]", "bfloat16, float32", 10.0),
        ("bare", None, None, 5.0),
    ]


@pytest.mark.parametrize("types", ["no list", [["float"]], [3, None], {"a": "float"}])
def test_malformed_data_types_are_ignored(tmp_path: Path, types: Any) -> None:
    arguments = {"Input Dims": [[2]], "Input type": types}
    path = written(tmp_path / "a.json", complete("cpu_op", "aten::mm", 0, 20, **arguments))
    assert [row.dtypes for row in attributed(path).shapes] == [None]


def test_many_rows_are_summed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", *(complete("cpu_op", f"op{index}", index, index + 1) for index in range(700)))
    rows = attributed(path).operators
    assert len(rows) == 501
    assert (rows[-1].name, rows[-1].kind, rows[-1].count) == ("200 smaller rows", "none", 200)
    assert sum(row.time_us for row in rows) == 700


def test_ascend_kernels_have_the_operator_that_their_flow_starts_at(tmp_path: Path) -> None:
    """torch_npu writes flows instead of correlations."""
    host, hardware = 9, 800
    flow = {"cat": "async_npu", "name": "torch_to_npu", "id": 1704161511422904204}
    path = written(
        tmp_path / "trace_view.json",
        {"ph": "M", "name": "process_name", "pid": hardware, "args": {"name": "Ascend Hardware"}},
        complete("cpu_op", "aten::mm", 0, 20),
        complete("cpu_op", "aclnnMm", 5, 10),
        {"ph": "X", "name": "MatMulV2", "pid": hardware, "tid": 3, "ts": 50, "dur": 7},
        {"ph": "X", "name": "EVENT_WAIT", "pid": hardware, "tid": 3, "ts": 60, "dur": 1},
        {"ph": "s", "pid": host, "tid": 1, "ts": 5, **flow},
        {"ph": "f", "pid": hardware, "tid": 3, "ts": 50, **flow},
        {"ph": "s", "pid": host, "tid": 1, "ts": 0, **flow | {"id": 5}},
        {"ph": "f", "pid": hardware, "tid": 3, "ts": 51, **flow | {"id": 5}},
    )
    assert sums(attributed(path).operators) == {
        ("operator", "aclnnMm"): (1, 7_000),
        ("none", "not attributed: no launch recorded"): (1, 1_000),
    }


def test_kernels_of_ascend_tables_have_the_operator_of_their_device_event(tmp_path: Path) -> None:
    """Times come from the table, and flows from the trace. The second kernel has a different start in the trace."""
    flow = {"cat": "async_npu", "name": "torch_to_npu", "id": 100}
    flows = [
        {"ph": "s", "pid": ascend_files.HOST, "tid": ascend_files.HOST, "ts": ascend_files.time_us(20), **flow},
        {"ph": "f", "pid": ascend_files.HARDWARE, "tid": 16, "ts": ascend_files.time_us(100), **flow},
    ]
    trace = ascend_files.trace_view([*ascend_files.framework_events(), *flows], ascend_files.msprof_events())
    rows = [
        {"Name": "aclnnMatmul_MatMulV3Common_MatMulV3", "Type": "MatMulV3", "at": 100, "us": 41},
        {"Name": "Cast66", "Type": "Cast", "at": 151, "us": 10},
    ]
    table = ascend_files.kernel_rows(rows, ascend_files.LEVEL_1, steps=False)
    directory = ascend_files.raw(tmp_path)
    ascend_files.analysed(directory, kernels=table, trace=trace)
    assert sums(attributed(directory).operators) == {
        ("operator", "aten::mm"): (1, 41_000),
        ("none", "not attributed: no launch recorded"): (1, 10_000),
    }


def test_flows_of_ascend_leave_the_steps_unchanged(tmp_path: Path) -> None:
    """The kernel table assigns kernels to steps, even if a kernel's flow starts in a different step."""
    flow = {"cat": "async_npu", "name": "torch_to_npu", "id": 100}
    flows = [
        {"ph": "s", "pid": ascend_files.HOST, "tid": ascend_files.HOST, "ts": ascend_files.time_us(1030), **flow},
        {"ph": "f", "pid": ascend_files.HARDWARE, "tid": 16, "ts": ascend_files.time_us(100), **flow},
    ]
    steps = []
    for name, extra in (("a", []), ("b", flows)):
        trace = ascend_files.trace_view([*ascend_files.framework_events(), *extra], ascend_files.msprof_events())
        directory = ascend_files.raw(tmp_path / name)
        ascend_files.analysed(
            directory, kernels=ascend_files.kernel_rows(ascend_files.KERNELS[:1], ascend_files.LEVEL_1), trace=trace
        )
        steps.append(summarise_trace(directory).steps)
    assert steps[0] == steps[1]


@pytest.mark.torch
def test_self_times_equal_torchs_averages(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(3):
            with torch.profiler.record_function("train"):
                model(torch.rand(8, 32)).square().mean().backward()
                optimizer.step()
    profiler.export_chrome_trace(str(tmp_path / "a.json"))
    times = attributed(tmp_path / "a.json")
    averages = {row.key: row for row in profiler.key_averages()}
    assert times.basis == "host"
    for row in times.operators:
        assert row.time_us == pytest.approx(averages[row.name].self_cpu_time_total, abs=1e-3)
    # torch merges an operator with its only child if both have the same name, even when their shapes differ.
    unmerged = {row.name for row in times.operators if row.count == averages[row.name].count}
    assert "aten::addmm" in unmerged
    expected, by_shape = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for average in profiler.key_averages(group_by_input_shape=True):
        expected[average.key, json.dumps(average.input_shapes)] += average.self_cpu_time_total
    for row in times.shapes:
        if row.name in unmerged:
            by_shape[row.name, row.shapes or "[]"] += row.time_us
    assert by_shape == {key: pytest.approx(expected[key], abs=1e-3) for key in by_shape}


@pytest.mark.torch
def test_operators_have_their_module_and_line(tmp_path: Path) -> None:
    """Backward operators belong to the module and line of their forward operators."""
    torch = pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(
        "import torch\n"
        "class Block(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = torch.nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        return self.activate(self.linear(x))\n"
        "    def activate(self, x):\n"
        "        return torch.sigmoid(x)\n"
        "model = torch.nn.Sequential(Block(), Block())\n"
        "def train():\n"
        "    model(torch.rand(4, 8)).sum().backward()\n"
    )
    namespace: dict[str, Any] = {"__name__": "job"}
    code = compile((tmp_path / "job.py").read_text(), str(tmp_path / "job.py"), "exec")
    exec(code, namespace)  # noqa: S102 - the code above
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profiler:
        namespace["train"]()
    profiler.export_chrome_trace(str(tmp_path / "a.json"))
    times = attributed(tmp_path / "a.json")
    modules = {row.name for row in times.modules if row.kind == "module"}
    assert modules == {"Sequential > Block", "Sequential > Block > Linear"}
    lines = {row.name.removeprefix(str(tmp_path)).lstrip("/"): row for row in times.lines}
    assert set(lines) == {"job.py(6): forward", "job.py(8): activate", "job.py(11): train"}
    # There are two calls to sigmoid and two to each backward operator.
    assert lines["job.py(8): activate"].count == 2 + 2 * len(
        ["evaluate_function: SigmoidBackward0", "SigmoidBackward0", "aten::sigmoid_backward"]
    )


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(
        tmp_path / "a.json",
        complete("cpu_op", "aten::mm", 0, 20),
        *launched(1, 2, 10),
        complete("cpu_op", "a" * 200, 50, 60),
        *launched(2, 51, 30),
    )


def test_summary_by_owner_fits_the_terminal(trace: Path) -> None:
    lines = run("summary", trace, "--by", "line").splitlines()
    assert lines[0] == "Device time by line: 0.040 ms"
    assert lines[1].split() == ["ms", "share", "kernels", "line"]
    assert lines[3].split() == ["0.010", "25.0%", "1", "operator", "aten::mm"]
    assert "with_stack" in " ".join(lines[4:])
    assert max(map(len, lines)) <= 80


def test_hidden_rows_are_summed(trace: Path) -> None:
    hidden = run("summary", trace, "--by", "operator", "--top", 1).splitlines()[-1]
    assert hidden.split() == ["0.010", "25.0%", "1", "1", "more", "row", "(--top", "0", "shows", "all)"]
    assert "more row" not in run("summary", trace, "--by", "operator", "--top", 0)


def test_ranks_of_a_role_are_summed(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.json"
    other.write_bytes(trace.read_bytes())
    document = json.loads(run("summary", trace, other, "--json"))
    assert [rank["attributed"]["total_us"] for rank in document["ranks"]] == [40, 40]
    assert run("summary", trace, other, "--by", "operator").count("0.040 ms") == 2  # unrelated traces


def test_tables_are_available_as_csv_and_in_python(trace: Path) -> None:
    header, first, _ = run("summary", trace, "--by", "operator", "--csv").splitlines()
    assert header.endswith(
        "basis,name,kind,shapes,dtypes,count,time_us,share,flops,size_bytes,work_us,peak_share,bound"
    )
    assert first.endswith(f"device,{'a' * 200},operator,,,1,30.0,0.75,,,,,")
    assert run("summary", trace, "--csv", "--rows", "time-by-operator").splitlines()[1] == first
    table = traces.load(trace, cache=False).table("time_by_operator")
    assert [row[list(table.columns).index("time_us")] for row in table.rows()] == [30, 10]


@pytest.mark.parametrize("option", ["--json", "--full"])
def test_contradicting_options_are_rejected(trace: Path, option: str) -> None:
    result = CliRunner().invoke(app, ["summary", str(trace), "--by", "line", option])
    assert result.exit_code == 2
    assert f"--by and {option} cannot be combined" in result.output


def test_traces_without_owners_say_so(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", complete("user_annotation", "alone", 0, 20))
    assert "No trace has operators" in run("summary", path, "--by", "operator")


def test_tables_of_kernels_have_no_owners(trace: Path, tmp_path: Path) -> None:
    table = tmp_path / "kernel_details.csv"
    table.write_text(ascend_files.kernel_rows(ascend_files.KERNELS, ascend_files.LEVEL_1, steps=False))
    assert "No trace has operators, or device events together" in run("summary", table, "--by", "operator")
    output = run("summary", table, trace, "--by", "operator")
    assert "Excluded: 1 trace without events of the host." in output


def test_cached_summaries_have_the_same_times(trace: Path) -> None:
    first = traces.load(trace).summary.ranks[0].attributed
    assert first is not None
    assert attrs.asdict(first) == attrs.asdict(attributed(trace))
