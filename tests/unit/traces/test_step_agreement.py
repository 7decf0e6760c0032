"""Tests that `summary`, `trim` and an independent reader assign the same device work to a step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from real_traces import named

from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.writing.windows import step_window

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


def complete(path: Path) -> list[dict[str, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def by_hand(events: list[dict[str, Any]]) -> dict[int, tuple[float, float, float]]:
    """Return the device start and end, by External id, and the kernel time of each step with device work."""
    annotations = [event for event in events if event.get("cat") == "user_annotation"]
    device_annotations = [event for event in events if event.get("cat") == "gpu_user_annotation"]
    kernels = [event for event in events if event.get("cat") in DEVICE]
    extent = {}
    for step in annotations:
        if not step["name"].startswith("ProfilerStep#"):
            continue
        begin, end = step["ts"], step["ts"] + step["dur"]
        ids = {
            (annotation["name"], annotation["args"]["External id"])
            for annotation in annotations
            if begin <= annotation["ts"] <= end
        }
        step_annotations = [
            device_annotation
            for device_annotation in device_annotations
            if (device_annotation["name"], device_annotation["args"].get("External id")) in ids
        ]
        if step_annotations:
            number = int(step["name"].partition("#")[2])
            extent[number] = (
                min(device_annotation["ts"] for device_annotation in step_annotations),
                max(device_annotation["ts"] + device_annotation["dur"] for device_annotation in step_annotations),
            )
    result = {}
    ordered = sorted(extent, key=lambda number: extent[number][0])
    for number, following in zip(ordered, [*ordered[1:], None], strict=True):
        limit = extent[following][0] if following is not None else float("inf")
        used = sum(kernel["dur"] for kernel in kernels if extent[number][0] <= kernel["ts"] < limit)
        result[number] = (*extent[number], used)
    return result


def check(path: Path) -> None:
    events = complete(path)
    expected = by_hand(events)
    summary = summarise_trace(path)
    device_us_by_step = {step.step: step.device_us for step in summary.steps if step.step is not None}
    assert expected
    for number, (begin_us, end_us, device_us) in expected.items():
        assert device_us_by_step[number] == pytest.approx(device_us, abs=0.01), number
        window = step_window(path, range(number, number + 1))
        assert window.begin_ns is not None
        assert window.end_ns is not None
        # A window begins on the host and ends with the last kernel launched in the step.
        host_end_us = max(event["ts"] + event["dur"] for event in events if event["name"] == f"ProfilerStep#{number}")
        assert window.begin_ns / 1e3 <= begin_us + 0.5
        assert window.end_ns / 1e3 == pytest.approx(max(end_us, host_end_us), abs=1.0)


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["gpu/nccl.json.gz", "gpu/ns_resolution_rank0.pt.trace.json.gz"])
def test_real_traces(name: str) -> None:
    check(named(name))


def write(path: Path, steps: list[tuple[int, bool]]) -> Path:
    """Write steps of 100 us. Some `forward` annotations launch nothing, so only IDs connect them with device work."""
    events: list[dict[str, Any]] = []
    for index, (number, launches) in enumerate(steps):
        start = index * 100.0
        events += [
            annotation("user_annotation", f"ProfilerStep#{number}", start, 100, 1, number),
            annotation("user_annotation", "forward", start + 10, 20, 1, 1000 + number),
            annotation("user_annotation", "backward", start + 40, 20, 1, 2000 + number),
            annotation("gpu_user_annotation", "backward", start + 90, 30, 7, 2000 + number),
            kernel("gemm_backward", start + 90, 30),
        ]
        if launches:
            events += [
                annotation("gpu_user_annotation", "forward", start + 60, 20, 7, 1000 + number),
                kernel("gemm", start + 60, 20),
            ]
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return path


def annotation(category: str, name: str, ts: float, dur: float, track: int, external_id: int) -> dict[str, Any]:
    args = {"External id": external_id}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": track, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": {"device": 0}}


def test_annotation_without_launches_does_not_shift_other_annotations(tmp_path: Path) -> None:
    """By order, the second `forward` on the device would be assigned to the second on the host."""
    check(write(tmp_path / "trace.json", [(3, True), (4, False), (5, True)]))


def test_window_without_ids_is_determined_by_order(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", [(3, True), (4, True)])
    document = json.loads(path.read_text(encoding="utf-8"))
    for event in document["traceEvents"]:
        event["args"].pop("External id", None)
    path.write_text(json.dumps(document), encoding="utf-8")
    window = step_window(path, range(3, 4))
    assert (window.begin_ns, window.end_ns) == (0, 120_000)
    assert [step.device_us for step in summarise_trace(path).steps] == [50.0, 50.0]
