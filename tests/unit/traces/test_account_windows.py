"""Tests for the account of large traces, which is computed in windows, and for its memory use."""

from __future__ import annotations

import random
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accounts import account_of, write
from planted_owners import layers
from simulated_machine import Program, random_program, run_steps

from profdeck_traces.account import table
from profdeck_traces.account.model import Account
from profdeck_traces.account.recording import StepAnnotations
from profdeck_traces.account.row_kinds import RowKind, row_kinds
from profdeck_traces.account.windows import PathWindows
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.attribution.rows import Attribution
from profdeck_traces.reading.events import Events, read_events

MAX_READING_BYTES, MAX_ACCOUNT_BYTES = 66, 300
"""Maximum memory per event in bytes, as stated in docs/explanation/numbers.md."""
STEPS = 24


def divide(monkeypatch: pytest.MonkeyPatch, max_events: int) -> None:
    """Divide all traces into windows of at most `max_events` events."""
    monkeypatch.setattr("profdeck_traces.account.windows.MAX_EVENTS", max_events)
    monkeypatch.setattr("profdeck_traces.account.windows.MAX_WHOLE_EVENTS", 0)


def times_of(account: Account) -> dict[Any, tuple[float, int]]:
    return {owner.key: (owner.time_us, owner.count) for owner in account.owners}


def program_of(seed: int) -> Program:
    """Return a random program with synchronisations, without them, or with a device that falls behind the host."""
    rnd = random.Random(seed)  # noqa: S311 - test data
    program = random_program(rnd)
    if seed % 3 == 1:
        program = [call for call in program if call[0] != "sync"]
    return layers(10, rnd.choice([3, 20]), 2) if seed % 3 == 2 else program


@pytest.mark.parametrize("seed", range(9))
def test_windows_have_the_owners_of_the_whole_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    events = run_steps(program_of(seed), STEPS, sync_records=seed % 2 == 0).events
    path = write(tmp_path, events)
    expected = account_of(path)
    divide(monkeypatch, len(events) // 6)
    account = account_of(path)
    assert times_of(account) == times_of(expected)
    assert (account.time_us, account.steps, account.border) == (expected.time_us, expected.steps, expected.border)
    assert "windows" in account.notes[-1]
    if account.border == "host":
        assert [owner.gain_us for owner in account.owners] == [owner.gain_us for owner in expected.owners]


@pytest.mark.parametrize("seed", range(6))
def test_recordings_without_steps_are_divided_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    events = [event for event in run_steps(program_of(seed), 40).events if event.get("cat") != "user_annotation"]
    path = write(tmp_path, events)
    expected = account_of(path)
    divide(monkeypatch, len(events) // 4)
    account = account_of(path)
    assert "windows" in account.notes[-1]
    assert {key: time_us for key, (time_us, _) in times_of(account).items()} == {
        key: time_us for key, (time_us, _) in times_of(expected).items()
    }
    assert (account.time_us, account.steps, account.border) == (expected.time_us, 1, "recording")


def test_a_large_recording_of_events_without_a_duration_has_no_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide(monkeypatch, 10)
    names = ("aten::a", "aten::b")
    events = [
        {"ph": "X", "cat": "cpu_op", "name": names[at % 2], "pid": 1, "tid": 1, "ts": at, "dur": 0} for at in range(50)
    ]
    assert summarise_trace(write(tmp_path, events)).account is None


def step_events(steps: int) -> list[dict[str, Any]]:
    """Return the events of steps in which every event can be on the critical path."""
    program = [call for number in range(20) for call in (("op", f"aten::op{number}", 30), ("launch", "k", 20, 7))]
    return run_steps([*program, ("sync", 7)], steps).events


def windows_of(events: Events) -> tuple[PathWindows, Attribution]:
    """Return the windows and the attribution of a trace with torch.profiler steps."""
    rows = np.flatnonzero(events.has_category({"user_annotation"}))
    steps = StepAnnotations(events.track[rows], events.start_ns[rows], events.end_ns[rows])
    kinds = row_kinds(events, lambda name: name.startswith("ProfilerStep"), lambda _name: False)
    names = Attribution(events, lambda name: name.startswith("ProfilerStep"))
    return PathWindows(names, kinds, steps, np.zeros(len(rows), np.bool_)), names


def memory_of(path: Path) -> tuple[int, int, int]:
    """Return a trace's number of events, the size of its columns, and the peak memory of computing its account."""
    events = read_events(path)
    arrays = [*events.all.values(), *(array for pairs in events.args.values() for array in (pairs.row, pairs.value))]
    tracemalloc.start()
    try:
        account = account_from(*windows_of(events))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert account.owners[0].gain_us is not None
    return len(events), sum(array.nbytes for array in arrays), peak


def test_memory_per_event_is_bounded(tmp_path: Path) -> None:
    """Test with every event on the critical path and every third event on the device."""
    # The first account also loads modules and caches, which would hide part of the difference.
    _, few, many = (memory_of(write(tmp_path, step_events(steps))) for steps in (10, 50, 150))
    events, columns, account = (after - before for before, after in zip(few, many, strict=True))
    assert columns <= MAX_READING_BYTES * events
    assert account <= MAX_ACCOUNT_BYTES * events


def account_from(windows: PathWindows, names: Attribution) -> Account:
    account = table.account_of(windows, names, "global_step")
    assert account is not None
    return account


def test_looking_up_an_arg_does_not_copy_its_column(tmp_path: Path) -> None:
    events = read_events(write(tmp_path, step_events(30)))
    rows = events.args["correlation"].row[:1].astype(np.int64)
    size = events.args["correlation"].row.nbytes
    tracemalloc.start()
    try:
        events.arg("correlation", rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size / 2


def test_a_walk_does_not_copy_the_device_events(tmp_path: Path) -> None:
    """NumPy would convert a column of 2 or 4 bytes per event to look up a Python integer."""
    path = write(tmp_path, run_steps([*[("copy", "c", 20, 7, True)] * 20, ("sync", 7)], 100).events)
    windows, _ = windows_of(read_events(path))
    recording = next(iter(windows)).recording
    work, walk, threads = recording.work, recording.walk, recording.threads
    track, end_ns = next(iter(work.streams)), int(work.ends[-1])
    copies = np.flatnonzero(recording.kinds == RowKind.COPY_CALL)
    segment = int(np.flatnonzero(np.isin(threads.row, copies))[-1])
    walk.continuation(threads.main, threads.end_of(segment), 0)
    tracemalloc.start()
    try:
        work.outstanding(track, end_ns)
        work.ended_between(0, end_ns, track)
        walk.continuation(threads.main, threads.end_of(segment), 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(work.rows)


def calls_of(path: Path) -> int:
    """Return the number of function calls needed to compute the account."""
    windows, names = windows_of(read_events(path))
    account_from(windows, names)
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    windows, names = windows_of(read_events(path))
    sys.setprofile(count)
    try:
        account_from(windows, names)
    finally:
        sys.setprofile(None)
    return calls


def test_time_is_linear_in_the_number_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = step_events(20), step_events(80)
    assert calls_of(write(tmp_path, many)) < 5 * calls_of(write(tmp_path, few))
    divide(monkeypatch, len(many) // 8)
    windows, _ = windows_of(read_events(write(tmp_path, many)))
    assert len(windows) == pytest.approx(8, abs=1)
    sizes = [window.events.complete for window in windows]
    assert sum(sizes) < 1.5 * len(many)
    assert max(sizes) < 1.5 * len(many) / 8
