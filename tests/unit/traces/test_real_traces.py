"""Compare real GPU and NPU traces with a reference reader that uses only the standard library.

`test_oracle.py` checks the summaries of GPU traces.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.reading.columns import ANNOTATION, OPERATOR
from profdeck_traces.reading.integrity import check_trace

BESIDE_THE_CHECKOUT = Path(__file__).resolve().parents[4] / "shared" / "data"
DATA = Path(os.environ.get("PROFDECK_TEST_DATA") or BESIDE_THE_CHECKOUT)
NPU: list[Path | None] = [*DATA.glob("npu/trace_view.json")]
TRACES: list[Path | None] = [*sorted(DATA.glob("gpu/*.json.gz")), *NPU]

pytestmark = pytest.mark.shared_data


def each(paths: list[Path | None]) -> pytest.MarkDecorator:
    skip = pytest.mark.skip(reason=f"no traces in {DATA}; set PROFDECK_TEST_DATA")
    missing = [pytest.param(None, marks=skip)]
    return pytest.mark.parametrize("path", paths or missing, ids=lambda path: path.name if path else "none")


def events_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, parse_float=Decimal)
    events: list[dict[str, Any]] = document["traceEvents"] if isinstance(document, dict) else document
    return events


def nanoseconds(time_us: Any) -> int:
    return round(Decimal(time_us) * 1000)


@each(TRACES)
def test_real_traces_are_complete_and_every_event_is_counted(path: Path) -> None:
    check = check_trace(path)

    assert check.problem is None
    assert check.whole
    assert check.events == sum("ph" in event for event in events_of(path))
    assert check.size_bytes == path.stat().st_size


@each(NPU)
def test_npu_summary_equals_the_reference(path: Path) -> None:
    events = [event for event in events_of(path) if event["ph"] == "X"]
    ascend = {
        e["pid"] for e in events_of(path) if e["ph"] == "M" and e.get("args", {}).get("name") == "Ascend Hardware"
    }
    summary = summarise_trace(path)

    totals: dict[tuple[str, str], list[int]] = defaultdict(list)
    busy: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    stacks: dict[Any, list[tuple[int, int, str, str]]] = defaultdict(list)
    for event in events:
        start, duration = nanoseconds(event["ts"]), nanoseconds(event["dur"])
        category = event.get("cat", "Ascend Hardware" if event["pid"] in ascend else "")
        if category in ("kernel", "gpu_memcpy", "gpu_memset", "Ascend Hardware"):
            totals[category, event["name"]].append(duration)
            busy[event["pid"]].append((start, start + duration))
        elif category in (OPERATOR, ANNOTATION):
            if event["name"].startswith("ProfilerStep#"):
                category = ANNOTATION  # Ascend's profiler marks steps by operators
            stacks[event["pid"], event["tid"]].append((start, -(start + duration), category, event["name"]))

    def same(expected: dict[Any, int]) -> Any:
        # Ascend writes durations with more digits than nanoseconds: each may be rounded either way.
        return pytest.approx({key: time / 1000 for key, time in expected.items()}, rel=0, abs=0.1)

    kernels = {(kernel.kind, kernel.name): kernel for kernel in summary.kernels}
    assert {key: kernel.count for key, kernel in kernels.items()} == {key: len(found) for key, found in totals.items()}
    assert {key: kernel.total_us for key, kernel in kernels.items()} == same(
        {key: sum(found) for key, found in totals.items()}
    )
    assert {key: kernel.max_us for key, kernel in kernels.items()} == same(
        {key: max(found) for key, found in totals.items()}
    )
    assert {device.device: device.busy_us for device in summary.devices} == same(
        {device: covered(spans) for device, spans in busy.items()}
    )
    operators = {(OPERATOR, operator.name): operator.self_us for operator in summary.operators}
    annotations = {(ANNOTATION, annotation.name): annotation.self_us for annotation in summary.annotations}
    assert operators | annotations == same(self_times(stacks))
    steps = [
        -end - start for spans in stacks.values() for start, end, _, name in spans if name.startswith("ProfilerStep#")
    ]
    assert {"steps": sum(step.duration_us for step in summary.steps)} == same({"steps": sum(steps)})


def covered(spans: list[tuple[int, int]]) -> int:
    total, reach = 0, min(start for start, _ in spans)
    for start, end in sorted(spans):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total


def self_times(stacks: dict[Any, list[tuple[int, int, str, str]]]) -> dict[tuple[str, str], int]:
    """Time between neighbouring starts and ends belongs to the innermost event that is open."""
    own: dict[tuple[str, str], int] = defaultdict(int)
    for spans in stacks.values():
        spans.sort(key=lambda span: span[:2])
        stack: list[tuple[int, int, str, str]] = []
        now = 0
        for span in [*spans, None]:
            until = span[0] if span else None
            while stack and (until is None or -stack[-1][1] <= until):
                _, end, *key = stack.pop()
                own[key[0], key[1]] += max(0, -end - now)
                now = max(now, -end)
            if span and until is not None:
                if stack:
                    own[stack[-1][2], stack[-1][3]] += until - now
                now = until
                own[span[2], span[3]] += 0
                stack.append(span)
    return own
