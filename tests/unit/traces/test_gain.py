"""Tests for gains: the time that steps would save without an owner."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from simulated_machine import Program, random_program, run_steps, scaled, step_us

from profdeck_traces.account.model import Account, OwnerKey, OwnerTime
from profdeck_traces.account.table import MAX_GAINS, MAX_OWNERS, largest_owners
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.reading import compiled


def account_of(directory: Path, program: Program, steps: int = 1, *, sync_records: bool = True) -> Account:
    path = directory / "trace.json"
    path.write_text(json.dumps({"traceEvents": run_steps(program, steps, sync_records=sync_records).events}))
    account = summarise_trace(path).account
    assert account is not None
    return account


def check_limits(account: Account) -> None:
    """Check that no gain exceeds the time of its owner or cause, or the steps."""
    for one in (*account.owners, *account.causes):
        assert one.gain_us is None or one.gain_us <= min(one.time_us, account.time_us)


def owner_of(account: Account, name: str) -> OwnerTime:
    return next(owner for owner in account.owners if owner.name == name)


@pytest.mark.parametrize(("sync_records", "least"), [(True, 0.99), (False, 0.75)])
def test_gains_agree_with_a_simulation_of_the_changed_program(
    tmp_path: Path,
    sync_records: bool,
    least: float,
) -> None:
    """A gain must equal the time saved in a simulation without the owner, to within 1 % of the step."""
    rnd = random.Random(2)  # noqa: S311 - test data
    gain_errors, time_errors = [], []
    for _ in range(30):
        program = random_program(rnd)
        duration_us = step_us(program)
        account = account_of(tmp_path, program, sync_records=sync_records)
        check_limits(account)
        for owner in account.owners:
            if owner.kind in {"operator", "kernel", "copy"} and owner.gain_us is not None:
                assert owner.name is not None
                saved_us = duration_us - step_us(scaled(program, owner.name, 0))
                gain_errors.append(abs(owner.gain_us - saved_us) / duration_us)
                time_errors.append(abs(owner.time_us - saved_us) / duration_us)
    is_right = np.array(gain_errors) < 0.01
    assert len(is_right) > 100
    assert is_right.mean() >= least
    assert (np.array(time_errors) < 0.01).mean() < is_right.mean()


def test_another_path_limits_the_gain(tmp_path: Path) -> None:
    # Without the kernel, the launch takes 4 µs, the operator 80 µs and the synchronisation 4 µs.
    program: Program = [("launch", "gemm", 100, 7), ("op", "aten::host", 80), ("sync", None)]
    account = account_of(tmp_path, program)
    assert account.time_us == 112
    gemm = owner_of(account, "gemm")
    assert (gemm.time_us, gemm.gain_us, gemm.next_limit) == (100, 24, "operator")


def test_gains_add_up_over_the_steps_of_the_account(tmp_path: Path) -> None:
    program: Program = [("op", "aten::a", 500), ("launch", "k", 50, 7), ("sync", None)]
    account = account_of(tmp_path, program, 4)
    assert owner_of(account, "aten::a").gain_us == 500 * account.steps


def in_modules(program: Program, rnd: random.Random) -> Program:
    """Return the program with each launch moved into the ``Linear`` module of one of two blocks."""
    return [
        ("in frame", f"nn.Module: {rnd.choice('AB')}_0", [("in frame", "nn.Module: Linear_0", [instruction])])
        if instruction[0] == "launch"
        else instruction
        for instruction in program
    ]


def test_joined_gains_agree_with_a_simulation_without_all_owners_of_the_row(tmp_path: Path) -> None:
    rnd = random.Random(3)  # noqa: S311 - test data
    errors = []
    for _ in range(30):
        program = in_modules(random_program(rnd), rnd)
        duration_us = step_us(program)
        account = account_of(tmp_path, program)
        rows = Counter(owner.row for owner in account.owners)
        for gain in account.joined_gains:
            assert rows[gain.row] > 1
            owners = [owner for owner in account.owners if owner.row == gain.row]
            assert account.row_gain(owners) == (gain.gain_us, gain.next_limit)
            assert 0 <= gain.gain_us <= min(account.time_us, sum(owner.time_us for owner in owners))
            if gain.kind == "kernel":
                assert gain.name is not None
                assert gain.origin == "Linear"
                saved_us = duration_us - step_us(scaled(program, gain.name, 0))
                errors.append(abs(gain.gain_us - saved_us) / duration_us)
    assert len(errors) > 25
    assert (np.array(errors) < 0.01).mean() >= 0.97


def test_the_gain_of_a_row_is_that_of_all_its_owners(tmp_path: Path) -> None:
    # In each half, one block's kernel is the bottleneck. Without it, the other block's kernel becomes the bottleneck.
    program: Program = []
    for durations in ((520, 500), (500, 520)):
        for block, stream, duration in zip("AB", (7, 8), durations, strict=True):
            module = ("in frame", "nn.Module: Linear_0", [("launch", "gemm", duration, stream)])
            program.append(("in frame", f"nn.Module: {block}_0", [module]))
        program.append(("sync", None))
    account = account_of(tmp_path, program)
    (gain,) = (gain for gain in account.joined_gains if gain.kind == "kernel")
    owners = [owner for owner in account.owners if owner.row == gain.row]
    assert [owner.time_us for owner in owners] == [520, 520]
    assert all(owner.gain_us is not None and owner.gain_us < 30 for owner in owners)
    assert gain.gain_us == step_us(program) - step_us(scaled(program, "gemm", 0)) > 900


Call = tuple[str, str, int, float, float, dict[str, int]]
UNRECORDED: list[Call] = [
    ("user_annotation", "ProfilerStep#1", 1, 0, 1_000_000, {}),
    ("cuda_runtime", "cudaMemcpyAsync", 1, 332_330, 232, {"correlation": 15}),
    ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 7, 332_465, 0, {"device": 0, "stream": 7, "correlation": 15}),
    ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 7, 332_465, 1, {"device": 0, "stream": 7, "correlation": 17}),
    ("cpu_op", "aten::sort", 2, 332_516, 500_000, {}),
    ("cuda_runtime", "cudaEventSynchronize", 2, 661_114, 166, {"correlation": 40}),
    ("python_function", "train.py(3): f", 2, 661_280, 265, {"Python id": 185}),
]
"""A third of the step is not recorded."""
EARLY_SYNC: list[Call] = [
    ("user_annotation", "ProfilerStep#0", 1, 0, 1_000, {}),
    ("cuda_runtime", "cudaEventSynchronize", 2, 2, 323, {"correlation": 10}),
    ("kernel", "gemm", 8, 36, 1, {"device": 0, "stream": 8}),
    ("cuda_runtime", "cudaLaunchKernel", 1, 43, 1, {"correlation": 1}),
    ("kernel", "elementwise", 9, 48, 0, {"device": 0, "stream": 9, "correlation": 1}),
    ("cuda_runtime", "cudaStreamSynchronize", 1, 76, 64, {"correlation": 5}),
    ("cuda_runtime", "cudaLaunchKernel", 2, 325, 0.001, {"correlation": 11}),
    ("kernel", "ncclDevKernel_AllReduce_Sum_f32", 7, 1_440, 1_000, {"device": 0, "stream": 7, "correlation": 11}),
]
"""A synchronisation starts before the first border, which is the end of the device work before the step."""


def traced(directory: Path, calls: list[Call]) -> Account:
    events = [
        {"ph": "X", "cat": category, "name": name, "tid": tid, "pid": int("device" not in args), "args": args}
        | {"ts": ts, "dur": dur}
        for category, name, tid, ts, dur, args in calls
    ]
    path = directory / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    account = summarise_trace(path).account
    assert account is not None
    return account


@pytest.mark.parametrize("calls", [UNRECORDED, EARLY_SYNC])
def test_a_gain_is_at_most_the_time_and_the_step(tmp_path: Path, calls: list[Call]) -> None:
    check_limits(traced(tmp_path, calls))


def test_a_synchronisation_that_starts_before_the_first_step_counts(tmp_path: Path) -> None:
    account = traced(tmp_path, EARLY_SYNC)
    (cause,) = (one for one in account.causes if one.cause == "synchronisation")
    first_us = 2_440 - account.time_us
    assert account.border == "device"
    assert first_us > 2
    assert cause.time_us == pytest.approx(64 + 325 - first_us)


def test_work_off_the_path_has_no_gain(tmp_path: Path) -> None:
    program: Program = [("launch", "hidden", 50, 8), ("launch", "shown", 400, 7), ("sync", None)]
    account = account_of(tmp_path, program)
    assert "hidden" not in {owner.name for owner in account.owners}
    assert owner_of(account, "shown").gain_us == 400 - 46


def test_sums_of_small_owners_contain_an_unnamed_owner_that_is_small_itself() -> None:
    def key(kind: str, name: str | None) -> OwnerKey:
        return kind, name, None, None, None, None, None, None, None

    times = {key("python", f"f{number}"): (10_000, 1) for number in range(MAX_OWNERS)}
    times |= {key("profiler", "a"): (3_000, 1), key("profiler", None): (2_000, 1), key("between", None): (1_000, 1)}
    total_ns = sum(time_ns for time_ns, _ in times.values())
    assert sum(owner.time_us for owner in largest_owners(times, total_ns)) * 1000 == pytest.approx(total_ns)


def test_only_the_largest_owners_have_a_gain(tmp_path: Path) -> None:
    account = account_of(tmp_path, [("op", f"aten::op{number}", 100 - number) for number in range(20)])
    gains = [owner.gain_us for owner in account.owners]
    assert gains[:MAX_GAINS] == [100 - number for number in range(MAX_GAINS)]
    assert set(gains[MAX_GAINS:]) == {None}


def test_gains_are_the_same_without_the_compiled_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = random_program(random.Random(3))  # noqa: S311 - test data
    expected = account_of(tmp_path, program)
    monkeypatch.setattr(compiled, "load_library", lambda: None)
    assert account_of(tmp_path, program) == expected


def test_a_large_trace_has_no_gains_and_the_account_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profdeck_traces.account.gain.MAX_EVENTS", 2)
    monkeypatch.setattr("profdeck_traces.account.gain.MAX_EVENTS_WITHOUT_LIBRARY", 2)
    account = account_of(tmp_path, [("op", "aten::a", 5), ("op", "aten::b", 5)])
    assert {owner.gain_us for owner in account.owners} == {None}
    assert "Gains are not computed for traces with more than 2 events." in account.notes
