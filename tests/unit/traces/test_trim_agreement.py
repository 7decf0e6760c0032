"""Tests that the steps of trimmed traces have the same summary as in the original, for real traces and windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from real_traces import each

from profdeck_traces.analysis.model import StepSummary
from profdeck_traces.analysis.step_names import GLOBAL_STEP, StepNames
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.writing.trim import trim_trace
from profdeck_traces.writing.windows import iteration_window, step_window

MOST_WINDOWS = 12


def step_facts(steps: tuple[StepSummary, ...]) -> list[tuple[str, float, float]]:
    """Return names and times. Without device work, the device is unknown."""
    return [(step.name, step.duration_us, step.device_us or 0.0) for step in steps]


@pytest.mark.shared_data
@each("gpu/*.json.gz", "npu/trace_view.json")
def test_steps_of_a_trimmed_trace_equal_those_of_the_trace(path: Path, tmp_path: Path) -> None:
    all_steps = summarise_trace(path).steps
    steps = {step.step: step for step in all_steps if step.kind == GLOBAL_STEP and step.step is not None}
    if not steps:
        pytest.skip("no step is marked in it")
    numbers = sorted(steps)
    windows = [range(first, last + 1) for first in numbers for last in numbers if first <= last]
    for number, window in enumerate(windows[:: -(-len(windows) // MOST_WINDOWS)]):
        destination = tmp_path / f"{number}.trace.json"
        trim_trace(path, destination, step_window(path, window))
        expected = tuple(step for step in steps.values() if step.step in window)
        trimmed_steps = tuple(step for step in summarise_trace(destination).steps if step.kind == GLOBAL_STEP)
        assert step_facts(trimmed_steps) == step_facts(expected), window


def test_iterations_of_a_trimmed_trace_equal_those_of_the_trace(tmp_path: Path) -> None:
    """Each iteration launches work that starts during the next iteration and partly overlaps its work."""
    events: list[dict[str, Any]] = []
    for number in range(5):
        start = 100.0 * number
        common = {"ph": "X", "name": f"execute_{number}", "args": {"External id": number}}
        events += [
            {**common, "cat": "user_annotation", "pid": 1, "tid": 1, "ts": start, "dur": 90},
            {**common, "cat": "gpu_user_annotation", "pid": 0, "tid": 7, "ts": start + 95, "dur": 110},
            *(
                {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": start + 95 + ts, "dur": 40}
                for ts in (0, 70)
            ),
            {"ph": "X", "cat": "cpu_op", "name": "op", "pid": 1, "tid": 1, "ts": start + 5, "dur": 10},
        ]
    path = tmp_path / "engine.trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    names = StepNames([r"execute_\d+"])
    expected = summarise_trace(path, step_names=names).steps
    assert [step.device_us for step in expected] == [80, 80, 80, 80, 80]
    for first in range(5):
        for last in range(first, 5):
            destination = tmp_path / f"{first}-{last}.trace.json"
            trim_trace(path, destination, iteration_window(path, range(first, last + 1), names))
            trimmed_summary = summarise_trace(destination, step_names=names)
            assert step_facts(trimmed_summary.steps) == step_facts(expected[first : last + 1])
            assert sum(operator.count for operator in trimmed_summary.operators) == last + 1 - first
