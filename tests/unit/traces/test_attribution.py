"""Tests of attribution: the launch, operator, annotation, module, frame and forward operator of each event."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from hypothesis import given, strategies as st
from real_traces import each

from profdeck_traces.attribution.frames import is_user_frame
from profdeck_traces.attribution.rows import Attribution
from profdeck_traces.reading.reader import read_trace

Event = dict[str, Any]
MAIN, AUTOGRAD, OTHER = 1, 2, 3


def complete(category: str, name: str, start: float, end: float, thread: int = MAIN, **args: Any) -> Event:
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": thread, **times, "args": args}


def op(name: str, start: float, end: float, thread: int = MAIN, **args: Any) -> Event:
    return complete("cpu_op", name, start, end, thread, **{key.replace("_", " "): value for key, value in args.items()})


def kernel(name: str, start: float, correlation: int, **args: Any) -> Event:
    return complete("kernel", name, start, start + 10, 7, correlation=correlation, **args) | {"pid": 0}


def launch(start: float, correlation: int, thread: int = MAIN, name: str = "cudaLaunchKernel", **args: Any) -> Event:
    return complete("cuda_runtime", name, start, start + 1, thread, correlation=correlation, **args)


def backward(
    name: str, start: float, end: float, number: int, forward_thread: int = 1, thread: int = AUTOGRAD
) -> Event:
    return op(name, start, end, thread, Sequence_number=number, Fwd_thread_id=forward_thread)


def forward(name: str, start: float, end: float, number: int, thread: int = MAIN) -> Event:
    return op(name, start, end, thread, Sequence_number=number, Fwd_thread_id=0)


def is_step(name: str) -> bool:
    return name.startswith("ProfilerStep")


def owners(path: Path, events: Sequence[Event], kind: str) -> dict[str, str | None]:
    """Return the name of each event's owner, keyed by the name of the event. Names must be unique."""
    path.write_text(json.dumps({"traceEvents": [*events]}))
    trace = read_trace(path)
    assert trace.raw is not None
    raw, rows = trace.raw, getattr(Attribution(trace.raw, is_step), kind)
    names = [raw.names[code] for code in raw.name.tolist()]
    return {name: None if row < 0 else names[row] for name, row in zip(names, rows.tolist(), strict=True)}


def owner(path: Path, events: Sequence[Event], name: str, kind: str) -> str | None:
    return owners(path, events, kind)[name]


def test_all_kernels_of_a_graph_have_its_launch(tmp_path: Path) -> None:
    events = [
        launch(0, 5, name="cudaGraphLaunch"),
        launch(5, 6),
        *(kernel(f"k{index}", 10 * index, 5) for index in range(1, 4)),
        kernel("single", 50, 6),
        kernel("lost", 60, 7),
    ]
    launches = owners(tmp_path / "a.json", events, "launch")
    assert [launches[f"k{index}"] for index in range(1, 4)] == ["cudaGraphLaunch"] * 3
    assert launches["single"] == "cudaLaunchKernel"
    assert launches["lost"] is None


def test_a_missing_correlation_is_no_launch(tmp_path: Path) -> None:
    assert owner(tmp_path / "a.json", [launch(0, 0), kernel("k", 5, 0)], "k", "launch") is None


def test_the_operator_around_the_launch_precedes_the_external_id(tmp_path: Path) -> None:
    events = [
        op("aten::copy_", 0, 10, External_id=8),
        op("aten::detach", 20, 30, External_id=3),
        launch(1, 3),
        kernel("k", 5, 3, **{"External id": 3}),
    ]
    assert owner(tmp_path / "a.json", events, "k", "operator") == "aten::copy_"


def test_external_ids_count_without_launches(tmp_path: Path) -> None:
    events = [
        op("aten::mm", 0, 10, External_id=3),
        op("aten::add", 20, 30, External_id=4),
        kernel("k", 25, 9, **{"External id": 4}),
    ]
    assert owner(tmp_path / "a.json", events, "k", "operator") == "aten::add"


@pytest.mark.parametrize(
    "others",
    [
        [],  # every external id equals the correlation
        [launch(1, 5), kernel("nested", 5, 5, **{"External id": 4}), kernel("other", 6, 99, **{"External id": 6})],
    ],
)
def test_wrong_external_ids_are_ignored(tmp_path: Path, others: list[Event]) -> None:
    events = [
        op("aten::mm", 0, 10, External_id=3),
        op("aten::add", 20, 30, External_id=4),
        kernel("k", 25, 4, **{"External id": 4}),
        *others,
    ]
    assert owner(tmp_path / "a.json", events, "k", "operator") is None


def test_steps_own_no_events(tmp_path: Path) -> None:
    events = [op("ProfilerStep#1", 0, 10), complete("user_annotation", "ProfilerStep#1", 0, 9)]
    events += [launch(1, 5), kernel("k", 5, 5)]
    assert owner(tmp_path / "a.json", events, "k", "operator") is None
    assert owner(tmp_path / "a.json", events, "k", "annotation") is None


def test_an_annotation_can_start_and_end_in_different_frames(tmp_path: Path) -> None:
    """An annotation starts in ``__enter__`` and ends in ``__exit__``."""
    events = [
        complete("python_function", "train.py(1): main", 0, 100),
        complete("python_function", "stages.py(1): begin", 10, 20),
        complete("user_annotation", "forward", 15, 85),
        launch(30, 1),
        complete("python_function", "stages.py(9): end", 80, 95),
        launch(82, 2),
        launch(90, 3),
        *(kernel(f"k{number}", 200 + 10 * number, number) for number in (1, 2, 3)),
    ]
    frames, annotations = (owners(tmp_path / "a.json", events, kind) for kind in ("frame", "annotation"))
    kernels = ["k1", "k2", "k3"]
    assert [frames[name] for name in kernels] == ["train.py(1): main", "stages.py(9): end", "stages.py(9): end"]
    assert [annotations[name] for name in kernels] == ["forward", "forward", None]


def test_backward_kernels_have_the_module_and_line_of_the_forward_operator(tmp_path: Path) -> None:
    events = [
        complete("python_function", "train.py(1): main", 0, 300),
        complete("python_function", "nn.Module: Net_0", 5, 90),
        complete("python_function", "model.py(7): forward", 6, 80),
        complete("python_function", "nn.Module: Linear_12", 10, 50),
        complete("python_function", "torch/nn/modules/linear.py(130): forward", 11, 49),
        forward("aten::linear", 12, 48, 4),
        forward("aten::addmm", 13, 40, 4),
        forward("aten::relu", 60, 70, 5),
        backward("AddmmBackward0", 100, 120, 4),
        op("aten::mm", 101, 110, AUTOGRAD),
        launch(102, 1, AUTOGRAD),
        kernel("gemm", 130, 1),
    ]
    path = tmp_path / "a.json"
    assert owner(path, events, "gemm", "operator") == "aten::mm"
    assert owner(path, events, "gemm", "forward") == "aten::addmm"
    assert owner(path, events, "gemm", "module") == "nn.Module: Linear_12"
    assert owner(path, events, "gemm", "frame") == "model.py(7): forward"
    trace = read_trace(path)
    assert trace.raw is not None
    codes, texts = Attribution(trace.raw, is_step).module_paths
    row = next(row for row, name in enumerate(trace.raw.name.tolist()) if trace.raw.names[name] == "gemm")
    assert texts[codes[row]] == "Net > Linear"


def test_threads_number_their_operators_independently(tmp_path: Path) -> None:
    """Two threads use overlapping numbers. Backward operators must match the operators of their own forward thread."""
    events = [
        *(forward(f"main {number}", 10 * number, 10 * number + 5, number) for number in range(6)),
        *(forward(f"other {number}", 10 * number, 10 * number + 5, number, OTHER) for number in range(3, 9)),
        *(backward(f"of main {number}", 200 + number, 200.5 + number, number) for number in range(6)),
        *(backward(f"of other {number}", 300 + number, 300.5 + number, number, 2) for number in range(3, 9)),
    ]
    found = owners(tmp_path / "a.json", events, "forward")
    assert found["of main 4"] == "main 4"
    assert found["of other 4"] == "other 4"


def test_an_ambiguous_forward_thread_is_unknown(tmp_path: Path) -> None:
    events = [forward("a", 0, 5, 1), forward("b", 0, 5, 1, OTHER), backward("c", 10, 15, 1)]
    assert owner(tmp_path / "a.json", events, "c", "forward") is None


def test_a_later_operator_is_not_the_forward_operator(tmp_path: Path) -> None:
    events = [backward("b", 10, 15, 1), forward("next step", 20, 25, 1)]
    assert owner(tmp_path / "a.json", events, "b", "forward") is None


@pytest.mark.parametrize(
    "name",
    [
        "train.py(12): main",
        "my/models/torch.py(3): forward",
        "/home/user/torch/train.py(12): <module>",
        "/work/profdeck/examples/train.py(12): main",
        "profdeck/train.py(12): main",
        "profdeck\\train.py(12): main",
        "profdeck_job/backends/train.py(12): main",
        "plugins/profdeck_job/train.py(12): main",
        "/data/profdeck/base/model.py(3): forward",
        "/data/jobs.zip/profdeck/train.py(3): main",
        "test/model.py(1): forward",
        "C:\\jobs\\train.py(3): main",
        "<ipython-input-3-aa>(1): train",
        "/tmp/ipykernel_7/12.py(1): train",
        "<string>(1): <module>",
    ],
)
def test_frames_of_user_code(name: str) -> None:
    assert is_user_frame(name)


@pytest.mark.parametrize(
    "name",
    [
        "torch/nn/modules/linear.py(130): forward",
        "/opt/venv/lib/python3.12/site-packages/transformers/trainer.py(1): train",
        "/usr/lib/python3/dist-packages/yaml/loader.py(1): load",
        "/usr/lib/python3.11/threading.py(1): run",
        "lib/python3.9/asyncio/events.py(1): run",
        "threading.py(975): _bootstrap",
        "multiprocessing/queues.py(9): get",
        "numpy/core/fromnumeric.py(1): sum",
        "profdeck/profiler.py(1): capture",
        "profdeck_torch/recorder.py(1): step",
        "/src/core/profdeck/profiler.py(1): capture",
        "core/profdeck/backends/recording.py(1): check",
        "plugins\\profdeck_vllm\\worker.py(1): start",
        "/opt/profdeck.zip/profdeck_traces/reading/events.py(1): read_events",
        "/opt/venv/lib/python3.12/site-packages/profdeck_other/module.py(1): start",
        "/tmp/torchinductor_root/ob/cobh.py(132): call",
        "C:\\venv\\Lib\\site-packages\\yaml\\loader.py(1): load",
        "train.py(3): <listcomp>",  # part of its function, as in Python 3.12
        "<string>(2): __init__",
        "<frozen importlib._bootstrap>(1): _find_and_load",
        "<built-in method linear of type object at 0x7f>",
        "nn.Module: Linear_0",
        "aten::mm",
        "",
    ],
)
def test_frames_of_other_code(name: str) -> None:
    assert not is_user_frame(name)


def around(events: Sequence[Event], inner: Event, matches: Any) -> Event | None:
    """Among the matching events still open on the thread when `inner` starts, return the one that started last."""
    start = oracle.span(inner)[0]
    is_open = [
        (oracle.span(event)[0], -oracle.span(event)[1], index)
        for index, event in enumerate(events)
        if matches(event) and (event["pid"], event["tid"]) == (inner["pid"], inner["tid"])
        if oracle.span(event)[0] <= start < oracle.span(event)[1]
    ]
    return events[max(is_open)[2]] if is_open else None


@pytest.mark.shared_data
@each("gpu/*.json.gz", "public/*.json.gz")
def test_real_device_events_have_the_operator_around_their_launch(path: Path) -> None:
    """Compare about 30 device events with an independent search of the JSON."""
    events = [event for event in oracle.events_of(path) if event.get("ph") == "X"]
    spellings = {"Operator": "cpu_op", "Runtime": "cuda_runtime", "Kernel": "kernel", "Memset": "gpu_memset"}
    spellings["Memcpy"] = "gpu_memcpy"
    for event in events:
        event["cat"] = spellings.get(event.get("cat"), event.get("cat"))
    calls = {event["args"]["correlation"]: event for event in events if event["cat"] in ("cuda_runtime", "cuda_driver")}
    expected = []
    work = [event for event in events if event["cat"] in oracle.DEVICE]
    every = 1 + len(work) // 30
    for event in work[::every]:
        call = calls.get(event["args"]["correlation"])
        operator = call and around(events, call, lambda other: other["cat"] == "cpu_op")
        module = call and around(events, call, lambda other: other["name"].startswith("nn.Module: "))
        expected.append([other["name"] if other else None for other in (call, operator, module)])
    trace = read_trace(path)
    assert trace.raw is not None
    raw, names = trace.raw, Attribution(trace.raw, is_step)
    in_file = np.flatnonzero(names.is_device)
    in_file = in_file[np.argsort(raw.all["row"][in_file])][::every]
    found = [
        [raw.names[raw.name[row]] if row >= 0 else None for row in rows]
        for rows in zip(names.launch[in_file], names.operator[in_file], names.module[in_file], strict=True)
    ]
    is_forward = names.forward[in_file] >= 0
    for row in np.flatnonzero(is_forward).tolist():
        found[row][2] = expected[row][2]  # here, the module is that of the forward operator
    assert found == expected


@pytest.mark.shared_data
@each("gpu/amd_mi250.json.gz", "gpu/nccl.json.gz", "gpu/ns_resolution*.json.gz", "npu/trace_view.json")
def test_forward_operators_equal_the_flows_of_the_recorder(path: Path) -> None:
    """Kineto writes a flow ``fwdbwd`` from each forward operator to its backward operator."""
    starts: dict[Any, dict[str, Any]] = {}
    ends: dict[Any, dict[str, Any]] = {}
    for event in oracle.events_of(path):
        if event.get("cat") == "fwdbwd":
            (starts if event["ph"] == "s" else ends)[event["id"]] = event
    trace = read_trace(path)
    assert trace.raw is not None
    raw, names = trace.raw, Attribution(trace.raw, is_step)
    rows = {
        (raw.tracks[track], time_ns): row
        for row, (track, time_ns) in enumerate(zip(raw.track.tolist(), raw.start_ns.tolist(), strict=True))
        if names.is_operator[row]
    }

    def row_of(flow: dict[str, Any]) -> int | None:
        return rows.get(((flow["pid"], flow["tid"]), oracle.nanoseconds(flow["ts"])))

    flows = [(row_of(ends[key]), row_of(starts[key])) for key in starts.keys() & ends.keys()]
    assert flows
    found = [(end, names.forward[end]) for end, _ in flows if end is not None]
    assert found == flows


SPANS = st.lists(
    st.tuples(
        st.sampled_from(["cpu_op", "user_annotation", "python_function"]), st.integers(0, 40), st.integers(0, 20)
    ),
    max_size=25,
)


@given(SPANS)
def test_owners_are_open_when_an_event_starts(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[str, int, int]]
) -> None:
    """However events overlap, the owner is the open event of its kind that started last."""
    path = tmp_path_factory.getbasetemp() / "attribution.json"
    events = [
        complete(category, f"f.py({index}): {index}", start, start + length)
        for index, (category, start, length) in enumerate(spans)
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_trace(path)
    assert trace.raw is not None
    raw, names = trace.raw, Attribution(trace.raw, is_step)
    in_order = [events[row] for row in raw.all["row"].tolist()]
    kinds = {"operator": "cpu_op", "annotation": "user_annotation", "frame": "python_function"}
    for kind, category in kinds.items():
        for row, found in enumerate(getattr(names, kind).tolist()):
            is_open = [
                index
                for index, event in enumerate(in_order[: row + 1])
                if event["cat"] == category
                if index == row or oracle.span(event)[1] > oracle.span(in_order[row])[0]
            ]
            assert found == max(is_open, default=-1)
