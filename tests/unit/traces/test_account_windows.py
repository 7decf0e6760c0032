"""Tests for the account of large traces, which is computed in windows, and for its memory."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted_owners import layers
from simulated_machine import Program, random_program, run_steps

from profdeck_traces.account import table
from profdeck_traces.account.model import Account
from profdeck_traces.account.row_kinds import row_kinds
from profdeck_traces.account.recording import StepAnnotations
from profdeck_traces.account.windows import Windows
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.attribution.rows import Attribution
from profdeck_traces.reading.events import read_events

MAX_READING_BYTES, MAX_ACCOUNT_BYTES = 66, 300
"""Maximum memory per event, as stated in docs/explanation/numbers.md."""
STEPS = 24


def write(directory: Path, events: list[dict[str, Any]]) -> Path:
    path = directory / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def account_of(path: Path) -> Account:
    account = summarise_trace(path).account
    assert account is not None
    return account


def divide(monkeypatch: pytest.MonkeyPatch, max_events: int) -> None:
    """Divide all traces into windows of at most `max_events` events."""
    monkeypatch.setattr("profdeck_traces.account.windows.MAX_EVENTS", max_events)
    monkeypatch.setattr("profdeck_traces.account.windows.MAX_WHOLE_EVENTS", 0)


def times_of(account: Account) -> dict[Any, tuple[float, int]]:
    return {owner.key: (owner.time_us, owner.count) for owner in account.owners}


def program_of(seed: int) -> Program:
    """Return a random program that synchronises, one that does not, or one with a device that falls behind."""
    rnd = random.Random(seed)  # noqa: S311 - test data
    program = random_program(rnd)
    if seed % 3 == 1:
        program = [call for call in program if call[0] != "sync"]
    return layers(10, rnd.choice([3, 20]), 2) if seed % 3 == 2 else program  # noqa: PLR2004


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
