"""Compare real GPU and NPU traces with a reference reader that uses only the standard library.

`test_oracle.py` checks the summaries of GPU traces.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import oracle
import pytest
from real_traces import each

from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.reading.columns import ANNOTATION, OPERATOR
from profdeck_traces.reading.integrity import check_trace

NPU = "npu/trace_view.json"

pytestmark = pytest.mark.shared_data


@each("gpu/*.json.gz", NPU)
def test_real_traces_are_complete_and_all_events_are_counted(path: Path) -> None:
    check = check_trace(path)

    assert check.problem is None
    assert check.whole
    assert check.events == sum("ph" in event for event in oracle.events_of(path))
    assert check.size_bytes == path.stat().st_size


@each(NPU)
def test_npu_summary_equals_the_reference(path: Path) -> None:
    events = [event for event in oracle.events_of(path) if event["ph"] == "X"]
    ascend = {
        e["pid"]
        for e in oracle.events_of(path)
        if e["ph"] == "M" and e.get("args", {}).get("name") == "Ascend Hardware"
    }
    summary = summarise_trace(path)

    totals: dict[tuple[str, str], list[int]] = defaultdict(list)
    busy: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    on_host: list[dict[str, Any]] = []
    steps: list[int] = []
    for event in events:
        start, duration = oracle.nanoseconds(event["ts"]), oracle.nanoseconds(event["dur"])
        category = event.get("cat", "Ascend Hardware" if event["pid"] in ascend else "")
        if category in ("kernel", "gpu_memcpy", "gpu_memset", "Ascend Hardware"):
            totals[category, event["name"]].append(duration)
            busy[event["pid"]].append((start, start + duration))
        elif category in (OPERATOR, ANNOTATION):
            if event["name"].startswith(oracle.STEP):
                category = ANNOTATION  # Ascend's profiler annotates steps with operators
                steps.append(duration)
            on_host.append(event | {"cat": category})

    def same(expected: dict[Any, int]) -> Any:
        # Ascend writes durations with more digits than nanoseconds: each may be rounded either way.
        return pytest.approx({key: time / 1000 for key, time in expected.items()}, rel=0, abs=0.1)

    kernels = {(kernel.kind, kernel.name): kernel for kernel in summary.kernels}
    assert {key: kernel.count for key, kernel in kernels.items()} == {
        key: len(durations) for key, durations in totals.items()
    }
    assert {key: kernel.total_us for key, kernel in kernels.items()} == same(
        {key: sum(durations) for key, durations in totals.items()}
    )
    assert {key: kernel.max_us for key, kernel in kernels.items()} == same(
        {key: max(durations) for key, durations in totals.items()}
    )
    assert {device.device: device.busy_us for device in summary.devices} == same(
        {device: oracle.covered(spans) for device, spans in busy.items()}
    )
    operators = {(OPERATOR, operator.name): operator.self_us for operator in summary.operators}
    annotations = {(ANNOTATION, annotation.name): annotation.self_us for annotation in summary.annotations}
    self_ns = oracle.self_times(on_host)
    assert operators | annotations == same(
        {key: self_ns[key] for key in {(event["cat"], event["name"]) for event in on_host}}
    )
    assert {"steps": sum(step.duration_us for step in summary.steps)} == same({"steps": sum(steps)})
