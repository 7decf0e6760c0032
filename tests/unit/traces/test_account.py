"""Tests for the account: the critical path of the steps, and the time of its owners."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from account_oracle import Owner, wrong_owners
from accounts import account_of, write
from hypothesis import given, strategies as st
from planted_owners import layers, planted
from real_traces import each
from simulated_machine import Machine, Program, random_program, run_steps, scaled, step_us

from profdeck_traces.account.gain import Replay
from profdeck_traces.account.model import Account
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.recording import RecordingPath, StepAnnotations, path_of
from profdeck_traces.account.row_kinds import row_kinds
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.attribution.rows import Attribution
from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading.events import Events, read_events

PLANTED = planted()


def ns(time_us: float) -> int:
    return round(time_us * 1000)


def walked(path: Path) -> tuple[Events, RecordingPath]:
    """Return the events and the critical path of a trace that contains torch.profiler steps."""
    events = read_events(path)
    is_annotation = events.has_category({"user_annotation"})
    is_step = events.with_name(is_annotation, lambda name: name.startswith("ProfilerStep#"))
    rows = np.flatnonzero(is_step)
    rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
    steps = StepAnnotations(events.track[rows], events.start_ns[rows], events.end_ns[rows])
    names = Attribution(events, lambda name: name.startswith("ProfilerStep#"))
    kinds = row_kinds(
        events,
        is_step=lambda name: name.startswith("ProfilerStep#"),
        is_collective=lambda name: "nccl" in name.lower(),
    )
    recording = path_of(events, names.launch, kinds, steps)
    return events, recording


def check_replay(events: Events, recording: RecordingPath) -> None:
    """Check that a replay with unchanged durations reproduces the recorded times."""
    assert Replay(recording, events, np.ones(len(recording.borders.times) - 1, np.bool_)).is_exact


def check_path(path: Path, *, max_checked: int = 200) -> None:
    """Check the critical path of each step with the oracle, and check the replay."""
    events, recording = walked(path)
    if len(recording.path):
        check_replay(events, recording)
    for begin, end, part in recording.parts():
        if begin == end:
            continue
        positions = np.where(part.row >= 0, events.all["row"][part.row].astype(np.int64), -1).tolist()
        owners = [
            Owner(*owner)
            for owner in zip(
                part.begin.tolist(),
                part.end.tolist(),
                [OwnerKind(kind).label for kind in part.kind.tolist()],
                positions,
                strict=True,
            )
        ]
        assert wrong_owners(path, begin, end, owners, every=max(1, len(owners) // max_checked)) == []


def check_sums(account: Account) -> None:
    assert sum(ns(owner.time_us) for owner in account.owners) == ns(account.time_us)
    assert sum(owner.share for owner in account.owners) == pytest.approx(1)
    assert all(0 <= ns(owner.gain_us) <= ns(owner.time_us) for owner in account.owners if owner.gain_us is not None)


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_owner_is_the_largest(tmp_path: Path, name: str) -> None:
    expected = PLANTED[name]
    path = write(tmp_path, expected.machine.events)
    account = account_of(path)
    largest = account.owners[0]

    assert (largest.kind, largest.name) == (expected.kind, expected.name.replace(" object at 0x1", ""))
    if expected.owns_nothing is not None:
        assert expected.owns_nothing not in {owner.name for owner in account.owners}
    check_sums(account)
    check_path(path)


@pytest.mark.shared_data
@each("gpu/*.json.gz", "public/*.json.gz", "npu/trace_view.json", "attack/*.json*", "reports/*/*.json*")
def test_owners_of_real_traces_add_up_to_the_steps(path: Path) -> None:
    try:
        summary = summarise_trace(path)
    except TraceError:
        pytest.skip("the trace cannot be summarised")
    if summary.account is None:
        assert not summary.steps or not any(step.duration_us for step in summary.steps)
        return
    check_sums(summary.account)
    begins = [step.start_us for step in summary.steps if step.kind == summary.account.basis and not step.cold]
    if summary.account.border == "host":
        ends = [step.start_us + step.duration_us for step in summary.steps if step.kind == summary.account.basis]
        assert ns(summary.account.time_us) <= ns(max(ends)) - ns(min(begins))


@pytest.mark.shared_data
@pytest.mark.slow
@each("gpu/*.json.gz", "public/*.json.gz")
def test_paths_of_real_traces_agree_with_the_oracle(path: Path) -> None:
    check_path(path)


CATEGORIES = {
    "user_annotation": ["ProfilerStep#1", "gloo:all_reduce", "enumerate(DataLoader)#x", "stage"],
    "python_function": [
        "a.py(1): f",
        "<built-in method run_backward of x>",
        "<built-in method acquire of _thread.lock>",
        "torch/serialization.py(1): save",
        "Python GC",
    ],
    "cpu_op": ["aten::mm", "aten::item"],
    "cuda_runtime": [
        *("cudaLaunchKernel", "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"),
        *("cudaMemcpyAsync", "cudaMemcpy", "cudaFree", "cudaGraphLaunch", "hipMemcpyWithStream"),
    ],
    "overhead": ["flush"],
    "kernel": ["k", "ncclKernel"],
    "gpu_memcpy": ["Memcpy HtoD"],
}


@st.composite
def events(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw arbitrary events, including overlapping calls, wrong correlations, and early or late device work."""
    rnd = random.Random(draw(st.integers(0, 2**32)))  # noqa: S311 - test data
    scale = rnd.choice([10, 100, 1000])
    drawn: list[dict[str, Any]] = []
    for _ in range(rnd.randint(1, 80)):
        category = rnd.choice([*CATEGORIES, "kernel", "cuda_sync"])
        args: dict[str, Any] = {"correlation": rnd.randint(0, 20)} if rnd.random() < 0.8 else {}
        name = "Stream Wait Event"
        if category == "cuda_sync":
            args |= {"stream": rnd.randint(7, 8), "wait_on_stream": rnd.randint(7, 8)}
            args["wait_on_cuda_event_record_corr_id"] = rnd.randint(0, 20)
        else:
            name = rnd.choice(CATEGORIES[category])
        is_device = category in {"kernel", "gpu_memcpy", "cuda_sync"}
        if is_device:
            args = {"stream": rnd.randint(7, 8)} | args
        times = {"ts": rnd.randint(0, scale) + rnd.choice([0, 0, 0.001, 0.5])}
        times["dur"] = rnd.choice([0, 0.001, rnd.randint(0, scale), rnd.randint(0, 5)])
        lane = {"pid": 0, "tid": args["stream"]} if is_device else {"pid": 1, "tid": rnd.randint(1, 3)}
        drawn.append({"ph": "X", "cat": category, "name": name, "args": args} | times | lane)
    return drawn


@given(events())
def test_owners_of_any_events_add_up(tmp_path_factory: pytest.TempPathFactory, drawn: list[dict[str, Any]]) -> None:
    path = write(tmp_path_factory.mktemp("events"), drawn)
    events, recording = walked(path)
    if len(recording.path):
        check_replay(events, recording)
    assert list(recording.borders.times) == sorted(recording.borders.times)
    for begin, end, part in recording.parts():
        if begin == end:
            assert not len(part)
            continue
        assert (part.begin[0], part.end[-1]) == (begin, end)
        assert (part.begin[1:] == part.end[:-1]).all()
        assert (part.end > part.begin).all()
    if account := summarise_trace(path).account:
        check_sums(account)


def test_owned_time_is_the_derivative_of_the_step(tmp_path: Path) -> None:
    """If a name becomes slightly faster, the step shortens by the same fraction of the name's time on the path."""
    rnd, change = random.Random(1), 0.002  # noqa: S311 - test data
    results: Counter[bool] = Counter()
    for _ in range(30):
        program = random_program(rnd)
        account = account_of(write(tmp_path, run_steps(program).events))
        duration_us = step_us(program)
        owned: Counter[str | None] = Counter()
        for owner in account.owners:
            if owner.kind in {"operator", "kernel", "copy"}:
                owned[owner.name] += owner.time_us  # type: ignore[assignment]  # a float
        for name in ("opA", "opB", "kA", "kB", "kC", "cA"):
            slower = (step_us(scaled(program, name, 1 + change)) - duration_us) / change
            faster = (duration_us - step_us(scaled(program, name, 1 - change))) / change
            # If two paths have the same length, the two derivatives differ.
            low, high = sorted((slower, faster))
            results[low - 0.5 <= owned[name] <= high + 0.5] += 1
    assert results[True] / results.total() > 0.99


def test_a_step_ends_with_its_device_work_if_the_device_falls_behind(tmp_path: Path) -> None:
    behind = account_of(write(tmp_path, run_steps(layers(20, 200, 3), 3).events))
    assert (behind.border, behind.steps, behind.basis) == ("device", 3, "global_step")
    level = account_of(write(tmp_path, run_steps([*layers(20, 200, 3), ("sync", None)], 3).events))
    assert level.border == "host"


def test_without_steps_the_recording_counts_as_one(tmp_path: Path) -> None:
    machine = Machine()
    machine.run([("op", "aten::mm", 30), ("gap", 10), ("op", "aten::add", 5)], 7)
    account = account_of(write(tmp_path, machine.events))
    assert (account.basis, account.border, account.steps, account.time_us) == ("recording", "recording", 1, 45)
    assert [(owner.kind, owner.name, owner.time_us) for owner in account.owners] == [
        ("operator", "aten::mm", 30),
        ("between", None, 10),
        ("operator", "aten::add", 5),
    ]


def test_owners_have_operator_annotation_and_line_without_addresses(tmp_path: Path) -> None:
    launch: Program = [("op", "prologue", 2), ("launch", "gemm", 500, 7)]
    inner: Program = [("in frame", "nn.Module: Linear_3", [("in op", "aten::linear", launch)])]
    program: Program = [("note", "stage", [("in frame", "train.py(5): step", inner)]), ("sync", None)]
    largest = account_of(write(tmp_path, run_steps(program).events)).owners[0]
    assert (largest.kind, largest.name, largest.operator) == ("kernel", "gemm", "aten::linear")
    assert (largest.module, largest.annotation, largest.line) == ("Linear", "stage", "train.py(5): step")


def test_allocations_are_not_runtime_calls(tmp_path: Path) -> None:
    machine = Machine()
    machine.add("cuda_runtime", "cudaMalloc", 0, 40, 1, correlation=1)
    machine.add("cuda_runtime", "cudaFuncGetAttributes", 40, 10, 1, correlation=2)
    owners = account_of(write(tmp_path, machine.events)).owners
    assert [(owner.kind, owner.time_us) for owner in owners] == [("allocation", 40), ("runtime call", 10)]


def test_a_launch_waits_for_a_full_queue(tmp_path: Path) -> None:
    machine, launches = Machine(), 1100
    kernels: Program = [("launch", "k", 100, 7)] * launches
    machine.run(kernels)
    # Make the last launch block until the device has finished 50 kernels.
    last = max((e for e in machine.events if e["cat"] == "cuda_runtime"), key=lambda event: event["ts"])
    last["dur"] = 50 * 101 + 12 - last["ts"] + last["dur"]
    machine.add("user_annotation", "ProfilerStep#0", 0, last["ts"] + last["dur"] + 300_000, 1)
    kinds = {owner.kind for owner in account_of(write(tmp_path, machine.events)).owners}
    assert "queue full" in kinds


def test_a_collective_includes_the_wait_for_other_ranks_and_the_account_says_so(tmp_path: Path) -> None:
    account = account_of(write(tmp_path, PLANTED["early rank"].machine.events))
    assert any("other ranks" in note for note in account.notes)
    assert not any("cuda_sync" in note for note in account.notes)


def test_missing_sync_records_and_stacks_are_noted(tmp_path: Path) -> None:
    notes = " ".join(account_of(write(tmp_path, PLANTED["no sync records"].machine.events)).notes)
    assert "cuda_sync" in notes
    assert "stacks" in notes


@pytest.mark.parametrize(
    "frames",
    [
        [("threading.py(982): run", 0, 1_000), ("writer.py(10): loop", 1, 998)],
        [
            ("threading.py(982): run", 100, 850),
            ("profdeck/backends/recording.py(147): check", 101, 800),
            ("<built-in function len>", 400, 300),
        ],
    ],
    ids=["blocked since before the recording", "of profdeck"],
)
def test_nothing_waits_for_a_background_thread(tmp_path: Path, frames: list[tuple[str, int, int]]) -> None:
    def event(category: str, name: str, thread: int, start: float, duration: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": duration}

    events = [
        event("user_annotation", "ProfilerStep#1", 1, 0, 1_000),
        event("python_function", "train.py(1): main", 1, 0, 1_000),
        event("python_function", "<built-in method acquire of _thread.lock object at 0x1>", 1, 200, 600),
        event("cpu_op", "aten::mm", 1, 850, 100),
        *(event("python_function", name, 2, start, duration) for name, start, duration in frames),
    ]

    owners = account_of(write(tmp_path, events)).owners

    assert {owner.name for owner in owners} <= {
        None,
        "train.py(1): main",
        "<built-in method acquire of _thread.lock>",
        "aten::mm",
    }
    (wait,) = (owner for owner in owners if owner.kind == "wait for thread")
    assert wait.time_us == 600


def test_small_owners_are_summed_by_kind(tmp_path: Path) -> None:
    machine = Machine()
    machine.run([("op", f"aten::op{number}", 1000 - number) for number in range(400)])
    account = account_of(write(tmp_path, machine.events))
    check_sums(account)
    assert len(account.owners) == 301
    assert [owner.count for owner in account.owners if owner.name is None] == [100]
